"""Shadow: a share of stable's requests also runs on the candidate, and only the difference is kept.

    client <- answer of stable -> copy of its outputs --.
                                  the request's bodies -+-> candidate (one at a time) -> agreement, in the window
                                                        `-> dropped, unless both engines have nothing else to do

It costs memory for one request and 64 KiB of its answer, the candidate's compute, and about 0.5 ms of the loop at most:
a request that comes meanwhile waits so long, and without a spare core shares the processor with one shadow batch.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Sequence

from trtmodel_worker.front.agreement import Sample
from trtmodel_worker.front.calls import Body, Call, Failed, Outputs, Shape
from trtmodel_worker.front.engine import Engine
from trtmodel_worker.front.models import Invalid
from trtmodel_worker.front.router import WHOLE, Router, Table
from trtmodel_worker.front.windows import Mirror, Windows

log = logging.getLogger(__name__)


class Trial:
    """One request that runs, or will. `counts` are of the window and the candidate for which it was chosen."""

    def __init__(self, table: Table, candidate: Engine, counts: Mirror, call: Call, sample: Sample) -> None:
        self.table = table
        self.candidate = candidate
        self.counts = counts
        self.call = call
        self.sample = sample
        self.failures = counts.failures


class Shadow:
    """`seconds`: how long a candidate may take."""

    def __init__(self, router: Router, windows: Windows, seconds: float) -> None:
        self._router = router
        self._windows = windows
        self._seconds = seconds
        self._owed = 0
        self._trial: Trial | None = None

    def will_take(self, engine: Engine) -> bool:
        """Whether the answer that `engine` is about to give may be offered with success: then the request's bytes must
        be copied before, where they are the client's to change once it has its answer."""
        table = self._router.table
        chosen = table is not None and engine is table.stable and table.shadow and self._owed + table.shadow >= WHOLE
        return bool(chosen) and self._trial is None

    def offer(self, shapes: Sequence[Shape], bodies: Sequence[Body], outputs: Outputs, engine: Engine) -> None:
        """`engine` has answered, and the client has its answer. The bodies must stay as they are; of the outputs
        copies are taken. Never raises: nobody waits for this."""
        table = self._router.table
        if table is None or not table.shadow or engine is not table.stable:
            return
        self._owed += table.shadow
        if self._owed < WHOLE:
            return
        self._owed -= WHOLE
        candidate = table.candidate
        if candidate is None or candidate is engine:
            return
        counts = self._windows.counters(candidate.digest).mirror()
        if self._trial is not None or not _idle(table, candidate):
            self._drop(counts, candidate)
            return
        try:
            self._begin(table, candidate, counts, shapes, bodies, outputs)
        except Exception:
            log.exception("a request could not be mirrored")
            self._fail(counts, candidate, "InternalError")

    def _begin(
        self,
        table: Table,
        candidate: Engine,
        counts: Mirror,
        shapes: Sequence[Shape],
        bodies: Sequence[Body],
        outputs: Outputs,
    ) -> None:
        mine, theirs = table.stable.manifest, candidate.manifest
        if (mine.inputs, mine.outputs) != (theirs.inputs, theirs.outputs):
            self._fail(counts, candidate, "OtherSignature")
            return
        try:
            for rule, shape in zip(candidate.admission.rules, shapes, strict=True):
                rule.check(rule.datatype, list(shape))
            candidate.admission.check_together(shapes)
        except Invalid:
            self._fail(counts, candidate, "InvalidInput")
            return
        call = Call(shapes, bodies, time.monotonic() + self._seconds, self._answered, self._failed)
        call.alone, call.mirror = True, counts.attempts
        self._trial = Trial(table, candidate, counts, call, Sample(mine.outputs, outputs))
        # Not yet: others of the same batch, and of this turn of the loop, are to be answered first.
        asyncio.get_running_loop().call_soon(functools.partial(self._start, self._trial))

    def _start(self, trial: Trial) -> None:
        if self._router.table is trial.table and _idle(trial.table, trial.candidate):
            trial.candidate.submit(trial.call)
        else:
            self._trial = None
            self._drop(trial.counts, trial.candidate)

    def _answered(self, outputs: Outputs, engine: Engine) -> None:
        trial, self._trial = self._trial, None
        assert trial is not None
        if engine is not trial.candidate:
            self._fail(trial.counts, trial.candidate, "Down")
            return
        trial.counts.mirrored += 1
        trial.candidate.stats.mirrored += 1
        for name, found in trial.sample.compare(outputs).items():
            trial.counts.add(name, found)
            trial.candidate.stats.add_agreement(name, found)

    def _failed(self, failure: Failed) -> None:
        trial, self._trial = self._trial, None
        assert trial is not None
        if trial.counts.failures == trial.failures:  # the scheduler has counted most classes by itself
            trial.counts.attempts.count_failed("InvalidInput" if failure.status == 400 else "NotAnswered")
        trial.candidate.stats.mirrors_failed += 1

    def _drop(self, counts: Mirror, candidate: Engine) -> None:
        counts.dropped += 1
        candidate.stats.mirrors_dropped += 1

    def _fail(self, counts: Mirror, candidate: Engine, kind: str) -> None:
        counts.attempts.count_failed(kind)
        candidate.stats.mirrors_failed += 1


def _idle(table: Table, candidate: Engine) -> bool:
    return candidate.alive and table.stable.scheduler.idle and candidate.scheduler.idle
