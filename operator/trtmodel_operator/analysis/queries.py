"""What the number that a query of Prometheus gave says: within its bounds or not. No number, no verdict."""

from __future__ import annotations

import math

from trtmodel_contract.gate import Verdict

from trtmodel_operator.model import Answer, Check, QuerySpec

FAILING_ANSWERS = 2  # in a row: a rate over the last minutes still has some of what was before the step in it


def judge_query(query: QuerySpec, answer: Answer | None, before: Check | None, now: float, stale: float) -> Check:
    """`before` is how the query stood at the last look. An answer older than `stale` seconds says nothing any more, and
    what cannot be compared says nothing at all: neither is a Pass, and neither is held against the candidate."""
    name, fails = query.name, before.fails if before is not None else 0
    if answer is None:
        return Check(name, Verdict.INCONCLUSIVE.value, f"{name}: not answered yet", fails=fails)
    if now - answer.at > stale:
        text = f"{name}: the last answer is {now - answer.at:.0f} s old"
        return Check(name, Verdict.INCONCLUSIVE.value, text, answered=answer.at, fails=fails)
    if answer.value is None or not math.isfinite(answer.value):
        text = f"{name}: {answer.error or f'{answer.value} is no number that can be compared'}"
        return Check(name, Verdict.INCONCLUSIVE.value, text, answered=answer.at, fails=fails)
    value = answer.value
    low = query.low is not None and value < query.low
    high = query.high is not None and value > query.high
    if not (low or high):
        return Check(name, Verdict.PASS.value, f"{name} is {value:g}{_bounds(query)}", value, answer.at)
    if before is None or before.answered != answer.at:
        fails += 1
    return Check(name, Verdict.FAIL.value, f"{name} is {value:g}{_bounds(query)}", value, answer.at, fails)


def _bounds(query: QuerySpec) -> str:
    bounds = [f"{word} {bound:g}" for word, bound in (("min", query.low), ("max", query.high)) if bound is not None]
    return f", {', '.join(bounds)}" if bounds else ""
