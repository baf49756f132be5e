"""A process that may run in short slices only, so that it disturbs what serves on the same processors no longer than
one slice at a time.

    requests ######........########################
    runs     ......##..##............#............#   up to a share of the time that is free; else now and then
    stopped  ######..##..############.############.

A low priority is not enough: a processor that has something to run, however unimportant, takes no work from a busy one,
so requests wait behind each other while a warm-up computes (Magika at 70 % load on two cores: p99 in a swap 4x with
SCHED_IDLE, 7x with nice 19). A stopped process leaves its processor idle.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

SLICE_SECONDS = 0.001
MOST_SLICES_LATE = 12  # then it runs all the same, for a thirteenth of the time: preparing must end
SHARE = 0.5  # of the time that is free: a slice ends when a request comes, yet it costs that one its caches


def takes_time(running: int, waiting: int, lanes: int, cpus: float) -> bool:
    """Whether a process that runs beside `running` requests, on as many of `lanes`, takes time from them: each lane
    computes with its part of the processors, one more is for the front, and one for the process itself."""
    busy = running * max(1.0, cpus / max(1, lanes))
    return waiting > 0 or (running > 0 and cpus - busy < 2.0)


class Pulse:
    """Stops and continues a process by `send` from now on, until `end`: it runs a `share` of the time, less while it is
    `crowded`: that asks whether the process would take time from requests."""

    def __init__(self, send: Callable[[int], None], crowded: Callable[[], bool], share: float = SHARE) -> None:
        self._send = send
        self._rests = 1.0 / share - 1.0
        self._crowded = crowded
        self._late = 0
        self._forced = False
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._runs = True
        self._timer = self._loop.call_later(SLICE_SECONDS, self._stop)

    def crowd(self) -> None:
        """A request came that it would take time from."""
        if self._runs and not self._forced:
            self._timer.cancel()
            self._stop()

    def end(self) -> None:
        """Continued for good."""
        self._timer.cancel()
        self._send(signal.SIGCONT)

    def _stop(self) -> None:
        self._runs = False
        self._send(signal.SIGSTOP)
        ran = max(self._loop.time() - self._began, SLICE_SECONDS / 4)
        self._timer = self._loop.call_later(ran * self._rests, self._continue)

    def _continue(self) -> None:
        self._forced = self._late == MOST_SLICES_LATE
        if not self._forced and self._crowded():
            self._late += 1
            self._timer = self._loop.call_later(SLICE_SECONDS, self._continue)
            return
        self._late, self._runs, self._began = 0, True, self._loop.time()
        self._send(signal.SIGCONT)
        self._timer = self._loop.call_later(SLICE_SECONDS, self._stop)
