"""A work queue with client-go's semantics, for one event loop.

A key is queued once however often it is added; it is worked on by at most one worker at a time; added while it is
worked on, it is queued again when the work is done. So no event is lost and no two passes of one model overlap.

There are two lanes: what changed, and what is only looked at again. Of five turns the second lane gets one, so that
neither a resync of thousands holds up a change, nor a storm of changes the resync.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Protocol

from trtmodel_operator.ports import Key

BACKOFF_FIRST = 1.0  # seconds
BACKOFF_MOST = 300.0
SHARE = 5  # of so many turns one is the second lane's


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
        self._waiting: dict[Key, float] = {}  # in order; the value is since when
        self._aside: dict[Key, float] = {}  # the second lane; no key is in both
        self._turn = 0
        self._running: set[Key] = set()
        self._again: set[Key] = set()  # added while running
        self._timers: dict[Key, tuple[float, Timer]] = {}
        self._failures: dict[Key, int] = {}
        self._filled = asyncio.Event()

    def add(self, key: Key) -> None:
        if key in self._running:
            self._again.add(key)
        elif key not in self._waiting:
            self._aside.pop(key, None)
            self._waiting[key] = self._now()
            self._filled.set()

    def add_aside(self, key: Key) -> None:
        """To the second lane, unless it waits or is worked on already."""
        if key not in self._running and key not in self._waiting and key not in self._aside:
            self._aside[key] = self._now()
            self._filled.set()

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

    async def get(self) -> Key:
        """The key that waits longest in the lane whose turn it is. A timer of the key is dropped: the pass that begins
        sets its own."""
        while not self._waiting and not self._aside:
            self._filled.clear()
            await self._filled.wait()
        self._turn = (self._turn + 1) % SHARE
        lane = self._aside if self._aside and (not self._waiting or self._turn == 0) else self._waiting
        key = next(iter(lane))
        del lane[key]
        self._running.add(key)
        if held := self._timers.pop(key, None):
            held[1].cancel()
        return key

    def done(self, key: Key) -> None:
        self._running.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def depth(self) -> int:
        return len(self._waiting) + len(self._aside)

    def oldest(self) -> float:
        """How long the first key of the first lane has waited, in seconds."""
        return self._now() - next(iter(self._waiting.values())) if self._waiting else 0.0

    def _expired(self, key: Key) -> None:
        del self._timers[key]
        self.add(key)
