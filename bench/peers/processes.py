"""A server as a process with all that it starts: what they cost, and that all of them end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
STOP_SECONDS = 10.0
TICKS = os.sysconf("SC_CLK_TCK")


def become_reaper() -> None:
    """Descendants whose parent ends become this process's children, so that none is lost (Ray's daemons are)."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def free_port() -> int:
    """Below the range from which the kernel gives ports to clients: one of them may not take it before the server."""
    while True:
        port = random.randrange(15_000, 32_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("", port))
            return port


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in task.read_text().split()]
        except OSError:
            continue
    return found


def tree(pid: int) -> list[int]:
    """`pid` and its living descendants."""
    found, rest = [], [pid]
    while rest:
        at = rest.pop()
        found.append(at)
        rest += children(at)
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def pss_mib(pids: Sequence[int]) -> float:
    """Memory in use, shared pages divided by who shares them."""
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += next((int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")), 0)
    return total / 1024


def cpu_seconds(pids: Sequence[int]) -> float:
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


class Server:
    """One started server. `log`: where its output goes."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], cwd: Path, log: Path) -> None:
        self.command, self.environment, self.cwd, self.log = list(command), dict(environment), cwd, log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, env=self.environment, cwd=self.cwd, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def pids(self) -> list[int]:
        return tree(self.pid) if self.alive() else []

    def stop(self) -> None:
        """As a container ends: SIGTERM to the first process, up to STOP_SECONDS, then SIGKILL to all that is left."""
        if self.process is not None and self.alive():
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        end_descendants()
        if self.process is not None:
            # PyTriton ends at SIGTERM without removing its shared memory (named so, with its process's number).
            for path in Path("/dev/shm").glob(f"pytrtion{self.pid}-*"):
                path.unlink(missing_ok=True)
        self.process = None

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-1500:] if self.log.exists() else ""


def end_descendants() -> None:
    """SIGKILL to every descendant of this process, which started them all, until none is left."""
    while True:
        for pid in tree(os.getpid())[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        time.sleep(0.01)
