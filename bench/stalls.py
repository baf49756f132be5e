"""What the machine takes away by itself. A virtual one's processors stand still now and then, each for itself, for some
milliseconds up to seconds, and whatever runs there stands still with them. So a thread of real-time priority on each
looks whether it wakes up in time: nothing on this side of the hypervisor can keep it.

    python bench/stalls.py CPU        one line for each stall: seconds of the monotonic clock at its begin and end
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from types import TracebackType
from typing import IO

EACH_SECONDS = 0.002
LATE_SECONDS = 0.004
PRIORITY = 50


class Stalls:
    """Of the CPUs that this process may use, from `with` on. `known` is False where real-time priority is not allowed:
    then nothing is known."""

    def __init__(self) -> None:
        self.known = True
        self._found: list[tuple[float, float]] = []
        self._lookers: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> Stalls:
        for cpu in os.sched_getaffinity(0):
            looker = subprocess.Popen([sys.executable, __file__, str(cpu)], stdout=subprocess.PIPE, text=True)
            self._lookers.append(looker)
            assert looker.stdout is not None
            self._readers.append(threading.Thread(target=self._read, args=(looker.stdout,), daemon=True))
            self._readers[-1].start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for looker in self._lookers:
            looker.terminate()
            looker.wait()
        for reader in self._readers:
            reader.join()

    def between(self, begin: float, end: float) -> list[tuple[float, float]]:
        """Begin and end of those that touch this time of the monotonic clock."""
        return [stall for stall in list(self._found) if stall[0] <= end and stall[1] >= begin]

    def longest(self, begin: float, end: float) -> str:
        """In ms, for a table."""
        if not self.known:
            return "not known"
        return f"{1e3 * max((b - a for a, b in self.between(begin, end)), default=0.0):.1f}"

    def _read(self, lines: IO[str]) -> None:
        for text in lines:
            if text.startswith("denied"):
                self.known = False
            else:
                begin, end = map(float, text.split())
                self._found.append((begin, end))


def look(cpu: int) -> None:
    os.sched_setaffinity(0, {cpu})
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    except PermissionError:
        print("denied", flush=True)
        return
    while True:
        due = time.monotonic() + EACH_SECONDS
        time.sleep(EACH_SECONDS)
        now = time.monotonic()
        if now - due > LATE_SECONDS:
            print(due, now, flush=True)


if __name__ == "__main__":
    look(int(sys.argv[1]))
