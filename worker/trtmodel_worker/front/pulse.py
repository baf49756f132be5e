"""A process that is prepared while others serve on the same processors runs in the moments that they leave it.

    requests  ######......#########.............##############################
    runs      ......  ####         .  ##########           #
    stopped   ######  ...#########.             ########## .##################
                    `- nothing runs, and nothing has come for a moment:    `- a short slice all the same, the more
                       until the next request is given to a lane              often the longer it takes

Who comes when nothing runs is answered soonest: that its first moments are shared makes no slow request slower. A slice
beside requests does, and so does each look at the clock that the front takes for it.

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
SETTLED_SECONDS = 0.001  # without a request: one client that asks again at once leaves no moment between


class Crowd(enum.IntEnum):
    """What is left for a process beside those that serve."""

    NONE = 0  # a processor of its own
    SOME = 1  # one that the front needs now and then: at any load there are such moments
    FULL = 2


PATIENCE_SECONDS = {Crowd.SOME: 0.006, Crowd.FULL: 0.1}  # until a slice comes all the same
HALVED_SECONDS = 15.0  # preparing must end: after so long it has half of the patience, after twice that a third ...


def crowd(running: int, waiting: int, lanes: int, cpus: float) -> Crowd:
    """Beside `running` requests, on as many of `lanes`: each lane computes with its part of the processors, and one
    more is for the front."""
    left = cpus - running * max(1.0, cpus / max(1, lanes))
    if waiting or (running and left < 1.0):
        return Crowd.FULL
    return Crowd.SOME if running and left < 2.0 else Crowd.NONE


class Pulse:
    """Stops and continues a process by `send` from now on, until `end`, as `crowd` says. Tell it by `look` what may
    have changed."""

    def __init__(self, send: Callable[[int], None], crowd: Callable[[], Crowd]) -> None:
        self._send = send
        self._crowd = crowd
        self._loop = asyncio.get_running_loop()
        self._born = self._stopped = self._loop.time()
        self._runs = True
        self._lasts = False  # a slice that no request ends: in a full crowd there is always one
        self._seen = Crowd.NONE
        self._timer = self._loop.call_later(SLICE_SECONDS, self._turn)

    def look(self, crowd: Crowd) -> None:
        """A request was given to a lane, or has been answered; this is the crowd now."""
        if not self._runs:
            if crowd is not self._seen:
                self._wait(crowd)
        elif crowd and not self._lasts:
            self._stop(crowd)

    def end(self) -> None:
        """Continued for good."""
        self._timer.cancel()
        self._send(signal.SIGCONT)

    def _stop(self, crowd: Crowd) -> None:
        self._runs, self._stopped = False, self._loop.time()
        self._send(signal.SIGSTOP)
        self._wait(crowd)

    def _wait(self, crowd: Crowd) -> None:
        self._timer.cancel()
        self._seen, now = crowd, self._loop.time()
        if crowd:
            due = self._stopped + PATIENCE_SECONDS[crowd] / (1.0 + (now - self._born) / HALVED_SECONDS)
        else:
            due = now + SETTLED_SECONDS
        self._timer = self._loop.call_later(max(0.0, due - now), self._turn)

    def _turn(self) -> None:
        """A slice is over, or a wait."""
        crowd = self._crowd()
        if self._runs:
            self._lasts = False
            if crowd:
                self._stop(crowd)
        elif crowd is not self._seen:
            self._wait(crowd)  # it has changed in a way that nobody tells
        else:
            self._runs, self._lasts = True, crowd is Crowd.FULL
            self._send(signal.SIGCONT)
            if crowd:
                self._timer = self._loop.call_later(SLICE_SECONDS, self._turn)
