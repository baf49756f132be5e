"""Schedulers with pretended hosts in one process, on a clock that jumps: hours of faults in seconds, each run the same
again from its seed.

The sockets and the shared memory are real, and so is all of the scheduling. A pretended host multiplies by its engine's
factor. It reads its input as late as it can and, once it is to die, writes rubbish into its output region until it is
reaped: a region that is given away too soon shows as a wrong answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
from jumping_clock import simulate
from trtmodel_contract.identity import Profile, ShapeRange
from trtmodel_contract.manifest import TensorSpec
from trtmodel_worker.front.batching import Buckets
from trtmodel_worker.front.calls import Attempt, Batch, Call, Failed, Outputs
from trtmodel_worker.front.ladder import Overdue, Refused, RetryBudget
from trtmodel_worker.front.lanes import LanePort
from trtmodel_worker.front.regions import SharedArena
from trtmodel_worker.front.scheduler import Rules, Scheduler
from trtmodel_worker.front.stats import RevisionStats
from trtmodel_worker.front.windows import Windows
from trtmodel_worker.host.arena import plan_layout
from trtmodel_worker.host.wire import (
    FailureClass,
    answer_message,
    failure_message,
    is_probe,
    parse_generation,
    parse_run,
    rested_message,
)

F32 = np.dtype(np.float32)
WIDTHS = (3, 5)
MOST_ROWS = 8
INPUTS = (TensorSpec("x", "FP32", (-1, -1)),)
OUTPUTS = (TensorSpec("y", "FP32", (-1, -1)),)
PROFILES = (Profile({"x": ShapeRange((1, 3), (1, 3), (MOST_ROWS, 5))}),)
OUTPUT_BYTES = 4096
DEATH_SECONDS = 0.03  # from a host's end until it is reaped
START_SECONDS = 1.0
HANG_SECONDS = 2.0
STILL_SECONDS = 1.0


class Request:
    """A call of distinct values, and what became of it."""

    def __init__(self, number: int, rows: int, width: int, seconds: float) -> None:
        self.number = number
        self.sent = np.full((rows, width), number, np.float32) + np.arange(rows, dtype=np.float32)[:, None] / 16
        self.answers: list[tuple[PretendedEngine, np.ndarray]] = []
        self.failures: list[Failed] = []
        self.cancelled = False
        self.ended_at = 0.0
        self.call = Call(
            ((rows, width),), (memoryview(self.sent.tobytes()),), time.monotonic() + seconds, self._answer, self._fail
        )

    @property
    def ends(self) -> int:
        return len(self.answers) + len(self.failures)

    def _answer(self, outputs: Outputs, engine: PretendedEngine) -> None:
        (shape, view) = outputs[0]
        self.answers.append((engine, np.frombuffer(view, np.float32).reshape(shape).copy()))
        self.ended_at = time.monotonic()

    def _fail(self, failure: Failed) -> None:
        self.failures.append(failure)
        self.ended_at = time.monotonic()

    def check(self) -> None:
        """It ended once, and well if it was answered."""
        assert self.ends <= 1, f"request {self.number} ended {self.ends} times"
        assert self.ends == 1 or self.cancelled, f"request {self.number} was lost"
        for engine, found in self.answers:
            assert found.tolist() == (self.sent * np.float32(engine.factor)).tolist(), f"request {self.number}"


Behave = Callable[["PretendedHost", LanePort, np.ndarray], "str | FailureClass"]
"""What a host does with a batch: 'ok', 'crash', 'killed', 'stop', 'still', 'lie', or a failure."""


class PretendedHost:
    """One host. `guilty`: a request is why it died."""

    def __init__(self, engine: PretendedEngine, lanes: int) -> None:
        self.engine = engine
        self.failures = 0
        self.why = ""
        self.guilty = True
        self.innocent = False
        self.dead = self.killed = False  # killed: by somebody, while its sockets are still open
        self.stopped: list[Callable[[], None]] | None = None
        self.ends: dict[LanePort, socket.socket] = {}
        self.writing: dict[LanePort, int] = {}  # where a batch writes whose answer was not sent
        loop = asyncio.get_running_loop()
        for _ in range(lanes):
            front, back = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for end in (front, back):
                end.setblocking(False)
            lane = LanePort(self, front)
            self.ends[lane] = back
            loop.add_reader(front.fileno(), engine.scheduler.readable, lane)
            loop.add_reader(back.fileno(), self._asked, lane)
        engine.hosts.append(self)
        engine.scheduler.add(list(self.ends))

    # -- as the front sees it

    def kill(self, why: str, *, guilty: bool = True) -> None:
        if not self.why:
            self.why = why
            self.guilty = self.guilty and guilty
            for lane in self.ends:
                asyncio.get_running_loop().remove_reader(lane.channel.fileno())
            self._end()

    def hung_up(self, why: str) -> None:
        self.kill(why)

    def is_stopped(self) -> bool:
        return self.stopped is not None

    def is_lingering(self) -> bool:
        if not self.killed or self.why:
            return False
        self.guilty, self.innocent = False, True
        self.kill("somebody killed it")
        return True

    # -- as the world does it

    def die(self, *, guilty: bool, innocent: bool = False) -> None:
        """All its sockets close; the front has not reaped it yet. `innocent`: but sees that somebody killed it."""
        if self.dead:
            return
        self.guilty, self.innocent = guilty, innocent
        self._close()
        self._end()

    def stop(self) -> None:
        if self.stopped is None:
            self.stopped = []

    def wake(self) -> None:
        todo, self.stopped = self.stopped or [], None
        for each in todo:
            each()

    # -- inside

    def _end(self) -> None:
        if self.dead:
            return
        self.dead = True
        self.engine.scheduler.suspend(self)
        self._scribble()
        asyncio.get_running_loop().call_later(DEATH_SECONDS, self._reaped)

    def _reaped(self) -> None:
        self._scribble()
        for lane in self.ends:
            asyncio.get_running_loop().remove_reader(lane.channel.fileno())
            lane.channel.close()
        self._close()
        engine = self.engine
        engine.hosts.remove(self)
        engine.deaths += 1
        engine.idle_deaths += all(lane.attempt is None or lane.attempt.abandoned for lane in self.ends)
        engine.scheduler.remove(self, count_death=True, guilty=self.guilty)
        asyncio.get_running_loop().call_later(START_SECONDS, engine.start)

    def _close(self) -> None:
        for end in self.ends.values():
            if end.fileno() >= 0:
                asyncio.get_running_loop().remove_reader(end.fileno())
                end.close()

    def _scribble(self) -> None:
        for at in self.writing.values():
            self.engine.arena.memory.view[at : at + 64] = b"\xab" * 64

    def _asked(self, lane: LanePort) -> None:
        if self.stopped is not None:
            asyncio.get_running_loop().remove_reader(self.ends[lane].fileno())
            self.stopped.append(lambda: self._listen_again(lane))
            return
        data = self.ends[lane].recv(65536)
        if data:
            if not is_probe(data):
                self.writing[lane] = parse_run(data, (2,))[1]
            delay = self.engine.world.choice.uniform(*self.engine.seconds)
            asyncio.get_running_loop().call_later(delay, self._run, lane, data)

    def _listen_again(self, lane: LanePort) -> None:
        if not self.dead:
            asyncio.get_running_loop().add_reader(self.ends[lane].fileno(), self._asked, lane)

    def _run(self, lane: LanePort, data: bytes) -> None:
        if self.stopped is not None:
            self.stopped.append(lambda: self._run(lane, data))
        elif not self.dead:
            self._answer(lane, data)

    def _answer(self, lane: LanePort, data: bytes) -> None:
        generation, engine = parse_generation(data), self.engine
        if is_probe(data):
            failed = engine.drifted
            self._say(lane, failure_message(generation, FailureClass.WRONG_OUTPUT, 1, "it drifted") if failed
                      else answer_message(generation, 1, ()))  # fmt: skip
            return
        _, out, room, (place,) = parse_run(data, (2,))
        x = engine.arena.memory.array(place[0], F32, place[1]).copy()
        what = engine.behave(self, lane, x)
        engine.sizes.append(len(x))
        if what == "ok":
            y = x * np.float32(engine.factor)
            assert y.nbytes <= room
            engine.arena.memory.array(out, F32, y.shape)[...] = y
            self._say(lane, answer_message(generation, 1_000_000, ((out, y.shape),)))
        elif isinstance(what, FailureClass):
            if what is FailureClass.INVALID_INPUT and lane.attempt is not None:
                engine.invalid.append(lane.attempt)
            self._say(lane, failure_message(generation, what, 1_000_000, what.name))
            if what is FailureClass.RECOVERABLE:
                asyncio.get_running_loop().call_later(0.02, self._say, lane, rested_message(5))
        elif what in ("crash", "killed"):
            self.die(guilty=what == "crash")
        elif what == "stop":
            self.stop()
            self._run(lane, data)
        elif what == "still":  # this lane alone, and then it answers as it should have
            asyncio.get_running_loop().call_later(STILL_SECONDS, self._answer, lane, data)
        else:
            lie = engine.world.choice.choice(
                [
                    answer_message(generation + 1, 1, ((out, x.shape),)),
                    answer_message(generation, 1, ((out + engine.arena.layout.output_bytes, x.shape),)),
                    answer_message(generation, 1, ((out, (x.shape[0], -1)),)),
                    answer_message(generation, 1, ()),
                    rested_message(1),
                    b"\1" * 23,
                ]
            )
            self._say(lane, lie)

    def _say(self, lane: LanePort, message: bytes) -> None:
        if self.stopped is not None:
            self.stopped.append(lambda: self._say(lane, message))
        elif not self.dead:
            with contextlib.suppress(OSError):
                self.ends[lane].send(message)
                self.writing.pop(lane, None)


class PretendedEngine:
    """What a scheduler asks of its engine, and the figures of a run."""

    def __init__(
        self, world: World, name: str, factor: float, hosts: int, lanes: int, buckets: Sequence[int], behave: Behave
    ) -> None:
        self.world = world
        self.name = name
        self.factor = factor
        self.lanes = lanes
        self.behave = behave
        self.seconds = (0.001, 0.004)
        self.hedges_elsewhere = True
        self.admission = mock.Mock(batched=True)
        self.arena = world.arena
        self.stats = RevisionStats()
        self.hosts: list[PretendedHost] = []
        self.deaths = self.idle_deaths = self.attempts = 0
        self.invalid: list[Attempt] = []
        self.drifted = False
        self.sizes: list[int] = []
        overdue = Overdue(0.0)
        overdue.expect(0.004)
        self.scheduler = Scheduler(
            self, world.arena, OUTPUTS, Buckets(buckets, MOST_ROWS), overdue,  # type: ignore[arg-type]
            lambda: world.windows.counters(name), self.stats, world.rules,
        )  # fmt: skip
        run = self.scheduler.run
        self.scheduler.run = lambda batch, not_of=None: self._count(  # type: ignore[method-assign]
            batch, run(batch, not_of)
        )
        self.scheduler.batchable = True
        self.scheduler.hang_after = HANG_SECONDS
        self.scheduler.hosts_wanted = hosts
        for _ in range(hosts):
            self.start()

    @property
    def uncounted(self) -> int:
        """Attempts that are no failures of the engine."""
        return sum(attempt.uncounted for attempt in self.invalid)

    def _count(self, batch: Batch, sent: bool) -> bool:
        self.attempts += sent * len(batch.calls)
        return sent

    def start(self) -> None:
        if not self.world.over:
            PretendedHost(self, self.lanes)


class World:
    """`elsewhere`: name of the engine that helps the one of this name."""

    def __init__(
        self,
        seed: int = 0,
        *,
        queue_limit: int = 1000,
        delay: float = 0.0,
        attempts: int = 3,
        budget: float = 10.0,
    ) -> None:
        self.choice = random.Random(seed)
        self.over = False
        lanes = 8
        self.arena = SharedArena(plan_layout(INPUTS, OUTPUTS, PROFILES, 4 * lanes, OUTPUT_BYTES))
        self.windows = Windows()
        self.rules = Rules(queue_limit, delay, attempts, RetryBudget(budget), Refused())
        self.engines: dict[str, PretendedEngine] = {}
        self.requests: list[Request] = []
        self._ticker: asyncio.Task[None] | None = None

    def engine(
        self,
        name: str = "stable",
        factor: float = 2.0,
        *,
        hosts: int = 1,
        lanes: int = 2,
        buckets: Sequence[int] = (),
        behave: Behave = lambda *_: "ok",
        helper: str = "",
    ) -> PretendedEngine:
        made = self.engines[name] = PretendedEngine(self, name, factor, hosts, lanes, buckets, behave)
        if helper:
            other = self.engines[helper].scheduler
            made.scheduler.elsewhere = lambda: other if other.lanes else None
        if self._ticker is None:
            self._ticker = asyncio.ensure_future(self._tick())
        return made

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            for engine in self.engines.values():
                engine.scheduler.tick(time.monotonic())

    def send(self, engine: PretendedEngine, rows: int = 1, width: int = 3, seconds: float = 60.0) -> Request:
        request = Request(16 * (len(self.requests) + 1), rows, width, seconds)
        self.requests.append(request)
        engine.scheduler.submit(request.call)
        return request

    async def warm(self, engine: PretendedEngine) -> None:
        """Requests one after the other, from which it learns how long a run takes."""
        for _ in range(60):
            self.send(engine)
            await asyncio.sleep(0.01)

    def cancel(self, request: Request) -> None:
        request.cancelled = True
        request.call.cancel()

    async def settle(self, seconds: float = 300.0) -> None:
        """Until nothing waits and nothing runs, every host is up and every lane is free."""
        deadline = time.monotonic() + seconds
        while not (all(r.ends or r.cancelled for r in self.requests) and all(map(_quiet, self.engines.values()))):
            assert time.monotonic() < deadline, f"it does not come to rest: {self.describe()}"
            await asyncio.sleep(0.1)

    def check(self) -> None:
        """What must hold after every run."""
        for request in self.requests:
            request.check()
        assert self.arena.in_use == 0
        for engine in self.engines.values():
            lanes = engine.scheduler._lanes
            assert sorted(map(id, lanes.free)) == sorted(map(id, lanes.all)), engine.name
            assert len(lanes.all) == engine.scheduler.hosts_wanted * engine.lanes
            assert engine.scheduler._hedges._running == 0
            assert not engine.scheduler._suspects.running
            assert (engine.scheduler.waiting, engine.scheduler.running) == (0, 0)

    def close(self) -> None:
        self.over = True
        if self._ticker is not None:
            self._ticker.cancel()
        for engine in self.engines.values():
            for host in engine.hosts:
                for lane in host.ends:
                    asyncio.get_running_loop().remove_reader(lane.channel.fileno())
                    lane.channel.close()
                host._close()
        self.arena.memory.close()

    def counted(self, engine: PretendedEngine) -> Mapping[str, int]:
        """Attempts by what became of them."""
        found = self.windows.counters(engine.name)
        return {"ok": found.ok, "abandoned": found.abandoned, **found.failed}

    def describe(self) -> str:
        open_ = [r.number for r in self.requests if not r.ends and not r.cancelled]
        states = {
            e.name: (e.scheduler.waiting, e.scheduler.running, len(e.scheduler._lanes.free), len(e.hosts))
            for e in self.engines.values()
        }
        return f"open {open_[:10]}, (waiting, running, free lanes, hosts) {states}, regions {self.arena.in_use}"


def _quiet(engine: PretendedEngine) -> bool:
    scheduler = engine.scheduler
    all_up = len(scheduler._lanes.all) == scheduler.hosts_wanted * engine.lanes
    return scheduler.idle and all_up and len(scheduler._lanes.free) == len(scheduler._lanes.all)


@contextlib.contextmanager
def world(*arguments: Any, **more: Any) -> Iterator[World]:
    made = World(*arguments, **more)
    try:
        yield made
    finally:
        made.close()


def run(story: Callable[[World], Coroutine[Any, Any, None]], **more: Any) -> None:
    """The story in a world of its own, until all is at rest and what must hold afterwards does."""

    async def whole() -> None:
        with world(**more) as w:
            await story(w)
            await w.settle()
            w.check()

    simulate(whole())
