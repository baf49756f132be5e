"""containerd: its configuration, its images, and the end of its containers."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from . import host
from .processes import Components
from .settings import POD_CIDR, POD_LINK, POD_NETWORK, ClusterError, Settings
from .shell import run, say, succeeds
from .store import Store

_SECONDS = 60.0
_IMPORT_SECONDS = 600.0
_CNI_RESULTS = Path("/var/lib/cni/results")


def put(path: Path, text: str) -> None:
    """Write only if changed: kube-proxy exits when its configuration file is written to."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class Runtime:
    """The containerd of this cluster; it shares nothing with another one on the machine."""

    def __init__(self, settings: Settings, components: Components) -> None:
        self._settings, self._components = settings, components

    def _ctr(self, *args: str) -> list[str]:
        return ["ctr", "-a", str(self._settings.containerd_socket), "-n", "k8s.io", *args]

    def start(self, pause_image: str) -> None:
        """Write the configuration and start it; does not wait for it."""
        run_dir = self._settings.run
        put(run_dir / "cni/net.d/10-pods.conflist", _CNI.format(run=run_dir))
        put(
            run_dir / "containerd.toml",
            _CONTAINERD.format(
                run=run_dir, socket=self._settings.containerd_socket, pause=pause_image, cni=host.CNI_PLUGINS
            ),
        )
        self._components.start(
            "containerd", ["containerd", "-c", run_dir / "containerd.toml", "--log-level", "info"], ports=()
        )

    def answers(self) -> bool:
        return succeeds(self._ctr("version"))

    def images(self) -> dict[str, str]:
        """Manifest digests of the images that containerd has, by reference."""
        lines = run(self._ctr("images", "ls"), timeout=_SECONDS).splitlines()[1:]
        return {fields[0]: fields[2] for fields in (line.split() for line in lines) if len(fields) > 2}

    def load(self, store: Store, ref: str) -> bool:
        """Import one image of the store; layers that containerd has are not moved. False if it was there."""
        if self.images().get(ref) == store.digest(ref):
            return False
        started = time.monotonic()
        present = set(run(self._ctr("content", "ls", "-q"), timeout=_SECONDS).split())
        importer = subprocess.Popen(
            self._ctr("images", "import", "-"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert importer.stdin is not None
        broken = False
        try:
            with importer.stdin as pipe:
                size = store.write_archive(ref, pipe, present)
        except BrokenPipeError:
            broken = True
        output, _ = importer.communicate(timeout=_IMPORT_SECONDS)
        if importer.returncode or broken:
            raise ClusterError(f"containerd did not take {ref}: {output.decode(errors='replace')[-500:]}")
        say(f"loaded {ref}: {size / 1e6:.1f} MB in {time.monotonic() - started:.1f} s")
        return True

    def load_archive(self, archive: Path) -> str:
        """Import a docker or OCI archive; returns what ctr said."""
        return run(self._ctr("images", "import", str(archive)), timeout=_IMPORT_SECONDS)

    def end_containers(self) -> None:
        """Kill and forget every container. They outlive kubelet and containerd on purpose, so ask containerd."""
        if not self._shims() and not self._components.alive("containerd"):
            return
        config = self._settings.run / "containerd.toml"
        self._components.start("containerd", ["containerd", "-c", config], ports=())
        deadline = time.monotonic() + _SECONDS
        while not self.answers():
            if time.monotonic() > deadline:
                raise ClusterError("containerd does not answer, so its containers cannot be ended")
            time.sleep(0.1)
        while tasks := self._list("tasks"):
            for task in tasks:
                succeeds(self._ctr("tasks", "kill", "-s", "SIGKILL", task))
            time.sleep(0.3)
            for task in tasks:
                succeeds(self._ctr("tasks", "rm", "-f", task))
            if time.monotonic() > deadline:
                raise ClusterError(f"these containers do not end: {' '.join(tasks)}")
        for container in self._list("containers"):
            succeeds(self._ctr("containers", "rm", container))

    def _list(self, kind: str) -> list[str]:
        return run(self._ctr(kind, "ls", "-q"), timeout=_SECONDS).split()

    def _shims(self) -> list[int]:
        """Shim processes that were started for our socket."""
        mark = f"-address\0{self._settings.containerd_socket}\0".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = entry.read_bytes()
            except OSError:
                continue
            if b"containerd-shim-runc" in line and mark in line:
                found.append(int(entry.parent.name))
        return found

    def unmount(self) -> None:
        """Unmount what is left below the state folder, and remove our pods' network namespaces."""
        inside = f"{self._settings.run}/"
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in sorted((m for m in mounts if m.startswith(inside)), reverse=True):
            succeeds(["umount", "-l", mount])
        for namespace in Path("/run/netns").glob("cni-*"):
            if self._is_ours(namespace.name):
                succeeds(["umount", "-l", str(namespace)])
                namespace.unlink(missing_ok=True)
        for result in _CNI_RESULTS.glob(f"{POD_NETWORK}-*"):
            result.unlink(missing_ok=True)

    @staticmethod
    def _is_ours(namespace: str) -> bool:
        """The CNI library keeps a result per pod, which names network and namespace."""
        return any(namespace in r.read_text(errors="replace") for r in _CNI_RESULTS.glob(f"{POD_NETWORK}-*"))


_CNI = (
    """{{"cniVersion":"0.4.0","name":"%s","plugins":[
 {{"type":"bridge","bridge":"%s","isGateway":true,"ipMasq":false,"hairpinMode":true,
  "ipam":{{"type":"host-local","dataDir":"{run}/cni/ipam","ranges":[[{{"subnet":"%s"}}]],"routes":[{{"dst":"0.0.0.0/0"}}]}}}},
 {{"type":"portmap","capabilities":{{"portMappings":true}}}}]}}
"""
    % (POD_NETWORK, POD_LINK, POD_CIDR)
)

# restrict_oom_score_adj: without CAP_SYS_RESOURCE (some virtual machines) every sandbox fails otherwise with
# "runc create failed: unable to start container process: can't get final child's PID from pipe: EOF".
_CONTAINERD = """version = 2
root = "{run}/containerd/root"
state = "{run}/containerd/state"
disabled_plugins = ["io.containerd.snapshotter.v1.aufs","io.containerd.snapshotter.v1.btrfs","io.containerd.snapshotter.v1.devmapper","io.containerd.snapshotter.v1.zfs"]
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  stream_server_address = "127.0.0.1"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni}"
    conf_dir = "{run}/cni/net.d"
"""
