"""Long-running components: started once, recognised later, ended only if they are ours."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .settings import ClusterError
from .shell import tail

_LARGEST_LOG = 50 << 20
_STOP_SECONDS = 15.0


@dataclass(frozen=True)
class Identity:
    """A process, not just its number: numbers are used again, also after a reboot."""

    pid: int
    exe: str
    started: str  # clock ticks since boot
    boot: str

    def alive(self) -> bool:
        """Whether this very process runs. A zombie, which init may reap late, counts as ended."""
        return _identify(self.pid) == self


def _identify(pid: int) -> Identity | None:
    try:
        exe = str(Path(f"/proc/{pid}/exe").readlink())
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Identity(pid, exe, stat.rpartition(")")[2].split()[19], boot)


class Components:
    """The components of one cluster: records in `run/pid`, logs in `run/log`."""

    def __init__(self, run: Path) -> None:
        self._pids, self._logs = run / "pid", run / "log"

    def identity(self, name: str) -> Identity | None:
        """Who was started under this name last, alive or not."""
        try:
            return Identity(**json.loads((self._pids / name).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def alive(self, name: str) -> bool:
        known = self.identity(name)
        return known is not None and known.alive()

    def log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def start(self, name: str, argv: Sequence[str | Path], *, ports: Sequence[tuple[str, int]]) -> None:
        """Start it unless it runs; one that runs from another binary (a new version) is replaced.

        Raises ClusterError when a port that it needs is taken by something else.
        """
        found = shutil.which(str(argv[0]))
        if found is None:
            raise ClusterError(f"{argv[0]} is missing: run `cluster up` again")
        program = os.path.realpath(found)  # /proc/PID/exe names no link
        known = self.identity(name)
        if known is not None and known.alive():
            if known.exe == program:
                return
            self.stop(name)
        for address, port in ports:
            _require_free(name, address, port)
        self._pids.mkdir(parents=True, exist_ok=True)
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self.log(name)
        if log.exists() and log.stat().st_size > _LARGEST_LOG:
            log.replace(log.with_suffix(".log.1"))
        command = [program, *(str(a) for a in argv[1:])]
        with log.open("ab") as out:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd="/"
            )
        identity = _identify(child.pid)
        if identity is None:
            raise ClusterError(f"{name} ended at once:\n{tail(log)}")
        (self._pids / name).write_text(json.dumps(identity.__dict__) + "\n")

    def require_alive(self, *names: str) -> None:
        """Raise ClusterError with the end of the log of the first component that died."""
        for name in names:
            if not self.alive(name):
                raise ClusterError(f"{name} died. The end of {self.log(name)}:\n{tail(self.log(name))}")

    def stop(self, name: str) -> None:
        """End it: SIGTERM, then SIGKILL. A process that is not the recorded one is left alone."""
        known = self.identity(name)
        if known is not None and known.alive():
            os.kill(known.pid, signal.SIGTERM)
            deadline = time.monotonic() + _STOP_SECONDS
            while known.alive() and time.monotonic() < deadline:
                time.sleep(0.05)
            if known.alive():
                os.kill(known.pid, signal.SIGKILL)
        (self._pids / name).unlink(missing_ok=True)


def _require_free(name: str, address: str, port: int) -> None:
    with socket.socket() as probe:
        probe.settimeout(1)
        if probe.connect_ex((address, port)) == 0:
            raise ClusterError(
                f"{name} needs {address}:{port}, where another program listens already "
                f"(see: ss -ltnp 'sport = :{port}'). Another cluster on this machine? It is left alone"
            )
