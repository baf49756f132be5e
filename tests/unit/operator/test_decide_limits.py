"""Limits of the gate that are changed while something is on trial, or serves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decide_scene import (
    A,
    B,
    Scene,
    asks_for,
    busy,
    canary,
    decide,
    digest,
    edited,
    found,
    has_built,
    later,
    new,
    obey,
    of,
    serving,
)
from trtmodel_operator.conditions import status
from trtmodel_operator.model import CreateJob, Signal, Stage

STRICT = {"top1Delta": 0.0001}  # 2 of 2,000 that differ are more
HALF = {"top1Delta": 0.001}  # and neither more nor less than this


def measured(seen: Scene, revision: str, differs: int) -> Scene:
    """The figures that are known of this revision."""
    built = tuple(
        replace(b, artifact=found(revision, differs)) if b.revision == revision else b for b in seen.memory.built
    )
    return replace(seen, memory=replace(seen.memory, built=built))


def on_trial() -> Scene:
    return measured(canary(serving(A)), B, 2)


def test_a_candidate_that_fails_tightened_limits_goes_back_at_once_without_a_job() -> None:
    seen = edited(on_trial(), verify__thresholds=STRICT)
    decision = decide(later(busy(seen), 5))
    assert decision.memory.candidate is None
    assert decision.memory.rejected[0].reason == "GateFailed"
    assert "by today's limits: top-1 differs in 2 of 2,000 samples" in decision.situation.message
    assert {(s.stable, s.candidate) for s in of(decision, Signal)} == {(digest(A), "")}
    after = decide(obey(seen, decision))
    assert (after.situation.stage, of(after, CreateJob)) == (Stage.GATE_FAILED, [])


def test_it_is_tried_again_when_the_limits_allow_it_again() -> None:
    seen = edited(on_trial(), verify__thresholds=STRICT)
    seen = edited(obey(seen, decide(seen)), verify__thresholds={"top1Delta": 0.005})
    again = decide(seen).memory.candidate
    assert again is not None
    assert again.revision == B


@pytest.mark.parametrize("limits", [HALF, {"top1Delta": 0.01}], ids=["neither proved nor disproved", "loosened"])
def test_only_limits_that_it_fails_end_a_trial(limits: dict[str, float]) -> None:
    assert decide(edited(on_trial(), verify__thresholds=limits)).memory.candidate is not None


def test_what_serves_serves_on_under_limits_that_it_fails_and_status_says_so() -> None:
    seen = edited(measured(serving(A), A, 2), verify__thresholds=STRICT)
    decision = decide(seen)
    assert decision.memory.stable == seen.memory.stable
    assert not of(decision, Signal)
    verified = next(c for c in status(seen, decision, {})["conditions"] if c["type"] == "Verified")  # type: ignore[attr-defined]
    assert (verified["status"], verified["reason"]) == ("False", "GateFailed")


def test_a_first_revision_under_way_has_nothing_to_go_back_to_and_stays() -> None:
    seen = has_built(new(), A)
    seen = measured(obey(seen, decide(seen)), A, 2)
    decision = decide(edited(seen, verify__thresholds=STRICT))
    assert decision.rule == "first_rollout"
    assert decision.memory.rejected == ()


def test_other_workers_on_trial_are_not_judged_by_the_engine_that_serves_already() -> None:
    seen = edited(measured(serving(A), A, 2), serving__pod={"annotations": {"team": "b"}})
    seen = obey(seen, decide(seen))
    assert seen.memory.step is not None
    assert seen.memory.step.platform is not None
    assert decide(edited(seen, verify__thresholds=STRICT)).memory.candidate is not None


def test_a_revision_that_waits_for_its_turn_is_judged_as_ever() -> None:
    seen = measured(asks_for(serving(A), B), B, 2)
    assert decide(edited(seen, verify__thresholds=STRICT)).situation.stage is Stage.GATE_FAILED
