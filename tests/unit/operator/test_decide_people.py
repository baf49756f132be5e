"""What waits for a person, and what a person may skip: pauses, manual promotion, promote, skip-step, pause, resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
    has_built,
    later,
    made_up,
    members,
    new,
    obey,
    of,
    run,
    serving,
    silent,
    with_engine,
    with_worker,
    without,
)
from trtmodel_contract.control import EngineState
from trtmodel_operator.conditions import status
from trtmodel_operator.model import CreateJob, Decision, Memory, Signal, Stage
from trtmodel_operator.spec import parse_command

ONE = {"workers": 1, "hold": "15s"}
HALF = {"workers": "50%", "hold": "15s"}


def commanded(seen: Scene, text: str) -> Scene:
    return replace(seen, command=parse_command(text))


def notice(decision: Decision) -> tuple[str, str]:
    (found,) = decision.notices
    return found.reason, found.message


def watched(seen: Scene, until: Callable[[Decision], bool], looks: int = 60, **figures: Any) -> tuple[Scene, Decision]:
    """Passes an interval apart, under traffic, until that decision, which is not carried out."""
    for _ in range(looks):
        decision = decide(seen)
        if until(decision):
            return seen, decision
        seen = later(busy(obey(seen, decision, seconds=0), **figures), 5)
    raise AssertionError(f"{decision.rule}: {decision.situation}")


def rule(name: str) -> Callable[[Decision], bool]:
    return lambda decision: decision.rule == name


def with_pause() -> Scene:
    """The first of two steps was passed, and pauses."""
    seen = canary(serving(A, rollout__steps=[{**ONE, "pause": True}, HALF]))
    seen, decision = watched(seen, rule("wait_for_person"))
    return obey(seen, decision, seconds=0)


def manual() -> Scene:
    """All that is missing is a person's word."""
    seen, decision = watched(canary(serving(A, rollout__promotion="Manual")), rule("wait_for_person"))
    return obey(seen, decision, seconds=0)


@pytest.mark.parametrize(
    ("scene", "reason", "command"),
    [(with_pause, "StepPaused", "resume"), (manual, "AwaitingPromotion", "promote")],
)
def test_who_waits_for_a_person_says_for_which_command(scene: Callable[[], Scene], reason: str, command: str) -> None:
    seen = scene()
    decision = decide(seen)
    situation = decision.situation
    assert (situation.stage, situation.reason) == (Stage.PAUSED, reason)
    assert f"use the command {command}@{B} to go on, or abort@{B} to go back" in situation.message
    assert situation.summary.startswith(f"waits for {command}, ")
    told = {c["type"]: c["status"] for c in status(seen, decision, {})["conditions"]}  # type: ignore[attr-defined]
    assert (told["Progressing"], told["Stalled"], told["Ready"], told["Available"]) == (
        "False",
        "False",
        "False",
        "True",
    )


@pytest.mark.parametrize("scene", [with_pause, manual])
def test_a_person_may_take_longer_than_the_deadline_and_bad_figures_still_take_it_back(
    scene: Callable[[], Scene],
) -> None:
    seen = scene()
    for _ in range(100):  # 500 s, of a deadline of 300
        decision = decide(seen)
        assert decision.rule == "wait_for_person"
        seen = later(busy(obey(seen, decision, seconds=0)), 5)
    _, decision = watched(seen, lambda d: d.memory.candidate is None, looks=20, failed=60)
    assert decision.situation.reason == "ErrorRateTooHigh"


def test_a_canary_that_is_replaced_during_a_long_pause_is_prepared_and_not_late() -> None:
    seen = with_pause()
    for _ in range(100):  # 500 s, of a deadline of 300
        seen = busy(obey(later(seen, 5), decide(later(seen, 5)), seconds=0))
    (uid,) = members(seen)
    seen = made_up(without(later(seen, 1), uid))  # between two looks
    said = set()
    for _ in range(4):
        decision = decide(seen)
        said.add(decision.situation.stage)
        seen = obey(seen, decision, seconds=0.05)
    assert said <= {Stage.PREPARING, Stage.CANARY}


