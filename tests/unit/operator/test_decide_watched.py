"""A trial is looked at in time, whatever else the model waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from decide_scene import (
    A,
    Scene,
    busy,
    canary,
    decide,
    edited,
    finished,
    later,
    obey,
    run,
    serving,
    with_worker,
)
from trtmodel_contract.jobs import JobResult, Reason
from trtmodel_operator.model import Decision, JobKind, Stage

RESYNC = 300.0  # seconds: until the next pass where no pass asked for one


def on_its_own_time(seen: Scene, until: Callable[[Decision], bool], change: Callable[[Scene], Scene]) -> Decision:
    """Passes when the last one asked for the next; nothing else leads to one."""
    for _ in range(300):
        decision = decide(seen)
        if until(decision):
            return decision
        moved = decision.memory != seen.memory
        wanted = 0.0 if moved else RESYNC if decision.requeue is None else decision.requeue
        seen = change(later(obey(seen, decision, seconds=0), wanted))
    raise AssertionError(f"{decision.rule}: {decision.situation}")


def unresolvable(seen: Scene) -> Scene:
    """The spec was set to a source that is not there, and the Job has said so."""
    seen = edited(seen, source__uri="s3://models/nothing.onnx")
    seen = finished(obey(seen, decide(seen), seconds=0), JobKind.RESOLVE, JobResult(Reason.SOURCE_NOT_FOUND, "nothing"))
    seen = obey(seen, decide(seen), seconds=0)
    decision = decide(seen)
    assert (decision.rule, decision.situation.stage) == ("resolve", Stage.STALLED)
    return seen


def test_a_trial_beside_a_job_that_failed_for_good_is_judged_by_its_figures() -> None:
    seen = unresolvable(canary(serving(A)))
    taken = on_its_own_time(seen, lambda d: d.memory.candidate is None, lambda s: busy(s, failed=60))
    assert (taken.rule, taken.situation.reason) == ("analysis_says_no", "ErrorRateTooHigh")


def test_a_platform_on_trial_beside_a_job_that_failed_for_good_has_its_deadline() -> None:
    seen = edited(serving(A), serving__pod={"annotations": {"team": "b"}})
    seen = obey(seen, decide(seen), seconds=0)
    (fresh,) = [w for w in seen.workers if w.uid not in {o.uid for o in serving(A).workers}]

    def pulled_in_vain(now: Scene) -> Scene:
        trouble: dict[str, Any] = {"trouble": "ImagePullBackOff", "message": "not found"}
        return with_worker(now, fresh.uid, ready=False, report=None, **trouble)

    taken = on_its_own_time(unresolvable(pulled_in_vain(seen)), lambda d: d.memory.candidate is None, pulled_in_vain)
    assert (taken.rule, taken.situation.reason) == ("deadline_passed", "ImagePullBackOff")


@pytest.mark.parametrize("interval", ["5s", "10m"])
def test_whatever_ends_a_pass_the_next_is_due_while_a_trial_goes_on(interval: str) -> None:
    seen = canary(serving(A, rollout__analysis={"interval": interval, "minRequests": 150}))
    due = {"5s": 5, "10m": 100}[interval]
    assert decide(unresolvable(seen)).requeue == due
    assert decide(edited(seen, rollout__paused=True)).requeue == due
    unreadable = decide(replace(seen, spec=None, spec_error="spec.source is missing"))
    assert (unreadable.rule, unreadable.requeue) == ("spec_unreadable", 10)  # for the time to live


def test_without_workers_or_without_a_trial_no_pass_is_due_for_one() -> None:
    seen = edited(canary(serving(A)), serving__replicas=0)
    _, decision = run(seen, lambda s, d: not s.workers and not d.actions)
    assert (decision.rule, decision.requeue) == ("scaled_to_zero", None)
    assert decision.memory.candidate is not None
    assert decide(unresolvable(serving(A))).requeue is None
