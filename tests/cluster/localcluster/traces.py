"""Files outside of the state folder that containerd, the kubelet, the CNI plugins and buildah make, none of which
can be told to make them elsewhere. `down --purge` removes those that were not there before, and no folder in use."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

# In the order of removal: what lies inside comes first.
_PATHS = tuple(
    Path(p)
    for p in (
        "/run/containerd/runc/k8s.io",
        "/run/containerd/runc",
        "/run/containerd/s",
        "/run/containerd/fifo",
        "/run/containerd",
        "/run/netns",
        "/var/lib/cni/results",
        "/var/lib/cni",
        "/var/lib/containers/cache/blob-info-cache-v1.boltdb",
        "/var/lib/containers/cache",
        "/var/lib/containers",
        "/var/lib/kubelet/device-plugins/kubelet.sock",
        "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint",
        "/var/lib/kubelet/device-plugins",
        "/var/lib/kubelet",
        "/var/log/containers",
        "/etc/cni/net.d/cni.lock",
        "/etc/cni/net.d",
        "/etc/cni",
    )
)


def present() -> list[str]:
    """The paths that exist now, to be recorded before the first of our programs runs."""
    return [str(p) for p in _PATHS if p.exists()]


def remove_except(before: Collection[str]) -> None:
    """Remove the paths that were not there before; a folder only when it is empty."""
    for path in _PATHS:
        if str(path) in before:
            continue
        with suppress(OSError):  # not there, or in use by another program by now
            path.rmdir() if path.is_dir() else path.unlink()