@pytest.mark.parametrize("how", ["spec", "command"])
def test_counters_that_begin_anew_during_a_pause_take_no_time_from_the_deadline(how: str) -> None:
    seen = later(busy(canary(serving(A))), 5)
    seen = obey(seen, decide(seen), seconds=0)
    seen = edited(seen, rollout__paused=True) if how == "spec" else commanded(seen, "pause#1")
    for _ in range(100):  # 500 s, of a deadline of 300
        fresh = later(seen, 5)
        for worker in fresh.workers:
            assert worker.report is not None
            model = replace(worker.report.models["magika"], windows={fresh.memory.window: {}})
            fresh = with_worker(fresh, worker.uid, report=replace(worker.report, models={"magika": model}))
        seen = obey(fresh, decide(fresh), seconds=0)
        seen = later(busy(seen), 5)
        seen = obey(seen, decide(seen), seconds=0)
    assert seen.memory.candidate is not None
    assert seen.memory.waited < 20


def test_resume_lifts_the_pause_of_its_step_once() -> None:
    seen = commanded(with_pause(), f"resume@{B}#1")
    decision = decide(seen)
    assert (decision.rule, notice(decision)[0]) == ("advance", "CommandTaken")
    seen = obey(seen, decision)
    assert seen.memory.step is not None
    assert (seen.memory.step.index, seen.memory.step.resumed) == (1, False)
    _, decision = watched(seen, lambda d: d.memory.stable is not None and d.memory.stable.revision == B)
    assert decision.rule == "promote"


def test_a_step_with_a_pause_that_was_not_passed_waits_for_nobody() -> None:
    seen = canary(serving(A, rollout__steps=[{**ONE, "pause": True}, HALF]))
    decision = decide(commanded(seen, "resume#1"))
    assert (decision.rule, notice(decision)[0]) == ("watch", "CommandIgnored")


def test_promote_gives_a_manual_promotion_and_it_is_done_at_once() -> None:
    seen = commanded(manual(), f"promote@{B}#1")
    decision = decide(seen)
    assert decision.rule == "promote"
    assert decision.memory.stable is not None
    assert decision.memory.stable.revision == B
    assert {s.stable for s in of(decision, Signal)} == {digest(B)}
    assert decision.memory.history[0].outcome == "Promoted"
    assert decision.memory.history[0].message.startswith("a person promoted it; 0 of ")


def test_a_manual_promotion_waits_only_when_every_worker_has_it_ready() -> None:
    seen = with_engine(manual(), "w3", B, state=EngineState.LOADING)
    assert decide(seen).rule == "prepare"
    assert decide(silent(manual(), "w3")).rule == "prepare"


def test_until_then_the_last_preparation_has_a_deadline_as_ever() -> None:
    seen = with_engine(manual(), "w3", B, state=EngineState.LOADING)
    for _ in range(80):  # 400 s, of a deadline of 300
        decision = decide(seen)
        if decision.memory.candidate is None:
            break
        seen = later(busy(replace(seen, memory=decision.memory)), 5)
    assert decision.situation.reason == "ProgressDeadlineExceeded"


def test_a_first_revision_waits_for_nobody() -> None:
    seen = has_built(edited(new(), rollout__promotion="Manual"), A)
    seen, decision = run(seen, lambda _, d: d.memory.stable is not None)
    assert decision.rule == "first_rollout"


def test_after_an_absence_what_waited_is_held_again_and_waits_again() -> None:
    seen = manual()
    seen = later(seen, 3600)
    decision = decide(seen)
    assert decision.memory.step is not None
    assert (decision.memory.step.index, decision.memory.step.held) == (1, 0.0)
    seen, decision = watched(obey(seen, decision), rule("wait_for_person"))
    assert decision.situation.reason == "AwaitingPromotion"


