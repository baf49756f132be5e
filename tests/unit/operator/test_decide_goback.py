"""rollback to any revision in the history: loaded beside what serves, then switched."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decide_scene import (
    A,
    B,
    C,
    Scene,
    asks_for,
    busy,
    canary,
    decide,
    deployed,
    digest,
    edited,
    later,
    obey,
    of,
    promoted,
    run,
    silent,
    with_engine,
    with_worker,
    without,
)
from trtmodel_contract.control import EngineState, Role
from trtmodel_contract.jobs import Reason
from trtmodel_operator.model import ApplyPointer, CreateJob, Decision, Memory, Signal, Stage
from trtmodel_operator.spec import parse_command


def commanded(seen: Scene, text: str) -> Scene:
    return replace(seen, command=parse_command(text))


def three() -> Scene:
    """C was promoted over B, and B over A: B is the standby, and A in the history alone."""
    seen = asks_for(promoted(), C)
    for _ in range(60):
        decision = decide(seen)
        if decision.rule == "settle" and not decision.actions:
            return seen
        seen = later(busy(obey(seen, decision, seconds=0)), 5)
    raise AssertionError(decision)


def far_back() -> tuple[Scene, Decision]:
    seen = commanded(three(), f"rollback@{A}#1")
    return seen, decide(seen)


def test_promotions_are_remembered_with_their_engines() -> None:
    history = three().memory.history
    assert [(h.revision, [e.manifest_digest for e in h.engines]) for h in history] == [
        (C, [digest(C)]),
        (B, [digest(B)]),
        (A, [digest(A)]),
    ]


def test_every_worker_loads_it_beside_what_serves_and_answers_on() -> None:
    seen, decision = far_back()
    assert decision.rule == "take_command"
    assert decision.notices[0].reason == "CommandTaken"
    assert decision.memory.stable == seen.memory.stable
    assert not of(decision, CreateJob)
    assert not of(decision, ApplyPointer)
    signals = of(decision, Signal)
    assert len(signals) == 4
    for signal in signals:
        assert (signal.stable, signal.candidate, signal.weight) == (digest(C), "", 0)
        assert [(e.role, e.revision) for e in signal.engines] == [(Role.STABLE, C), (Role.CANDIDATE, A)]


def test_when_all_have_it_all_are_switched_and_what_was_left_is_not_tried_again() -> None:
    seen, decision = far_back()
    seen, decision = run(obey(seen, decision), lambda _, d: d.rule == "going_back" and d.memory.candidate is None)
    assert decision.memory.stable == deployed(A)
    assert decision.memory.standby is not None
    assert decision.memory.standby.revision == C
    assert decision.situation.reason == "RolledBackByCommand"
    assert (decision.memory.history[0].revision, decision.memory.history[0].outcome) == (C, "RolledBack")
    assert [p.stable.revision for p in of(decision, ApplyPointer)] == [A]
    assert {s.stable for s in of(decision, Signal)} == {digest(A)}
    after = decide(obey(seen, decision))
    assert (after.rule, after.situation.stage) == ("rejected", Stage.ROLLED_BACK)
    assert after.memory.stable == deployed(A)
    assert not of(after, CreateJob)


def test_back_and_back_again_and_only_what_was_left_last_is_not_tried() -> None:
    seen = promoted()
    for number, (goal, left) in enumerate([(A, B), (B, A)]):
        seen = commanded(seen, f"rollback@{goal}#{number}")
        decision = decide(seen)
        assert decision.memory.stable is not None
        assert decision.memory.stable.revision == goal
        assert [r.revision for r in decision.memory.rejected] == [left]
        seen, decision = run(obey(seen, decision), lambda _, d: not d.actions)
    assert decision.situation.stage is Stage.SERVING


def with_another_device(seen: Scene) -> Scene:
    """The first worker has another load key, for which what serves has an engine of its own."""
    stable, report = seen.memory.stable, seen.workers[0].report
    assert stable is not None
    assert report is not None
    key = replace(report.load_key, device="other")
    engines = (*stable.artifacts, replace(stable.artifacts[0], load_key=str(key)))
    memory = replace(seen.memory, stable=replace(stable, artifacts=engines))
    return with_worker(replace(seen, memory=memory), seen.workers[0].uid, report=replace(report, load_key=key))


def test_no_flip_leaves_a_worker_behind_that_has_no_engine_of_the_standby() -> None:
    seen = commanded(with_another_device(promoted()), "rollback#1")
    decision = decide(seen)
    assert decision.notices[0].reason == "CommandIgnored"
    assert f"no engine of {A} for pod-w0 with the load key" in decision.notices[0].message
    assert decision.memory.stable == seen.memory.stable


def test_a_worker_that_serves_nothing_holds_up_no_flip() -> None:
    seen = with_another_device(promoted())
    seen = replace(seen, memory=replace(seen.memory, stable=deployed(B)))  # no engine of that either
    decision = decide(commanded(seen, "rollback#1"))
    assert decision.memory.stable is not None
    assert decision.memory.stable.revision == A


def test_a_worker_that_says_nothing_is_waited_for_and_refuses_no_way_back() -> None:
    seen = three()
    *newer, oldest = seen.memory.history
    engines = (*oldest.engines, replace(oldest.engines[0], load_key="onnxruntime-1.20-other"))
    seen = replace(seen, memory=replace(seen.memory, history=(*newer, replace(oldest, engines=engines))))
    seen = silent(commanded(seen, f"rollback@{A}#1"), "w2")
    decision = decide(seen)
    assert decision.notices[0].reason == "CommandTaken"
    decision = decide(obey(seen, decision))
    assert decision.situation.reason == "GoingBack"
    assert "pod-w2 is unknown" in decision.situation.message


def test_it_waits_for_the_last_worker_and_says_for_what() -> None:
    seen, decision = far_back()
    seen = obey(seen, decision, loading=[A])
    decision = decide(seen)
    assert (decision.rule, decision.situation.reason) == ("going_back", "GoingBack")
    assert f"going back to {A}, which is being loaded on pod-w0" in decision.situation.message
    for lacking in (with_engine(seen, "w3", A, state=EngineState.READY), silent(seen, "w2"), without(seen, "w1")):
        assert decide(lacking).memory.stable == seen.memory.stable


def test_one_that_cannot_be_loaded_any_more_changes_nothing() -> None:
    seen, decision = far_back()
    seen = with_engine(
        obey(seen, decision), "w1", A, state=EngineState.FAILED, reason="ArtifactNotFound", message="gone"
    )
    decision = decide(seen)
    assert decision.memory.candidate is None
    assert decision.memory.stable == seen.memory.stable
    assert "cannot hold it: gone" in decision.situation.message
    assert decide(obey(seen, decision)).situation.stage is Stage.SERVING


def test_hosts_that_died_in_its_earlier_life_do_not_count() -> None:
    seen = promoted()
    seen = canary(with_engine(seen, "w1", A, deaths=1), C)  # A is the standby, and resident but for the members
    seen = commanded(seen, f"rollback@{A}#1")
    _, decision = run(obey(seen, decide(seen)), lambda _, d: d.memory.candidate is None)
    assert decision.memory.stable is not None
    assert decision.memory.stable.revision == A


def test_a_storage_that_is_away_is_waited_for_and_a_person_may_give_it_up() -> None:
    seen, decision = far_back()
    seen = obey(seen, decision)
    for worker in seen.workers:
        seen = with_engine(seen, worker.uid, A, state=EngineState.FAILED, reason=Reason.STORAGE_UNAVAILABLE.value)
    for _ in range(80):
        seen = later(seen, 10)
        decision = decide(seen)
        assert decision.rule == "going_back"
        seen = replace(seen, memory=decision.memory)
    decision = decide(commanded(seen, f"abort@{A}#2"))
    assert decision.memory.candidate is None
    assert decision.memory.stable == seen.memory.stable


def test_a_candidate_on_trial_goes_at_once() -> None:
    seen = canary(promoted(), C)
    decision = decide(commanded(seen, f"rollback@{A}#1"))
    assert decision.memory.candidate is not None
    assert decision.memory.candidate.revision == A
    assert decision.memory.step is not None
    assert decision.memory.step.back
    assert {s.candidate for s in of(decision, Signal)} == {""}
    assert (decision.memory.history[0].revision, decision.memory.history[0].outcome) == (C, "RolledBack")
    _, decision = run(obey(seen, decision), lambda _, d: d.memory.candidate is None)
    assert decision.memory.stable is not None
    assert decision.memory.stable.revision == A


def test_a_pause_and_another_spec_do_not_hold_it_up_and_that_spec_is_for_later() -> None:
    seen, decision = far_back()
    seen = edited(obey(seen, decision), rollout__paused=True, source__uri="s3://models/d.onnx")
    seen, decision = run(seen, lambda _, d: d.memory.stable == deployed(A))
    assert not of(decision, CreateJob)
    seen = edited(obey(seen, decision), rollout__paused=False)
    assert of(decide(seen), CreateJob)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rollback@dddddddddd#1", f"the revision to go back to is {B}, or with its name {A}"),
        (f"rollback@{C}#1", f"{C} serves already"),
    ],
)
def test_what_cannot_be_gone_back_to_is_refused_before_a_worker_is_touched(text: str, why: str) -> None:
    seen = three()
    decision = decide(commanded(seen, text))
    assert why in decision.notices[0].message
    assert decision.memory == replace(seen.memory, command=text)
    assert not of(decision, Signal)


def test_a_worker_that_there_is_no_engine_for_refuses_it_too() -> None:
    seen = three()
    worker = seen.workers[2]
    assert worker.report is not None
    report = replace(worker.report, load_key=replace(worker.report.load_key, version="9"))
    workers = tuple(replace(w, report=report) if w.uid == worker.uid else w for w in seen.workers)
    decision = decide(commanded(replace(seen, workers=workers), f"rollback@{A}#1"))
    assert f"there is no engine of {A} for pod-w2 with the load key" in decision.notices[0].message
    assert decision.memory.candidate is None


def test_a_memory_of_an_older_operator_knows_no_engines_and_says_so() -> None:
    seen = three()
    old = replace(seen.memory, history=tuple(replace(h, engines=()) for h in seen.memory.history))
    decision = decide(commanded(replace(seen, memory=old), f"rollback@{A}#1"))
    assert decision.notices[0].message.endswith(f"the revision to go back to is {B}")


def test_with_status_lost_on_the_way_back_what_serves_is_stable() -> None:
    seen, decision = far_back()
    seen = replace(obey(seen, decision), memory=Memory())
    decision = decide(seen)
    assert decision.memory.stable is not None
    assert decision.memory.stable.revision == C
