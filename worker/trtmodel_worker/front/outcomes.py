"""What comes of a batch: an answer for each of its requests, another try, or a failure.

A batch is over when one of its attempts has answered, or when the last one has failed or died.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trtmodel_worker.front import ladder
from trtmodel_worker.front.assembly import parts
from trtmodel_worker.front.calls import Attempt, Batch, Call, Failed, Outputs
from trtmodel_worker.front.stats import RevisionStats
from trtmodel_worker.front.suspects import Suspects
from trtmodel_worker.host.wire import Answer, FailureClass

if TYPE_CHECKING:
    from trtmodel_worker.front.engine import Engine

log = logging.getLogger(__name__)
CLASS_NAMES = {
    FailureClass.INVALID_INPUT: "InvalidInput",
    FailureClass.RECOVERABLE: "Recoverable",
    FailureClass.OUT_OF_MEMORY: "OutOfMemory",
    FailureClass.OUTPUT_TOO_LARGE: "OutputTooLarge",
    FailureClass.INTERNAL: "Internal",
    FailureClass.WRONG_OUTPUT: "WrongOutput",
}
_LOG_SECONDS = 1.0
_NEWEST = 0.05  # weight of the newest batch in the mean


class Outcomes:
    """Of one engine's batches, wherever they ran. `again` puts requests at the head of the queue, `unbatch` makes the
    engine run requests one by one from now on, `shrink` batches of fewer rows than these. Seconds of a
    lane, of late: `pace` for a request, `run_seconds` for a batch."""

    def __init__(
        self,
        engine: Engine,
        stats: RevisionStats,
        overdue: ladder.Overdue,
        suspects: Suspects,
        attempts: int,
        budget: ladder.RetryBudget,
        refused: ladder.Refused,
        again: Callable[[Sequence[Call]], None],
        unbatch: Callable[[], None],
        shrink: Callable[[int], None],
    ) -> None:
        self.pace = self.run_seconds = 0.0
        self._engine = engine
        self._stats = stats
        self._overdue = overdue
        self._suspects = suspects
        self._attempts = attempts
        self._budget = budget
        self._refused = refused
        self._again = again
        self._unbatch = unbatch
        self._shrink = shrink
        self._logged = 0.0

    def expect(self, seconds: float) -> None:
        """`seconds` of one run, as the warm-up measured it: the first request's run alone may be a slow one."""
        if not self.pace:
            self.pace = self.run_seconds = seconds

    def completed(self, attempt: Attempt, answer: Answer, outputs: Outputs, engine: Engine) -> None:
        """An attempt on a batch of this scheduler has ended; `engine` ran it."""
        batch, seconds = attempt.batch, answer.nanoseconds / 1e9
        if batch.suspect:
            self._suspects.running = False
        if answer.failure is not None:
            self._failed(attempt, answer.failure, answer.text)
            return
        if not attempt.abandoned:
            attempt.counters.count_ok(batch.bucket, seconds, attempt.uncounted)
        # Beside traffic rehearsals take as long as they must, and a host that was stopped tells how long that was.
        if engine is self._engine and not batch.calls[0].rehearsed and not attempt.stopped:
            self._overdue.observe(batch.bucket, seconds)
            lane_seconds = time.monotonic() - attempt.started
            self.run_seconds = _mean(self.run_seconds, lane_seconds)
            self.pace = _mean(self.pace, lane_seconds / len(batch.calls))
        if not batch.answered:
            batch.answered = True
            self._stats.hedge_wins += attempt.is_hedge
            for other in batch.attempts:
                if other is not attempt:
                    other.abandon()
            self._deliver(batch, attempt, seconds, outputs, engine)
        for _, view in outputs:
            view.release()

    def bereaved(self, batch: Batch, guilty: bool) -> None:
        """A host died that ran `batch`."""
        if batch.suspect:
            self._suspects.running = False
        for call in batch.calls:
            call.deaths += guilty
            call.kills += not guilty
        if batch.answered or _runs(batch):
            return
        _leave(batch)
        limit = ladder.MAX_DEATHS if guilty else ladder.MAX_KILLS
        again = []
        for call in batch.calls:
            if call.done:
                continue
            died = call.deaths if guilty else call.kills
            if died < limit and call.mirror is None:
                again.append(call)
                continue
            if guilty and call.mirror is None:
                self._refused.add(call.digest(), time.monotonic())
            call.fail(Failed(500, f"{died} engine hosts died while they ran this request"))
        self._stats.replays += len(again)
        if guilty:
            self._suspects.extend(again)
        self._again([] if guilty else again)

    def expire(self, attempt: Attempt, now: float) -> None:
        waited = False
        for call in attempt.batch.calls:
            if not call.done and call.deadline <= now:
                attempt.abandon_one()
                self._stats.timeouts += 1
                call.fail(Failed(503, "the engine did not answer within the request's time limit"))
            waited = waited or not call.done
        attempt.abandoned = attempt.abandoned or not waited

    def _failed(self, attempt: Attempt, failure: FailureClass, text: str) -> None:
        batch, name = attempt.batch, CLASS_NAMES[failure]
        if failure is not FailureClass.INVALID_INPUT:
            if not attempt.abandoned:
                attempt.counters.count_failed(name, attempt.uncounted)
            self._stats.count_failure(name)
            if time.monotonic() - self._logged > _LOG_SECONDS:  # a broken engine would fill the log
                self._logged = time.monotonic()
                log.warning("an attempt failed, %s: %s", name, text)
        if batch.answered or _runs(batch, attempt):
            return
        _leave(batch, attempt)
        together = len(batch.calls)  # with those whose clients are gone by now: one of them may be why it failed
        if failure is FailureClass.OUT_OF_MEMORY and together > 1:
            self._shrink(batch.rows)
        again, costs = [], 0
        for call in batch.calls:
            if call.done:
                continue
            step, cost = ladder.after_failure(failure, together, call.tries + 1, self._attempts)
            if step is ladder.Next.FAIL or call.mirror is not None:
                self._give_up(call, failure, text)
                continue
            call.tries += cost
            call.alone = call.alone or step is ladder.Next.ALONE
            costs += cost
            again.append(call)
        if costs and not self._budget.take(costs):
            self._stats.denied += costs
            for call in again:
                self._give_up(call, failure, text)
            return
        self._stats.retries += costs
        self._stats.splits += len(again) > 1 and again[0].alone
        self._again(again)

    def _give_up(self, call: Call, failure: FailureClass, text: str) -> None:
        invalid = failure is FailureClass.INVALID_INPUT
        call.fail(Failed(400, text) if invalid else Failed(500, f"the engine failed ({CLASS_NAMES[failure]}): {text}"))

    def _deliver(self, batch: Batch, attempt: Attempt, seconds: float, outputs: Outputs, engine: Engine) -> None:
        now, calls = time.monotonic(), batch.calls
        if len(calls) == 1 and batch.padded == batch.rows:
            if calls[0].mirror is None:
                self._stats.observe(attempt.started - calls[0].since, seconds, now - calls[0].since)
            _answer(calls[0], outputs, engine)
            return
        if any(shape[:1] != (batch.padded,) for shape, _ in outputs):
            self._rows_unknown(calls)
            return
        for call, part in parts(batch, outputs):
            if call.mirror is None:
                self._stats.observe(attempt.started - call.since, seconds, now - call.since)
            _answer(call, part, engine)

    def _rows_unknown(self, calls: Sequence[Call]) -> None:
        """The number of an output's rows is not the batch's: it depends on the data, so nobody's rows can be told."""
        log.error("an output does not have the batch's rows: this engine runs requests one by one from now on")
        self._unbatch()
        again = [call for call in calls if not call.done]
        for call in again:
            call.alone = True
        self._again(again)


def _runs(batch: Batch, ended: Attempt | None = None) -> bool:
    """Whether another attempt may soon answer: not one whose host stands still."""
    return any(attempt is not ended and not attempt.stopped for attempt in batch.attempts)


def _leave(batch: Batch, ended: Attempt | None = None) -> None:
    """Its requests go on without it, and without what a host that stands still has of it."""
    batch.answered = True
    for attempt in batch.attempts:
        if attempt is not ended:
            attempt.abandon()


def _mean(so_far: float, newest: float) -> float:
    return so_far + _NEWEST * (newest - so_far) if so_far else newest


def _answer(call: Call, outputs: Outputs, engine: Engine) -> None:
    """A defect in the writing of one answer costs the others of its batch nothing."""
    if call.done:
        return
    call.done = True
    try:
        call.on_answer(outputs, engine)
    except Exception:
        log.exception("an answer could not be written")
        call.on_failure(Failed(500, "the answer could not be written: see the worker's log"))
