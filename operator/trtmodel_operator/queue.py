"""A work queue with client-go's semantics, for one event loop.

A key is queued once however often it is added; it is worked on by at most one worker at a time; added while it is
worked on, it is queued again when the work is done. So no event is lost and no two passes of one model overlap.

There are three lanes: what people asked for, what changed, and what is only looked at again. The first goes before the
second, and that before the third; but of five turns each of the others gets one, so that no storm in one of them stops
another. A pass that has acted may wait until the first passes of all that people asked for have acted, too (`calm`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from trtmodel_operator.ports import Key

BACKOFF_FIRST = 1.0  # seconds
BACKOFF_MOST = 300.0
SHARE = 5  # of so many turns one is the second lane's and one the third's
ASKED, CHANGED, AGAIN = 0, 1, 2  # the lanes


class Timer(Protocol):
    def cancel(self) -> object: ...


class WorkQueue:
    """`now` is a monotonic clock, `call_later` the event loop's, `jitter` gives a number from 0 to 1 by chance."""

    def __init__(
        self,
        *,
        now: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], Timer] | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._now = now
        self._call_later = call_later
        self._jitter = jitter
        self._lanes: tuple[dict[Key, float], ...] = ({}, {}, {})  # in order; the value is since when
        self._lane_of: dict[Key, int] = {}  # no key is in two
        self._turn = 0
        self._running: set[Key] = set()
        self._to_act: set[Key] = set()  # of those, what people asked for and nothing was done about yet
        self._calm = asyncio.Event()
        self._calm.set()
        self._again: dict[Key, int] = {}  # added while running -> lane
        self._timers: dict[Key, tuple[float, Timer]] = {}
        self._failures: dict[Key, int] = {}
        self._idle: deque[asyncio.Future[None]] = deque()  # who waits for any key
        self._idle_for_asked: deque[asyncio.Future[None]] = deque()

    def add(self, key: Key, lane: int = CHANGED) -> None:
        """To this lane, unless it waits in it or an earlier one already. While it is worked on, a mere look is not
        wanted."""
        if key in self._running:
            if lane < AGAIN:
                self._again[key] = min(lane, self._again.get(key, lane))
            return
        held = self._lane_of.get(key)
        if held is not None and held <= lane:
            return
        if held is not None:
            del self._lanes[held][key]
        self._lanes[lane][key], self._lane_of[key] = self._now(), lane
        self._wake()

    def add_after(self, key: Key, seconds: float) -> None:
        """Of several, the earliest counts."""
        due = self._now() + seconds
        if held := self._timers.get(key):
            if held[0] <= due:
                return
            held[1].cancel()
        later = self._call_later or asyncio.get_running_loop().call_later
        self._timers[key] = (due, later(seconds, lambda: self._expired(key)))

    def add_after_failure(self, key: Key, at_least: float = 0.0) -> float:
        """Add after an exponential back-off with jitter, but no earlier than `at_least` seconds (a Retry-After);
        the delay that was chosen."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay: float = min(BACKOFF_MOST, BACKOFF_FIRST * 2.0 ** min(failures, 32))
        delay = max(at_least, delay * (0.75 + 0.25 * self._jitter()))
        self.add_after(key, delay)
        return delay

    def forget(self, key: Key) -> None:
        """The work succeeded: the next failure starts again with the shortest delay."""
        self._failures.pop(key, None)

    async def get(self, *, asked_only: bool = False) -> Key:
        """The key that waits longest in the lane whose turn it is; with `asked_only`, in the first. A timer of the key
        is dropped: the pass that begins sets its own."""
        while not (self._lanes[ASKED] if asked_only else self._lane_of):
            await self._wait(self._idle_for_asked if asked_only else self._idle)
        lanes = self._lanes[:CHANGED] if asked_only else self._in_turn()
        lane = next(lane for lane in lanes if lane)
        key = next(iter(lane))
        del lane[key], self._lane_of[key]
        self._running.add(key)
        if lane is self._lanes[ASKED]:
            self._to_act.add(key)
            self._settle()
        if held := self._timers.pop(key, None):
            held[1].cancel()
        self._wake()  # who was woken for what is left may have found this one
        return key

    def _in_turn(self) -> Sequence[dict[Key, float]]:
        self._turn = (self._turn + 1) % SHARE
        return [self._lanes[self._turn], *self._lanes] if self._turn in (CHANGED, AGAIN) else self._lanes

    def _wake(self) -> None:
        """One of those who may take what waits: of a hundred at rest, all others would wake up in vain."""
        if not self._lane_of:
            return
        for idle in [self._idle_for_asked, self._idle] if self._lanes[ASKED] else [self._idle]:
            while idle:
                waiting = idle.popleft()
                if not waiting.done():
                    waiting.set_result(None)
                    return

    async def _wait(self, idle: deque[asyncio.Future[None]]) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        idle.append(waiting)
        try:
            await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self._wake()  # another one in its place
            raise

    def acted(self, key: Key) -> None:
        """The pass has done what there is to do at once; what is left is to tell of it."""
        self._to_act.discard(key)
        self._settle()

    async def calm(self, most: float) -> None:
        """Returns when all passes over what people asked for have acted, at the latest after so many seconds. (What
        waits in the queue for a pass may need the place of one that waits here.)"""
        if not self._calm.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._calm.wait(), most)

    def _settle(self) -> None:
        if self._to_act:
            self._calm.clear()
        else:
            self._calm.set()

    def done(self, key: Key) -> None:
        self._running.discard(key)
        self.acted(key)
        if (lane := self._again.pop(key, None)) is not None:
            self.add(key, lane)

    def depth(self) -> int:
        return len(self._lane_of)

    def oldest(self) -> float:
        """How long a change has waited at most, in seconds."""
        first = [next(iter(lane.values())) for lane in self._lanes[:AGAIN] if lane]
        return self._now() - min(first) if first else 0.0

    def _expired(self, key: Key) -> None:
        del self._timers[key]
        self.add(key)