def test_a_pause_that_a_person_lifted_stays_lifted_after_an_absence() -> None:
    steps = [ONE, {**HALF, "pause": True}]
    seen = canary(serving(A, rollout__steps=steps, rollout__promotion="Manual"))
    seen, decision = watched(seen, rule("wait_for_person"))
    assert decision.situation.reason == "StepPaused"
    seen = commanded(obey(seen, decision, seconds=0), "resume#1")
    seen, decision = watched(seen, rule("wait_for_person"))
    assert decision.situation.reason == "AwaitingPromotion"
    seen, decision = watched(later(seen, 3600), rule("wait_for_person"))
    assert decision.situation.reason == "AwaitingPromotion"


def test_promote_in_mid_step_skips_the_steps_that_are_left_but_no_worker() -> None:
    seen = commanded(canary(serving(A)), f"promote@{B}#1")
    decision = decide(seen)
    assert decision.memory.step is not None
    assert (decision.memory.step.index, decision.memory.step.approved) == (2, True)
    assert (decision.rule, decision.memory.stable) == ("prepare", seen.memory.stable)
    held_back = obey(seen, decision, loading=[B])
    assert decide(held_back).rule == "prepare"
    seen, decision = run(obey(seen, decision), lambda _, d: d.memory.candidate is None)
    assert decision.memory.stable is not None
    assert decision.memory.stable.revision == B


def test_a_promoted_candidate_that_fails_on_the_way_is_taken_back() -> None:
    seen = commanded(canary(serving(A)), "promote#1")
    seen = with_engine(obey(seen, decide(seen)), "w3", B, state=EngineState.FAILED, message="no kernel image")
    decision = decide(seen)
    assert decision.memory.candidate is None
    assert decision.situation.reason == "EngineFailed"


def test_who_promoted_is_not_asked_again_after_an_absence() -> None:
    seen = commanded(canary(serving(A)), "promote#1")
    seen = obey(seen, decide(seen), loading=[B])
    decision = decide(later(seen, 3600))
    assert decision.memory.step is not None
    assert (decision.memory.step.index, decision.memory.step.approved) == (2, True)


def test_skip_step_goes_to_the_next_step_and_after_the_last_to_every_worker() -> None:
    seen = canary(serving(A))
    for number in (1, 2):
        seen = commanded(seen, f"skip-step@{B}#{number}")
        decision = decide(seen)
        assert f"step {number} of 2 is skipped" in notice(decision)[1]
        assert decision.memory.step is not None
        assert decision.memory.step.index == number
        seen = obey(seen, decision)
    decision = decide(commanded(seen, "skip-step#3"))
    assert "no step is left: use promote" in notice(decision)[1]


def test_pause_stops_the_way_forward_as_the_spec_does_and_resume_ends_it() -> None:
    seen = commanded(canary(serving(A)), f"pause@{B}#1")
    decision = decide(seen)
    assert (decision.rule, decision.memory.paused) == ("paused", f"pause@{B}#1")
    for _ in range(80):  # 400 s, of a deadline of 300
        seen = later(busy(obey(seen, decision, seconds=0)), 5)
        decision = decide(seen)
        assert decision.rule == "paused"
        assert f"was paused by the command pause@{B}#1: use the command resume" in decision.situation.message
    assert len(members(seen)) == 1
    assert decision.memory.step is not None
    assert decision.memory.step.held == 0.0
    assert decision.memory.waited == 0.0
    seen = commanded(seen, f"resume@{B}#2")
    assert decide(seen).memory.paused == ""
    _, decision = watched(seen, lambda d: d.memory.stable is not None and d.memory.stable.revision == B)
    assert decision.rule == "promote"


def test_the_deadline_stands_still_in_a_pause() -> None:
    seen = canary(serving(A))
    few = {"requests": 1}
    seen, decision = watched(seen, lambda d: d.situation.reason == "Inconclusive", **few)
    before = decision.memory.waited
    seen = commanded(obey(seen, decision, seconds=0), "pause#1")
    for _ in range(80):  # 400 s, of a deadline of 300
        decision = decide(seen)
        assert decision.rule == "paused"
        seen = later(busy(obey(seen, decision, seconds=0), **few), 5)
    assert decision.memory.waited == before
    assert decide(commanded(seen, "resume#2")).memory.candidate is not None


