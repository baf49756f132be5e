"""The scheduler of one engine: requests wait here until a lane is free. Nothing else schedules.

    submit -> [waiting] -> dispatch, after all that this turn of the loop has read: rows of several requests side by
                           side in one input region, one message -> lane (at most one attempt each)
    overdue              -> the same region also to a lane of another host: a hedge
    answer               -> bounds checked; the first one is delivered; the ladder decides what follows a failure
    host reaped          -> its batches' requests run again (ladder.py)

A region is free again only when its attempts were acknowledged or their hosts reaped: an attempt that nobody waits for
any more keeps its lane and its regions until then.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtmodel_contract.manifest import TensorSpec

from trtmodel_worker.front import ladder
from trtmodel_worker.front.assembly import OutputCheck, fill, parts
from trtmodel_worker.front.batching import Buckets, Waiting
from trtmodel_worker.front.calls import Attempt, Batch, Call, Failed, Outputs
from trtmodel_worker.front.lanes import Host, LanePort, Lanes
from trtmodel_worker.front.regions import NONE, SharedArena
from trtmodel_worker.front.stats import RevisionStats
from trtmodel_worker.front.windows import Counters
from trtmodel_worker.host.wire import (
    MAX_MESSAGE_BYTES,
    Answer,
    FailureClass,
    MessageError,
    parse_answer,
    probe_message,
    run_message,
)

if TYPE_CHECKING:
    from trtmodel_worker.front.engine import Engine

log = logging.getLogger(__name__)
_generations = itertools.count(1)  # of all engines: regions are shared between them

_CLASS_NAMES = {
    FailureClass.INVALID_INPUT: "InvalidInput",
    FailureClass.RECOVERABLE: "Recoverable",
    FailureClass.OUT_OF_MEMORY: "OutOfMemory",
    FailureClass.OUTPUT_TOO_LARGE: "OutputTooLarge",
    FailureClass.INTERNAL: "Internal",
    FailureClass.WRONG_OUTPUT: "WrongOutput",
}
HOST_DEATH = "HostDeath"
DOWN = "Down"
_LOG_SECONDS = 1.0
_LANES_PER_HEDGE = 4  # one hedge at a time for so many lanes, at least one: a slow engine must not get double load
_LEAST_LOOK_SECONDS = 0.002
_BROKEN = (FailureClass.RECOVERABLE, FailureClass.INTERNAL)  # what a host in order does not say again and again


@dataclass(frozen=True)
class Rules:
    """`delay`: seconds that a free lane waits for a fuller batch. `attempts` per request. `budget` and `refused` are
    shared by all engines of a worker."""

    queue_limit: int
    delay: float
    attempts: int
    budget: ladder.RetryBudget
    refused: ladder.Refused


class Scheduler:
    """`elsewhere`: the scheduler of the engine that may take this one's work while no host of it can, or while one is
    overdue; None if there is none. `batchable`: a host has shown that rows do not see each other."""

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
        self.hang_after = float("inf")
        self.hosts_wanted = 1
        self.elsewhere: Callable[[], Scheduler | None] = lambda: None
        self._engine = engine
        self._arena = arena
        self._check = OutputCheck(outputs, arena)
        self._counters = counters
        self._stats = stats
        self._rules = rules
        self._lanes = Lanes(overdue)
        self._waiting = Waiting()
        self._suspects: deque[Call] = deque()
        self._suspect_runs = False
        self._hedges = 0
        self._logged = 0.0
        self._loop = asyncio.get_running_loop()
        self._pump_due = False
        self._delay_timer: asyncio.TimerHandle | None = None
        self._hedge_timer: asyncio.TimerHandle | None = None

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
    def running(self) -> int:
        return sum(1 for lane in self._lanes.all if lane.attempt is not None)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self.waiting and not self.running

    # -- requests come

    def submit(self, call: Call) -> None:
        rules = self._rules
        rules.budget.earn()
        if rules.refused and rules.refused.holds(call.digest(), time.monotonic()):
            call.fail(Failed(500, "engine hosts died while they ran this request: it is refused for some minutes"))
            return
        if len(self._waiting) >= rules.queue_limit:
            self._stats.refused += 1
            call.fail(Failed(503, f"{rules.queue_limit} requests wait for a lane already: try again later"))
            return
        if self._lanes.free:
            self._stats.lane_hits += 1
        else:
            self._stats.lane_waits += 1
        self._group(call)
        self._waiting.push(call)
        if not self._pump_due:
            self._pump_later()

    def take_over(self, calls: Sequence[Call]) -> None:
        """Requests of another engine that cannot answer them."""
        for call in calls:
            self._group(call)
        self._waiting.push_front(calls)
        self._pump_later()

    def fail_waiting(self, message: str) -> None:
        """No lane will come: whoever waits learns it now."""
        waiting = [*self._suspects, *self._waiting.drain()]
        self._suspects.clear()
        for call in waiting:
            call.fail(Failed(503, message))

    # -- hosts come and go

    def add(self, lanes: Sequence[LanePort]) -> None:
        self._lanes.add(lanes)
        self._pump()

    def suspend(self, host: Host) -> None:
        """The host is about to end: it gets nothing more."""
        self._lanes.suspend(host)

    def remove(self, host: Host, *, count_death: bool, guilty: bool = True) -> None:
        """The host was reaped, so nothing of it can write any more: its batches run again. `guilty`: a request may be
        why it died."""
        counted = False
        for lane in self._lanes.remove(host):
            attempt, lane.attempt = lane.attempt, None
            if attempt is None:
                continue
            batch = attempt.batch
            if count_death and not attempt.abandoned:
                counted = True
                attempt.counters.count_failed(HOST_DEATH, len(batch.calls))
            self._ended(attempt)
            batch.owner.bereaved(batch, guilty)
        if count_death and not counted:
            self._counters().count_failed(HOST_DEATH)  # it died idle: the engine's fault all the same
        self._pump()

    def bereaved(self, batch: Batch, guilty: bool) -> None:
        """A host died that ran `batch`."""
        if batch.suspect:
            self._suspect_runs = False
        for call in batch.calls:
            call.deaths += 1
        if batch.answered or batch.attempts:  # or a hedge still runs
            return
        batch.answered = True
        limit = ladder.MAX_DEATHS if guilty else ladder.MAX_KILLS
        again = []
        for call in batch.calls:
            if call.done:
                continue
            if call.deaths < limit:
                again.append(call)
                continue
            if guilty:
                self._rules.refused.add(call.digest(), time.monotonic())
            call.fail(Failed(500, f"{call.deaths} engine hosts died while they ran this request"))
        self._stats.replays += len(again)
        if guilty:
            self._suspects.extend(again)
        else:
            self._waiting.push_front(again)
        self._pump_later()

    # -- time passes

    def tick(self, now: float) -> None:
        """Deadlines and hangs. Called several times a second."""
        for lane in self._lanes.all:
            if lane.attempt is not None:
                self._expire(lane.attempt, now)
            if lane.busy and now - lane.since > self.hang_after and not lane.dying:
                lane.host.kill(f"a run took longer than {self.hang_after:.1f} s")
        late = self._waiting.expired(now)
        late += [call for call in self._suspects if call.deadline <= now and not call.done]
        for call in late:
            self._stats.timeouts += 1
            call.fail(Failed(503, "no lane became free within the request's time limit: try again later"))
        self._pump()

    def _look_for_overdue(self) -> None:
        """Run what is overdue on another host too. Comes again while something runs."""
        now = time.monotonic()
        soonest = 0.0
        for lane in self._lanes.all:
            attempt = lane.attempt
            if attempt is None or attempt.batch.hedged or attempt.batch.owner is not self:
                continue
            batch = attempt.batch
            due = attempt.started + self.overdue.after(batch.bucket)
            if due > now:
                soonest = min(soonest or due, due)
            elif batch.wanted and not batch.suspect and self._hedges < max(1, self.lanes // _LANES_PER_HEDGE):
                self.readable(lane)  # after a stall of the loop, answers are there that nobody has read
                if lane.attempt is attempt and self._hedge(batch, lane.host):
                    self._hedges += 1
                    self._stats.hedges += 1
                else:
                    soonest = now
        wait = max(_LEAST_LOOK_SECONDS, soonest - now)
        self._hedge_timer = self._loop.call_later(wait, self._look_for_overdue) if soonest else None

    def probe(self) -> None:
        """One idle lane of each host proves itself again, if nothing waits and another lane is free meanwhile."""
        hosts: set[int] = set()
        for lane in list(self._lanes.free):
            if len(self._waiting) or len(self._lanes.free) < 2 or id(lane.host) in hosts:
                continue
            hosts.add(id(lane.host))
            generation = next(_generations)
            if self._lanes.send(lane, probe_message(generation)):
                lane.probing = generation
                self._stats.probes += 1

    # -- hosts answer

    def readable(self, lane: LanePort) -> None:
        """A lane's host has something to say."""
        try:
            data = lane.channel.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError as e:
            lane.host.kill(f"its lane failed: {e}")
            return
        if not data:
            lane.host.kill("it closed its lane")
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
        if answer.failure is FailureClass.RECOVERABLE:
            lane.resting, lane.since = True, time.monotonic()
        else:
            self._lanes.give(lane)
        if len(self._waiting) and not self._pump_due:
            self._pump()  # the lane works on while this answer is written
        try:
            attempt.batch.owner.completed(attempt, answer, outputs, self._engine)
        finally:
            self._ended(attempt)
        self._judge(lane.host, attempt.batch, answer)
        if self.waiting and not self._pump_due:
            self._pump_later()

    def completed(self, attempt: Attempt, answer: Answer, outputs: Outputs, engine: Engine) -> None:
        """An attempt on a batch of this scheduler has ended; `engine` ran it."""
        batch, seconds = attempt.batch, answer.nanoseconds / 1e9
        if batch.suspect:
            self._suspect_runs = False
        if answer.failure is not None:
            self._failed(attempt, answer.failure, answer.text)
            return
        if not attempt.abandoned:
            attempt.counters.count_ok(batch.bucket, seconds, len(batch.calls))
        if engine is self._engine:
            self.overdue.observe(batch.bucket, seconds)
        if not batch.answered:
            batch.answered = True
            self._stats.hedge_wins += attempt.is_hedge
            for other in batch.attempts:
                if other is not attempt:
                    other.abandon()
            self._deliver(batch, attempt, seconds, outputs, engine)
        for _, view in outputs:
            view.release()

    # -- inside

    def _group(self, call: Call) -> None:
        """Which others it can run with."""
        if not self.batchable:
            call.rows, call.key = 1, None
            return
        shapes = call.shapes
        call.rows = shapes[0][0]
        call.key = (shapes[0][1:],) if len(shapes) == 1 else tuple(shape[1:] for shape in shapes)

    def _failed(self, attempt: Attempt, failure: FailureClass, text: str) -> None:
        batch, name = attempt.batch, _CLASS_NAMES[failure]
        if failure is not FailureClass.INVALID_INPUT:
            if not attempt.abandoned:
                attempt.counters.count_failed(name, len(batch.calls))
            self._stats.count_failure(name)
            if time.monotonic() - self._logged > _LOG_SECONDS:  # a broken engine would fill the log
                self._logged = time.monotonic()
                log.warning("an attempt failed, %s: %s", name, text)
        if batch.answered or len(batch.attempts) > 1:  # or another attempt on it still runs
            return
        batch.answered = True
        calls = [call for call in batch.calls if not call.done]
        tries = 1 + max((call.tries for call in calls), default=0)
        step, costs = ladder.after_failure(failure, len(calls), tries, self._rules.attempts)
        if step is ladder.Next.FAIL or (costs and not self._rules.budget.take(len(calls))):
            invalid = failure is FailureClass.INVALID_INPUT
            for call in calls:
                call.fail(Failed(400, text) if invalid else Failed(500, f"the engine failed ({name}): {text}"))
            return
        for call in calls:
            call.tries += costs
            call.alone = call.alone or step is ladder.Next.ALONE
        if costs:
            self._stats.retries += len(calls)
        if step is ladder.Next.ALONE and len(calls) > 1:
            self._stats.splits += 1
        self._waiting.push_front(calls)
        self._pump_later()

    def _judge(self, host: Host, batch: Batch, answer: Answer) -> None:
        """A host on which one request after the other fails is replaced. The same request again proves nothing."""
        if answer.failure is None:
            host.failures = 0
        elif answer.failure in _BROKEN and batch.calls[0].tries <= 1:
            host.failures += 1
            if host.failures >= ladder.MAX_FAILURES_IN_A_ROW:
                host.kill(f"{host.failures} requests in a row failed on it, the last one so: {answer.text}")

    def _expire(self, attempt: Attempt, now: float) -> None:
        waited = False
        for call in attempt.batch.calls:
            if not call.done and call.deadline <= now:
                if not attempt.abandoned:
                    attempt.counters.abandoned += 1
                self._stats.timeouts += 1
                call.fail(Failed(503, "the engine did not answer within the request's time limit"))
            waited = waited or not call.done
        attempt.abandoned = attempt.abandoned or not waited

    def _pump_later(self) -> None:
        """Dispatch when everything that this turn of the loop has read is here: it goes out as one batch."""
        if not self._pump_due:
            self._pump_due = True
            self._loop.call_soon(self._pump_now)

    def _pump_now(self) -> None:
        self._pump_due = False
        self._pump()

    def _pump(self) -> None:
        if self._suspects:
            self._pump_suspects()
        if not len(self._waiting):
            return
        if not self._lanes.free:
            other = None if self.lanes else self.elsewhere()
            if other is not None:
                calls = self._waiting.drain()
                self._counters().count_failed(DOWN, len(calls))
                other.take_over(calls)
            return
        most = self.buckets.most
        while self._lanes.free and len(self._waiting):
            if self._rules.delay and self._wait_for_more(most):
                return
            calls = self._waiting.take(most)
            if not self._dispatch(self, calls):
                self._waiting.push_front(calls)
                return

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
        """One at a time, and only where another host lives on if it dies: one request cannot end them all."""
        while self._suspects and not self._suspect_runs:
            call = self._suspects[0]
            if call.done:
                self._suspects.popleft()
                continue
            place, other, hosts = self, self.elsewhere(), self.hosts
            if other is not None and hosts < 2:
                place = other if hosts + other.hosts >= 2 else self
            if place is self and hosts < 2 and (other is not None or self.hosts_wanted > 1):
                return
            if not place._lanes.free or not self._dispatch(place, [call], suspect=True):
                return
            self._suspects.popleft()
            self._suspect_runs = True

    def _dispatch(self, place: Scheduler, calls: Sequence[Call], *, suspect: bool = False) -> bool:
        """Give a batch of `calls` to a free lane of `place`. False if a region is missing, or the lane is dead."""
        slot = self._arena.take_input()
        if slot == NONE:
            return False
        batch = self._batch(calls)
        batch.suspect = suspect
        batch.input_slot = slot
        fill(batch, self._arena)
        lane = place._lanes.next()
        if lane is None or not place._run(batch, lane):
            self._arena.give_input(slot)
            return False
        self._stats.batches += 1
        self._stats.rows += batch.rows
        self._stats.padded_rows += batch.padded - batch.rows
        return True

    def _batch(self, calls: Sequence[Call]) -> Batch:
        shapes = calls[0].shapes
        if not self.batchable:
            rows = shapes[0][0] if self._engine.admission.batched else 1
            return Batch(self, calls, shapes, rows, rows, self.buckets.name(rows))
        rows = calls[0].rows if len(calls) == 1 else sum(call.rows for call in calls)
        padded = self.buckets.pad(rows)
        if padded != calls[0].rows:
            shapes = [(padded, *shape[1:]) for shape in shapes]
        return Batch(self, calls, shapes, rows, padded, self.buckets.name(padded))

    def _run(self, batch: Batch, lane: LanePort) -> bool:
        """One more attempt on a batch whose rows lie in its input region."""
        slot = self._arena.take_output()
        if slot == NONE:
            return False
        layout = self._arena.layout
        attempt = Attempt(batch, lane, self._counters(), next(_generations), slot)
        output = layout.output_region(slot)
        message = run_message(attempt.generation, output, layout.output_bytes, batch.places, batch.shapes)
        if not self._lanes.send(lane, message):
            self._arena.give_output(slot)
            return False
        lane.attempt = attempt
        batch.attempts.append(attempt)
        owner = batch.owner
        if owner._hedge_timer is None:
            owner._hedge_timer = self._loop.call_later(owner.overdue.after(batch.bucket), owner._look_for_overdue)
        return True

    def _hedge(self, batch: Batch, host: Host) -> bool:
        lane = self._lanes.next(host)
        if lane is not None:
            batch.hedged = self._run(batch, lane)
            return batch.hedged
        other = self.elsewhere() if self._engine.hedges_elsewhere else None
        lane = other._lanes.next() if other is not None else None
        if other is not None and lane is not None:
            batch.hedged = other._run(batch, lane)
        return batch.hedged

    def _said_unasked(self, lane: LanePort, answer: Answer) -> None:
        """The end of a probe, or of a lane's rest. Raises MessageError."""
        if lane.probing and answer.generation == lane.probing:
            lane.probing = 0
            if answer.failure is not None:
                self._stats.probe_failures += 1
                self._counters().count_failed(_CLASS_NAMES[answer.failure])
                lane.host.kill(f"its periodic probe failed: {answer.text}")
                return
        elif lane.resting and answer.generation == 0 and answer.failure is None:
            lane.resting = False
            self._stats.rebuilt_lanes += 1
        else:
            raise MessageError(f"an answer to attempt {answer.generation}, while nothing runs on this lane")
        self._lanes.give(lane)
        self._pump()

    def _ended(self, attempt: Attempt) -> None:
        """Nothing writes to the attempt's region any more."""
        batch = attempt.batch
        self._arena.give_output(attempt.output_slot)
        batch.attempts.remove(attempt)
        if not batch.attempts:
            self._arena.give_input(batch.input_slot)
            if batch.hedged:
                batch.owner._hedges -= 1

    def _deliver(self, batch: Batch, attempt: Attempt, seconds: float, outputs: Outputs, engine: Engine) -> None:
        now, calls = time.monotonic(), batch.calls
        if len(calls) == 1 and batch.padded == batch.rows:
            self._stats.observe(attempt.started - calls[0].since, seconds, now - calls[0].since)
            if not calls[0].done:
                calls[0].done = True
                calls[0].on_answer(outputs, engine)
            return
        if any(shape[:1] != (batch.padded,) for shape, _ in outputs):
            self._unbatch(calls)
            return
        for call, part in parts(batch, outputs):
            self._stats.observe(attempt.started - call.since, seconds, now - call.since)
            if not call.done:
                call.done = True
                call.on_answer(part, engine)

    def _unbatch(self, calls: Sequence[Call]) -> None:
        """The number of an output's rows is not the batch's: it depends on the data, so nobody's rows can be told."""
        log.error("an output does not have the batch's rows: this engine runs requests one by one from now on")
        self.batchable = False
        again = [call for call in calls if not call.done]
        for call in again:
            call.alone = True
        self._waiting.push_front(again)
        self._pump_later()
