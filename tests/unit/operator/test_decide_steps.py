"""scaled_to_zero, first_rollout, steps_edited, prepare, advance, watch, promote, settle."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decide_scene import (
    A,
    B,
    Scene,
    asks_for,
    booted,
    busy,
    canary,
    decide,
    digest,
    edited,
    has_built,
    later,
    members,
    new,
    obey,
    of,
    reaches,
    run,
    serving,
    silent,
    with_engine,
    with_worker,
    without,
)
from trtmodel_contract.control import EngineState
from trtmodel_operator.decide.members import count
from trtmodel_operator.model import ApplyPointer, ApplyService, ApplyWorkload, Decision, Signal, Stage


def held(seen: Scene, looks: int = 4, **figures: float) -> Scene:
    """`looks` passes, an interval apart, with traffic."""
    for _ in range(looks):
        seen = later(busy(seen, **figures), 5)  # type: ignore[arg-type]
        decision = decide(seen)
        if decision.rule not in ("watch", "prepare"):
            return seen
        seen = obey(seen, decision, seconds=0)
    return seen


# ---------------------------------------------------------------------------------------------------------------
# first rollout
# ---------------------------------------------------------------------------------------------------------------


def test_the_pointer_names_the_first_candidate_before_there_is_a_deployment() -> None:
    decision = decide(has_built(new(), A))
    assert [type(a) for a in decision.actions] == [ApplyPointer, ApplyService, ApplyWorkload]
    (pointer,) = of(decision, ApplyPointer)
    assert (pointer.stable.revision, pointer.standby) == (A, None)
    assert pointer.sequence == decision.memory.sequence == 1
    assert decision.situation.stage is Stage.DEPLOYING


def test_the_first_candidate_is_promoted_when_every_desired_worker_says_that_it_serves() -> None:
    seen, decision = run(has_built(new(), A), lambda _, d: d.memory.stable is not None)
    assert decision.rule == "first_rollout"
    assert decision.memory.stable is not None
    assert decision.memory.stable.revision == A
    assert decision.memory.candidate is None
    assert decision.memory.standby is None
    assert decision.memory.history[0].outcome == "Promoted"
    assert decide(obey(seen, decision)).actions == ()


@pytest.mark.parametrize("missing", ["a worker", "a report", "readiness", "the engine", "the load key"])
def test_the_first_candidate_waits_for_the_last_worker(missing: str) -> None:
    seen, _ = run(has_built(new(), A), lambda _, d: d.memory.stable is not None)
    if missing == "a worker":
        seen = without(seen, "w3")
    elif missing == "a report":
        seen = silent(seen, "w3")
    elif missing == "readiness":
        seen = with_worker(seen, "w3", ready=False)
    elif missing == "the engine":
        seen = with_engine(seen, "w3", A, state=EngineState.LOADING)
    else:
        report = seen.workers[3].report
        assert report is not None
        seen = with_worker(seen, "w3", report=replace(report, load_key=replace(report.load_key, version="1.19")))
    decision = decide(seen)
    assert decision.memory.stable is None
    building = missing == "the load key"  # an engine for it
    assert decision.situation.stage is (Stage.BUILDING if building else Stage.DEPLOYING)


def test_a_first_rollout_that_takes_too_long_is_stalled_says_why_and_goes_on() -> None:
    seen = has_built(new(), A)
    seen = obey(seen, decide(seen))
    seen = with_worker(seen, "w0", ready=False, report=None, trouble="CrashLoopBackOff", message="exit code 1")
    for _ in range(40):
        seen = later(obey(seen, decide(seen)), 8)
    decision = decide(seen)
    assert (decision.situation.stage, decision.situation.reason) == (Stage.STALLED, "ProgressDeadlineExceeded")
    assert "CrashLoopBackOff, exit code 1" in decision.situation.message
    healed = replace(seen, workers=tuple(booted(w.uid, seen.pointers[0]) for w in seen.workers))
    assert decide(healed).memory.stable is not None


# ---------------------------------------------------------------------------------------------------------------
# prepare
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "n", "expected"),
    [
        (1, 4, 1),
        (3, 4, 3),
        (9, 4, 3),
        ("50%", 4, 2),
        ("50%", 3, 2),
        ("1%", 4, 1),
        ("100%", 4, 3),
        ("25%", 8, 2),
        ("26%", 8, 3),
        (1, 1, 1),
        ("100%", 1, 1),
        (5, 2, 1),
        ("100%", 1000, 999),
    ],
)
def test_a_step_takes_one_worker_at_least_and_leaves_one_at_least_where_there_are_two(
    workers: int | str, n: int, expected: int
) -> None:
    assert count(workers, n) == expected


def test_nobody_is_routed_before_every_member_says_that_it_holds_the_candidate() -> None:
    seen = asks_for(serving(A, rollout__steps=[{"workers": 2, "hold": "15s"}]), B)
    seen = obey(seen, decide(seen), loading=[B])
    assert not members(seen)
    loading = [w.uid for w in seen.workers if any(e.revision == B for e in w.report.models["magika"].engines)]  # type: ignore[union-attr]
    decision = decide(seen)
    assert (decision.rule, decision.situation.stage) == ("prepare", Stage.PREPARING)
    assert all(s.candidate == "" for s in of(decision, Signal))
    one = with_engine(seen, loading[0], B, state=EngineState.READY)
    assert decide(one).rule == "prepare"
    assert all(s.candidate == "" for s in of(decide(one), Signal))
    both = with_engine(one, loading[1], B, state=EngineState.READY)
    opened = decide(both)
    assert opened.memory.step is not None
    assert opened.memory.step.routed
    assert [s.candidate for s in of(opened, Signal) if s.candidate] == [digest(B)] * 2


def test_a_step_opens_under_a_window_that_nobody_has_counted_in() -> None:
    seen = canary(serving(A))
    assert seen.memory.window not in ("", "w1")
    for worker in seen.workers:
        assert worker.report is not None
        assert worker.report.models["magika"].windows[seen.memory.window] == {}


def test_members_that_answer_with_the_candidate_stay_members_in_the_next_step() -> None:
    first = canary(serving(A))
    second = canary(serving(A), index=1)
    assert set(members(first)) < set(members(second))
    assert len(members(second)) == 2


def test_a_replaced_member_starts_a_fresh_window_with_the_whole_hold() -> None:
    seen = held(canary(serving(A)), looks=2)
    assert seen.memory.step is not None
    assert seen.memory.step.held > 0
    (member,) = members(seen)
    window = seen.memory.window
    seen = without(seen, member)
    seen = replace(seen, workers=(*seen.workers, booted("w9", seen.pointers[0])))
    seen, _ = run(seen, reaches("watch"))
    assert seen.memory.step is not None
    assert seen.memory.step.held == 0
    assert seen.memory.window != window
    assert len(members(seen)) == 1


def test_a_silent_member_is_waited_for_and_not_replaced() -> None:
    seen = canary(serving(A))
    (member,) = members(seen)
    quiet = silent(seen, member)
    decision = decide(later(quiet, 5))
    assert decision.memory.candidate is not None
    assert decision.memory.step is not None
    assert not [s for s in of(decision, Signal) if s.candidate]
    assert not [s for s in of(decision, Signal) if any(e.revision == B for e in s.engines)]


def test_a_pod_that_is_not_ready_is_not_chosen_where_another_is() -> None:
    base = serving(A)
    chosen = members(canary(base))[0]
    seen = asks_for(with_worker(base, chosen, ready=False), B)
    decision = decide(seen)
    told = [s.uid for s in of(decision, Signal) if any(e.revision == B for e in s.engines)]
    assert len(told) == 1
    assert told != [chosen]


def test_the_message_says_what_the_worker_that_is_waited_for_does() -> None:
    seen = asks_for(serving(A), B)
    seen = obey(seen, decide(seen), loading=[B])
    assert "Loading" in decide(seen).situation.message


# ---------------------------------------------------------------------------------------------------------------
# hold, advance, promote
# ---------------------------------------------------------------------------------------------------------------


def test_a_step_passes_only_after_its_hold_and_a_pass() -> None:
    seen = canary(serving(A))
    rules = []
    for _ in range(4):
        seen = later(busy(seen), 5)
        rules.append(decide(seen).rule)
        seen = obey(seen, decide(seen), seconds=0)
    assert rules == ["watch", "watch", "advance", "prepare"]
    assert seen.memory.step is not None
    assert seen.memory.step.index == 1


def test_after_its_hold_a_step_without_a_verdict_waits() -> None:
    seen = canary(serving(A))
    for _ in range(8):
        seen = obey(later(busy(seen, requests=2), 5), decide(later(busy(seen, requests=2), 5)), seconds=0)
    decision = decide(seen)
    assert (decision.rule, decision.situation.reason) == ("watch", "Inconclusive")
    assert "150 requests are the least" in decision.situation.message


def test_a_step_without_a_hold_still_needs_its_verdict() -> None:
    seen = canary(serving(A, rollout__steps=[{"workers": 1, "hold": "0s"}]))
    assert decide(seen).rule == "watch"
    assert decide(later(seen, 5)).rule == "watch"
    assert decide(later(busy(seen), 5)).rule == "advance"


def test_the_last_preparation_routes_nobody_new_and_needs_every_worker() -> None:
    seen = held(canary(serving(A), index=1))
    seen = obey(seen, decide(seen), loading=[B])
    assert seen.memory.step is not None
    assert seen.memory.step.index == 2
    assert seen.memory.step.routed
    assert seen.memory.step.verdict == "Pass"
    assert len(members(seen)) == 2
    decision = decide(seen)
    assert (decision.rule, decision.memory.stable) == ("prepare", seen.memory.stable)
    loading = [w.uid for w in seen.workers if w.uid not in members(seen)]
    for uid in loading:
        assert decide(seen).rule == "prepare"
        seen = with_engine(seen, uid, B, state=EngineState.READY)
        told = [s for s in of(decide(seen), Signal) if s.uid == uid]
        assert all(s.candidate == "" for s in told)
    assert decide(seen).rule == "promote"


@pytest.mark.parametrize("missing", ["a worker", "a report"])
def test_nothing_is_promoted_without_the_report_of_every_desired_worker(missing: str) -> None:
    seen = held(canary(serving(A), index=1))
    seen = obey(seen, decide(seen))
    assert decide(seen).rule == "promote"
    uid = next(w.uid for w in seen.workers if w.uid not in members(seen))
    seen = without(seen, uid) if missing == "a worker" else silent(seen, uid)
    decision = decide(seen)
    assert decision.rule == "prepare"
    assert decision.memory.stable == seen.memory.stable


def test_a_promotion_is_remembered_then_pointed_to_then_signalled() -> None:
    seen = held(canary(serving(A), index=1))
    seen = obey(seen, decide(seen))
    decision = decide(seen)
    assert decision.rule == "promote"
    assert decision.memory.stable is not None
    assert decision.memory.standby is not None
    assert (decision.memory.stable.revision, decision.memory.standby.revision) == (B, A)
    assert decision.memory.candidate is None
    assert decision.memory.step is None
    assert decision.memory.sequence == seen.memory.sequence + 1
    kinds = [type(a) for a in decision.actions]
    assert kinds == [ApplyPointer, *[Signal] * 4]
    (pointer,) = of(decision, ApplyPointer)
    assert (pointer.stable.revision, pointer.standby.revision) == (B, A)
    assert {(s.stable, s.candidate) for s in of(decision, Signal)} == {(digest(B), "")}
    assert decision.memory.history[0].outcome == "Promoted"


def test_a_fleet_of_one_is_compared_with_its_own_past_and_promoted() -> None:
    seen = busy(serving(A, replicas=1))
    seen = canary(seen)
    for _ in range(40):
        if decide(seen).rule == "promote":
            break
        seen = later(busy(seen), 5)
        decision = decide(seen)
        seen = obey(seen, decision, seconds=0)
    assert decide(seen).rule == "promote"
    assert seen.memory.step is not None
    assert "its own figures from before the rollout" in seen.memory.step.sentence


def test_a_worker_that_still_answers_with_a_dropped_candidate_is_not_settled() -> None:
    seen = canary(serving(A))
    (uid,) = members(seen)
    decision = decide(edited(seen, source__uri="s3://models/a.onnx"))
    back = obey(edited(seen, source__uri="s3://models/a.onnx"), decision)
    assert decide(back).situation.stage is Stage.SERVING
    deaf = with_worker(back, uid, report=next(w.report for w in seen.workers if w.uid == uid))
    assert decide(deaf).situation.stage is Stage.PROMOTING


# ---------------------------------------------------------------------------------------------------------------
# steps edited, scaled to zero, settle
# ---------------------------------------------------------------------------------------------------------------


def test_edited_steps_begin_again_and_go_on_being_watched() -> None:
    seen = canary(serving(A), index=1)
    seen = edited(seen, rollout__steps=[{"workers": 1, "hold": "1m"}])
    decision = decide(seen)
    assert decision.rule == "steps_edited"
    assert decision.memory.step is not None
    assert (decision.memory.step.index, decision.memory.step.routed) == (0, False)
    assert decision.memory.step.seen_at > 0
    assert len([s for s in of(decision, Signal) if s.candidate]) == 1


def test_at_zero_replicas_nothing_is_promoted() -> None:
    seen = has_built(edited(new(), serving__replicas=0), A)
    seen = obey(seen, decide(seen))
    decision = decide(seen)
    assert (decision.rule, decision.situation.reason) == ("scaled_to_zero", "ScaledToZero")
    assert decision.memory.stable is None
    assert seen.workers == ()


def test_scaling_a_served_model_to_zero_and_back_changes_nothing_else() -> None:
    seen = serving(A)
    zero = edited(seen, serving__replicas=0)
    decision = decide(zero)
    assert of(decision, ApplyWorkload)[0].replicas == 0
    gone = obey(zero, decision)
    assert decide(gone).situation.stage is Stage.SCALED_TO_ZERO
    _, last = run(edited(gone, serving__replicas=4), reaches("settle"))
    assert last.memory.stable == seen.memory.stable


def test_a_settled_model_writes_nothing_and_does_nothing() -> None:
    seen = serving(A)
    for wait in (0, 5, 300, 86_400):
        decision = decide(later(seen, wait))
        assert decision.memory == seen.memory
        assert decision.actions == ()
        assert decision.requeue is None


def test_workers_that_never_come_back_are_told_after_the_deadline_and_not_counted_for_ever() -> None:
    seen = without(serving(A), "w3")
    decision: Decision | None = None
    for _ in range(60):
        seen = later(obey(seen, decide(seen)), 8)
        decision = decide(seen)
    assert decision is not None
    assert (decision.situation.stage, decision.situation.reason) == (Stage.STALLED, "ProgressDeadlineExceeded")
    assert decide(later(seen, 20)).memory == seen.memory
