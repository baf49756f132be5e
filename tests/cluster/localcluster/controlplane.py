"""etcd, API server, controller-manager and scheduler."""

from __future__ import annotations

from pathlib import Path

from .binaries import Binaries
from .processes import Components
from .settings import API_PORT, NODE_IP, POD_CIDR, SERVICE_CIDR, Settings

_ETCD = "http://127.0.0.1:2379"
_ETCD_PEER = "http://127.0.0.1:2380"


def start_storage(settings: Settings, components: Components, binaries: Binaries) -> None:
    """etcd and the API server; does not wait for them."""
    pki = settings.run / "pki"
    components.start(
        "etcd",
        [binaries.kubernetes("etcd"), "--name", "default", "--data-dir", settings.run / "etcd",
         "--unsafe-no-fsync",  # a test cluster: its state may be lost with the machine's power
         "--log-level", "warn",
         "--listen-client-urls", _ETCD, "--advertise-client-urls", _ETCD,
         "--listen-peer-urls", _ETCD_PEER, "--initial-advertise-peer-urls", _ETCD_PEER,
         "--initial-cluster", f"default={_ETCD_PEER}"],
        ports=(("127.0.0.1", 2379), ("127.0.0.1", 2380)),
    )  # fmt: skip
    components.start(
        "kube-apiserver",
        [binaries.kubernetes("kube-apiserver"), "--etcd-servers", _ETCD,
         "--bind-address", NODE_IP, "--advertise-address", NODE_IP, "--secure-port", str(API_PORT),
         "--service-cluster-ip-range", SERVICE_CIDR,
         "--authorization-mode", "Node,RBAC", "--enable-admission-plugins", "NodeRestriction",
         "--client-ca-file", pki / "ca.crt",
         "--tls-cert-file", pki / "apiserver.crt", "--tls-private-key-file", pki / "apiserver.key",
         "--kubelet-client-certificate", pki / "kubelet-client.crt",
         "--kubelet-client-key", pki / "kubelet-client.key",
         "--kubelet-certificate-authority", pki / "ca.crt",
         "--kubelet-preferred-address-types", "InternalIP",
         "--service-account-issuer", "https://kubernetes.default.svc.cluster.local",
         "--service-account-key-file", pki / "sa.pub", "--service-account-signing-key-file", pki / "sa.key",
         "--requestheader-client-ca-file", pki / "ca.crt",
         "--requestheader-allowed-names", "front-proxy-client",
         "--requestheader-username-headers", "X-Remote-User", "--requestheader-group-headers", "X-Remote-Group",
         "--requestheader-extra-headers-prefix", "X-Remote-Extra-",
         "--proxy-client-cert-file", pki / "front-proxy.crt", "--proxy-client-key-file", pki / "front-proxy.key",
         "--allow-privileged", "--profiling=false", "--endpoint-reconciler-type", "lease"],
        ports=((NODE_IP, API_PORT),),
    )  # fmt: skip


def start_controllers(settings: Settings, components: Components, binaries: Binaries) -> None:
    """Controller-manager and scheduler. Call it when the API server is ready."""
    pki = settings.run / "pki"

    def common(name: str) -> list[str | Path]:
        config = pki / f"{name}.conf"
        return [
            binaries.kubernetes(name), "--kubeconfig", config, "--authentication-kubeconfig", config,
            "--authorization-kubeconfig", config, "--bind-address", "127.0.0.1", "--leader-elect=false",
        ]  # fmt: skip

    components.start(
        "kube-controller-manager",
        [*common("kube-controller-manager"), "--use-service-account-credentials",
         "--root-ca-file", pki / "ca.crt", "--service-account-private-key-file", pki / "sa.key",
         "--cluster-signing-cert-file", pki / "ca.crt", "--cluster-signing-key-file", pki / "ca.key",
         "--cluster-cidr", POD_CIDR, "--service-cluster-ip-range", SERVICE_CIDR, "--allocate-node-cidrs=false",
         "--flex-volume-plugin-dir", settings.run / "kubelet/volume-plugins",
         "--terminated-pod-gc-threshold", "200"],
        ports=(("127.0.0.1", 10257),),
    )  # fmt: skip
    components.start("kube-scheduler", common("kube-scheduler"), ports=(("127.0.0.1", 10259),))
