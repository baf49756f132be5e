"""The machine below the cluster: its components, the processes in containers, and the packets between pods.

Only what the cluster's recipe started is touched: a component by its record of pid, binary and start time; a process in
a container by a descriptor that is opened first and then checked to be of that container.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))

from localcluster import binaries, controlplane, node, settings
from localcluster.processes import Components
from localcluster.settings import KUBERNETES_VERSION, ClusterError

__all__ = ["KUBERNETES_VERSION", "Machine"]

COMMENT = "trtmodel-chaos"
DEAD_SECONDS = 15.0
AGAIN_SECONDS = 0.2
CALL_SECONDS = 20.0
# What watches the API server. Each waits up to a minute before it asks again one that was away twice (80 s were seen
# until the kubelet heard of a new pod): a Service leads to dead workers for so long, and no new one begins.
FOLLOWERS = ("kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet")


class Machine:
    """Raises SystemExit where the cluster is none of this machine's own processes."""

    def __init__(self) -> None:
        self._settings = settings.from_environment()
        if self._settings.mode:
            raise SystemExit("chaos kills processes of this machine: it needs the local cluster (leave CLUSTER empty)")
        self._components = Components(self._settings.run)
        self._built = binaries.located(self._settings)
        self._frozen: list[tuple[int, int]] = []  # pid, descriptor
        self.alone = threading.Lock()  # of who kills components, until they are back
        self.pod_logs = self._settings.run / "podlogs"
        self.kept_logs = self._settings.run / "chaos-logs"  # on the same file system: they are links
        self._earlier: frozenset[Path] = frozenset()  # folders of pods of runs before

    # ------------------------------------------------------------------------------------------------ components

    def kill_component(self, name: str) -> int:
        """SIGKILL; returns its pid when it is gone, 0 if it did not run."""
        known = self._components.identity(name)
        if known is None or not known.alive():
            return 0
        os.kill(known.pid, signal.SIGKILL)
        deadline = time.monotonic() + DEAD_SECONDS
        while known.alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        return known.pid

    def start_components(self) -> None:
        """Those that do not run, as `cluster up` would; does not wait for them. One that was killed may hold its port
        for some moments longer, on a busy machine: tried again. Raises ClusterError."""
        deadline = time.monotonic() + DEAD_SECONDS
        while True:
            try:
                return self._start()
            except ClusterError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(AGAIN_SECONDS)

    def _start(self) -> None:
        controlplane.start_storage(self._settings, self._components, self._built)
        controlplane.start_controllers(self._settings, self._components, self._built)
        node.start(self._settings, self._components, self._built)

    def restart_followers(self) -> None:
        """So that they look at once at an API server that is back: how long Kubernetes waits is not what is tested."""
        for name in FOLLOWERS:
            self.kill_component(name)
        self.start_components()

    # ------------------------------------------------------------------------------------------------- processes

    def signal_in(self, container: str, number: int, words: str = "") -> int:
        """Sends a signal to the first process of a container, or to one whose command line has these words. Returns its
        pid; 0 if there is none."""
        for pid in _processes(container):
            if words not in _command(pid) if words else not _is_first(pid):
                continue
            with contextlib.suppress(OSError):
                descriptor = os.pidfd_open(pid)
                if not _lies_in(pid, container):  # its number was used again
                    os.close(descriptor)
                    continue
                signal.pidfd_send_signal(descriptor, number)
                if number == signal.SIGSTOP:
                    self._frozen.append((pid, descriptor))
                else:
                    os.close(descriptor)
                return pid
        return 0

    def thaw(self, pid: int) -> bool:
        """False if it has ended meanwhile."""
        for entry in [e for e in self._frozen if e[0] == pid]:
            self._frozen.remove(entry)
            try:
                signal.pidfd_send_signal(entry[1], signal.SIGCONT)
            except ProcessLookupError:
                return False
            finally:
                os.close(entry[1])
        return True

    # --------------------------------------------------------------------------------------------------- packets

    def cut(self, one: str, other: str = "") -> None:
        """No packet between these addresses, or between one and everybody, goes on."""
        for rule in _rules(one, other):
            _iptables("-I", "FORWARD", "1", *rule)

    def mend(self, one: str, other: str = "") -> int:
        """How many packets were lost by the cut."""
        lost = _dropped(_iptables("-v", "-S", "FORWARD"), one, other)
        for rule in _rules(one, other):
            with contextlib.suppress(subprocess.CalledProcessError):
                _iptables("-D", "FORWARD", *rule)
        return lost

    def heal(self) -> None:
        """Everything runs and reaches everything again; also after a run that was killed in the middle."""
        for line in _iptables("-S", "FORWARD").splitlines():
            if COMMENT in line.split():
                _iptables("-D", *line.split()[1:])
        for pid, _ in list(self._frozen):
            self.thaw(pid)
        self.start_components()

    # ------------------------------------------------------------------------------------------------------ logs

    def forget_logs(self) -> None:
        """All that are here belong to a run before: the kubelet removes some only a while after their namespace."""
        shutil.rmtree(self.kept_logs, ignore_errors=True)
        self._earlier = frozenset(self.pod_logs.glob("*"))

    def keep_logs(self, namespaces: tuple[str, ...]) -> None:
        """Links to the logs of this run's pods, since the kubelet deletes them with the pods."""
        for namespace in namespaces:
            for file in self.pod_logs.glob(f"{namespace}_*/*/*.log"):
                link = self.kept_logs / file.relative_to(self.pod_logs)
                if file.parents[1] not in self._earlier and not link.exists():
                    link.parent.mkdir(parents=True, exist_ok=True)
                    with contextlib.suppress(OSError):
                        link.hardlink_to(file)


def _rules(one: str, other: str) -> list[list[str]]:
    tail = ["-m", "comment", "--comment", COMMENT, "-j", "DROP"]
    if not other:
        return [["-d", one, *tail], ["-s", one, *tail]]
    return [["-s", one, "-d", other, *tail], ["-s", other, "-d", one, *tail]]


def _dropped(rules: str, *addresses: str) -> int:
    """Packets that these rules dropped, of those between the addresses. A line ends in `-c PACKETS BYTES -j DROP`."""
    found = [line.split() for line in rules.splitlines() if COMMENT in line.split()]
    wanted = {f"{address}/32" for address in addresses if address}
    return sum(int(words[words.index("-c") + 1]) for words in found if wanted <= set(words))


def _iptables(*arguments: str) -> str:
    command = ["iptables", "-w", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=CALL_SECONDS).stdout


def _processes(container: str) -> list[int]:
    numbers = [int(p.name) for p in Path("/proc").glob("[0-9]*")]
    return sorted(pid for pid in numbers if _lies_in(pid, container))


def _lies_in(pid: int, container: str) -> bool:
    try:
        return container in Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return False


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _is_first(pid: int) -> bool:
    """Whether it is process 1 of its container."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    numbers = next((line.split()[1:] for line in lines if line.startswith("NSpid:")), [])
    return len(numbers) > 1 and numbers[-1] == "1"
