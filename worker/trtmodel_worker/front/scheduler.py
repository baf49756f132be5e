"""The scheduler of one engine: requests wait here until a lane is free. Nothing else schedules.

    submit -> [waiting] -> dispatch, after all that this turn of the loop has read: rows of several requests side by
                           side in one input region, one message -> lane (at most one attempt each)
    overdue              -> the same region also to a lane of another host, or of the only one: a hedge
    answer               -> bounds checked; the first one is delivered; the ladder decides what follows a failure
    host reaped          -> its batches' requests run again (ladder.py)

A region is free again only when its attempts were acknowledged or their hosts reaped: an attempt that nobody waits for
any more keeps its lane and its regions until then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtmodel_contract.manifest import TensorSpec

from trtmodel_worker.front import ladder
from trtmodel_worker.front.assembly import CannotFill, OutputCheck, fill
from trtmodel_worker.front.batching import Buckets, Waiting
from trtmodel_worker.front.calls import Attempt, Batch, Call, Failed
from trtmodel_worker.front.entrance import Entrance
from trtmodel_worker.front.hedging import Hedges
from trtmodel_worker.front.lanes import Host, LanePort, Lanes, next_generation
from trtmodel_worker.front.outcomes import CLASS_NAMES, Outcomes
from trtmodel_worker.front.probing import Probes
from trtmodel_worker.front.regions import NONE, SharedArena
from trtmodel_worker.front.spinning import NEVER, Spin, SpinRule
from trtmodel_worker.front.stats import RevisionStats
from trtmodel_worker.front.suspects import Suspects
from trtmodel_worker.front.windows import Counters
from trtmodel_worker.host.wire import (
    MAX_MESSAGE_BYTES,
    Answer,
    FailureClass,
    MessageError,
    parse_answer,
    run_message,
)

if TYPE_CHECKING:
    from trtmodel_worker.front.engine import Engine

HOST_DEATH = "HostDeath"
DOWN = "Down"


@dataclass(frozen=True)
class Rules:
    """`delay`: seconds that a free lane waits for a fuller batch. `attempts` per request. `budget` and `refused` are
    shared by all engines of a worker."""

    queue_limit: int
    delay: float
    attempts: int
    budget: ladder.RetryBudget
    refused: ladder.Refused
    spin: SpinRule = NEVER


class Scheduler:
    """`elsewhere`: the scheduler of the engine that may take this one's work while no host of it can, or while one is
    overdue; None if there is none. `batchable`: a host has shown that rows do not see each other. `pins`: its hosts'
    devices read files of clients by themselves. `on_load`: a lane has got a request, or the last one that waited has
    been answered."""

    def __init__(
        self,
        engine: Engine,
        arena: SharedArena,
        outputs: Sequence[TensorSpec],
        buckets: Buckets,
        overdue: ladder.Overdue,
        counters: Callable[[], Counters],
        stats: RevisionStats,
        rules: Rules,
    ) -> None:
        self.buckets = buckets
        self.overdue = overdue
        self.batchable = False
        self.pins = False
        self.hang_after = float("inf")
        self.hosts_wanted = 1
        self.elsewhere: Callable[[], Scheduler | None] = lambda: None
        self.on_load: Callable[[], None] = lambda: None
        self._engine = engine
        self._arena = arena
        self._check = OutputCheck(outputs, arena)
        self._counters = counters
        self._stats = stats
        self._rules = rules
        self._lanes = Lanes(overdue)
        self._spin = Spin(rules.spin)
        self._waiting = Waiting()
        self._suspects = Suspects()
        self._hedges = Hedges(self._lanes, overdue, stats, self.readable, self._run_again)
        self._outcomes = Outcomes(
            engine, stats, overdue, self._suspects, rules.attempts, rules.budget, rules.refused, self._again,
            self._unbatch, lambda rows: self.buckets.shrink(rows, time.monotonic()),
        )  # fmt: skip
        self._entrance = Entrance(rules.queue_limit, self._lanes, self._waiting, self._outcomes)
        self._probes = Probes(self._lanes, self._waiting, stats)
        self._loop = asyncio.get_running_loop()
        self._pump_due = self._came_alone = False
        self._delay_timer: asyncio.TimerHandle | None = None

    # -- what is seen from outside

    @property
    def lanes(self) -> int:
        """Lanes that can take a request, now or after the one they run."""
        return self._lanes.living

    @property
    def hosts(self) -> int:
        """Hosts that live."""
        return self._lanes.hosts

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._suspects)

    @property
    def suspects_wait(self) -> bool:
        """Whether requests wait until so many hosts live that one may die of them."""
        return self._suspects.waiting

    @property
    def running(self) -> int:
        return sum(1 for lane in self._lanes.all if lane.attempt is not None)

    @property
    def quarantined(self) -> int:
        """Regions that a host may still write which is ended but not reaped yet: nobody else gets them."""
        return sum(1 for lane in self._lanes.all if lane.dying and lane.attempt is not None)

    @property
    def has_room(self) -> bool:
        """A lane is free."""
        return bool(self._lanes.free)

    @property
    def is_unused(self) -> bool:
        """All lanes are free."""
        return len(self._lanes.free) == len(self._lanes.all)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self.waiting and not self.running

    # -- requests come

    def may_come(self) -> None:
        """A client has connected: it may ask for something at once."""
        if self._spin.eager and self.is_unused:
            self._spin.may_come()

    def comes(self) -> None:
        """The head of a request is here."""
        if self._spin.eager and self.is_unused and self._spin.comes():
            self._lanes.wake()

    def submit(self, call: Call) -> None:
        rules = self._rules
        rules.budget.earn()
        if rules.refused and rules.refused.holds(call.digest(), time.monotonic()):
            call.fail(Failed(500, "engine hosts died while they ran this request: it is refused for some minutes"))
            return
        why = self._entrance.why_not(call, self.buckets.most)
        if why:
            self._refuse(call, why)
            return
        if not call.rehearsed:
            self._stats.asked(waits=not self._lanes.free)
        call.group(together=self.batchable)
        self._waiting.push(call)
        if self._pump_due:
            return
        if self._came_alone and self._lanes.free:
            self._pump()  # as the last one did: waiting for company would only cost it a turn of the loop
        else:
            self._pump_later()

    def take_over(self, calls: Sequence[Call]) -> None:
        """Requests of another engine that cannot answer them. Those that were with a host already come first."""
        for call in calls:
            call.group(together=self.batchable)
            if call.ran:
                continue
            why = self._entrance.why_not(call)
            if why:
                self._refuse(call, why)
            else:
                self._waiting.push(call)
        self._again([call for call in calls if call.ran])

    def fail_waiting(self, message: str) -> None:
        """No lane will come: whoever waits learns it now."""
        for call in self._suspects.drain() + self._waiting.drain():
            call.fail(Failed(503, message))

    # -- hosts come and go

    def expect(self, by_bucket: Mapping[str, float], slowest: float) -> None:
        """Seconds of a run, as a host's warm-up has measured them: by batch size, and the slowest."""
        self.buckets.measured(by_bucket)
        self.overdue.expect(slowest)
        self._outcomes.expect(min(by_bucket.values(), default=slowest))

    def add(self, lanes: Sequence[LanePort]) -> None:
        self._lanes.add(lanes)
        self._freed()

    def suspend(self, host: Host) -> None:
        """The host is about to end: it gets nothing more."""
        self._hedges.suspend(host)

    def remove(self, host: Host, *, count_death: bool, guilty: bool = True) -> None:
        """The host was reaped, so nothing of it can write any more: its batches run again. `guilty`: a request may be
        why it died."""
        counted, bereaved = False, {}
        for lane in self._lanes.remove(host):
            attempt, lane.attempt = lane.attempt, None
            if attempt is None:
                continue
            if count_death and not attempt.abandoned:
                counted = True
                attempt.counters.count_failed(HOST_DEATH, attempt.uncounted)
            self._ended(attempt)
            bereaved[id(attempt.batch)] = attempt.batch  # once, also if two of its lanes ran it
        for batch in bereaved.values():
            batch.owner.bereaved(batch, guilty)
        if count_death and not counted:
            self._counters().count_failed(HOST_DEATH)  # it died idle: the engine's fault all the same
        self._pump()

    # -- time passes

    def tick(self, now: float) -> None:
        """Deadlines and hangs. Called several times a second."""
        self.buckets.grow(now)
        for lane in self._lanes.all:
            if lane.attempt is not None:
                lane.attempt.batch.owner.expire(lane.attempt, now)
            if lane.hangs(now, self.hang_after):
                lane.host.kill(f"a run took longer than {self.hang_after:.1f} s")
        for call in self._waiting.expired(now) + self._suspects.expired(now):
            self._fail_late(call)
        self._pump()

    def probe(self) -> None:
        """Idle lanes prove that they answer as when they were built."""
        self._probes.look()

    # -- hosts answer

    def readable(self, lane: LanePort) -> None:
        """A lane's host has something to say."""
        try:
            data = lane.channel.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError as e:
            lane.host.hung_up(f"its lane failed: {e}")
            return
        if not data:
            lane.host.hung_up("it closed its lane")
            return
        attempt = lane.attempt
        try:
            if attempt is None:
                self._said_unasked(lane, parse_answer(data, 0))
                return
            answer = parse_answer(data, self._check.count)
            if answer.generation != attempt.generation:
                raise MessageError(f"an answer to attempt {answer.generation}, which does not run on this lane")
            outputs = self._check.outputs(answer, attempt.output_slot)
        except MessageError as e:
            lane.host.kill(f"it broke the protocol: {e}")  # the regions stay taken until it was reaped
            return
        lane.attempt = None
        self._spin.answered()
        if answer.failure is FailureClass.RECOVERABLE:
            lane.resting, lane.since = True, time.monotonic()
        else:
            self._lanes.give(lane)
        self._probes.judge(lane.host, attempt.batch, answer)
        self._freed()  # the lane works on while this answer is written
        try:
            attempt.batch.owner.completed(attempt, answer, outputs, self._engine)
        finally:
            self._ended(attempt)
        if not self.waiting:
            self.on_load()
        elif not self._pump_due:
            self._pump_later()

    # -- inside

    def _refuse(self, call: Call, why: str) -> None:
        self._stats.refused += 1
        call.fail(Failed(503, f"{why}: try again later"))

    def _fail_late(self, call: Call) -> None:
        self._stats.timeouts += 1
        call.fail(Failed(503, "no lane became free within the request's time limit: try again later"))

    def _again(self, calls: Sequence[Call]) -> None:
        """Requests that have waited before."""
        self._waiting.push_front(calls)
        self._pump_later()

    def _unbatch(self) -> None:
        self.batchable = False

    def _pump_later(self) -> None:
        """Dispatch when everything that this turn of the loop has read is here: it goes out as one batch."""
        if not self._pump_due:
            self._pump_due = True
            self._loop.call_soon(self._pump_now)

    def _freed(self) -> None:
        """A lane is free, for what claims it or else for who waits."""
        if self._hedges.freed():
            self._pump_later()
        elif not self._pump_due:
            self._pump()

    def _pump_now(self) -> None:
        self._pump_due = False
        self._hedges.settle()
        self._pump()

    def _pump(self) -> None:
        if len(self._suspects):
            self._pump_suspects()
        if not len(self._waiting):
            return
        if not self._lanes.free:
            other = self._relief()
            if other is not None:
                calls = self._waiting.drain()
                self._counters().count_failed(DOWN, len(calls))
                other.take_over(calls)
            return
        most = self.buckets.most if self.batchable else 0
        while self._lanes.free and len(self._waiting):
            if self._rules.delay and not self._waiting.full_first(most) and self._wait_for_more(most):
                return
            late = self._entrance.next_late()
            if late is not None:
                self._fail_late(late)
                continue
            free = len(self._lanes.free)
            calls = self._waiting.take(most)
            if not self._dispatch(self, calls):
                left = [call for call in calls if not call.done]
                self._waiting.push_front(left)
                if len(self._lanes.free) == free and len(left) == len(calls):  # no region, rather than a dead lane
                    return

    def _relief(self) -> Scheduler | None:
        """Who takes what waits here: nobody while a lane may still come in time."""
        stuck = self._engine.hedges_elsewhere and self._lanes.stuck
        return self.elsewhere() if stuck or not self.lanes else None

    def _wait_for_more(self, most: int) -> bool:
        """Whether the next batch is worth waiting for; then it is looked at again in time."""
        oldest = self._waiting.oldest()
        if oldest is None or oldest.alone or oldest.key is None or self._waiting.rows(most) >= most:
            return False
        left = oldest.since + self._rules.delay - time.monotonic()
        if left <= 0:
            return False
        if self._delay_timer is not None:
            self._delay_timer.cancel()
        self._delay_timer = self._loop.call_later(left, self._pump)
        return True

    def _pump_suspects(self) -> None:
        """Only where another host lives on if this one dies: one request cannot end them all."""
        call = self._suspects.next()
        if call is None:
            return
        place, other, hosts = self, self.elsewhere(), self.hosts
        if other is not None and hosts < 2:
            place = other if hosts + other.hosts >= 2 else self
        if place is self and hosts < 2 and (other is not None or self.hosts_wanted > 1):
            return
        if place.has_room and self._dispatch(place, [call], suspect=True):
            self._suspects.sent()

    def _dispatch(self, place: Scheduler, calls: Sequence[Call], *, suspect: bool = False) -> bool:
        """Give a batch of `calls` to a free lane of `place`. False if a region is missing, or the lane is dead, or the
        bytes of a call cannot be read: that one has failed then."""
        slot = self._arena.take_input()
        if slot == NONE:
            return False
        batch = self._batch(calls)
        batch.suspect = suspect
        batch.input_slot = slot
        try:
            fill(batch, self._arena, alone=len(calls) == 1 and place.is_unused and not place.pins)
        except CannotFill as e:
            self._arena.give_input(slot)
            e.call.fail(Failed(400, str(e)))
            return False
        if not place.run(batch):
            self._arena.give_input(slot)
            return False
        self._came_alone = len(calls) == 1 and not len(self._waiting)
        if not calls[0].rehearsed:
            self._stats.dispatched(batch.rows, batch.padded - batch.rows)
        return True

    def _batch(self, calls: Sequence[Call]) -> Batch:
        shapes = calls[0].shapes
        if not self.batchable or calls[0].key is None:
            rows = shapes[0][0] if self._engine.admission.batched else 1
            return Batch(self._outcomes, self._hedges, calls, shapes, rows, rows, self.buckets.name(rows))
        rows = calls[0].rows if len(calls) == 1 else sum(call.rows for call in calls)
        padded = self.buckets.pad(rows)
        if padded != calls[0].rows:
            shapes = [(padded, *shape[1:]) for shape in shapes]
        return Batch(self._outcomes, self._hedges, calls, shapes, rows, padded, self.buckets.name(padded))

    def run(self, batch: Batch, not_of: Host | None = None) -> bool:
        """One more attempt on a batch, of this engine or another one, whose rows lie in its input region; not on the
        host `not_of`. False if there is no lane or no region for it."""
        lane = self._lanes.next(not_of)
        slot = self._arena.take_output() if lane is not None else NONE
        if lane is None or slot == NONE:
            return False
        layout = self._arena.layout
        attempt = Attempt(batch, batch.calls[0].mirror or self._counters(), next_generation(), slot)
        output = layout.output_region(slot)
        soon = self._spin.sent(lone=len(batch.calls) == 1 and self.is_unused)
        reads = batch.reads
        message = run_message(
            attempt.generation, output, layout.output_bytes, batch.places, batch.shapes, soon, bool(reads)
        )
        if not self._lanes.send(lane, message, reads):
            self._arena.give_output(slot)
            return False
        lane.attempt = attempt
        batch.attempts.append(attempt)
        batch.hedges.watch(batch)
        self.on_load()
        return True

    def _run_again(self, batch: Batch, lane: LanePort) -> bool:
        """A hedge: on another host than that of `lane` or, if nobody else may answer, on another lane of it."""
        if len(self._waiting):
            self._pump_later()
        if self.run(batch, lane.host):
            return True
        other = self.elsewhere() if self._engine.hedges_elsewhere else None
        if other is not None:
            started = other.run(batch)
        else:
            spare = self._lanes.hosts == 1 and self._lanes.living > 2  # what hangs takes not the last one
            started = spare and not lane.host.is_stopped() and self.run(batch)
        if not started:
            for place in {self, other or self}:
                place._hedges.claim(self._hedges)
        return started

    def _said_unasked(self, lane: LanePort, answer: Answer) -> None:
        """The end of a probe, or of a lane's rest. Raises MessageError."""
        if lane.probing and answer.generation == lane.probing:
            lane.probing = 0
            if answer.failure is not None:
                self._stats.probe_failures += 1
                self._counters().count_failed(CLASS_NAMES[answer.failure])
                lane.host.kill(f"its probe failed: {answer.text}", guilty=False)
                return
        elif lane.resting and answer.generation == 0 and answer.failure is None:
            lane.resting = False
            self._stats.rebuilt_lanes += 1
        else:
            raise MessageError(f"an answer to attempt {answer.generation}, while nothing runs on this lane")
        self._lanes.give(lane)
        self._probes.doubt(lane.host)
        self._freed()

    def _ended(self, attempt: Attempt) -> None:
        """Nothing writes to the attempt's region any more."""
        batch = attempt.batch
        self._arena.give_output(attempt.output_slot)
        batch.attempts.remove(attempt)
        if attempt.is_hedge:
            batch.hedges.ended()
        if not batch.attempts:
            self._arena.give_input(batch.input_slot)
