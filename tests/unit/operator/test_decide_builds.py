"""resolve, superseded, rejected, build, gate."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decide_scene import (
    LOAD_KEY,
    A,
    B,
    C,
    Scene,
    asks_for,
    build_result,
    canary,
    digest,
    edited,
    figures,
    finished,
    found,
    has_built,
    knows,
    new,
    obey,
    of,
    resolve_result,
    serving,
)
from trtmodel_contract.identity import LoadKey
from trtmodel_contract.jobs import BuildTask, FoundArtifact, JobResult, Reason, ResolveTask
from trtmodel_operator.decide import decide
from trtmodel_operator.model import (
    CreateJob,
    Decision,
    DeleteJob,
    JobKind,
    JobState,
    ObservedJob,
    Signal,
    Stage,
)


def one_job(decision: Decision) -> CreateJob:
    (job,) = of(decision, CreateJob)
    assert isinstance(job, CreateJob)
    return job


def name_of(seen: Scene) -> str:
    return one_job(decide(seen)).name


# ---------------------------------------------------------------------------------------------------------------
# resolve
# ---------------------------------------------------------------------------------------------------------------


def test_a_new_model_is_resolved_first_by_a_job_with_what_it_reads() -> None:
    decision = decide(new())
    job = one_job(decision)
    assert (decision.rule, decision.situation.stage) == ("resolve", Stage.RESOLVING)
    assert isinstance(job.task, ResolveTask)
    assert (job.task.source_uri, job.task.dataset.uri) == ("s3://models/a.onnx", "s3://data/eval.npz")
    assert job.image == "worker:1"
    assert len(job.name) <= 63


def test_a_job_that_runs_is_waited_for_and_not_made_again() -> None:
    seen = obey(new(), decide(new()))
    decision = decide(seen)
    assert decision.rule == "resolve"
    assert decision.actions == ()
    assert decision.memory == seen.memory


@pytest.mark.parametrize(
    "changes",
    [
        {"source__uri": "s3://models/other.onnx"},
        {"source__sha256": "a" * 64},
        {"engine__precision": "FP16"},
        {"verify__dataset": {"uri": "s3://data/other.npz"}},
        {"verify__task": "Raw"},
        {"storage__bucket": "other"},
    ],
)
def test_a_field_that_the_resolve_job_reads_asks_anew(changes: dict[str, object]) -> None:
    assert name_of(edited(new(), **changes)) != name_of(new())


@pytest.mark.parametrize(
    "changes",
    [
        {"serving__replicas": 9},
        {"rollout__steps": [{"workers": 2}]},
        {"rollout__paused": False},
        {"verify__thresholds": {"top1Delta": 0.5}},
        {"rollout__analysis": {"interval": "9s"}},
    ],
)
def test_scaling_steps_and_limits_never_resolve(changes: dict[str, object]) -> None:
    assert name_of(edited(new(), **changes)) == name_of(new())
    assert not of(decide(edited(serving(), **changes)), CreateJob)


@pytest.mark.parametrize(
    "changes",
    [
        {"build__deadline": "2h"},
        {"build__nodeSelector": {"disk": "ssd"}},
        {"build__resources": {"limits": {"memory": "8Gi"}}},
        {"storage__credentialsSecret": "another"},
    ],
)
def test_a_job_is_replaced_when_what_its_pod_is_made_of_is_corrected(changes: dict[str, object]) -> None:
    """It may wait for a node or be short of memory. One that answered is not asked again."""
    waits = obey(new(), decide(new()))
    decision = decide(edited(waits, **changes))
    assert of(decision, DeleteJob) == [DeleteJob(waits.jobs[0].name)]
    assert one_job(decision).name != waits.jobs[0].name
    failed = finished(waits, JobKind.RESOLVE, JobResult(Reason.ACCESS_DENIED, "the bucket refuses"))
    told = obey(failed, decide(failed))
    assert decide(told).situation.reason == "AccessDenied"
    assert one_job(decide(edited(told, **changes))).name != waits.jobs[0].name
    assert not of(decide(edited(serving(), **changes)), CreateJob)


def test_what_was_found_out_is_remembered_and_the_next_question_asked_at_once() -> None:
    seen = finished(obey(new(), decide(new())), JobKind.RESOLVE, resolve_result(B))
    decision = decide(seen)
    assert decision.memory.resolved is not None
    assert decision.memory.resolved.revision == B
    assert decision.requeue is not None
    assert decision.requeue < 1
    assert decide(obey(seen, decision)).rule == "build"


@pytest.mark.parametrize(
    ("result", "changes", "reason", "hint"),
    [
        (JobResult(Reason.SOURCE_NOT_FOUND, "no such key"), {}, "SourceNotFound", "no such key"),
        (JobResult(Reason.ACCESS_DENIED, "the bucket refuses"), {}, "AccessDenied", "command retry"),
        (JobResult(Reason.DIGEST_MISMATCH, "another file"), {}, "DigestMismatch", "another file"),
        (None, {"trouble": "OOMKilled", "message": "needs more"}, "OOMKilled", "resources.limits.memory"),
        (None, {"trouble": "DeadlineExceeded", "message": "too long"}, "DeadlineExceeded", "spec.build.deadline"),
        (None, {}, "JobFailed", "no reason"),
    ],
)
def test_a_job_that_ended_for_good_is_told_with_cause_and_way_out_and_not_tried_again(
    result: JobResult | None, changes: dict[str, str], reason: str, hint: str
) -> None:
    seen = finished(obey(new(), decide(new())), JobKind.RESOLVE, result, **changes)
    decision = decide(seen)
    assert (decision.situation.stage, decision.situation.reason) == (Stage.STALLED, reason)
    assert hint in decision.situation.message
    gone = replace(obey(seen, decision), jobs=())  # collected a day later
    again = decide(gone)
    assert again.situation == decision.situation
    assert again.actions == ()


def test_a_result_that_cannot_be_read_is_no_success() -> None:
    seen = obey(new(), decide(new()))
    seen = replace(seen, jobs=(replace(seen.jobs[0], state=JobState.COMPLETE, result=None),))
    assert decide(seen).situation.reason == "ResultMissing"


@pytest.mark.parametrize("trouble", ["Unschedulable", "ImagePullBackOff", "CreateContainerConfigError"])
def test_what_a_running_job_waits_for_is_told_in_the_same_pass(trouble: str) -> None:
    seen = obey(new(), decide(new()))
    seen = replace(seen, jobs=(replace(seen.jobs[0], trouble=trouble, message="0/1 nodes are available"),))
    situation = decide(seen).situation
    assert (situation.reason, situation.stuck) == (trouble, True)
    assert "0/1 nodes are available" in situation.message


def test_a_changed_spec_ends_the_job_of_the_old_one() -> None:
    seen = obey(new(), decide(new()))
    old = seen.jobs[0].name
    decision = decide(edited(seen, source__uri="s3://models/b.onnx"))
    assert of(decision, DeleteJob) == [DeleteJob(old)]
    assert one_job(decision).name != old


def test_a_build_goes_on_while_the_new_spec_is_being_resolved_and_ends_when_it_is_not_wanted() -> None:
    seen = knows(new(), A)
    seen = obey(seen, decide(seen))
    build = seen.jobs[0].name
    resolving = obey(
        edited(seen, source__uri="s3://models/b.onnx"), decide(edited(seen, source__uri="s3://models/b.onnx"))
    )
    assert build in [j.name for j in resolving.jobs]
    resolved = finished(resolving, JobKind.RESOLVE, resolve_result(B))
    decision = decide(resolved)
    assert of(decision, DeleteJob) == [DeleteJob(build)]
    assert one_job(decide(obey(resolved, decision))).kind is JobKind.BUILD


def test_without_any_image_it_says_which_setting_is_missing() -> None:
    decision = decide(new(default_image=""))
    assert decision.situation.reason == "NoWorkerImage"
    assert "spec.serving.image" in decision.situation.message
    assert decision.actions == ()


def test_going_back_to_the_fields_of_stable_asks_no_job() -> None:
    seen = canary(serving(A))
    decision = decide(edited(seen, source__uri="s3://models/a.onnx"))
    assert decision.rule == "superseded"
    assert not of(decision, CreateJob)


# ---------------------------------------------------------------------------------------------------------------
# superseded
# ---------------------------------------------------------------------------------------------------------------


def test_a_candidate_that_is_not_asked_for_any_more_leaves_its_workers_at_once() -> None:
    seen = canary(serving(A))
    decision = decide(asks_for(seen, C))
    assert decision.rule == "superseded"
    assert decision.memory.candidate is None
    assert decision.memory.history[0].outcome == "Superseded"
    assert all(s.candidate == "" for s in of(decision, Signal))
    following = decide(obey(asks_for(seen, C), decision))
    assert following.rule == "gate"
    assert following.memory.candidate is not None
    assert following.memory.candidate.revision == C


def test_with_no_stable_the_candidate_stays_until_its_successor_passed_the_gate() -> None:
    seen = has_built(new(), A)
    seen = obey(seen, decide(seen))
    assert seen.memory.candidate is not None
    changed_spec = knows(edited(seen, source__uri="s3://models/b.onnx"), B)
    building = decide(changed_spec)
    assert building.rule == "build"
    assert building.memory.candidate == seen.memory.candidate
    passed = decide(has_built(changed_spec, B))
    assert passed.memory.candidate is not None
    assert passed.memory.candidate.revision == B
    assert passed.memory.history[0].outcome == "Superseded"


# ---------------------------------------------------------------------------------------------------------------
# build
# ---------------------------------------------------------------------------------------------------------------


def test_an_engine_that_does_not_exist_is_built_with_what_was_resolved() -> None:
    decision = decide(knows(new(), B))
    job = one_job(decision)
    assert decision.rule == "build"
    assert isinstance(job.task, BuildTask)
    assert (job.task.revision, job.task.source_sha256) == (B, digest(f"source of {B}"))
    assert job.task.dataset.digest == digest("data")
    assert len(job.name) <= 63


def test_an_engine_that_resolve_found_with_figures_of_this_data_set_is_not_built() -> None:
    seen = finished(obey(new(), decide(new())), JobKind.RESOLVE, resolve_result(B, found(B)))
    assert decide(obey(seen, decide(seen))).rule == "gate"


def test_an_engine_that_was_never_measured_on_this_data_set_goes_through_a_job() -> None:
    bare = FoundArtifact(LOAD_KEY, digest(B), 1, "", None)
    seen = finished(obey(new(), decide(new())), JobKind.RESOLVE, resolve_result(B, bare))
    assert decide(obey(seen, decide(seen))).rule == "build"


def test_of_several_engines_the_one_for_the_workers_load_key_is_taken() -> None:
    other = LoadKey("ONNXRuntime", "1.19", "cpu")
    two = (FoundArtifact(other, digest("other"), 1, "", figures(B)), found(B))
    seen = edited(serving(A), source__uri="s3://models/b.onnx")
    seen = finished(obey(seen, decide(seen)), JobKind.RESOLVE, resolve_result(B, *two))
    passed = decide(obey(seen, decide(seen)))
    assert passed.rule == "gate"
    assert [a.load_key for a in passed.memory.candidate.artifacts] == [str(LOAD_KEY)]  # type: ignore[union-attr]


def test_several_engines_and_no_worker_to_ask_means_a_build() -> None:
    other = LoadKey("ONNXRuntime", "1.19", "cpu")
    two = (FoundArtifact(other, digest("other"), 1, "", figures(B)), found(B))
    seen = finished(obey(new(), decide(new())), JobKind.RESOLVE, resolve_result(B, *two))
    assert decide(obey(seen, decide(seen))).rule == "build"


def test_the_newest_build_of_a_load_key_is_taken() -> None:
    old = replace(found(B), manifest_digest=digest("old"), number=1)
    seen = finished(obey(new(), decide(new())), JobKind.RESOLVE, resolve_result(B, old, replace(found(B), number=2)))
    passed = decide(obey(seen, decide(seen)))
    assert passed.memory.candidate.artifacts[0].manifest_digest == digest(B)  # type: ignore[union-attr]


def test_what_resolve_finds_replaces_what_was_known_of_the_revision() -> None:
    seen = has_built(new(), B)
    seen = edited(seen, verify__dataset={"uri": "s3://data/new.npz"})
    seen = finished(obey(seen, decide(seen)), JobKind.RESOLVE, resolve_result(B))
    assert decide(seen).memory.built == ()


def test_a_built_engine_is_remembered_with_its_figures() -> None:
    seen = obey(knows(new(), B), decide(knows(new(), B)))
    decision = decide(finished(seen, JobKind.BUILD, build_result(B)))
    assert [(b.revision, b.artifact.figures) for b in decision.memory.built] == [(B, figures(B))]


def test_an_answer_for_another_revision_counts_for_nothing() -> None:
    seen = obey(knows(new(), B), decide(knows(new(), B)))
    decision = decide(finished(seen, JobKind.BUILD, build_result(C)))
    assert decision.memory.built == ()
    assert decision.situation.reason == "ResultMissing"


def test_an_engine_without_figures_is_not_verified() -> None:
    result = build_result(B)
    assert result.build is not None
    bare = replace(result, build=replace(result.build, artifact=replace(found(B), figures=None)))
    seen = obey(knows(new(), B), decide(knows(new(), B)))
    decision = decide(finished(seen, JobKind.BUILD, bare))
    assert decision.situation.reason == "VerificationMissing"
    assert decision.memory.candidate is None


def test_a_source_that_changed_under_the_build_is_resolved_again_but_not_for_ever() -> None:
    seen = knows(new(), B)
    names = set()
    for _ in range(3):
        seen = obey(seen, decide(seen))
        names.add(seen.jobs[-1].name)
        seen = finished(seen, JobKind.BUILD, JobResult(Reason.SOURCE_CHANGED, "it changed"))
        decision = decide(seen)
        assert decision.situation.reason == "SourceChanged"
        seen = replace(obey(seen, decision), jobs=())
        assert one_job(decide(seen)).kind is JobKind.RESOLVE
        seen = knows(seen, B)
    seen = finished(obey(seen, decide(seen)), JobKind.BUILD, JobResult(Reason.SOURCE_CHANGED, "it changed"))
    assert len(names) == 3
    assert decide(seen).situation.stage is Stage.STALLED


@pytest.mark.parametrize("reason", [Reason.OPERATOR_UNSUPPORTED, Reason.PROFILE_MISMATCH, Reason.STORAGE_UNAVAILABLE])
def test_a_failed_build_is_told_and_stable_serves_on(reason: Reason) -> None:
    seen = knows(edited(serving(A), source__uri="s3://models/b.onnx"), B)
    seen = finished(obey(seen, decide(seen)), JobKind.BUILD, JobResult(reason, "node 7"))
    decision = decide(seen)
    assert (decision.situation.stage, decision.situation.reason) == (Stage.STALLED, reason.value)
    assert decision.memory.stable == seen.memory.stable
    assert decision.memory.rejected == ()
    assert decision.actions == ()


# ---------------------------------------------------------------------------------------------------------------
# gate and rejected
# ---------------------------------------------------------------------------------------------------------------


def test_only_figures_that_pass_todays_thresholds_make_a_candidate() -> None:
    decision = decide(asks_for(serving(A), B))
    assert decision.rule == "gate"
    assert decision.memory.candidate is not None
    assert decision.memory.candidate.artifacts[0].manifest_digest == digest(B)
    assert decision.memory.step is not None
    assert decision.memory.step.index == 0


def test_figures_that_fail_reject_the_revision() -> None:
    seen = has_built(edited(serving(A), source__uri="s3://models/b.onnx"), B, differs=100)
    decision = decide(seen)
    assert (decision.situation.stage, decision.situation.reason) == (Stage.GATE_FAILED, "GateFailed")
    assert decision.memory.candidate is None
    assert [(r.revision, r.reason) for r in decision.memory.rejected] == [(B, "GateFailed")]
    assert decision.memory.history[0].outcome == "GateFailed"
    again = decide(obey(seen, decision))
    assert (again.rule, again.situation.reason) == ("rejected", "GateFailed")
    assert again.memory == decision.memory


def test_a_job_that_failed_the_gate_rejects_too() -> None:
    seen = knows(edited(serving(A), source__uri="s3://models/b.onnx"), B)
    seen = finished(obey(seen, decide(seen)), JobKind.BUILD, JobResult(Reason.GATE_FAILED, "top-1 differs in 9 %"))
    decision = decide(seen)
    assert decision.situation.reason == "GateFailed"
    assert "top-1 differs in 9 %" in decision.situation.message
    assert [r.revision for r in decision.memory.rejected] == [B]


def test_other_thresholds_judge_the_same_figures_anew_without_a_build() -> None:
    seen = has_built(edited(serving(A), source__uri="s3://models/b.onnx"), B, differs=100)
    seen = obey(seen, decide(seen))
    decision = decide(edited(seen, verify__thresholds={"top1Delta": 0.2}))
    assert decision.rule == "gate"
    assert decision.memory.candidate is not None


def test_inconclusive_figures_neither_reject_nor_promote_and_say_how_many_samples_would_decide() -> None:
    decision = decide(has_built(edited(serving(A), source__uri="s3://models/b.onnx"), B, differs=10))
    assert decision.situation.stage is Stage.GATE_INCONCLUSIVE
    assert "samples would" in decision.situation.message
    assert decision.memory.candidate is None
    assert decision.memory.rejected == ()


def test_an_inconclusive_job_is_no_rejection_and_more_samples_are_another_job() -> None:
    seen = knows(new(), B)
    seen = finished(obey(seen, decide(seen)), JobKind.BUILD, JobResult(Reason.GATE_INCONCLUSIVE, "needs 4,000 samples"))
    decision = decide(seen)
    assert decision.situation.stage is Stage.GATE_INCONCLUSIVE
    assert "needs 4,000 samples" in decision.situation.message
    assert decision.memory.rejected == ()
    more = edited(obey(seen, decision), verify__dataset={"uri": "s3://data/eval.npz", "samples": 4000})
    assert decide(more).rule == "resolve"


def test_rejections_are_bounded() -> None:
    seen = serving(A)
    for i in range(14):
        seen = has_built(edited(seen, source__uri=f"s3://models/{i}.onnx"), f"{i:010}", differs=100)
        seen = obey(seen, decide(seen))
    assert len(seen.memory.rejected) == 10
    assert len(seen.memory.history) == 5


def test_known_engines_are_bounded() -> None:
    seen = serving(A)
    for i in range(12):
        seen = knows(edited(seen, source__uri=f"s3://models/{i}.onnx"), f"{i:010}")
        seen = finished(obey(seen, decide(seen)), JobKind.BUILD, build_result(f"{i:010}"))
        seen = obey(seen, decide(seen))
    assert [b.revision for b in seen.memory.built] == [f"{i:010}" for i in range(11, 3, -1)]


def test_the_platform_is_pinned_by_the_first_deployment() -> None:
    seen = replace(serving(A), default_image="worker:2")
    decision = decide(seen)
    assert decision.rule == "settle"
    assert decision.actions == ()
    assert decide(edited(seen, source__uri="s3://models/b.onnx")).actions[0].image == "worker:1"  # type: ignore[union-attr]


def test_jobs_that_ended_stay_as_evidence() -> None:
    seen = serving(A)
    done = ObservedJob("magika-build-old", JobKind.BUILD, "default", JobState.FAILED)
    running = ObservedJob("magika-build-lost", JobKind.BUILD, "default", JobState.RUNNING)
    assert of(decide(replace(seen, jobs=(done, running))), DeleteJob) == [DeleteJob("magika-build-lost")]


def test_a_failure_of_a_spec_that_is_not_asked_for_any_more_is_forgotten() -> None:
    seen = edited(serving(A), source__uri="s3://models/gone.onnx")
    seen = finished(obey(seen, decide(seen)), JobKind.RESOLVE, JobResult(Reason.SOURCE_NOT_FOUND, "gone"))
    seen = obey(seen, decide(seen))
    assert seen.memory.failure is not None
    decision = decide(edited(seen, source__uri="s3://models/a.onnx"))
    assert decision.memory.failure is None
    assert decision.situation.stage is Stage.SERVING
