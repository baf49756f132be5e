"""Several targets: a Job, an engine, a Deployment and a pointer for each, and one rollout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from decide_scene import (
    MODEL,
    A,
    B,
    Scene,
    asks_for,
    build_result,
    busy,
    canary,
    decide,
    digest,
    edited,
    found,
    has_built,
    knows,
    later,
    members,
    new,
    obey,
    of,
    resolve_result,
    run,
    serving,
    with_engine,
    with_worker,
)
from trtmodel_contract.control import EngineState
from trtmodel_contract.identity import LoadKey
from trtmodel_contract.jobs import JobResult, Reason
from trtmodel_operator.conditions import status
from trtmodel_operator.model import (
    ApplyPointer,
    ApplyWorkload,
    CreateJob,
    DeleteWorkload,
    JobKind,
    JobState,
    Signal,
    Stage,
)
from trtmodel_operator.spec import parse_command

TARGETS: dict[str, Any] = {"targets": [{"name": "a10"}, {"name": "l4", "nodeSelector": {"gpu": "l4"}}]}


def both(replicas: int = 2, **changes: Any) -> Scene:
    """Revision A serves on two targets."""
    return serving(A, replicas, **TARGETS, **changes)


def held(**changes: Any) -> Scene:
    return both(rollout__onTargetFailure="Hold", **changes)


def ended(seen: Scene, target: str, result: JobResult) -> Scene:
    """The build Job of this target."""
    state = JobState.COMPLETE if result.reason is Reason.DONE else JobState.FAILED
    jobs = [
        replace(j, state=state, result=result) if (j.kind, j.target) == (JobKind.BUILD, target) else j
        for j in seen.jobs
    ]
    assert jobs != list(seen.jobs)
    return replace(seen, jobs=tuple(jobs))


def on(seen: Scene, target: str) -> list[str]:
    return [uid for uid in members(seen) for w in seen.workers if (w.uid, w.target) == (uid, target)]


def commanded(seen: Scene, text: str) -> Scene:
    return replace(seen, command=parse_command(text))


# ---------------------------------------------------------------------------------------------------------------
# building
# ---------------------------------------------------------------------------------------------------------------


def test_every_target_is_built_at_once_by_a_job_of_its_own() -> None:
    decision = decide(knows(edited(new(), **TARGETS), B))
    made = of(decision, CreateJob)
    assert [job.target.name for job in made] == ["a10", "l4"]
    assert len({job.name for job in made}) == 2


def test_the_answers_come_in_any_order_and_nothing_moves_before_the_last() -> None:
    seen = knows(edited(new(), **TARGETS), B)
    seen = obey(seen, decide(seen))
    seen = ended(seen, "l4", build_result(B, target="l4"))
    first = decide(seen)
    assert [b.target for b in first.memory.built] == ["l4"]
    waiting = decide(obey(seen, first))
    assert (waiting.rule, waiting.situation.stage, of(waiting, CreateJob)) == ("build", Stage.BUILDING, [])
    seen = ended(obey(seen, first), "a10", build_result(B, target="a10"))
    seen = obey(seen, decide(seen))
    candidate = decide(seen).memory.candidate
    assert candidate is not None
    assert {(a.target, a.manifest_digest) for a in candidate.artifacts} == {
        ("a10", digest(B, "a10")),
        ("l4", digest(B, "l4")),
    }


def test_a_target_that_cannot_be_built_is_told_and_the_other_is_still_taken() -> None:
    seen = knows(edited(both(), source__uri="s3://models/b.onnx"), B)
    seen = obey(seen, decide(seen))
    seen = ended(seen, "a10", JobResult(Reason.OPERATOR_UNSUPPORTED, "node 7"))
    told = decide(seen)
    assert (told.situation.stage, told.situation.reason) == (Stage.STALLED, "OperatorUnsupported")
    seen = ended(obey(seen, told), "l4", build_result(B, target="l4"))
    seen = obey(seen, decide(seen))
    assert [b.target for b in seen.memory.built if b.revision == B] == ["l4"]
    seen = obey(seen, decide(seen))
    for _ in range(3):  # told each time, and moved by nothing
        decision = decide(seen)
        assert decision.situation.reason in ("OperatorUnsupported", "Building")
        assert decision.memory.candidate is None
        seen = obey(seen, decision)


def test_two_failures_do_not_take_turns() -> None:
    seen = knows(edited(both(), source__uri="s3://models/b.onnx"), B)
    seen = obey(seen, decide(seen))
    seen = ended(seen, "a10", JobResult(Reason.OPERATOR_UNSUPPORTED, "node 7"))
    seen = ended(seen, "l4", JobResult(Reason.PROFILE_MISMATCH, "input x"))
    seen = obey(seen, decide(seen))
    again = decide(seen)
    assert again.memory == seen.memory
    assert again.situation.reason == "OperatorUnsupported"


def test_an_engine_that_fails_its_gate_on_one_target_stops_all() -> None:
    seen = knows(edited(both(), source__uri="s3://models/b.onnx"), B)
    seen = obey(seen, decide(seen))
    seen = ended(seen, "l4", build_result(B, target="l4"))
    seen = obey(seen, decide(seen))
    bad = replace(build_result(B, differs=200, target="a10"), reason=Reason.GATE_FAILED, message="top-1")
    seen = ended(seen, "a10", bad)
    seen, decision = run(seen, lambda _, d: d.situation.stage is Stage.GATE_FAILED)
    assert decision.memory.candidate is None
    assert decision.memory.rejected[0].revision == B


def test_resolve_finds_the_engine_of_each_gpu_by_the_name_of_its_device() -> None:
    targets = [{"name": "a10", "gpu": "NVIDIA-A10"}, {"name": "l4", "gpu": "NVIDIA-L4"}]
    seen = edited(new(), targets=targets, engine__runtime="TensorRT")
    there = [
        replace(found(B), load_key=LoadKey("TensorRT", "10.16", device, "8.6"), manifest_digest=digest(device))
        for device in ("NVIDIA A10", "NVIDIA L4")
    ]
    seen = obey(seen, decide(seen))
    job = replace(seen.jobs[0], state=JobState.COMPLETE, result=resolve_result(B, *there))
    seen = replace(seen, jobs=(job,))
    seen = obey(seen, decide(seen))
    decision = decide(seen)
    assert decision.rule == "gate"
    assert decision.memory.candidate is not None
    assert [(a.target, a.manifest_digest) for a in decision.memory.candidate.artifacts] == [
        ("a10", digest("NVIDIA A10")),
        ("l4", digest("NVIDIA L4")),
    ]


# ---------------------------------------------------------------------------------------------------------------
# the rollout
# ---------------------------------------------------------------------------------------------------------------


def test_each_target_has_a_deployment_and_a_pointer_with_its_own_engine() -> None:
    seen = has_built(edited(new(), **TARGETS), A)
    decision = decide(seen)
    assert [w.target.name for w in of(decision, ApplyWorkload)] == ["a10", "l4"]
    assert len({w.name for w in of(decision, ApplyWorkload)}) == 2
    assert [p.workload for p in of(decision, ApplyPointer)] == [w.name for w in of(decision, ApplyWorkload)]


def test_the_first_revision_is_promoted_when_every_worker_of_every_target_serves_it() -> None:
    seen = both()
    assert seen.memory.stable is not None
    assert sorted(seen.memory.stable.digests) == sorted([digest(A, "a10"), digest(A, "l4")])
    assert [w.report.models[MODEL.name].routes.stable for w in seen.workers if w.report] == [
        digest(A, w.target) for w in seen.workers
    ]


def test_a_step_opens_on_one_worker_of_each_target_when_both_are_ready() -> None:
    seen = asks_for(both(), B)
    seen = obey(seen, decide(seen), loading=[B])
    for _ in range(3):
        decision = decide(seen)
        assert (decision.rule, members(seen)) == ("prepare", [])
        seen = obey(seen, decision, loading=[B])
    opened = canary(both())
    assert (len(on(opened, "a10")), len(on(opened, "l4"))) == (1, 1)


def test_a_target_without_a_worker_holds_up_the_step() -> None:
    seen = asks_for(both(), B)
    seen = replace(seen, workers=tuple(w for w in seen.workers if w.target == "a10"))
    for _ in range(5):
        decision = decide(seen)
        assert all(not s.candidate for s in of(decision, Signal))
        seen = obey(seen, replace(decision, actions=tuple(of(decision, Signal))))
    assert decision.rule == "prepare"
    assert "workers of target l4 are missing" in decision.situation.message


def test_all_targets_are_promoted_by_one_write() -> None:
    seen = canary(both(), index=1)
    before = seen
    for _ in range(60):
        decision = decide(seen)
        before, seen = seen, busy(obey(seen, decision))
        if decision.rule == "promote":
            break
    assert before.memory.stable is not None
    assert seen.memory.stable is not None
    assert (before.memory.stable.revision, seen.memory.stable.revision) == (A, B)
    assert sorted(seen.memory.stable.digests) == sorted([digest(B, "a10"), digest(B, "l4")])


def test_a_failure_on_one_target_takes_the_candidate_back_on_all() -> None:
    seen = canary(both())
    uid = on(seen, "l4")[0]
    decision = decide(with_engine(seen, uid, B, state=EngineState.FAILED, message="no memory"))
    assert decision.memory.candidate is None
    assert decision.situation.stage is Stage.ROLLED_BACK
    assert "target l4: worker" in decision.situation.message
    assert all(not s.candidate for s in of(decision, Signal))


def test_a_slow_target_is_not_hidden_by_a_fast_one() -> None:
    seen = canary(both())
    for _ in range(12):
        decision = decide(seen)
        seen = obey(seen, decision, seconds=5)
        slow = busy(seen, seconds=0.04)
        fast = busy(seen, seconds=0.008)
        workers = [s if s.target == "l4" else f for s, f in zip(slow.workers, fast.workers, strict=True)]
        seen = replace(seen, workers=tuple(workers))
        if decision.memory.candidate is None:
            break
    assert decision.memory.rejected[0].reason == "TooSlow"
    assert "target l4" in decision.memory.rejected[0].message


def test_two_targets_that_are_slow_once_each_are_two_first_looks() -> None:
    seen = canary(both())
    slow, fast = busy(seen, seconds=0.04, requests=400), busy(seen, requests=400)
    workers = [s if s.target == "l4" else f for s, f in zip(slow.workers, fast.workers, strict=True)]
    step = seen.memory.step
    assert step is not None
    for before, fails in ((("a10",), 1), ((), 1), (("l4",), None)):
        memory = replace(seen.memory, step=replace(step, slow=before, fails=len(before)))
        decision = decide(replace(later(seen, 6), memory=memory, workers=tuple(workers)))
        assert (decision.memory.step and decision.memory.step.fails) == fails


# ---------------------------------------------------------------------------------------------------------------
# onTargetFailure: Hold
# ---------------------------------------------------------------------------------------------------------------


def failed_on_one() -> Scene:
    seen = canary(held())
    uid = on(seen, "l4")[0]
    seen = with_engine(seen, uid, B, deaths=1)
    decision = decide(seen)
    assert decision.situation.reason == "TargetFailed"
    return obey(seen, decision)


def test_hold_takes_it_back_on_that_target_alone_and_nothing_moves_until_a_person_decides() -> None:
    seen = failed_on_one()
    for _ in range(30):
        decision = decide(seen)
        assert (decision.rule, decision.situation.stage) == ("target_failed", Stage.STALLED)
        seen = busy(obey(seen, decision, seconds=20))
    assert (len(on(seen, "a10")), len(on(seen, "l4"))) == (1, 0)
    assert seen.memory.candidate is not None
    assert "use the command retry" in decision.situation.message
    conditions = {c["type"]: c["status"] for c in status(seen, decision, {})["conditions"]}  # type: ignore[attr-defined]
    assert (conditions["Stalled"], conditions["Available"]) == ("True", "True")


def test_the_looks_at_the_target_that_stays_go_on() -> None:
    seen = failed_on_one()
    for _ in range(8):
        decision = decide(seen)
        if decision.memory.candidate is None:
            break
        seen = busy(obey(seen, decision, seconds=5), failed=60)
    assert decision.memory.rejected[0].reason == "ErrorRateTooHigh"  # no target is left: all go back


def test_retry_tries_it_there_again_and_the_rollout_goes_on() -> None:
    seen = commanded(failed_on_one(), "retry#1")
    for _ in range(80):
        decision = decide(seen)
        if decision.rule == "promote":
            break
        seen = busy(obey(seen, decision, seconds=5))
    assert decision.rule == "promote"
    assert len(on(seen, "l4")) > 0


def test_retry_is_judged_by_what_comes_after_it() -> None:
    seen = canary(held(rollout__steps=[{"workers": 1, "hold": "15s", "weight": 10}]))
    for _ in range(8):
        decision = decide(seen)
        if decision.situation.reason == "TargetFailed":
            break
        seen = obey(seen, decision, seconds=5)
        bad, good = busy(seen, requests=2000, failed=150), busy(seen, requests=2000)
        seen = replace(
            seen, workers=tuple(b if b.target == "l4" else g for b, g in zip(bad.workers, good.workers, strict=True))
        )
    assert decision.situation.reason == "TargetFailed"
    seen = commanded(obey(seen, decision), "retry#1")
    for _ in range(40):
        decision = decide(seen)
        assert decision.situation.reason != "TargetFailed", decision.situation.message
        assert all(s.weight in (0, 10) for s in of(decision, Signal))
        if decision.rule == "promote":
            break
        seen = busy(obey(seen, decision, seconds=5), requests=2000)
    assert decision.rule == "promote"


def test_retry_of_a_target_that_failed_in_the_last_preparation_has_it_answer_before_it_is_promoted() -> None:
    seen = canary(held(), index=1)
    while seen.memory.step is not None and seen.memory.step.index < 2:
        seen = busy(obey(seen, decide(seen), seconds=5, loading=[B]))
    decision = decide(with_engine(seen, on(seen, "l4")[0], B, deaths=1))
    assert decision.situation.reason == "TargetFailed"
    seen = obey(seen, decision)
    for _ in range(3):
        seen = busy(obey(seen, decide(seen), seconds=5))
    assert not on(seen, "l4")
    seen = commanded(seen, "retry#1")
    answered = False
    for _ in range(40):
        decision = decide(seen)
        if decision.rule == "promote":
            break
        seen = busy(obey(seen, decision, seconds=5))
        answered |= bool(on(seen, "l4"))
    assert (decision.rule, answered) == ("promote", True)


def test_abort_takes_it_back_everywhere() -> None:
    decision = decide(commanded(failed_on_one(), f"abort@{B}#1"))
    assert decision.memory.candidate is None
    assert decision.memory.rejected[0].reason == "Aborted"


@pytest.mark.parametrize("dies_on", [False, True])
def test_a_target_that_failed_and_is_taken_out_of_the_spec_holds_up_nobody_any_more(dies_on: bool) -> None:
    seen = edited(failed_on_one(), targets=[{"name": "a10"}])
    if dies_on:  # and says nothing any more: for all that is known, it has the candidate still
        seen = with_worker(seen, "l4-1", report=None, restarts=9)
    for _ in range(40):
        decision = decide(seen)
        if decision.rule == "settle" and not decision.actions:
            break
        assert decision.situation.stage is not Stage.STALLED
        seen = busy(obey(seen, decision, seconds=5))
    assert (seen.memory.history[0].revision, seen.memory.history[0].outcome) == (B, "Promoted")
    assert {w.target for w in seen.workers} == {"a10"}


def test_hold_with_one_target_is_a_roll_back() -> None:
    seen = canary(serving(A, rollout__onTargetFailure="Hold"))
    decision = decide(with_engine(seen, members(seen)[0], B, deaths=1))
    assert decision.situation.stage is Stage.ROLLED_BACK


# ---------------------------------------------------------------------------------------------------------------
# targets come and go
# ---------------------------------------------------------------------------------------------------------------


def test_a_target_that_is_added_gets_its_engine_and_its_workers_without_a_rollout() -> None:
    seen = edited(serving(A, 2), targets=[{"name": "default"}, {"name": "l4"}])
    seen, decision = run(seen, lambda _, d: bool(of(d, CreateJob)))
    (job,) = of(decision, CreateJob)
    assert (decision.rule, job.target.name) == ("extend", "l4")
    seen = ended(obey(seen, decision), "l4", build_result(A, target="l4"))
    seen, decision = run(seen, lambda s, d: d.rule == "settle" and not d.actions and len(s.workers) == 4)
    assert decision.situation.stage is Stage.SERVING
    assert seen.memory.stable is not None
    assert {a.target for a in seen.memory.stable.artifacts} == {"default", "l4"}
    assert len(seen.memory.history) == 1


def test_the_workers_of_a_target_that_is_removed_go_when_the_others_serve() -> None:
    seen = edited(both(), targets=[{"name": "a10"}])
    uid = next(w.uid for w in seen.workers if w.target == "a10")
    assert of(decide(with_worker(seen, uid, ready=False)), DeleteWorkload) == []
    (gone,) = of(decide(seen), DeleteWorkload)
    assert "-l4-" in gone.name
    seen = obey(seen, decide(seen))
    assert {w.target for w in seen.workers} == {"a10"}
    seen, _ = run(seen, lambda s, d: d.rule == "settle" and not d.actions)
    assert [w.target for w in seen.workloads] == ["a10"]


def test_a_renamed_target_is_replaced_and_not_cut_off() -> None:
    seen = edited(serving(A, 2), targets=[{"name": "cpu"}])
    seen, decision = run(seen, lambda _, d: bool(of(d, CreateJob)))
    assert of(decision, DeleteWorkload) == []
    seen = ended(obey(seen, decision), "cpu", build_result(A, target="cpu"))
    while not of(decision, DeleteWorkload):
        assert {w.target for w in seen.workers} >= {"default"}
        decision = decide(seen)
        seen = obey(seen, decision)
    assert {w.target for w in seen.workers} == {"cpu"}


def test_status_tells_each_target_of_its_own_job() -> None:
    seen = knows(edited(new(), **TARGETS), B)
    seen = obey(seen, decide(seen))
    seen = ended(seen, "a10", JobResult(Reason.NO_SPACE, "disk full"))
    seen = obey(seen, decide(seen))
    told = {t["name"]: t["job"] for t in status(seen, decide(seen), {})["targets"]}  # type: ignore[attr-defined]
    assert told["a10"]["stage"] == "NoSpace"
    assert (told["l4"]["stage"], told["l4"]["name"]) == ("build", seen.jobs[1].name)