def test_what_was_paused_is_watched_and_taken_back() -> None:
    for paused in (commanded(canary(serving(A)), "pause#1"), edited(canary(serving(A)), rollout__paused=True)):
        _, decision = watched(paused, lambda d: d.memory.candidate is None, looks=20, failed=60)
        assert decision.situation.reason == "ErrorRateTooHigh"


def test_a_pause_holds_also_what_comes_next_until_it_is_lifted() -> None:
    seen = commanded(serving(A), "pause#1")
    assert decide(seen).situation.stage is Stage.SERVING
    seen = asks_for(obey(seen, decide(seen)), B)
    decision = decide(seen)
    assert (decision.rule, of(decision, CreateJob)) == ("paused", [])
    assert decide(commanded(seen, "resume#2")).memory.candidate is not None


def test_with_status_lost_what_was_paused_by_command_stays_so() -> None:
    seen = replace(asks_for(serving(A), B), command=parse_command("pause#1"), memory=Memory())
    seen, decision = run(seen, lambda _, d: d.memory.stable is not None)
    assert decision.memory.paused == "pause#1"
    assert decide(obey(seen, decision)).rule == "paused"


def test_promote_ends_a_pause_too() -> None:
    seen = commanded(canary(serving(A)), "pause#1")
    seen = commanded(obey(seen, decide(seen)), "promote#2")
    assert decide(seen).memory.paused == ""
    assert decide(seen).rule == "prepare"


@pytest.mark.parametrize("text", ["promote#9", "skip-step#9", "pause#9", "resume#9"])
@pytest.mark.parametrize("scene", [with_pause, manual])
def test_each_command_is_taken_once(text: str, scene: Callable[[], Scene]) -> None:
    seen = commanded(scene(), text)
    seen = obey(seen, decide(seen), seconds=0)
    again = decide(seen)
    assert again.notices == ()
    assert again.memory.command == text


@pytest.mark.parametrize("verb", ["promote", "skip-step"])
def test_the_gate_cannot_be_skipped(verb: str) -> None:
    seen = edited(serving(A), source__uri="s3://models/b.onnx")
    assert "none is on trial" in notice(decide(commanded(seen, f"{verb}#1")))[1]
    first = has_built(new(), A)
    first = obey(first, decide(first), loading=[A])
    assert "nothing serves yet, so there are no steps" in notice(decide(commanded(first, f"{verb}#1")))[1]


def test_a_command_to_go_on_cannot_be_taken_while_the_spec_cannot_be_read() -> None:
    seen = replace(canary(serving(A)), spec=None, spec_error="broken")
    decision = decide(commanded(seen, "promote#1"))
    assert "the spec cannot be read" in notice(decision)[1]
    assert decision.memory.candidate == seen.memory.candidate


def test_resume_says_whose_pause_it_cannot_lift() -> None:
    seen = edited(canary(serving(A)), rollout__paused=True)
    assert "spec.rollout.paused is true" in notice(decide(commanded(seen, "resume#1")))[1]
    assert "waits for the command promote" in notice(decide(commanded(manual(), "resume#1")))[1]


def test_what_was_taken_back_while_the_spec_could_not_be_read_does_not_return_with_the_next_spec() -> None:
    seen = canary(serving(A))
    broken = replace(seen, spec=None, spec_error="broken", generation=seen.generation + 1)
    aborted = decide(commanded(broken, f"abort@{B}#1"))
    died = decide(with_engine(broken, members(broken)[0], B, deaths=1))
    for decision in (aborted, died):
        assert decision.memory.candidate is None
        healed = replace(obey(broken, decision), spec=seen.spec, generation=seen.generation + 2)
        healed, decision = run(healed, lambda _, d: not d.actions and d.rule != "take_command")
        assert (decision.rule, decision.situation.stage) == ("rejected", Stage.ROLLED_BACK)
        assert not members(healed)
        # From then on it is bound to these limits, as any other.
        later_on = edited(healed, rollout__analysis={"maxErrorRateIncrease": 0.5})
        assert run(has_built(later_on, B), lambda _, d: d.memory.candidate is not None)
