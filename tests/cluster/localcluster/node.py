"""kubelet and kube-proxy of the one node."""

from __future__ import annotations

from .binaries import Binaries
from .processes import Components
from .runtime import put
from .settings import MAX_PODS, NODE, NODE_IP, POD_CIDR, SERVICE_DNS, Settings

# failCgroupV1: from 1.35 the kubelet else exits on a host with cgroup v1.
# imageGCHighThresholdPercent 100: never; local images come from no registry, so they could not come back.
_KUBELET = """apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: {ip}
healthzBindAddress: 127.0.0.1
readOnlyPort: 0
authentication: {{anonymous: {{enabled: false}}, webhook: {{enabled: true}}, x509: {{clientCAFile: {run}/pki/ca.crt}}}}
authorization: {{mode: Webhook}}
tlsCertFile: {run}/pki/kubelet-serving.crt
tlsPrivateKeyFile: {run}/pki/kubelet-serving.key
containerRuntimeEndpoint: unix://{socket}
failCgroupV1: false
failSwapOn: false
cgroupDriver: cgroupfs
cgroupRoot: /
clusterDNS: [{dns}]
clusterDomain: cluster.local
resolvConf: {run}/resolv.conf
podLogsDir: {run}/podlogs
volumePluginDir: {run}/kubelet/volume-plugins
imageGCHighThresholdPercent: 100
evictionHard: {{memory.available: 300Mi, nodefs.available: 2%, imagefs.available: 2%, nodefs.inodesFree: 1%}}
maxPods: {max_pods}
nodeStatusUpdateFrequency: 10s
registerNode: true
shutdownGracePeriod: 0s
"""

_PROXY = """apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: iptables
clusterCIDR: {pods}
hostnameOverride: {node}
clientConnection: {{kubeconfig: {run}/pki/kube-proxy.conf}}
healthzBindAddress: 127.0.0.1:10256
metricsBindAddress: 127.0.0.1:10249
nodePortAddresses: ["{ip}/32"]
conntrack: {{maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}}
"""


def start(settings: Settings, components: Components, binaries: Binaries) -> None:
    """Write both configurations and start both; does not wait for them."""
    run = settings.run
    put(run / "resolv.conf", "")  # pods get no resolver but the cluster's
    put(
        run / "kubelet.yaml",
        _KUBELET.format(
            ip=NODE_IP, run=run, socket=settings.containerd_socket, dns=SERVICE_DNS, max_pods=MAX_PODS
        ),
    )
    components.start(
        "kubelet",
        [binaries.kubernetes("kubelet"), "--config", run / "kubelet.yaml",
         "--kubeconfig", run / "pki/kubelet.conf", "--root-dir", run / "kubelet",
         "--hostname-override", NODE, "--node-ip", NODE_IP, "--v", "2"],
        ports=((NODE_IP, 10250), ("127.0.0.1", 10248)),
    )  # fmt: skip
    put(run / "kube-proxy.yaml", _PROXY.format(pods=POD_CIDR, node=NODE, run=run, ip=NODE_IP))
    components.start(
        "kube-proxy",
        [binaries.kubernetes("kube-proxy"), "--config", run / "kube-proxy.yaml", "--v", "2"],
        ports=(("127.0.0.1", 10256), ("127.0.0.1", 10249)),
    )
