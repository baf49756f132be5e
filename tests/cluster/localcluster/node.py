"""kubelet and kube-proxy of the one node."""

from __future__ import annotations

from .binaries import Binaries
from .files import filled, put
from .processes import Components
from .settings import MAX_PODS, NODE, NODE_IP, POD_CIDR, SERVICE_DNS, Settings


def start(settings: Settings, components: Components, binaries: Binaries) -> None:
    """Write both configurations and start both; does not wait for them."""
    run = settings.run
    values = {
        "RUN": str(run),
        "SOCKET": str(settings.containerd_socket),
        "NODE": NODE,
        "NODE_IP": NODE_IP,
        "POD_CIDR": POD_CIDR,
        "SERVICE_DNS": SERVICE_DNS,
        "MAX_PODS": str(MAX_PODS),
    }
    put(run / "resolv.conf", "")  # pods get no resolver but the cluster's
    put(run / "kubelet.yaml", filled("kubelet.yaml", values))
    put(run / "kube-proxy.yaml", filled("kube-proxy.yaml", values))
    components.start(
        "kubelet",
        [binaries.kubernetes("kubelet"), "--config", run / "kubelet.yaml",
         "--kubeconfig", run / "pki/kubelet.conf", "--root-dir", run / "kubelet",
         "--hostname-override", NODE, "--node-ip", NODE_IP, "--v", "2"],
        ports=((NODE_IP, 10250), ("127.0.0.1", 10248)),
    )  # fmt: skip
    components.start(
        "kube-proxy",
        [binaries.kubernetes("kube-proxy"), "--config", run / "kube-proxy.yaml", "--v", "2"],
        ports=(("127.0.0.1", 10256), ("127.0.0.1", 10249)),
    )
