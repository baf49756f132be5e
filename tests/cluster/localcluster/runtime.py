"""containerd: its configuration, its images, and the end of its containers."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from . import host
from .files import filled, put
from .processes import Components
from .settings import POD_CIDR, POD_LINK, POD_NETWORK, ClusterError, Settings
from .shell import run, say, succeeds
from .store import Store

_SECONDS = 60.0
_IMPORT_SECONDS = 600.0
_CNI_RESULTS = Path("/var/lib/cni/results")


class Runtime:
    """The containerd of this cluster; it shares nothing with another one on the machine."""

    def __init__(self, settings: Settings, components: Components) -> None:
        self._settings, self._components = settings, components

    def _ctr(self, *args: str) -> list[str]:
        return ["ctr", "-a", str(self._settings.containerd_socket), "-n", "k8s.io", *args]

    def start(self, pause_image: str) -> None:
        """Write the configuration and start it; does not wait for it."""
        run_dir = self._settings.run
        values = {
            "RUN": str(run_dir),
            "SOCKET": str(self._settings.containerd_socket),
            "PAUSE_IMAGE": pause_image,
            "CNI_PLUGINS": str(host.CNI_PLUGINS),
            "POD_NETWORK": POD_NETWORK,
            "POD_LINK": POD_LINK,
            "POD_CIDR": POD_CIDR,
        }
        put(run_dir / "cni/net.d/10-pods.conflist", filled("cni.conflist", values))
        put(run_dir / "containerd.toml", filled("containerd.toml", values))
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
        importer.stdin = None  # closed above; communicate would flush it
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
        # The CNI library keeps a result per pod and network, which names the pod's namespace.
        results = {r: r.read_text(errors="replace") for r in _CNI_RESULTS.glob("*")}
        ours = " ".join(text for r, text in results.items() if r.name.startswith(f"{POD_NETWORK}-"))
        for namespace in [n for n in Path("/run/netns").glob("cni-*") if n.name in ours]:
            succeeds(["umount", "-l", str(namespace)])
            namespace.unlink(missing_ok=True)
            for result in [r for r, text in results.items() if namespace.name in text]:
                result.unlink(missing_ok=True)
