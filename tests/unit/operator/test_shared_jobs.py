"""One build for several TRTModels of a namespace, over real HTTP: it belongs to all of them and outlives each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from decide_scene import MODEL, RAW, B, build_result, decide, edited, found, knows, new, of, resolve_result
from fakes.api_server import FakeApiServer, Seen, refusal
from kubernetes.aio.client import Configuration
from trtmodel_contract.codec import dumps
from trtmodel_contract.identity import ModelRef
from trtmodel_contract.jobs import JobResult
from trtmodel_operator import manifests
from trtmodel_operator.adapters.api import Api
from trtmodel_operator.adapters.cluster import KubernetesCluster, owner_uids
from trtmodel_operator.adapters.informer import owners
from trtmodel_operator.adapters.observe import observe
from trtmodel_operator.adapters.signing import Ed25519Signer, Keys
from trtmodel_operator.adapters.workers import HttpWorkers
from trtmodel_operator.main import SystemClock
from trtmodel_operator.metrics import OperatorMetrics
from trtmodel_operator.model import CreateJob, JobState, Observed
from trtmodel_operator.ports import ClusterError, Conflict, Json
from trtmodel_operator.reconcile import Reconciler

ONE, TWO = (ModelRef("ml", name, f"uid of {name}") for name in ("one", "two"))


def on(server: FakeApiServer, scene: Callable[[KubernetesCluster], Awaitable[Any]]) -> Any:
    async def go() -> Any:
        api = Api(Configuration(host=server.url), timeout=10.0)
        try:
            return await scene(KubernetesCluster(api, instance="operator-1"))
        finally:
            await api.close()

    return asyncio.run(go())


def build_job(model: ModelRef, **changes: Any) -> Json:
    """What the decision for this model comes to."""
    seen = knows(replace(edited(new(), **changes), model=model), B)
    (create,) = of(decide(seen), CreateJob)
    assert seen.spec is not None
    return manifests.job(model, seen.spec, create)


def asked_by(server: FakeApiServer, *models: ModelRef) -> Json:
    """The Job after these asked for it, one after the other."""

    async def scene(cluster: KubernetesCluster) -> None:
        for model in models:
            await cluster.create_job(build_job(model))

    on(server, scene)
    (job,) = server.all("jobs")
    return job


def observed(server: FakeApiServer, model: ModelRef) -> Observed:
    class Silent:
        async def report(self, ip: str, uid: str) -> Any:
            raise AssertionError("there are no workers")

    class NoKeys:
        def public_keys(self) -> dict[str, str]:
            return {}

    async def scene(cluster: KubernetesCluster) -> Observed:
        raw = {"metadata": {"namespace": "ml", "name": model.name, "uid": model.uid}, "spec": RAW}
        children = await cluster.children(("ml", model.name))
        return await observe(raw, children, workers=Silent(), signer=NoKeys(), default_image="w", now=1.0)  # type: ignore[arg-type]

    found: Observed = on(server, scene)
    return found


def with_pod(server: FakeApiServer, job: Json, message: str, phase: str = "Failed", code: int = 42) -> None:
    labels = {**job["spec"]["template"]["metadata"]["labels"], "batch.kubernetes.io/job-name": job["metadata"]["name"]}
    server.put(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "namespace": "ml",
                "name": f"{job['metadata']['name']}-x",
                "labels": labels,
                "ownerReferences": [{"uid": job["metadata"]["uid"], "kind": "Job", "name": "j", "controller": True}],
            },
            "status": {
                "phase": phase,
                "containerStatuses": [{"state": {"terminated": {"exitCode": code, "message": message}}}],
            },
        }
    )


def test_two_models_that_ask_for_one_engine_wait_for_one_job(api_server: FakeApiServer) -> None:
    job = asked_by(api_server, ONE, TWO, TWO, ONE)
    assert owner_uids(job) == (ONE.uid, TWO.uid)
    assert [o.get("controller", False) for o in job["metadata"]["ownerReferences"]] == [True, False]
    assert [(j.state, j.made_by) for j in observed(api_server, ONE).jobs] == [(JobState.RUNNING, "one")]
    assert [j.made_by for j in observed(api_server, TWO).jobs] == ["one"]
    assert [j.name for j in observed(api_server, TWO).jobs] == [job["metadata"]["name"]]


def test_two_that_ask_at_the_same_moment_end_with_one_job_of_both(api_server: FakeApiServer) -> None:
    async def until_done(cluster: KubernetesCluster, model: ModelRef) -> None:
        while True:
            try:
                return await cluster.create_job(build_job(model))
            except Conflict:
                continue

    models = [ModelRef("ml", f"m{n}", f"uid-{n}") for n in range(6)]

    async def scene(cluster: KubernetesCluster) -> None:
        await asyncio.gather(*(until_done(cluster, m) for m in models))

    on(api_server, scene)
    (job,) = api_server.all("jobs")
    assert set(owner_uids(job)) == {m.uid for m in models}


def test_the_answer_reaches_who_did_not_make_the_job(api_server: FakeApiServer) -> None:
    job = asked_by(api_server, ONE, TWO)
    with_pod(api_server, job, '{"schema":"trtmodel.io/result/v1","reason":"ModelInvalid","message":"node 7"}')
    for model in (ONE, TWO):
        (seen,) = observed(api_server, model).jobs
        assert (seen.state, seen.result and seen.result.message) == (JobState.FAILED, "node 7")


def test_who_needs_it_no_more_leaves_it_to_the_others_and_the_last_removes_it(api_server: FakeApiServer) -> None:
    name = asked_by(api_server, ONE, TWO)["metadata"]["name"]
    on(api_server, lambda c: c.delete_job(("ml", "one"), name))
    (job,) = api_server.all("jobs")
    assert owner_uids(job) == (TWO.uid,)  # the garbage collector keeps it when `one` is deleted
    assert observed(api_server, ONE).jobs == ()
    assert [j.name for j in observed(api_server, TWO).jobs] == [name]
    on(api_server, lambda c: c.delete_job(("ml", "two"), name))
    assert api_server.all("jobs") == []


def test_a_job_that_was_joined_while_it_was_being_removed_stays(api_server: FakeApiServer) -> None:
    name = asked_by(api_server, ONE)["metadata"]["name"]
    joined = []

    def fault(seen: Seen) -> None:
        if seen.method == "DELETE" and not joined:
            joined.append(True)
            held = api_server.get("jobs", "ml", name)
            assert held is not None
            held["metadata"]["ownerReferences"].append({"kind": "TRTModel", "name": "two", "uid": TWO.uid})
            key = next(k for k in api_server._objects if k[1] == "jobs")
            held["metadata"]["resourceVersion"] = "later"
            api_server._objects[key] = held

    api_server.fault = fault
    with pytest.raises(Conflict):
        on(api_server, lambda c: c.delete_job(("ml", "one"), name))
    api_server.fault = None
    on(api_server, lambda c: c.delete_job(("ml", "one"), name))
    assert [owner_uids(j) for j in api_server.all("jobs")] == [(TWO.uid,)]


@pytest.mark.parametrize(
    ("reason", "left"), [("BackoffLimitExceeded", 0), ("DeadlineExceeded", 0), ("PodFailurePolicy", 1)]
)
def test_what_failed_by_chance_for_another_one_is_made_anew_and_a_rejection_is_shared(
    api_server: FakeApiServer, reason: str, left: int
) -> None:
    job = asked_by(api_server, ONE)
    job["status"] = {"conditions": [{"type": "Failed", "status": "True", "reason": reason}]}
    api_server.put(job)

    async def scene(cluster: KubernetesCluster) -> None:
        await cluster.create_job(build_job(TWO))

    if left:
        on(api_server, scene)
        assert owner_uids(api_server.all("jobs")[0]) == (ONE.uid, TWO.uid)
        return
    with pytest.raises(Conflict):
        on(api_server, scene)
    on(api_server, scene)
    assert owner_uids(api_server.all("jobs")[0]) == (TWO.uid,)


@pytest.mark.parametrize("kind", ["build", "resolve"])
def test_a_job_that_is_being_deleted_is_not_joined_and_made_anew_when_it_is_gone(
    api_server: FakeApiServer, kind: str
) -> None:
    job = asked_by(api_server, ONE)
    job["metadata"]["deletionTimestamp"] = "2026-11-30T00:00:00Z"
    job["metadata"]["labels"]["trtmodel.io/kind"] = kind
    api_server.put(job)
    with pytest.raises(Conflict, match="it is being deleted, and is made anew when it is gone"):
        on(api_server, lambda c: c.create_job(build_job(TWO)))
    api_server.delete("jobs", "ml", job["metadata"]["name"])
    on(api_server, lambda c: c.create_job(build_job(TWO)))
    assert owner_uids(api_server.all("jobs")[0]) == (TWO.uid,)


def test_a_failure_to_join_is_told(api_server: FakeApiServer) -> None:
    asked_by(api_server, ONE)
    api_server.fault = lambda seen: refusal(403, "no patch") if seen.method == "PATCH" else None
    with pytest.raises(ClusterError, match="no patch"):
        on(api_server, lambda c: c.create_job(build_job(TWO)))


def test_an_event_of_the_job_wakes_everybody_who_waits_for_it(api_server: FakeApiServer) -> None:
    assert owners(asked_by(api_server, ONE, TWO)["metadata"]["labels"]) == {"one", "two"}
    assert owners({"trtmodel.io/model": "one"}) == {"one"}
    assert owners({}) == set()


def test_a_suspended_job_begins_and_one_of_nobody_goes(api_server: FakeApiServer) -> None:
    job = build_job(ONE)
    job["spec"]["suspend"] = True
    api_server.put(job)

    async def scene(cluster: KubernetesCluster) -> None:
        (held,) = await cluster.unfinished_jobs()
        await cluster.resume_job(held)
        with pytest.raises(Conflict):
            await cluster.resume_job(held)  # it changed since
        (held,) = await cluster.unfinished_jobs()
        assert held["spec"]["suspend"] is False
        assert held["spec"]["backoffLimit"] == 2
        await cluster.remove_job(held)

    on(api_server, scene)
    assert api_server.all("jobs") == []


def test_the_workload_of_a_target_goes_with_its_pointer(api_server: FakeApiServer) -> None:
    for kind, version in (("Deployment", "apps/v1"), ("ConfigMap", "v1")):
        for name in ("magika-l4-1", "magika-a10-1"):
            api_server.put({"apiVersion": version, "kind": kind, "metadata": {"namespace": "ml", "name": name}})

    async def scene(cluster: KubernetesCluster) -> None:
        await cluster.delete_workload(("ml", MODEL.name), "magika-l4-1")
        await cluster.delete_workload(("ml", MODEL.name), "magika-l4-1")

    on(api_server, scene)
    for plural in ("deployments", "configmaps"):
        assert [o["metadata"]["name"] for o in api_server.all(plural)] == ["magika-a10-1"]


# ---------------------------------------------------------------------------------------------------------------
# The whole operator: two models that are applied at once
# ---------------------------------------------------------------------------------------------------------------


def raw_model(model: ModelRef) -> Json:
    meta = {"namespace": "ml", "name": model.name, "uid": model.uid, "generation": 1}
    return {"apiVersion": "trtmodel.io/v1alpha1", "kind": "TRTModel", "metadata": meta, "spec": RAW}


class Operator:
    """Passes of the real reconciler over the API server. There are no workers."""

    def __init__(self, server: FakeApiServer) -> None:
        self.server = server

    def passes(self, *models: ModelRef, times: int = 6) -> None:
        async def one(reconciler: Reconciler, model: ModelRef) -> None:
            with contextlib.suppress(Conflict):  # the controller comes back
                await reconciler.reconcile(("ml", model.name))

        async def scene(cluster: KubernetesCluster) -> None:
            signer = Ed25519Signer(Keys.made())
            clock = SystemClock()
            workers = HttpWorkers(signer, clock, lambda _: None)
            reconciler = Reconciler(cluster, workers, signer, clock, OperatorMetrics(), "worker:1")
            for _ in range(times):
                await asyncio.gather(*(one(reconciler, m) for m in models))
            await workers.close()

        on(self.server, scene)

    def ends(self, kind: str, result: JobResult) -> int:
        """The Jobs of this kind end well; how many there were."""
        jobs = [j for j in self.server.all("jobs") if j["metadata"]["labels"]["trtmodel.io/kind"] == kind]
        for job in jobs:
            job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
            self.server.put(job)
            with_pod(self.server, job, dumps(result).decode(), phase="Succeeded", code=0)
        return len(jobs)

    def candidate(self, model: ModelRef) -> str:
        found = self.server.get("trtmodels", "ml", model.name)
        assert found is not None
        return str((found["status"]["rollout"].get("candidate") or {}).get("revision", ""))


def test_two_models_with_one_recipe_applied_at_once_are_one_build(api_server: FakeApiServer) -> None:
    operator = Operator(api_server)
    for model in (ONE, TWO):
        api_server.put(raw_model(model))
    operator.passes(ONE, TWO)
    assert operator.ends("resolve", resolve_result(B)) == 2
    operator.passes(ONE, TWO)
    assert operator.ends("build", build_result(B)) == 1
    operator.passes(ONE, TWO)
    assert (operator.candidate(ONE), operator.candidate(TWO)) == (B, B)
    assert len(api_server.all("jobs")) == 3


def test_one_of_them_is_deleted_while_the_other_waits(api_server: FakeApiServer) -> None:
    operator = Operator(api_server)
    for model in (ONE, TWO):
        api_server.put(raw_model(model))
    operator.passes(ONE, TWO)
    operator.ends("resolve", resolve_result(B))
    operator.passes(ONE, TWO)
    (job,) = [j for j in api_server.all("jobs") if j["metadata"]["labels"]["trtmodel.io/kind"] == "build"]
    gone, left = (ONE, TWO) if job["metadata"]["labels"]["trtmodel.io/model"] == "one" else (TWO, ONE)
    api_server.delete("trtmodels", "ml", gone.name)
    job["metadata"]["ownerReferences"] = [o for o in job["metadata"]["ownerReferences"] if o["uid"] != gone.uid]
    assert job["metadata"]["ownerReferences"]  # so the garbage collector keeps it
    api_server.put(job)
    operator.passes(left)
    assert operator.ends("build", build_result(B)) == 1
    operator.passes(left)
    assert operator.candidate(left) == B


def test_a_cache_hit_makes_no_build_job_in_the_cluster(api_server: FakeApiServer) -> None:
    operator = Operator(api_server)
    api_server.put(raw_model(ONE))
    operator.passes(ONE)
    operator.ends("resolve", resolve_result(B, found(B)))
    operator.passes(ONE)
    assert operator.candidate(ONE) == B
    assert [j["metadata"]["labels"]["trtmodel.io/kind"] for j in api_server.all("jobs")] == ["resolve"]
    assert len(api_server.all("deployments")) == 1


def test_only_the_replicas_of_a_workload_are_written_and_the_next_apply_has_all_of_it(
    api_server: FakeApiServer,
) -> None:
    def deployment(image: str, replicas: int) -> Json:
        metadata = {"namespace": "ml", "name": "magika-l4-1"}
        spec = {"replicas": replicas, "template": {"image": image, "args": ["serve"]}}
        return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}

    def held() -> Json:
        (found,) = api_server.all("deployments")
        return dict(found["spec"])

    async def scene(cluster: KubernetesCluster) -> None:
        with pytest.raises(Conflict):
            await cluster.scale_workload(("ml", MODEL.name), "magika-l4-1", 5)  # it is gone
        await cluster.apply(deployment("worker:1", 2))
        await cluster.scale_workload(("ml", MODEL.name), "magika-l4-1", 5)
        assert held() == deployment("worker:1", 5)["spec"]
        await cluster.apply(deployment("worker:2", 3))
        assert held() == deployment("worker:2", 3)["spec"]

    on(api_server, scene)
