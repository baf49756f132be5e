"""Which engines are asked for: one Job for one recipe, one for each load key, none in tier Production."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from decide_scene import (
    LOAD_KEY,
    MODEL,
    A,
    B,
    Scene,
    asks_for,
    build_result,
    canary,
    changed_raw,
    decide,
    digest,
    edited,
    figures,
    finished,
    found,
    knows,
    members,
    new,
    obey,
    of,
    resolve_result,
    run,
    serving,
    with_worker,
)
from trtmodel_contract.identity import LoadKey, ModelRef
from trtmodel_contract.jobs import BuildResult, BuildTask, FoundArtifact, JobResult, Reason, ResolveTask
from trtmodel_contract.progress import JobProgress
from trtmodel_operator import manifests
from trtmodel_operator.conditions import status
from trtmodel_operator.model import CreateJob, Decision, DeleteJob, JobKind, JobState, ObservedJob, Signal, Stage
from trtmodel_operator.spec import parse_command

OTHER = LoadKey("ONNXRuntime", "1.20", "cpu-avx2")


def one_job(decision: Decision) -> CreateJob:
    (job,) = of(decision, CreateJob)
    assert isinstance(job, CreateJob)
    return job


def with_key(seen: Scene, uid: str, key: LoadKey = OTHER) -> Scene:
    """A worker on another kind of machine: it booted, and found nothing for its load key."""
    report = next(w.report for w in seen.workers if w.uid == uid)
    assert report is not None
    return with_worker(seen, uid, ready=False, report=replace(report, load_key=key, models={}))


def built_for(key: LoadKey, revision: str = A, differs: int = 0) -> JobResult:
    artifact = FoundArtifact(key, digest(revision, str(key)), 1, "", figures(revision, differs))
    return JobResult(Reason.DONE, "", build=BuildResult(revision, artifact, False, 1, 9.0, 3.0, "2026-11-29T20:00:00Z"))


def job_status(seen: Scene) -> dict[str, Any]:
    (target,) = status(seen, decide(seen), {})["targets"]  # type: ignore[misc]
    return dict(target["job"])


# ---------------------------------------------------------------------------------------------------------------
# one build for one recipe
# ---------------------------------------------------------------------------------------------------------------


def build_of(name: str, **changes: Any) -> CreateJob:
    seen = replace(edited(new(), **changes), model=ModelRef("ml", name, f"uid of {name}"))
    return one_job(decide(knows(seen, B)))


def test_two_models_with_one_recipe_ask_for_one_job() -> None:
    assert build_of("one").name == build_of("two").name
    assert B in build_of("one").name


@pytest.mark.parametrize(
    "changes",
    [
        {"verify__thresholds": {"top1Delta": 0.2}},
        {"serving__replicas": 1},
        {"rollout__paused": False},
        {"targets": [{"name": "here"}]},
    ],
)
def test_what_decides_neither_engine_nor_figures_nor_place_is_no_other_job(changes: dict[str, Any]) -> None:
    assert build_of("one", **changes).name == build_of("two").name


@pytest.mark.parametrize(
    "changes",
    [
        {"verify__dataset": {"uri": "s3://data/other.npz"}},
        {"storage__bucket": "other"},
        {"storage__credentialsSecret": "mine"},
        {"build__resources": {"limits": {"memory": "9Gi"}}},
        {"targets": [{"name": "default", "nodeSelector": {"zone": "b"}}]},
        {"targets": [{"name": "default", "runtimeClassName": "nvidia"}]},
        {"serving__image": "worker:2"},
    ],
)
def test_another_place_data_set_or_credentials_is_another_job(changes: dict[str, Any]) -> None:
    assert build_of("one", **changes).name != build_of("two").name


def test_jobs_are_told_what_the_collector_must_leave_alone_and_are_no_others_for_it() -> None:
    seen = edited(serving(A), source__uri="s3://models/b.onnx")
    plain, told = one_job(decide(seen)), one_job(decide(replace(seen, cluster="installation-1")))
    assert isinstance(plain.task, ResolveTask)
    assert isinstance(told.task, ResolveTask)
    assert (plain.task.cluster, plain.task.keep) == ("", None)
    assert (told.task.cluster, told.task.keep) == ("installation-1", (digest(A),))
    assert plain.name == told.name
    plain, told = one_job(decide(knows(seen, B))), one_job(decide(replace(knows(seen, B), cluster="installation-1")))
    assert isinstance(told.task, BuildTask)
    assert (plain.name, told.task.cluster) == (told.name, "installation-1")


def test_an_engine_that_another_models_job_built_is_found_once_more_by_our_own_which_pins_it_for_us() -> None:
    seen = knows(replace(new(), cluster="installation-1"), B)
    seen = obey(seen, decide(seen))
    for maker, asks in (("another", JobKind.RESOLVE), (MODEL.name, None), ("", None)):
        job = replace(seen.jobs[0], made_by=maker)
        taken = finished(replace(seen, jobs=(job,)), JobKind.BUILD, build_result(B))
        taken = obey(taken, decide(taken))
        made = of(decide(taken), CreateJob)
        assert [c.kind for c in made] == ([asks] if asks else [])
        if asks:
            found_again = finished(obey(taken, decide(taken)), JobKind.RESOLVE, resolve_result(B, found(B)))
            found_again = obey(found_again, decide(found_again))
            assert decide(found_again).memory.candidate is not None


def test_a_job_that_judged_by_other_limits_brings_its_figures_and_todays_limits_judge() -> None:
    seen = knows(edited(new(), verify__thresholds={"top1Delta": 0.2}), B)
    result = replace(build_result(B, differs=100), reason=Reason.GATE_FAILED, message="5 % of the answers differ")
    seen = finished(obey(seen, decide(seen)), JobKind.BUILD, result)
    seen = obey(seen, decide(seen))
    assert decide(seen).memory.candidate is not None
    strict = knows(edited(new(), verify__thresholds={"top1Delta": 0.01}), B)
    strict = finished(obey(strict, decide(strict)), JobKind.BUILD, result)
    strict = obey(strict, decide(strict))
    assert decide(strict).situation.stage is Stage.GATE_FAILED


def test_a_cache_hit_takes_no_job_but_the_resolve_job() -> None:
    seen = obey(new(), decide(new()))
    assert [j.kind for j in seen.jobs] == [JobKind.RESOLVE]
    seen = finished(seen, JobKind.RESOLVE, resolve_result(A, found(A)))
    seen, _ = run(seen, lambda s, d: d.rule == "settle" and not d.actions)
    assert [j.kind for j in seen.jobs] == [JobKind.RESOLVE]
    assert seen.memory.stable is not None
    assert seen.memory.stable.revision == A


def test_a_job_that_waits_for_its_turn_says_so_and_is_not_stuck() -> None:
    seen = obey(knows(new(), B), decide(knows(new(), B)))
    seen = replace(seen, jobs=(replace(seen.jobs[0], suspended=True),))
    situation = decide(seen).situation
    assert (situation.stage, situation.reason, situation.stuck) == (Stage.BUILDING, "BuildQueued", False)
    assert job_status(seen)["stage"] == "Queued"


def test_status_shows_what_a_running_job_says_of_itself() -> None:
    seen = obey(knows(new(), B), decide(knows(new(), B)))
    said = JobProgress("prove", "500 of 2,000 samples", 5.0, 60)
    seen = replace(seen, jobs=(replace(seen.jobs[0], progress=said),))
    shown = job_status(seen)
    assert (shown["stage"], shown["progress"], shown["message"]) == ("prove", 60, "500 of 2,000 samples")
    again = replace(seen, jobs=(replace(seen.jobs[0], trouble="Evicted", message="disk pressure"),))
    assert job_status(again)["message"] == "disk pressure"


@pytest.mark.parametrize("how", ["spec", "command"])
def test_an_edit_while_it_is_paused_ends_no_job_that_runs(how: str) -> None:
    """Set back before it goes on, the spec asks for that engine still."""
    seen = knows(edited(serving(A), source__uri="s3://models/b.onnx"), B)
    seen = obey(seen, decide(seen))
    if how == "command":
        seen = replace(seen, command=parse_command("pause#1"))
        seen = obey(seen, decide(seen))
    else:
        seen = edited(seen, rollout__paused=True)
    decision = decide(edited(seen, source__uri="s3://models/a.onnx"))
    assert not of(decision, DeleteJob)


def test_an_engine_of_another_models_job_that_resolve_cannot_choose_is_resolved_once_and_taken() -> None:
    """The bucket holds engines for several kinds of device, and nothing says which one the target is."""
    seen = knows(replace(new(), cluster="installation-1"), B)
    seen = obey(seen, decide(seen))
    seen = finished(replace(seen, jobs=(replace(seen.jobs[0], made_by="another"),)), JobKind.BUILD, build_result(B))
    made = []
    for _ in range(12):
        decision = decide(seen)
        made += [c.kind for c in of(decision, CreateJob)]
        seen = obey(seen, decision)
        if any(j.state is JobState.RUNNING for j in seen.jobs):
            seen = finished(seen, JobKind.RESOLVE, resolve_result(B))
    assert made == [JobKind.RESOLVE]
    assert seen.memory.stable is not None


def test_a_build_goes_on_while_an_engine_that_another_models_job_built_is_resolved_again() -> None:
    seen = edited(serving(A), source__uri="s3://models/b.onnx")
    seen = edited(seen, targets=[{"name": name, "gpu": name} for name in ("a10", "l4")])
    seen = knows(replace(seen, cluster="installation-1"), B)
    seen = obey(seen, decide(seen))
    asked = {j.target: j.name for j in seen.jobs if j.kind is JobKind.BUILD}
    assert asked.keys() == {"a10", "l4"}

    def ended(job: ObservedJob) -> ObservedJob:
        good = replace(job, state=JobState.COMPLETE, result=build_result(B, target="a10"), made_by="another")
        return good if job.name == asked["a10"] else job

    seen = replace(seen, jobs=tuple(ended(j) for j in seen.jobs))
    for _ in range(4):
        seen = obey(seen, decide(seen))
    seen = finished(seen, JobKind.RESOLVE, resolve_result(B, found(B, target="a10")))
    for _ in range(4):
        decision = decide(seen)
        assert asked["l4"] not in [j.name for j in of(decision, DeleteJob)]
        assert JobKind.BUILD not in [j.kind for j in of(decision, CreateJob)]
        seen = obey(seen, decision)
    assert [j.name for j in seen.jobs if j.state is JobState.RUNNING] == [asked["l4"]]


# ---------------------------------------------------------------------------------------------------------------
# workers without an engine for their load key
# ---------------------------------------------------------------------------------------------------------------


def test_nothing_is_built_for_a_worker_that_has_not_looked_at_its_machine_yet() -> None:
    decision = decide(with_key(serving(A), "w1", LoadKey(LOAD_KEY.runtime, "", "")))
    assert of(decision, CreateJob) == []
    assert decision.situation.reason != "NoEngineForLoadKey"


def test_a_worker_without_an_engine_for_its_load_key_gets_one_built_on_its_node() -> None:
    seen = with_key(serving(A), "w1")
    decision = decide(seen)
    job = one_job(decision)
    assert (decision.rule, decision.situation.reason) == ("extend", "NoEngineForLoadKey")
    assert (job.load_key, job.nodes) == (str(OTHER), ("node-w1",))
    assert isinstance(job.task, BuildTask)
    assert job.task.revision == A
    assert seen.spec is not None
    manifest = manifests.job(seen.model, seen.spec, job)
    (term,) = manifest["spec"]["template"]["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    assert term == {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-w1"]}]}
    assert manifest["metadata"]["annotations"]["trtmodel.io/load-key"] == str(OTHER)


def test_the_engine_is_added_to_what_serves_while_the_others_serve_on() -> None:
    seen = with_key(serving(A), "w1")
    for _ in range(4):
        seen = with_key(obey(seen, decide(seen)), "w1")
    others = [w for w in seen.workers if w.uid != "w1"]
    seen = finished(seen, JobKind.BUILD, built_for(OTHER))
    told = []
    for _ in range(3):
        decision = decide(seen)
        told += [s.stable for s in of(decision, Signal) if s.uid == "w1"]
        seen = obey(seen, decision)
    assert seen.memory.stable is not None
    assert [(a.load_key, a.manifest_digest) for a in seen.memory.stable.artifacts] == [
        (str(LOAD_KEY), digest(A)),
        (str(OTHER), digest(A, str(OTHER))),
    ]
    assert seen.memory.history == serving(A).memory.history
    for before in others:  # told of nothing but the next sequence
        after = next(w.report for w in seen.workers if w.uid == before.uid)
        assert after is not None
        assert before.report is not None
        assert after.models[MODEL.name].routes == before.report.models[MODEL.name].routes
    assert set(told) == {digest(A, str(OTHER))}


def test_a_worker_that_restarts_meanwhile_does_not_end_the_build_for_it() -> None:
    seen = with_key(serving(A), "w1")
    job = one_job(decide(seen))
    seen = obey(seen, decide(seen))
    seen = replace(seen, jobs=tuple(replace(j, load_key=job.load_key) for j in seen.jobs))
    seen = with_worker(seen, "w1", report=None, silence="its container has not started")
    for _ in range(3):
        seen = obey(seen, decide(seen))
    assert job.name in [j.name for j in seen.jobs if j.state is JobState.RUNNING]


def test_an_engine_that_was_built_on_another_kind_of_node_is_told_and_not_tried_for_ever() -> None:
    seen = with_key(serving(A), "w1")
    seen = finished(obey(seen, decide(seen)), JobKind.BUILD, built_for(LOAD_KEY))
    seen = with_key(obey(seen, decide(seen)), "w1")
    decision = decide(seen)
    assert decision.situation.reason == "OtherLoadKey"
    assert str(LOAD_KEY) in decision.situation.message
    assert not of(decision, CreateJob)


def test_an_engine_that_fails_its_gate_there_is_not_used_and_stable_stays() -> None:
    seen = with_key(serving(A), "w1")
    seen = finished(obey(seen, decide(seen)), JobKind.BUILD, built_for(OTHER, differs=200))
    seen = with_key(obey(seen, decide(seen)), "w1")
    decision = decide(seen)
    assert decision.situation.stage is Stage.GATE_FAILED
    assert "The others serve on" in decision.situation.message
    assert decision.memory.stable == serving(A).memory.stable
    assert not of(decision, CreateJob)


def test_a_new_revision_is_built_for_each_load_key_that_stable_serves() -> None:
    seen = with_key(serving(A), "w1")
    seen = finished(obey(seen, decide(seen)), JobKind.BUILD, built_for(OTHER))
    seen = replace(obey(seen, decide(seen)), jobs=())
    seen = with_key(obey(seen, decide(seen)), "w1")
    seen = knows(edited(seen, source__uri="s3://models/b.onnx"), B)
    first = one_job(decide(seen))
    assert first.load_key == ""  # where there is room: the nodes are full of workers
    seen = with_key(finished(obey(seen, decide(seen)), JobKind.BUILD, build_result(B)), "w1")
    seen = with_key(obey(seen, decide(seen)), "w1")
    second = decide(seen)
    assert (second.rule, one_job(second).load_key) == ("build", str(OTHER))
    seen = with_key(finished(obey(seen, second), JobKind.BUILD, built_for(OTHER, B)), "w1")
    seen = with_key(obey(seen, decide(seen)), "w1")
    candidate = decide(seen).memory.candidate
    assert candidate is not None
    assert {a.load_key for a in candidate.artifacts} == {str(LOAD_KEY), str(OTHER)}


def test_a_worker_that_nothing_ever_served_holds_up_no_new_revision() -> None:
    seen = with_key(asks_for(serving(A), B), "w1")
    assert decide(seen).rule == "gate"


def test_a_candidate_gets_the_engine_that_it_lacks_while_it_is_on_trial() -> None:
    seen = canary(serving(A))
    uid = next(w.uid for w in seen.workers if w.uid not in members(seen))
    seen = with_key(seen, uid)
    decision = decide(seen)
    assert decision.rule == "extend"
    assert isinstance(one_job(decision).task, BuildTask)
    seen = obey(seen, decision)
    waiting = decide(with_key(seen, uid))
    assert (waiting.rule, waiting.situation.stage) == ("watch", Stage.CANARY)  # the trial goes on meanwhile
    seen = finished(seen, JobKind.BUILD, built_for(OTHER, B))
    seen = obey(with_key(seen, uid), decide(with_key(seen, uid)))
    added = decide(with_key(seen, uid))
    assert added.memory.candidate is not None
    assert str(OTHER) in {a.load_key for a in added.memory.candidate.artifacts}
    assert added.memory.step == seen.memory.step


def test_a_build_that_fails_for_one_kind_of_worker_ends_no_trial() -> None:
    seen = canary(serving(A))
    uid = next(w.uid for w in seen.workers if w.uid not in members(seen))
    seen = with_key(seen, uid)
    seen = finished(obey(seen, decide(seen)), JobKind.BUILD, JobResult(Reason.OPERATOR_UNSUPPORTED, "node 7"))
    seen = with_key(obey(seen, decide(seen)), uid)
    decision = decide(seen)
    assert (decision.rule, decision.situation.stage) == ("watch", Stage.CANARY)
    assert not of(decision, CreateJob)


# ---------------------------------------------------------------------------------------------------------------
# tiers
# ---------------------------------------------------------------------------------------------------------------


def test_development_builds_quickly_which_is_another_engine_and_status_says_so() -> None:
    changes: dict[str, Any] = {
        "engine__precision": "INT8",
        "engine__calibration": {"uri": "s3://data/calibration.npz"},
        "engine__runtime": "TensorRT",
        "engine__optimizationLevel": 4,
    }
    usual, quick = edited(new(), **changes), edited(new(), build__tier="Development", **changes)
    assert usual.spec is not None
    assert quick.spec is not None
    assert (usual.spec.engine.precision, usual.spec.tier.changes) == ("INT8", "")
    assert (quick.spec.engine.precision, quick.spec.engine.optimization_level) == ("FP16", 1)
    assert quick.spec.calibration is None
    assert quick.spec.engine != usual.spec.engine
    seen = serving(A, build__tier="Development", **changes)
    conditions = {c["type"]: c["message"] for c in status(seen, decide(seen), {})["conditions"]}  # type: ignore[attr-defined]
    assert "tier Development made it another one: FP16 instead of INT8, optimization level 1" in conditions["Built"]


def test_staging_and_production_mean_one_engine() -> None:
    staging, production = (edited(new(), build__tier=tier).spec for tier in ("Staging", "Production"))
    assert staging is not None
    assert production is not None
    assert staging.engine == production.engine
    seen = edited(serving(A), build__tier="Production")
    assert decide(seen).actions == ()


def test_production_builds_nothing_and_says_how_to_get_the_engine() -> None:
    seen = knows(edited(new(), build__tier="Production"), B)
    decision = decide(seen)
    assert decision.actions == ()
    assert (decision.situation.stage, decision.situation.reason) == (Stage.STALLED, "NoStagedEngine")
    assert "trtmodel cache copy" in decision.situation.message
    assert "command refresh" in decision.situation.message


def test_production_takes_what_staging_built() -> None:
    seen = edited(new(), build__tier="Production")
    seen = obey(seen, decide(seen))
    seen = finished(seen, JobKind.RESOLVE, resolve_result(A, found(A)))
    seen, _ = run(seen, lambda s, d: d.rule == "settle" and not d.actions)
    assert [j.kind for j in seen.jobs] == [JobKind.RESOLVE]
    assert seen.memory.stable is not None


def test_where_nothing_is_built_a_worker_that_lacks_an_engine_holds_up_no_candidate() -> None:
    seen = canary(serving(A, build__tier="Production"))
    other = next(w for w in seen.workers if w.uid not in members(seen))
    assert other.report is not None
    strange = replace(other.report, load_key=replace(other.report.load_key, device="gpu-NVIDIA-L4-cc8.9"), models={})
    decision = decide(with_worker(seen, other.uid, ready=False, report=strange))
    assert (decision.rule, decision.memory.candidate) == ("watch", seen.memory.candidate)


def test_an_unknown_tier_is_refused() -> None:
    from trtmodel_operator.fields import SpecError
    from trtmodel_operator.spec import parse

    with pytest.raises(SpecError, match=r"spec.build.tier"):
        parse(changed_raw(new().raw, build__tier="Fast"))
