"""A TRTModel with deletionPolicy Delete: what holds it, what lets it go."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from decide_scene import NOW, A, B, Scene, canary, decide, edited, finished, has_built, knows, new, of, run, serving
from fakes.api_server import FakeApiServer, refusal
from kubernetes.aio.client import Configuration
from trtmodel_contract.codec import loads
from trtmodel_contract.jobs import CollectResult, CollectTask, JobResult, Reason
from trtmodel_operator import manifests
from trtmodel_operator.adapters.api import Api
from trtmodel_operator.adapters.cluster import FINALIZER, KubernetesCluster
from trtmodel_operator.adapters.observe import observe
from trtmodel_operator.adapters.signing import Ed25519Signer, Keys
from trtmodel_operator.buildqueue import ORPHAN_AGE, orphans
from trtmodel_operator.decide.farewell import GIVE_UP
from trtmodel_operator.model import (
    ApplyPointer,
    CreateJob,
    Decision,
    DeleteJob,
    DeleteWorkload,
    Guard,
    JobKind,
    JobState,
    ObservedJob,
    Signal,
    Stage,
)
from trtmodel_operator.ports import ClusterError, Conflict, Json

DONE = JobResult(Reason.DONE, "1 engines, 5 objects, 2,486 bytes removed", collect=CollectResult(1, 0, 0, 2486))


def deleted(seen: Scene, **changes: Any) -> Scene:
    """Somebody deletes a model whose artifacts are to go."""
    seen = edited(seen, deletionPolicy="Delete")
    return replace(seen, guarded=True, deleting=True, deleted_at=seen.now, **changes)


def bare(seen: Scene) -> Scene:
    """Its Jobs and workers have ended."""
    return replace(seen, jobs=(), workloads=(), pointers=(), workers=())


def collecting(seen: Scene) -> Scene:
    """The Job that removes the artifacts runs."""
    (create,) = of(decide(seen), CreateJob)
    assert create.kind is JobKind.COLLECT
    return replace(seen, jobs=(ObservedJob(create.name, JobKind.COLLECT, "", JobState.RUNNING),))


def told(decision: Decision) -> tuple[str, bool, str]:
    (notice,) = decision.notices
    return notice.reason, notice.warning, notice.message


# ---------------------------------------------------------------------------------------------------------------
# What is held
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scene", [new(), has_built(new(), A), serving(A), canary(serving(A))])
def test_a_model_is_held_from_the_pass_on_that_sees_delete_and_everything_else_goes_on(scene: Scene) -> None:
    before, after = decide(scene), decide(edited(scene, deletionPolicy="Delete"))
    assert Guard(on=True) not in before.actions
    there = {pointer.name for pointer in scene.pointers}
    known = (isinstance(a, Signal) or (isinstance(a, ApplyPointer) and a.workload in there) for a in before.actions)
    first = sum(known)  # nothing holds up a way back
    assert after.actions == (*before.actions[:first], Guard(on=True), *before.actions[first:])
    assert after.situation == before.situation
    held = decide(replace(edited(scene, deletionPolicy="Delete"), guarded=True))
    assert not of(held, Guard)


def test_a_model_whose_artifacts_are_to_stay_is_held_no_more() -> None:
    assert decide(replace(serving(A), guarded=True)).actions == (Guard(on=False),)


def test_a_spec_that_cannot_be_read_says_nothing_of_it() -> None:
    for guarded in (True, False):
        assert not of(decide(replace(new(), spec=None, spec_error="no", guarded=guarded)), Guard)


def test_the_policy_is_no_part_of_what_is_resolved_and_built() -> None:
    for scene in (new(), knows(new(), B)):
        jobs = [of(decide(edited(scene, deletionPolicy=policy)), CreateJob) for policy in ("Retain", "Delete")]
        assert jobs[0] == jobs[1] != []


# ---------------------------------------------------------------------------------------------------------------
# What lets it go
# ---------------------------------------------------------------------------------------------------------------


def test_jobs_and_workers_end_before_anything_is_removed() -> None:
    seen, _ = run(edited(serving(A), source__uri="s3://models/b.onnx"), lambda s, _: bool(s.jobs))
    decision = decide(deleted(seen))
    assert [a.name for a in of(decision, DeleteJob)] == [j.name for j in seen.jobs]
    assert [a.name for a in of(decision, DeleteWorkload)] == [w.name for w in seen.workloads]
    assert not of(decision, CreateJob)
    assert not of(decision, Guard)


def test_then_a_job_removes_what_only_this_model_has_pinned() -> None:
    seen = replace(bare(deleted(serving(A))), cluster="installation-1")
    (create,) = decide(seen).actions
    assert isinstance(create, CreateJob)
    assert create.task == CollectTask("ml", seen.spec.storage, "installation-1", seen.model, delete=True)
    decision = decide(collecting(seen))
    assert decision.actions == ()
    assert (decision.situation.stage, decision.situation.reason) == (Stage.DELETING, "RemovingArtifacts")
    assert "set spec.deletionPolicy to Retain" in decision.situation.message


def test_a_job_that_does_not_get_on_is_told_with_its_cause() -> None:
    seen = collecting(bare(deleted(serving(A))))
    seen = replace(seen, jobs=(replace(seen.jobs[0], trouble="Unschedulable", message="0/3 nodes are available"),))
    assert decide(seen).situation.stuck
    assert "0/3 nodes are available" in decide(seen).situation.message


def test_when_it_is_done_the_model_goes_with_an_event_that_says_what_went() -> None:
    seen = finished(collecting(bare(deleted(serving(A)))), JobKind.COLLECT, DONE)
    decision = decide(seen)
    assert decision.actions == (Guard(on=False),)
    assert told(decision)[:2] == ("ArtifactsRemoved", False)
    assert "5 objects" in told(decision)[2]


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        (Reason.BUCKET_NOT_FOUND, "bucket engines does not exist"),
        (Reason.ACCESS_DENIED, "the credentials are not accepted"),
        (Reason.STORAGE_UNAVAILABLE, "no answer"),
    ],
)
def test_a_bucket_or_credentials_that_are_gone_leave_the_artifacts_and_let_the_model_go(
    reason: Reason, message: str
) -> None:
    seen = finished(collecting(bare(deleted(serving(A)))), JobKind.COLLECT, JobResult(reason, message))
    decision = decide(seen)
    assert decision.actions == (Guard(on=False),)
    assert told(decision)[:2] == ("ArtifactsKept", True)
    assert message in told(decision)[2]
    assert "then run trtmodel cache collect s3://engines/trtmodel/ml" in told(decision)[2]


def test_a_job_that_never_comes_to_an_end_holds_it_for_an_hour() -> None:
    seen = collecting(bare(deleted(serving(A))))
    assert not of(decide(replace(seen, now=NOW + GIVE_UP)), Guard) or seen.now > NOW
    decision = decide(replace(seen, now=seen.now + GIVE_UP + 1))
    assert decision.actions == (Guard(on=False),)
    assert told(decision)[:2] == ("ArtifactsKept", True)


@pytest.mark.parametrize("policy", ["Retain", None])
def test_the_way_out_at_any_time_is_to_keep_them(policy: str | None) -> None:
    seen = collecting(bare(deleted(serving(A))))
    seen = edited(seen, deletionPolicy=policy) if policy else replace(seen, spec=None, spec_error="storage: gone")
    decision = decide(seen)
    assert decision.actions == (Guard(on=False),)
    assert told(decision)[0] == "ArtifactsKept"


def test_other_credentials_are_tried_by_another_job() -> None:
    seen = collecting(bare(deleted(serving(A))))
    decision = decide(edited(seen, storage__credentialsSecret="new"))
    (create,) = of(decision, CreateJob)
    assert create.name != seen.jobs[0].name


# ---------------------------------------------------------------------------------------------------------------
# The Job and the finalizer in the cluster
# ---------------------------------------------------------------------------------------------------------------


def manifest(seen: Scene) -> Json:
    (create,) = of(decide(seen), CreateJob)
    return manifests.job(seen.model, seen.spec, create)


def test_the_job_is_nobodys_so_that_no_kind_of_deletion_takes_it_and_it_is_no_orphan() -> None:
    made = manifest(bare(deleted(serving(A))))
    assert "ownerReferences" not in made["metadata"]
    assert loads(CollectTask, made["spec"]["template"]["spec"]["containers"][0]["env"][0]["value"]).delete
    made["metadata"]["creationTimestamp"] = "2026-11-30T00:00:00Z"
    assert orphans([made], 1e12 + ORPHAN_AGE) == []


def on(server: FakeApiServer, scene: Any) -> Any:
    async def go() -> Any:
        api = Api(Configuration(host=server.url), timeout=5.0)
        try:
            return await scene(KubernetesCluster(api))
        finally:
            await api.close()

    return asyncio.run(go())


def stored(server: FakeApiServer) -> Json:
    meta = {"namespace": "ml", "name": "magika", "uid": "uid-1"}
    return server.put({"apiVersion": "trtmodel.io/v1alpha1", "kind": "TRTModel", "metadata": meta, "spec": {"a": 1}})


def test_the_finalizer_comes_and_goes_and_nothing_else_is_written(api_server: FakeApiServer) -> None:
    stored(api_server)
    key = ("ml", "magika")
    on(api_server, lambda c: c.guard(key, "uid-1", on=True))
    found = api_server.get("trtmodels", *key)
    assert found is not None
    assert (found["metadata"]["finalizers"], found["spec"]) == ([FINALIZER], {"a": 1})
    on(api_server, lambda c: c.guard(key, "uid-1", on=False))
    found = api_server.get("trtmodels", *key)
    assert found is not None
    assert (found["metadata"].get("finalizers"), found["spec"]) == (None, {"a": 1})
    (put_on, _) = [s for s in api_server.writes("trtmodel-operator") if s.method == "PATCH"]
    assert put_on.body["metadata"]["uid"] == "uid-1", "an apply to a model that has gone would make a new one"
    assert set(put_on.body) == {"apiVersion", "kind", "metadata"}


def test_the_job_of_the_deleted_model_is_found_though_it_has_no_owner(api_server: FakeApiServer) -> None:
    seen = bare(deleted(serving(A)))
    raw = stored(api_server)
    raw["metadata"] |= {"deletionTimestamp": "2026-11-30T00:00:00Z", "finalizers": [FINALIZER]}
    made = manifest(seen)
    on(api_server, lambda c: c.create_job(made))
    on(api_server, lambda c: c.create_job(made))  # AlreadyExists is success

    async def look(cluster: KubernetesCluster) -> Any:
        children = await cluster.children(("ml", "magika"))
        signer = Ed25519Signer(Keys.made())
        return await observe(raw, children, workers=None, signer=signer, default_image="w:1", now=1.0)  # type: ignore[arg-type]

    found = on(api_server, look)
    assert [(j.name, j.kind) for j in found.jobs] == [(made["metadata"]["name"], JobKind.COLLECT)]
    assert (found.guarded, found.deleting, found.deleted_at) == (True, True, 1795996800.0)


def test_a_conflict_with_a_model_that_has_gone_is_told_as_one(api_server: FakeApiServer) -> None:
    stored(api_server)

    # As the API server has it where there is none, and where there is another one of this name.
    for code, words in ((409, "uid mismatch"), (422, 'TRTModel "a" is invalid: metadata.uid: field is immutable')):
        api_server.fault = lambda s, code=code, words=words: refusal(code, words) if s.method == "PATCH" else None
        with pytest.raises(Conflict):
            on(api_server, lambda c: c.guard(("ml", "magika"), "uid-0", on=True))


def test_a_job_of_the_same_name_that_somebody_owns_is_not_taken_for_it(api_server: FakeApiServer) -> None:
    made = manifest(bare(deleted(serving(A))))
    on(api_server, lambda c: c.create_job(made))
    owned = {
        "apiVersion": "trtmodel.io/v1alpha1",
        "kind": "TRTModel",
        "name": "magika",
        "uid": "u2",
        "controller": True,
    }
    other = {**made, "metadata": {**made["metadata"], "ownerReferences": [owned]}}
    with pytest.raises(ClusterError):
        on(api_server, lambda c: c.create_job(other))
