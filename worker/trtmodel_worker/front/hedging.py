"""Batches that run too long are also run on another host, or on another lane of the only one (a thread may stand still
alone, as its processor may); the first answer counts. So are those of a host that somebody stopped, as soon as that is
seen, and of one that was killed, if it is not reaped at once: a driver was seen to clean up for 100 ms after a process
on a GPU. What is due and finds no lane free goes before all that wait: under load there is always somebody who waits.

One timer looks, and only while something runs: one for every batch would cost more than the batches of a fast model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from trtmodel_worker.front.calls import FIRST_LOOK_SECONDS, Batch
from trtmodel_worker.front.ladder import Overdue
from trtmodel_worker.front.lanes import Host, LanePort, Lanes
from trtmodel_worker.front.stats import RevisionStats

_LANES_PER_HEDGE = 4  # one hedge at a time for so many lanes, at least one: a slow engine must not get double load
_AGAIN_SECONDS = 0.002  # after one that was due and could not be
_LEAST_SECONDS = 0.0001  # a timer that comes a rounding error too early must not come again at once
_REAPED_SECONDS = 0.005  # a process without a device is reaped sooner, and its requests run again then


class Hedges:
    """`drain` reads what a lane has said already: after a stall of the loop, answers are there that nobody has read.
    `start` runs a batch once more, elsewhere than on its lane; False if there is no place now."""

    def __init__(
        self,
        lanes: Lanes,
        overdue: Overdue,
        stats: RevisionStats,
        drain: Callable[[LanePort], None],
        start: Callable[[Batch, LanePort], bool],
    ) -> None:
        self._claims: set[Hedges] = set()
        self._called: set[Hedges] = set()
        self._lanes = lanes
        self._overdue = overdue
        self._stats = stats
        self._drain = drain
        self._start = start
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._due = 0.0
        self._running = 0

    def watch(self, batch: Batch) -> None:
        """`batch` has just been sent to a lane."""
        self._come(min(FIRST_LOOK_SECONDS, self._overdue.after(batch.bucket)))

    def suspend(self, host: Host) -> None:
        """`host` is about to end."""
        self._lanes.suspend(host)
        if host.innocent:
            self._come(_REAPED_SECONDS)

    def ended(self) -> None:
        """A hedge has ended. What it was for may run on: a stopped host holds all its lanes, and each has a batch. The
        next one of them may have waited for this end."""
        self._running -= 1
        if self._timer is not None:
            self._come(0.0)

    def claim(self, hedges: Hedges) -> None:
        """`hedges`, of this engine or of another one, have something due and found no lane free here."""
        self._claims.add(hedges)

    def freed(self) -> bool:
        """A lane is free. True if it is claimed: then `settle` comes before anybody who waits is sent to it."""
        if self._claims:
            self._called |= self._claims
            self._claims.clear()
        return bool(self._called)

    def settle(self) -> None:
        """Those look again that have claimed what is free. Who finds nothing claims anew, and is called by the next."""
        called, self._called = self._called, set()
        for hedges in called:
            if hedges._timer is not None:
                hedges._timer.cancel()
                hedges._look()

    def _come(self, seconds: float) -> None:
        """Look after so many seconds, if not sooner."""
        due = self._loop.time() + seconds
        if self._timer is not None:
            if self._due <= due:
                return
            self._timer.cancel()
        self._due = due
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        """Comes again while something runs that may become overdue."""
        self._timer = None
        now, soonest = time.monotonic(), 0.0
        again = now + _AGAIN_SECONDS
        most = max(1, self._lanes.living // _LANES_PER_HEDGE)
        for lane in self._lanes.all:
            attempt = lane.attempt
            if attempt is None or attempt.batch.hedged or attempt.batch.hedges is not self:
                continue
            if not attempt.batch.wanted:  # nor will it be: a host that was stopped with it costs no time until it ends
                continue
            if lane.dying and not lane.host.innocent:
                continue  # what a dead host ran may be why it died
            batch = attempt.batch
            stopped = False
            if not lane.dying and now >= attempt.started + attempt.look:
                attempt.look *= 2.0
                stopped = self._notice(lane.host) and self._overdue.is_auto
                if stopped:  # also those that come now look elsewhere at once, not when this one is overdue
                    self._lanes.stopped(lane.host)
            if lane.dying:
                due, allowed = lane.since + _REAPED_SECONDS, True
            else:
                due = now if stopped else attempt.started + self._overdue.after(batch.bucket)
                # Asked of the kernel: a host that has not answered for long may as well be slow, as all of them may be.
                allowed = due <= now and (self._running < most or stopped or lane.host.is_stopped())
            if due > now:
                look = due if lane.dying else min(due, attempt.started + attempt.look)
                soonest = min(soonest or look, look)
            elif allowed and not batch.suspect:
                if not lane.dying:
                    self._drain(lane)
                if lane.attempt is attempt and self._start(batch, lane):
                    batch.hedged = True
                    self._running += 1
                    self._stats.hedges += 1
                else:
                    soonest = min(soonest or again, again)
            else:
                soonest = min(soonest or again, again)
        if soonest:
            self._come(max(_LEAST_SECONDS, soonest - now))

    def _notice(self, host: Host) -> bool:
        """One that was killed and whose lanes are not closed yet: its end takes long, so nobody waits for that. True
        for one that was stopped: it answers nothing, so nobody waits until its batches are overdue either."""
        if not host.is_lingering():
            return host.is_stopped()
        for lane in self._lanes.all:
            if lane.host is host:
                lane.since = 0.0
        return False
