"""A process that may run in short slices only, so that it disturbs what serves on the same processors no longer than
one slice at a time.

    requests ######........################.....####
    runs     ......##..##..............#......#.....   up to a share of the time that is free; else now and then
    stopped  ######..##..##############.######.#####

A low priority is not enough: a processor that has something to run, however unimportant, takes no work from a busy one,
so requests wait behind each other while a warm-up computes (Magika at 70 % load on two cores: p99 in a swap 4x with
SCHED_IDLE, 7x with nice 19). A stopped process leaves its processor idle.
"""

from __future__ import annotations

import asyncio
import enum
import signal
from collections.abc import Callable

SLICE_SECONDS = 0.001
SHARE = 0.5  # of the time that is free: a slice ends when a request comes, yet it costs that one its caches


class Crowd(enum.IntEnum):
    """What is left for a process beside those that serve."""

    NONE = 0  # a processor of its own
    SOME = 1  # one that the front needs now and then: at any load there are such moments
    FULL = 2


PATIENCE = {Crowd.NONE: 0, Crowd.SOME: 6, Crowd.FULL: 60}  # slices until it runs all the same
HALVED_SECONDS = 15.0  # preparing must end: after so long it has half of the patience, after twice that a third ...


def crowd(running: int, waiting: int, lanes: int, cpus: float) -> Crowd:
    """Beside `running` requests, on as many of `lanes`: each lane computes with its part of the processors, and one
    more is for the front."""
    left = cpus - running * max(1.0, cpus / max(1, lanes))
    if waiting or (running and left < 1.0):
        return Crowd.FULL
    return Crowd.SOME if running and left < 2.0 else Crowd.NONE


class Pulse:
    """Stops and continues a process by `send` from now on, until `end`: it runs a `share` of the time, less in a
    `crowd`."""

    def __init__(self, send: Callable[[int], None], crowd: Callable[[], Crowd], share: float = SHARE) -> None:
        self._send = send
        self._rests = 1.0 / share - 1.0
        self._crowd = crowd
        self._waited = 0
        self._forced = False
        self._loop = asyncio.get_running_loop()
        self._born = self._began = self._loop.time()
        self._runs = True
        self._timer = self._loop.call_later(SLICE_SECONDS, self._stop)

    def make_way(self) -> None:
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
        crowd, now = self._crowd(), self._loop.time()
        if self._waited < PATIENCE[crowd] / (1.0 + (now - self._born) / HALVED_SECONDS):
            self._waited += 1
            self._timer = self._loop.call_later(SLICE_SECONDS, self._continue)
            return
        self._forced = crowd is Crowd.FULL
        self._waited, self._runs, self._began = 0, True, now
        self._send(signal.SIGCONT)
        self._timer = self._loop.call_later(SLICE_SECONDS, self._stop)
