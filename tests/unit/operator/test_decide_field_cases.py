"""Cases from the field (group F, rollout semantics): what other rollout controllers got wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decide_scene import (
    A,
    B,
    C,
    Scene,
    asks_for,
    build_result,
    busy,
    canary,
    decide,
    digest,
    edited,
    finished,
    has_built,
    knows,
    later,
    members,
    new,
    obey,
    of,
    promoted,
    resolve_result,
    serving,
    silent,
    with_engine,
    with_worker,
)
from trtmodel_contract.control import EngineState
from trtmodel_contract.jobs import JobResult, Reason
from trtmodel_operator.conditions import status
from trtmodel_operator.model import (
    ApplyWorkload,
    CreateJob,
    Decision,
    DeleteJob,
    JobKind,
    JobState,
    Signal,
    Stage,
)
from trtmodel_operator.spec import parse_command


def passes(seen: Scene, n: int, seconds: float = 5, **figures: float) -> tuple[Scene, Decision]:
    decision = decide(seen)
    for _ in range(n):
        seen = later(busy(seen, **figures) if figures else seen, seconds)  # type: ignore[arg-type]
        decision = decide(seen)
        seen = obey(seen, decision, seconds=0)
    return seen, decision


def test_F01_a_canary_without_traffic_neither_fails_nor_passes_until_the_deadline() -> None:
    seen = canary(serving(A))
    seen, decision = passes(seen, 20)
    assert (decision.rule, decision.situation.stage) == ("watch", Stage.CANARY)
    assert decision.situation.reason == "NoTraffic"
    assert decision.memory.stable is not None
    assert decision.memory.stable.revision == A
    _, decision = passes(seen, 60)
    assert decision.memory.candidate is None
    assert decision.memory.rejected[0].reason == "ProgressDeadlineExceeded"


def test_F03_one_error_in_few_requests_is_inconclusive() -> None:
    seen = canary(serving(A))
    for requests, failed in ((1, 1), (19, 0)):
        seen = later(busy(seen, requests=requests, failed=failed), 5)
        decision = decide(seen)
        assert decision.memory.step is not None
        assert decision.memory.step.verdict == "Inconclusive"
        assert decision.memory.candidate is not None
        seen = obey(seen, decision, seconds=0)


def test_F04_inconclusive_is_not_success_however_long_the_pause() -> None:
    seen = canary(serving(A))
    outcomes = set()
    for _ in range(80):
        seen = later(busy(seen, requests=1), 10)
        decision = decide(seen)
        assert decision.rule not in ("advance", "promote")
        outcomes.add(decision.situation.stage)
        seen = obey(seen, decision, seconds=0)
    assert outcomes == {Stage.CANARY, Stage.ROLLED_BACK}
    assert seen.memory.stable is not None
    assert seen.memory.stable.revision == A


def test_F04_a_source_of_figures_that_is_down_is_not_success_either() -> None:
    seen = canary(serving(A))
    for worker in seen.workers:
        seen = with_worker(seen, worker.uid, report=None, silence="connection refused")
    _, decision = passes(seen, 80, seconds=10)
    assert decision.memory.stable is not None
    assert decision.memory.stable.revision == A
    assert decision.memory.candidate is None


def test_F06_a_third_revision_in_mid_canary_retires_the_second() -> None:
    seen = canary(serving(A))
    seen = edited(seen, source__uri="s3://models/c.onnx")
    seen = obey(seen, decide(seen))
    seen = knows(seen, C)
    decision = decide(seen)
    assert decision.rule == "superseded"
    assert {s.candidate for s in of(decision, Signal)} == {""}
    seen = obey(seen, decision)
    assert not members(seen)
    building = decide(seen)
    assert [j.kind for j in of(building, CreateJob)] == [JobKind.BUILD]
    seen = obey(seen, building)
    # A fourth while the third is being built: one build at a time, the old one ends.
    old = seen.jobs[-1].name
    seen = knows(edited(seen, source__uri="s3://models/d.onnx"), "dddddddddd")
    decision = decide(seen)
    assert DeleteJob(old) in decision.actions
    assert len([j for j in obey(seen, decision).jobs if j.state is JobState.RUNNING and j.kind is JobKind.BUILD]) == 1
    assert decision.memory.stable is not None
    assert decision.memory.stable.revision == A


def test_F06_figures_of_the_second_revision_do_not_feed_the_verdict_on_the_third() -> None:
    seen, _ = passes(canary(serving(A)), 2, requests=200, seconds=5)
    window = seen.memory.window
    seen = canary(replace(seen), C)
    assert seen.memory.window != window
    seen = later(busy(seen, requests=1), 5)
    decision = decide(seen)
    assert decision.memory.step is not None
    assert decision.memory.step.figures.startswith("1 req")


def test_F07_back_to_the_stable_spec_is_immediate_with_no_build_and_no_analysis() -> None:
    seen = canary(serving(A))
    seen = edited(seen, source__uri="s3://models/a.onnx")
    decision = decide(seen)
    assert decision.memory.candidate is None
    assert not of(decision, CreateJob)
    assert {(s.stable, s.candidate) for s in of(decision, Signal)} == {(digest(A), "")}
    seen = obey(seen, decision)
    decision = decide(seen)
    assert decision.situation.stage is Stage.SERVING
    found = status(seen, decision, {})
    assert found["phase"] == "Serving"
    conditions = {c["type"]: c["status"] for c in found["conditions"]}  # type: ignore[attr-defined]
    assert (conditions["Ready"], conditions["Degraded"], conditions["Stalled"]) == ("True", "False", "False")


def test_F09_a_first_deploy_that_fails_its_gate_has_nothing_to_roll_back_to_and_no_pods() -> None:
    seen = knows(new(), A)
    seen = finished(obey(seen, decide(seen)), JobKind.BUILD, JobResult(Reason.GATE_FAILED, "top-1 differs in 40 %"))
    decision = decide(seen)
    assert decision.situation.stage is Stage.GATE_FAILED
    assert "nothing to roll back to" in decision.situation.message
    assert not of(decision, ApplyWorkload)


def test_F09_a_good_revision_does_not_wait_for_a_first_one_that_never_became_ready() -> None:
    seen = has_built(new(), A)
    seen = obey(seen, decide(seen))
    for worker in seen.workers:
        seen = with_worker(seen, worker.uid, ready=False)
    seen = obey(seen, decide(seen))
    seen = asks_for(seen, B)
    seen = obey(seen, decide(seen))
    assert seen.memory.candidate is not None
    assert seen.memory.candidate.revision == B
    for worker in seen.workers:
        seen = with_worker(seen, worker.uid, ready=True)
    decision = decide(obey(seen, decide(seen)))
    assert decision.memory.stable is not None
    assert decision.memory.stable.revision == B


def test_F09_a_first_deploy_takes_no_steps() -> None:
    seen = has_built(new(), A)
    rules = []
    for _ in range(6):
        decision = decide(seen)
        rules.append(decision.rule)
        seen = obey(seen, decision)
    assert "watch" not in rules
    assert seen.memory.stable is not None


def test_F10_the_same_spec_or_a_label_does_not_retry_what_was_aborted() -> None:
    seen = replace(canary(serving(A)), command=parse_command("abort#1"))
    seen = obey(seen, decide(seen))
    for _ in range(5):
        decision = decide(seen)
        assert decision.rule == "rejected"
        assert not of(decision, CreateJob)
        seen = obey(later(replace(seen, generation=seen.generation), 600), decision)


def test_F10_the_documented_retry_makes_exactly_one_new_attempt() -> None:
    seen = replace(canary(serving(A)), command=parse_command("abort#1"))
    seen = obey(seen, decide(seen))
    seen = replace(seen, command=parse_command("retry#2"))
    seen = obey(seen, decide(seen))
    assert seen.memory.attempt == 1
    seen = has_built(seen, B)
    assert decide(seen).memory.candidate is not None
    assert decide(obey(seen, decide(seen))).memory.attempt == 1


def test_F10_the_next_revision_starts_clean_with_a_fresh_deadline() -> None:
    seen, _ = passes(canary(serving(A)), 20, requests=1, seconds=10)
    assert seen.memory.waited > 100
    seen = replace(seen, command=parse_command("abort#1"))
    seen = obey(seen, decide(seen))
    seen = canary(seen, C)
    assert seen.memory.waited == 0
    assert decide(later(busy(seen), 5)).memory.candidate is not None


@pytest.mark.parametrize("sizes", [(8, 2, 1, 0, 4), (2, 8, 4), (1, 4), (0, 4)])
def test_F12_scaling_during_a_rollout_keeps_a_stable_worker_and_rederives_the_share(sizes: tuple[int, ...]) -> None:
    seen = canary(serving(A, rollout__steps=[{"workers": "25%", "hold": "15s"}, {"workers": "50%", "hold": "15s"}]))
    for replicas in sizes:
        seen = edited(seen, serving__replicas=replicas)
        for _ in range(6):
            decision = decide(seen)
            seen = obey(seen, decision)
            assert len(members(seen)) <= max(1, replicas - 1)
            assert status(seen, decision, {})["replicas"] == min(replicas, len(seen.workers))
            assert decision.memory.stable is not None
            assert decision.memory.stable.revision == A
        assert len(members(seen)) == {8: 2, 4: 1, 2: 1, 1: 1, 0: 0}[replicas]


def test_F15_going_back_to_what_no_worker_can_serve_is_refused_before_a_worker_is_touched() -> None:
    gone = promoted()
    for worker in gone.workers:
        gone = with_engine(gone, worker.uid, A, state=EngineState.FAILED, message="its manifest is gone")
    decision = decide(replace(gone, command=parse_command("rollback#1")))
    assert decision.memory.stable is not None
    assert decision.memory.stable.revision == B
    assert [n.reason for n in decision.notices] == ["CommandIgnored"]
    assert "its manifest is gone" in decision.notices[0].message
    assert not of(decision, Signal)


def test_F15_what_one_worker_still_holds_can_be_gone_back_to() -> None:
    seen = promoted()
    seen = with_engine(seen, "w0", A, state=EngineState.FAILED, message="its manifest is gone")
    decision = decide(replace(seen, command=parse_command("rollback#1")))
    assert decision.memory.stable is not None
    assert decision.memory.stable.revision == A


def test_F15_the_last_good_revision_outlives_any_number_of_failed_ones() -> None:
    seen = serving(A)
    for i in range(10):
        seen = replace(canary(seen, f"{i:010}"), command=parse_command(f"abort#{i}"))
        seen = obey(seen, decide(seen))
    assert seen.memory.stable is not None
    assert seen.memory.stable.revision == A
    assert all(e.revision == A for w in seen.workers if w.report for e in w.report.models["magika"].engines)


@pytest.mark.parametrize(
    ("result", "trouble"),
    [
        (JobResult(Reason.INTERNAL, "it crashed"), "Failed"),
        (None, ""),
        (None, "DeadlineExceeded"),
        (None, "Evicted"),
        (resolve_result(B), ""),
        (build_result(C), ""),
    ],
    ids=["exit 1", "no result", "too late", "evicted", "another answer", "another revision"],
)
def test_F17_only_an_explicit_success_for_this_revision_passes(result: JobResult | None, trouble: str) -> None:
    seen = knows(edited(serving(A), source__uri="s3://models/b.onnx"), B)
    seen = obey(seen, decide(seen))
    state = JobState.FAILED if trouble else JobState.COMPLETE
    seen = replace(seen, jobs=tuple(replace(j, state=state, result=result, trouble=trouble) for j in seen.jobs))
    for _ in range(3):
        decision = decide(seen)
        assert decision.memory.candidate is None
        assert decision.memory.stable is not None
        assert decision.memory.stable.revision == A
        assert all(b.revision != B for b in decision.memory.built)
        seen = obey(seen, decision)
    assert decision.situation.stage is Stage.STALLED


def test_G03_G09_a_canary_that_nobody_hears_passes_nothing_and_is_named() -> None:
    """Its counters are missing, which is neither zero errors nor a failure."""
    seen = canary(serving(A))
    (member,) = members(seen)
    pod = next(w.pod for w in seen.workers if w.uid == member)
    for _ in range(20):
        seen = later(silent(busy(seen), member), 5)
        decision = decide(seen)
        assert decision.rule not in ("advance", "promote")
        assert decision.memory.candidate is not None
        assert pod in decision.situation.message
        seen = obey(seen, decision, seconds=0)
    _, decision = passes(silent(seen, member), 60)
    assert decision.memory.stable is not None
    assert decision.memory.stable.revision == A
