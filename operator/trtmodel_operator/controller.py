"""What turns the queue: workers that reconcile, a resync that forgets nothing, and a witness of the watch."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping

from trtmodel_operator import logs
from trtmodel_operator.metrics import OperatorMetrics
from trtmodel_operator.ports import Cluster, ClusterError, Conflict, Key
from trtmodel_operator.queue import AGAIN, CHANGED, WorkQueue

WORKERS = 32  # passes at a time: most of a pass is waiting for answers
# And so many more, only for what people asked for. With hundred changes at once and a server that takes half a second
# for a write, the first 32 would hold up the others' first action with their own second and third.
ASKED_WORKERS = 128
RESYNC = 300.0  # seconds
AGAIN_RATE = 3.0  # models a second that are looked at again though nothing is known to have changed
PASS_TIMEOUT = 45.0  # seconds of one pass; less than STUCK, so that a slow API server is no reason to be restarted
STUCK = 60.0  # seconds without any worker finishing or idling, after which the process is of no use
ENDLESS = 120.0  # seconds of one pass, which was told to end after PASS_TIMEOUT and does not
STARVED = 900.0  # seconds that a change may wait for its pass: all models have had several by then
STOP_SECONDS = 2.0  # that passes under way get to end
BEAT = 1.0
BESIDE_AGAIN = 30.0  # seconds until what runs beside the passes is begun again, should it end
LAG_MOST = 5.0

log = logging.getLogger(__name__)


class WatchBroken(Exception):
    """The watch stays behind what a list shows, although it is open: only a new process is sure to cure it."""


class Witness:
    """Compares what the watch delivered with what a list shows. A busy object may be ahead in any one list; a watch
    that delivered nothing of an object between two lists, though the first was ahead already, has lost it."""

    def __init__(self) -> None:
        self._delivered: dict[Key, str] = {}
        self._asked: dict[Key, object] = {}
        self._behind: dict[Key, str] = {}  # what was delivered when a list was ahead of it
        self._lost = False

    def delivered(self, key: Key) -> str:
        """The version that came last; '' if none did."""
        return self._delivered.get(key, "")

    def deliver(self, key: Key, version: str, asked: object = None) -> bool:
        """True if `asked`, the part of the object that is other people's, is news. Our own writes to status come back
        as events too: a pass for each would double the work."""
        news = key not in self._asked or self._asked[key] != asked
        self._delivered[key], self._asked[key] = version, asked
        return news

    def missed(self, listed: Mapping[Key, str]) -> list[Key]:
        """Keys that a list shows in a newer version than came last: that event is late, or lost for good."""
        return [key for key, came in self._delivered.items() if came and key in listed and int(listed[key]) > int(came)]

    def compare(self, listed: Mapping[Key, str]) -> list[Key]:
        """Keys that were delivered and are gone: no event tells of an object that was deleted while the watch was
        down. Raises WatchBroken at the second list in a row that shows something lost."""
        gone = [key for key in self._delivered if key not in listed]
        for key in gone:
            del self._delivered[key], self._asked[key]
        ahead = {
            key: self._delivered.get(key, "") for key, version in listed.items() if self._delivered.get(key) != version
        }
        lost = sorted(key for key, delivered in ahead.items() if self._behind.get(key) == delivered)
        self._behind = ahead
        if lost and self._lost:
            raise WatchBroken(f"the watch delivers no events of {len(lost)} TRTModels, such as {'/'.join(lost[0])}")
        self._lost = bool(lost)
        return gone


class Controller:
    """`reconcile` does one pass and says after how many seconds it wants the next; None = when something happens.
    `broken` is called if the watch was found dead. `beside` are tasks by name that run for ever beside the passes. The
    passes begin when `before` returns."""

    def __init__(
        self,
        queue: WorkQueue,
        reconcile: Callable[[Key], Awaitable[float | None]],
        cluster: Cluster,
        metrics: OperatorMetrics,
        witness: Witness,
        broken: Callable[[], None],
        *,
        workers: int = WORKERS,
        asked_workers: int = ASKED_WORKERS,
        resync: float = RESYNC,
        pass_timeout: float = PASS_TIMEOUT,
        beside: Mapping[str, Callable[[], Awaitable[None]]] | None = None,
        before: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._queue, self._reconcile, self._cluster, self._metrics = queue, reconcile, cluster, metrics
        self._witness, self._broken = witness, broken
        self._workers, self._asked_workers = workers, asked_workers
        self._resync, self._pass_timeout = resync, pass_timeout
        self._beside, self._before = dict(beside or {}), before
        self._tasks: list[asyncio.Task[None]] = []
        self._began: dict[Key, float] = {}  # passes under way
        self._finished_at = time.monotonic()
        self._lag = 0.0

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._work(asked_only=n >= self._workers), name=f"reconcile {n}")
            for n in range(self._workers + self._asked_workers)
        ]
        self._tasks.append(asyncio.create_task(self._resync_forever(), name="resync"))
        self._tasks.append(asyncio.create_task(self._beat(), name="heartbeat"))
        self._tasks += [asyncio.create_task(self._for_ever(run), name=name) for name, run in self._beside.items()]

    async def stop(self) -> None:
        """Passes under way are cancelled: every line of them may be the last. One that does not end is left: the
        process ends soon, and the next leader waits."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            _, left = await asyncio.wait(self._tasks, timeout=STOP_SECONDS)
            for task in left:
                log.error("%s does not end", task.get_name())
        self._tasks = []

    def trouble(self) -> str:
        """Why this process makes no progress; '' if it does."""
        if self._lag > LAG_MOST:
            return f"the event loop was {self._lag:.1f} s late"
        now = time.monotonic()
        if len(self._began) >= self._workers and (idle := now - self._finished_at) > STUCK:
            return f"no pass has ended for {idle:.0f} s"
        if endless := ["/".join(key) for key, began in self._began.items() if now - began > ENDLESS]:
            return f"passes that do not end: {', '.join(sorted(endless))}"
        if (waited := self._queue.oldest()) > STARVED:
            return f"a change has waited for its pass for {waited:.0f} s"
        ended = [task.get_name() for task in self._tasks if task.done()]
        return f"ended: {', '.join(ended)}" if ended else ""

    async def _work(self, *, asked_only: bool) -> None:
        if self._before is not None:
            await self._before()
        while True:
            key = await self._queue.get(asked_only=asked_only)
            logs.about.set("/".join(key))
            started = self._began[key] = time.monotonic()
            try:
                result = await self._one(key)
            finally:
                del self._began[key]
                self._finished_at = time.monotonic()
                self._queue.done(key)
            self._metrics.seconds.observe(self._finished_at - started)
            self._metrics.reconciles.labels(result).inc()

    async def _one(self, key: Key) -> str:
        """The result for the metrics. No error ends the worker."""
        result, at_least, again = "error", 0.0, None
        try:
            async with asyncio.timeout(self._pass_timeout):
                requeue = await self._reconcile(key)
            self._queue.forget(key)
            if requeue is not None:
                self._queue.add_after(key, requeue * random.uniform(0.9, 1.1))  # noqa: S311 - spreads load
            return "done"
        except Conflict as e:
            result, problem = "conflict", str(e)
        except ClusterError as e:
            at_least, again, problem = e.retry_after, e.again, str(e)
        except TimeoutError:
            result, problem = "timeout", f"the pass took longer than {self._pass_timeout:g} s"
        except Exception as e:
            # A bug met by one model must not stop the others.
            log.exception("a pass failed in a way that was not foreseen")
            result, problem = "bug", f"{type(e).__name__}: {e}"
        if again is None:
            delay = self._queue.add_after_failure(key, at_least)
        else:
            delay = again
            self._queue.add_after(key, again)
        log.log(logging.INFO if result == "conflict" else logging.WARNING, "again in %.1f s: %s", delay, problem)
        return result

    async def _resync_forever(self) -> None:
        """Lists everything again and again. What is new gets a pass soon; the rest is looked at again one after the
        other, at a rate that thousands of models do not raise: in a burst they would be in the way of each other."""
        round_: deque[Key] = deque()
        known: set[Key] = set()
        while True:
            try:
                listed = await self._cluster.list_models()
                gone = self._witness.compare(listed)
            except ClusterError as e:
                log.warning("resync: %s", e)
            except WatchBroken as e:
                log.error("%s: this process ends", e)
                self._broken()
                return
            else:
                # What is gone gets its last pass also after one under way, which may not know it yet.
                for key in [*gone, *self._witness.missed(listed)]:
                    self._queue.add(key, CHANGED)
                for key in [key for key in listed if key not in known]:
                    self._queue.add(key, AGAIN)
                round_ = round_ or deque(key for key in listed if key in known)
                known = set(listed)
            until = time.monotonic() + self._resync * random.uniform(0.95, 1.05)  # noqa: S311 - spreads load
            pause = max(1 / AGAIN_RATE, self._resync / 2 / max(1, len(round_)))
            while (left := until - time.monotonic()) > 0:
                if round_:
                    self._queue.add(round_.popleft(), AGAIN)
                await asyncio.sleep(min(left, pause) if round_ else left)

    async def _for_ever(self, run: Callable[[], Awaitable[None]]) -> None:
        """A bug beside the passes must end neither them nor itself for good."""
        while True:
            try:
                await run()
            except Exception:
                log.exception("a task beside the passes failed in a way that was not foreseen")
            await asyncio.sleep(BESIDE_AGAIN)

    async def _beat(self) -> None:
        while True:
            due = time.monotonic() + BEAT
            await asyncio.sleep(BEAT)
            self._lag = time.monotonic() - due
            self._metrics.lag.set(self._lag)
