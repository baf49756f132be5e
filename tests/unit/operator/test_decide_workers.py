"""What every pass repairs: the fence, signals, pointers, Deployments."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from decide_scene import (
    MODEL,
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
    finished,
    later,
    members,
    obey,
    of,
    resolve_result,
    run,
    serving,
    silent,
    with_engine,
    with_worker,
    without,
)
from trtmodel_contract.control import EngineState, Fence, Role
from trtmodel_contract.identity import LoadKey
from trtmodel_contract.jobs import JobResult, Reason
from trtmodel_operator.model import ApplyPointer, ApplyService, ApplyWorkload, Decision, JobKind, Memory, Signal


def told(decision: Decision) -> set[str]:
    return {s.uid for s in of(decision, Signal)}


def plan(decision: Decision, uid: str) -> list[tuple[str, str]]:
    (signal,) = [s for s in of(decision, Signal) if s.uid == uid]
    return [(e.role.value, e.revision) for e in signal.engines]


def with_fence(seen: Scene, uid: str, fence: Fence) -> Scene:
    worker = next(w for w in seen.workers if w.uid == uid)
    assert worker.report is not None
    return with_worker(seen, uid, report=replace(worker.report, fence=fence))


# ---------------------------------------------------------------------------------------------------------------
# fence
# ---------------------------------------------------------------------------------------------------------------


def test_an_equal_sequence_never_has_other_content() -> None:
    """Over a whole rollout, whatever a worker is told under one sequence is the same."""
    seen, content = serving(A), {}
    seen = asks_for(seen, B)
    for _ in range(60):
        decision = decide(seen)
        for s in of(decision, Signal):
            said = (s.engines, s.stable, s.candidate, s.window)
            assert content.setdefault((s.uid, decision.memory.sequence), said) == said
        seen = later(busy(obey(seen, decision, seconds=0)), 2)
        if decision.rule == "settle" and decision.memory.stable.revision == B:  # type: ignore[union-attr]
            return
    raise AssertionError("the rollout did not end")


def test_the_sequence_counts_on_only_when_the_plan_changes() -> None:
    seen = canary(serving(A))
    assert decide(seen).memory.sequence == seen.memory.sequence
    assert decide(later(busy(seen), 5)).memory.sequence == seen.memory.sequence
    assert decide(without(seen, "w0")).memory.sequence == seen.memory.sequence + 1


@pytest.mark.parametrize("ahead", ["a worker", "a pointer"])
def test_what_is_ahead_of_the_memory_is_overtaken(ahead: str) -> None:
    seen = serving(A)
    high = seen.memory.sequence + 40
    if ahead == "a worker":
        seen = with_fence(seen, "w1", Fence(MODEL.uid, high))
    else:
        seen = replace(seen, pointers=(replace(seen.pointers[0], sequence=high),))
    decision = decide(seen)
    assert decision.memory.sequence == high + 1
    assert told(decision) == {"w0", "w1", "w2", "w3"}


def test_a_fence_of_another_model_is_not_overtaken() -> None:
    seen = with_fence(serving(A), "w1", Fence("another-uid", 900))
    assert decide(seen).memory.sequence == seen.memory.sequence


def test_new_signing_keys_are_a_new_plan() -> None:
    seen = replace(serving(A), key_ids=("k2",))
    decision = decide(seen)
    assert decision.memory.sequence == seen.memory.sequence + 1
    assert len(of(decision, ApplyPointer)) == 1
    assert told(decision) == {"w0", "w1", "w2", "w3"}


# ---------------------------------------------------------------------------------------------------------------
# signals
# ---------------------------------------------------------------------------------------------------------------


def test_a_worker_with_another_fence_is_told_again_and_the_others_are_left_alone() -> None:
    seen = serving(A)
    assert told(decide(seen)) == set()
    seen = with_fence(seen, "w2", Fence(MODEL.uid, seen.memory.sequence - 1))
    assert told(decide(seen)) == {"w2"}


def test_what_has_the_candidate_is_told_in_every_pass_which_renews_its_time_to_live() -> None:
    seen = canary(serving(A))
    assert told(decide(seen)) == set(members(seen))
    assert decide(seen).requeue is not None
    assert decide(seen).requeue <= 100  # type: ignore[operator]


def test_a_pass_is_due_well_before_the_candidates_time_to_live_ends_whatever_the_interval() -> None:
    seen = canary(serving(A, rollout__analysis={"interval": "10m", "minRequests": 150}))
    assert decide(seen).requeue == 100


def test_a_worker_that_cannot_be_asked_is_told_nothing() -> None:
    seen = silent(serving(A), "w1")
    assert "w1" not in told(decide(seen))


def test_a_worker_on_its_way_out_is_told_nothing_and_counted_nowhere() -> None:
    seen = with_worker(canary(serving(A)), "w0", terminating=True)
    decision = decide(seen)
    assert "w0" not in told(decision)
    assert f"of {3} workers" in decision.situation.summary or decision.rule == "prepare"


def test_members_hold_stable_and_candidate_and_the_others_stable_and_standby() -> None:
    seen = canary(serving(A))
    for _ in range(40):
        decision = decide(seen)
        if decision.rule == "settle":
            break
        seen = later(busy(obey(seen, decision, seconds=0)), 5)
    assert seen.memory.standby is not None
    seen = asks_for(seen, "cccccccccc")
    decision = decide(seen)
    roles = {tuple(plan(decision, uid)) for uid in told(decision)}
    assert roles == {
        (("Stable", B), ("Candidate", "cccccccccc")),
        (("Stable", B), ("Standby", A)),
    }


def test_going_back_to_the_standby_changes_its_role_and_loads_nothing() -> None:
    seen = serving(A)
    seen = replace(seen, memory=replace(seen.memory, standby=serving(B).memory.stable))
    seen, _ = run(seen, lambda _, d: not d.actions)
    seen = asks_for(seen, B)
    decision = decide(seen)
    assert (Role.CANDIDATE, B) in [(e.role, e.revision) for s in of(decision, Signal) for e in s.engines]
    assert decide(obey(seen, decision)).memory.step.routed  # type: ignore[union-attr]


def test_a_container_that_restarted_during_a_rollout_is_told_the_window() -> None:
    seen = canary(serving(A))
    uid = next(w.uid for w in seen.workers if w.uid not in members(seen))
    restarted = booted(uid, replace(seen.pointers[0], sequence=seen.memory.sequence))
    seen = replace(seen, workers=tuple(restarted if w.uid == uid else w for w in seen.workers))
    assert uid in told(decide(seen))


def test_a_new_worker_gets_what_the_others_have() -> None:
    seen = canary(serving(A))
    seen = replace(seen, workers=(*seen.workers, booted("w9", seen.pointers[0])))
    decision = decide(seen)
    assert plan(decision, "w9") == [("Stable", A)]
    (signal,) = [s for s in of(decision, Signal) if s.uid == "w9"]
    assert signal.window == seen.memory.window


def test_a_worker_without_an_engine_for_its_load_key_is_told_nothing_and_named() -> None:
    seen = serving(A)
    report = seen.workers[0].report
    assert report is not None
    other = replace(report, load_key=LoadKey("ONNXRuntime", "1.19", "cpu"), fence=Fence(MODEL.uid, 0))
    decision = decide(with_worker(seen, "w0", report=other, ready=False))
    assert "w0" not in told(decision)
    assert "NoEngineForLoadKey" in decision.situation.message


def test_an_unreadable_spec_sends_nobody_back_and_nobody_forward() -> None:
    seen = replace(canary(serving(A)), spec=None, spec_error="spec.source.uri is missing")
    decision = decide(seen)
    assert decision.rule == "spec_unreadable"
    assert decision.memory.candidate == seen.memory.candidate
    assert {s.candidate for s in of(decision, Signal) if s.uid in members(seen)} == {digest(B)}


# ---------------------------------------------------------------------------------------------------------------
# pointers and Deployments
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["gone", "other content", "unreadable", "other keys", "keys gone"])
def test_a_damaged_pointer_is_written_anew(damage: str) -> None:
    seen = serving(A)
    pointer = seen.pointers[0]
    if damage == "gone":
        seen = replace(seen, pointers=())
    elif damage == "other content":
        seen = replace(seen, pointers=(replace(pointer, content="x"),))
    elif damage == "unreadable":
        seen = replace(seen, pointers=(replace(pointer, content="", sequence=0, stable=None),))
    elif damage == "other keys":
        seen = replace(seen, pointers=(replace(pointer, key_ids=("old",)),))
    else:
        seen = replace(seen, published_key_ids=())
    (written,) = of(decide(seen), ApplyPointer)
    assert (written.stable.revision, written.sequence) == (A, decide(seen).memory.sequence)


def test_a_pointer_names_other_storage_only_after_a_job_has_been_there() -> None:
    """A worker that is replaced meanwhile boots from where its engines are known to be."""
    before = serving(A)
    seen = edited(before, storage__endpoint="http://nowhere:1")
    decision = decide(seen)
    assert not of(decision, ApplyPointer)
    assert not of(decision, Signal)
    failed = finished(obey(seen, decision), JobKind.RESOLVE, JobResult(Reason.STORAGE_UNAVAILABLE, "no answer"))
    assert not of(decide(failed), ApplyPointer)
    rewritten = replace(failed, pointers=(replace(failed.pointers[0], key_ids=("old",)),))
    (pointer,) = of(decide(rewritten), ApplyPointer)
    assert pointer.storage == before.pointers[0].storage
    reached = finished(obey(seen, decision), JobKind.RESOLVE, resolve_result(A))
    (pointer,) = of(decide(reached), ApplyPointer)
    assert pointer.storage is not None
    assert pointer.storage.endpoint == "http://nowhere:1"
    assert pointer.sequence > before.pointers[0].sequence


def test_a_candidate_is_never_in_the_pointer_while_there_is_a_stable() -> None:
    seen = canary(serving(A))
    assert not of(decide(seen), ApplyPointer)
    (pointer,) = of(decide(replace(seen, pointers=())), ApplyPointer)
    assert pointer.stable.revision == A


@pytest.mark.parametrize("damage", ["gone", "scaled by hand", "made of something else"])
def test_a_damaged_deployment_is_put_right(damage: str) -> None:
    seen = serving(A)
    workload = seen.workloads[0]
    if damage == "gone":
        seen = replace(seen, workloads=())
    elif damage == "scaled by hand":
        seen = replace(seen, workloads=(replace(workload, replicas=1),))
    else:
        seen = replace(seen, workloads=(replace(workload, fingerprint="x", replicas=1),))
    (applied,) = of(decide(seen), ApplyWorkload)
    assert (applied.replicas, applied.platform.image) == (4, "worker:1")
    assert applied.only_replicas == (damage == "scaled by hand")


def test_another_service_is_no_reason_to_write_a_deployment() -> None:
    assert decide(replace(serving(A), service_fingerprint="x")).actions == (ApplyService(),)


def test_scaling_is_done_also_while_a_rollout_is_under_way_and_while_paused() -> None:
    seen = edited(canary(serving(A)), serving__replicas=6)
    assert of(decide(seen), ApplyWorkload)[0].replicas == 6
    seen = edited(seen, rollout__paused=True)
    assert of(decide(seen), ApplyWorkload)[0].replicas == 6


def test_without_anything_to_serve_no_deployment_is_made() -> None:
    seen = replace(serving(A), memory=Memory(sequence=9), workloads=(), pointers=())
    assert not of(decide(seen), ApplyWorkload)
    assert not of(decide(seen), ApplyPointer)


def test_a_host_that_is_down_does_not_change_what_a_member_is_told() -> None:
    seen = canary(serving(A))
    uid = members(seen)[0]
    decision = decide(with_engine(seen, uid, B, state=EngineState.LOADING))
    assert [s.candidate for s in of(decision, Signal) if s.uid == uid] == [digest(B)]


def test_a_thousand_workers_take_no_second() -> None:
    seen = busy(canary(serving(A, replicas=1000)))
    started = time.process_time()
    decision = decide(later(seen, 5))
    assert time.process_time() - started < 1.0
    assert len(members(seen)) == 1
    assert decision.memory.candidate is not None
