"""Weight and shadow: which share of its workers' requests a candidate answers, and which it only mirrors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from decide_scene import (
    MODEL,
    A,
    B,
    Scene,
    booted,
    busy,
    canary,
    decide,
    digest,
    edited,
    later,
    members,
    obey,
    of,
    reaches,
    run,
    serving,
)
from trtmodel_contract.control import Routes
from trtmodel_operator.fields import SpecError
from trtmodel_operator.model import Decision, Signal
from trtmodel_operator.spec import parse

SHADOW = {"workers": 1, "weight": 0, "shadow": 50, "hold": "15s"}
TENTH = {"workers": 1, "weight": 10, "hold": "15s"}
HALF = {"workers": "50%", "weight": 50, "hold": "15s"}


def planned(*steps: dict[str, Any], replicas: int = 4) -> Scene:
    return serving(A, replicas=replicas, rollout__steps=list(steps))


def doses(seen: Scene) -> set[tuple[int, int]]:
    """(weight, shadow) of the workers that try the candidate, by their own reports."""
    found = (w.report.models[MODEL.name].routes for w in seen.workers if w.report is not None)
    return {(r.weight, r.shadow) for r in found if r.candidate}


def asked(decision: Decision) -> set[tuple[int, int]]:
    return {(s.weight, s.shadow) for s in of(decision, Signal) if s.candidate}


def look(seen: Scene, **figures: Any) -> tuple[Scene, Decision]:
    """An interval with traffic, and the pass after it."""
    seen = later(busy(seen, **figures), 5)
    decision = decide(seen)
    return obey(seen, decision, seconds=0), decision


@pytest.mark.parametrize(("step", "dose"), [(SHADOW, (0, 50)), (TENTH, (10, 0)), (HALF, (50, 0))])
def test_the_members_of_a_step_get_its_weight_and_shadow(step: dict[str, Any], dose: tuple[int, int]) -> None:
    seen = canary(planned(step, {"workers": 1}))
    assert doses(seen) == {dose}
    assert asked(decide(later(seen, 1))) == {dose}
    assert {s.candidate for s in of(decide(later(seen, 1)), Signal)} == {digest(B)}


def test_each_step_has_its_own_dose_and_the_first_members_stay() -> None:
    seen = canary(planned(SHADOW, TENTH, HALF))
    first = members(seen)
    found = [doses(seen)]
    for _ in range(60):
        seen, decision = look(seen, requests=400)
        assert decision.memory.candidate is not None
        if doses(seen) != found[-1] and len(doses(seen)) == 1:
            found.append(doses(seen))
        if decision.memory.step is not None and decision.memory.step.index == 3:
            break
    assert found == [{(0, 50)}, {(10, 0)}, {(50, 0)}]
    assert set(first) <= set(members(seen))
    assert len(members(seen)) == 2


def test_more_is_given_only_when_the_next_step_is_opened() -> None:
    seen = canary(planned(TENTH, HALF))
    for _ in range(20):
        seen, decision = look(seen, requests=400)
        if decision.rule == "advance":
            break
    assert decision.memory.step is not None
    assert (decision.memory.step.index, decision.memory.step.routed) == (1, False)
    assert asked(decision) == {(10, 0)}
    seen, decision = run(seen, lambda _, d: d.situation.reason == "Routing")
    assert asked(decision) == {(50, 0)}


def test_an_edited_plan_takes_weight_away_at_once() -> None:
    seen = canary(planned({"workers": 1, "weight": 80, "hold": "15s"}, HALF))
    decision = decide(edited(seen, rollout__steps=[TENTH, HALF]))
    assert decision.rule == "steps_edited"
    assert asked(decision) == {(10, 0)}
    more = decide(edited(seen, rollout__steps=[{"workers": 1, "weight": 90, "hold": "15s"}, HALF]))
    assert asked(more) == {(80, 0)}


def test_an_unreadable_spec_leaves_the_dose_as_it_is() -> None:
    seen = replace(canary(planned(TENTH, HALF)), spec=None, spec_error="broken")
    assert asked(decide(later(seen, 1))) == {(10, 0)}


def test_the_hold_does_not_count_while_a_member_gives_another_dose() -> None:
    seen = canary(planned(TENTH, HALF))
    (uid,) = members(seen)
    other = []
    for worker in seen.workers:
        assert worker.report is not None
        model = worker.report.models[MODEL.name]
        routes = replace(model.routes, weight=100) if worker.uid == uid else model.routes
        report = replace(worker.report, models={MODEL.name: replace(model, routes=routes)})
        other.append(replace(worker, report=report))
    decision = decide(later(busy(replace(seen, workers=tuple(other))), 5))
    assert decision.memory.step is not None
    assert decision.memory.step.held == 0.0
    assert asked(decision) == {(10, 0)}


def test_a_share_is_compared_with_stable_in_the_same_workers_also_in_a_fleet_of_one() -> None:
    for replicas in (1, 4):
        _, decision = look(canary(planned(HALF, replicas=replicas)), requests=400)
        assert "compared with stable in the same workers" in decision.situation.message
        assert decision.memory.step is not None
        assert decision.memory.step.verdict == "Pass"


def test_a_candidate_that_fails_what_it_mirrors_is_taken_back_and_no_client_met_it() -> None:
    seen = canary(planned(SHADOW, HALF))
    assert all(w.report.models[MODEL.name].routes.weight == 0 for w in seen.workers if w.report is not None)
    _, decision = look(seen, requests=400, failed=40)
    assert decision.memory.candidate is None
    assert decision.situation.reason == "ErrorRateTooHigh"


def test_a_tenth_that_fails_is_taken_back() -> None:
    seen, decision = look(canary(planned(TENTH, HALF)), requests=2000, failed=40)
    assert decision.memory.candidate is None
    assert doses(seen) == set()


def test_messages_say_which_share_and_the_column_too() -> None:
    seen = canary(planned({"workers": 1, "weight": 10, "shadow": 50, "hold": "15s"}, HALF))
    situation = decide(later(seen, 1)).situation
    assert "answers 10 % of the requests and mirrors 50 % of stable's answers on pod-" in situation.message
    assert situation.summary.startswith("step 1/2 1 of 4 workers at 10%, mirrors 50%")


def test_a_worker_that_was_replaced_in_mid_step_means_a_fresh_window_with_the_same_dose() -> None:
    seen = canary(planned(TENTH, HALF))
    window, (uid,) = seen.memory.window, members(seen)
    workers = tuple(w for w in seen.workers if w.uid != uid)
    seen = replace(seen, workers=(*workers, booted("x1", seen.pointers[0])))
    seen, decision = run(seen, reaches("watch"))
    assert decision.memory.window != window
    assert doses(seen) == {(10, 0)}
    assert len(members(seen)) == 1


def test_the_last_step_keeps_its_dose_while_all_workers_are_prepared_and_then_all_answer() -> None:
    seen = canary(planned(HALF))
    while seen.memory.step is not None and seen.memory.step.index == 0:
        seen, decision = look(seen, requests=400)
    assert doses(seen) == {(50, 0)}
    seen, decision = run(seen, reaches("settle"))
    assert decision.memory.stable is not None
    assert decision.memory.stable.revision == B
    routes = {w.report.models[MODEL.name].routes for w in seen.workers if w.report is not None}
    assert routes == {Routes(digest(B))}


@pytest.mark.parametrize(
    ("rollout", "why"),
    [
        ({"steps": [{"workers": 1, "shadow": 10}]}, "none is left to mirror"),
        ({"steps": [{"workers": 1, "weight": 0}, {"workers": 1}]}, "the candidate does nothing"),
        ({"steps": [{"workers": 1, "weight": 0, "shadow": 10}]}, "in the last step"),
        ({"steps": [TENTH], "memoryPolicy": "Resource"}, "memoryPolicy Resource keeps one"),
        ({"steps": [{"workers": 1, "weight": 101}]}, "weight"),
        ({"steps": [{"workers": 1, "pause": "yes"}]}, "pause"),
        ({"promotion": "Maybe"}, "promotion"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused_in_words(rollout: dict[str, Any], why: str) -> None:
    raw = {**planned(TENTH).raw, "rollout": rollout}
    with pytest.raises(SpecError, match=why):
        parse(raw)


def test_plans_that_were_written_before_there_were_shares_have_the_key_that_they_had() -> None:
    old = canary(serving(A))
    assert old.memory.step is not None
    assert old.memory.step.plan == "b6da3521c0"
