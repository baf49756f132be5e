"""Cases from the field (groups A and D) where the operator decides: models that no build can help, certificates that
change, and clocks that jump."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decide_scene import (
    A,
    B,
    Scene,
    busy,
    canary,
    decide,
    edited,
    finished,
    found,
    later,
    members,
    new,
    obey,
    of,
    resolve_result,
    run,
    serving,
)
from trtmodel_contract.exitcodes import FINAL_JOB_EXITS, JobExit
from trtmodel_contract.jobs import BuildTask, JobResult, Reason, ResolveTask
from trtmodel_operator import manifests
from trtmodel_operator.model import ApplyPointer, ApplyWorkload, CreateJob, JobKind, Signal, Stage

PEM = "-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n"


def refused(seen: Scene, reason: Reason, words: str) -> Scene:
    """The resolve Job of what is asked for says no."""
    seen = obey(seen, decide(seen))
    return finished(seen, JobKind.RESOLVE, JobResult(reason, words))


# What the check of the model finds, and the words that the user must meet again.
NO_BUILD_HELPS = [
    pytest.param(Reason.PROFILE_MISMATCH, "input x: free dimensions 'h', 'w' have no profile", id="A08"),
    pytest.param(Reason.MODEL_INVALID, "IR version 99, this image reads up to 13", id="A14"),
    pytest.param(Reason.OPERATOR_UNSUPPORTED, "node n1: acme.ops:FancyNorm", id="A16"),
    pytest.param(Reason.MODEL_INVALID, "a Git LFS pointer of 131 bytes", id="A25"),
]


@pytest.mark.parametrize(("reason", "words"), NO_BUILD_HELPS)
def test_a_model_that_no_build_helps_takes_no_gpu_and_no_second_try(reason: Reason, words: str) -> None:
    assert JobExit.REJECTED in FINAL_JOB_EXITS
    seen = refused(new(), reason, words)
    for _ in range(4):
        decision = decide(seen)
        assert (decision.situation.stage, decision.situation.reason) == (Stage.STALLED, reason.value)
        assert words in decision.situation.message
        assert of(decision, CreateJob) == []
        seen = obey(seen, decision, seconds=600)
    assert [j.kind for j in seen.jobs] == [JobKind.RESOLVE]  # the only Job that there ever was


def test_A14_a_newer_model_that_is_refused_leaves_the_running_one_alone() -> None:
    seen = refused(edited(serving(A), source__uri="s3://models/b.onnx"), Reason.MODEL_INVALID, "IR version 99")
    decision = decide(seen)
    assert decision.memory.stable == seen.memory.stable
    assert not of(decision, Signal)
    assert not of(decision, ApplyPointer)
    assert not of(decision, ApplyWorkload)


def test_D06_a_private_ca_reaches_jobs_and_workers_and_another_one_builds_nothing() -> None:
    seen = edited(new(), storage__caBundle=PEM.format("one"))
    create = decide(seen).actions[0]
    assert isinstance(create, CreateJob)
    assert isinstance(create.task, ResolveTask)
    assert create.task.storage.ca_bundle == PEM.format("one")
    seen = finished(obey(seen, decide(seen)), JobKind.RESOLVE, resolve_result(A))
    seen = obey(seen, decide(seen))
    (build,) = of(decide(seen), CreateJob)
    assert isinstance(build.task, BuildTask)
    assert build.task.storage.ca_bundle == PEM.format("one")
    seen = serving(A, storage__caBundle=PEM.format("one"))
    assert {p.storage.ca_bundle for p in seen.pointers if p.storage} == {PEM.format("one")}
    seen = edited(seen, storage__caBundle=PEM.format("two"))
    asked = decide(seen)
    assert [c.kind for c in of(asked, CreateJob)] == [JobKind.RESOLVE]
    assert not of(asked, ApplyPointer)  # nobody has reached the storage with it yet
    seen = finished(obey(seen, asked), JobKind.RESOLVE, resolve_result(A, found(A)))
    seen, _ = run(seen, lambda s, d: d.rule == "settle" and not d.actions)
    assert {p.storage.ca_bundle for p in seen.pointers if p.storage} == {PEM.format("two")}
    assert {j.kind for j in seen.jobs} == {JobKind.RESOLVE}
    assert len(seen.memory.history) == 1


def test_D06_the_ca_is_in_no_pods_environment_of_a_worker() -> None:
    seen = serving(A, storage__caBundle=PEM.format("one"))
    assert seen.spec is not None
    assert seen.memory.platform is not None
    apply = ApplyWorkload("x", seen.spec.targets[0], seen.memory.platform, 1)
    assert "CERTIFICATE" not in str(manifests.worker_deployment(seen.model, seen.spec, apply))


@pytest.mark.parametrize("jump", [1200.0, -1200.0], ids=["ahead", "back"])
def test_D12_a_clock_that_jumps_during_a_rollout_promotes_nothing_and_rolls_nothing_back(jump: float) -> None:
    seen = busy(canary(serving(A)), seconds=0.008)
    assert seen.memory.step is not None
    seen = later(seen, jump)
    for _ in range(3):
        decision = decide(seen)
        assert decision.memory.candidate is not None
        assert decision.memory.step is not None
        assert decision.memory.step.index == 0
        assert 0 <= decision.memory.step.held < 15
        assert 0 <= decision.memory.waited < 60
        seen = obey(seen, decision, seconds=0.5)
    assert len(members(seen)) == 1


def test_D12_the_rollout_goes_on_after_the_jump_with_a_window_of_its_own() -> None:
    seen = canary(serving(A))
    before = seen.memory.window
    seen = later(busy(seen), 1200)
    seen, last = run(replace(seen), lambda _, d: d.memory.window != before)
    assert last.memory.candidate is not None
    for _ in range(60):
        decision = decide(seen)
        if decision.rule == "promote":
            break
        seen = busy(obey(seen, decision, seconds=5))
    assert decision.rule == "promote"
    assert decision.memory.stable is not None
    assert decision.memory.stable.revision == B
