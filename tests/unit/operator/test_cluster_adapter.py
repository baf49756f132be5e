from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fakes.api_server import FakeApiServer, Seen, refusal
from kubernetes.aio.client import Configuration
from trtmodel_operator.adapters.api import Api, TokenBucket, resource_of
from trtmodel_operator.adapters.cluster import KubernetesCluster
from trtmodel_operator.ports import ClusterError, Conflict, Json

KEY = ("ml", "magika")
LABELS = {"trtmodel.io/model": "magika", "model.trtmodel.io/magika": ""}
calls: list[tuple[str, str, str]] = []


@pytest.fixture(autouse=True)
def _forget_calls() -> None:
    calls.clear()


def on(server: FakeApiServer, scene: Callable[[KubernetesCluster], Awaitable[Any]], **options: Any) -> Any:
    async def go() -> Any:
        settings = Configuration(host=server.url)
        options.setdefault("timeout", 5.0)
        api = Api(settings, on_call=lambda *call: calls.append(call), **options)
        try:
            cluster = KubernetesCluster(api, instance="operator-1")
            result = await scene(cluster)
            await cluster.close()
            return result
        finally:
            await api.close()

    return asyncio.run(go())


def model(name: str = "magika", uid: str = "uid-1", **more: Any) -> Json:
    metadata = {"namespace": "ml", "name": name, "uid": uid}
    return {"apiVersion": "trtmodel.io/v1alpha1", "kind": "TRTModel", "metadata": metadata, "spec": {"a": 1}, **more}


def job(name: str = "magika-resolve-1", uid: str = "uid-1") -> Json:
    owner = {"apiVersion": "trtmodel.io/v1alpha1", "kind": "TRTModel", "name": "magika", "uid": uid, "controller": True}
    metadata = {"namespace": "ml", "name": name, "labels": dict(LABELS), "ownerReferences": [owner]}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {"parallelism": 1}}


def test_a_missing_model_is_none_and_an_existing_one_is_given_as_it_is(api_server: FakeApiServer) -> None:
    assert on(api_server, lambda c: c.get_model(KEY)) is None
    api_server.put(model(spec={"unknown": {"field": [1, None]}}))
    found = on(api_server, lambda c: c.get_model(KEY))
    assert found["spec"] == {"unknown": {"field": [1, None]}}


def test_the_crd_is_required(api_server: FakeApiServer) -> None:
    on(api_server, lambda c: c.require_crd())
    api_server.kinds["trtmodel.io", "v1alpha1"] = {}
    with pytest.raises(ClusterError, match="the CRD of TRTModels is not installed"):
        on(api_server, lambda c: c.require_crd())


def test_all_models_are_listed_over_many_pages_with_their_versions(api_server: FakeApiServer, monkeypatch: Any) -> None:
    monkeypatch.setattr("trtmodel_operator.adapters.api.PAGE", 3)
    for n in range(8):
        api_server.put(model(f"m{n}", uid=f"uid-{n}"))
    listed = on(api_server, lambda c: c.list_models())
    assert set(listed) == {("ml", f"m{n}") for n in range(8)}
    newest = api_server.get("trtmodels", "ml", "m7")
    assert newest is not None
    assert listed["ml", "m7"] == newest["metadata"]["resourceVersion"]


def test_every_model_is_shown_and_none_is_kept(api_server: FakeApiServer, monkeypatch: Any) -> None:
    monkeypatch.setattr("trtmodel_operator.adapters.api.PAGE", 3)
    for n in range(8):
        api_server.put(model(f"m{n}", uid=f"uid-{n}"))
    shown: list[str] = []
    assert on(api_server, lambda c: c.models(lambda m: shown.append(m["metadata"]["name"]))) is None
    assert shown == [f"m{n}" for n in range(8)]


def test_a_list_whose_continuation_expired_is_read_again_from_its_start(
    api_server: FakeApiServer, monkeypatch: Any
) -> None:
    monkeypatch.setattr("trtmodel_operator.adapters.api.PAGE", 3)
    for n in range(5):
        api_server.put(model(f"m{n}", uid=f"uid-{n}"))
    expired = iter([True])

    def fault(seen: Seen) -> Any:
        return refusal(410, "expired") if seen.query.get("continue") and next(expired, False) else None

    api_server.fault = fault
    assert len(on(api_server, lambda c: c.list_models())) == 5


def test_only_the_given_namespaces_are_listed(api_server: FakeApiServer) -> None:
    for namespace in ("ml", "other", "third"):
        obj = model(uid=f"uid-{namespace}")
        obj["metadata"]["namespace"] = namespace
        api_server.put(obj)

    async def scene(_: KubernetesCluster) -> Any:
        api = Api(Configuration(host=api_server.url))
        try:
            return await KubernetesCluster(api, ["ml", "third"]).list_models()
        finally:
            await api.close()

    assert set(on(api_server, scene)) == {("ml", "magika"), ("third", "magika")}


def test_children_are_listed_by_label_in_their_own_namespace_with_their_kinds(api_server: FakeApiServer) -> None:
    api_server.put(job())
    other = job("other-1")
    other["metadata"]["labels"] = {"trtmodel.io/model": "other", "model.trtmodel.io/other": ""}
    api_server.put(other)
    found = on(api_server, lambda c: c.children(KEY))
    assert set(found) == {"Job", "Pod", "Deployment", "ConfigMap", "Service"}
    assert [(j["kind"], j["metadata"]["name"]) for j in found["Job"]] == [("Job", "magika-resolve-1")]
    lists = [s for s in api_server.seen if s.method == "GET"]
    asked = {s.path.rpartition("/")[2]: s.query["labelSelector"] for s in lists}
    assert asked.pop("jobs") == "model.trtmodel.io/magika"
    assert set(asked.values()) == {"trtmodel.io/model=magika"}
    assert all("/namespaces/ml/" in s.path for s in lists)


def test_memory_is_written_under_its_own_manager_and_leaves_the_rest_of_status_alone(api_server: FakeApiServer) -> None:
    version = api_server.put(model())["metadata"]["resourceVersion"]

    async def scene(cluster: KubernetesCluster) -> str:
        await cluster.write_status(KEY, {"phase": "Resolving", "conditions": [{"type": "Ready"}]})
        current = await cluster.get_model(KEY)
        assert current is not None
        return await cluster.write_memory(KEY, current["metadata"]["resourceVersion"], {"sequence": 1})

    written = on(api_server, scene)
    stored = api_server.get("trtmodels", "ml", "magika")
    assert stored is not None
    assert written == stored["metadata"]["resourceVersion"] != version
    assert stored["status"] == {
        "phase": "Resolving",
        "conditions": [{"type": "Ready"}],
        "rollout": {"sequence": 1},
    }
    assert stored["spec"] == {"a": 1}
    assert stored["metadata"]["managedFields"] == [
        {"manager": "trtmodel-status", "operation": "Apply", "subresource": "status"},
        {"manager": "trtmodel-rollout", "operation": "Apply", "subresource": "status"},
    ]
    assert "finalizers" not in stored["metadata"]


def test_a_stale_memory_is_a_conflict_and_changes_nothing(api_server: FakeApiServer) -> None:
    version = api_server.put(model())["metadata"]["resourceVersion"]
    api_server.put(model(spec={"a": 2}))
    with pytest.raises(Conflict):
        on(api_server, lambda c: c.write_memory(KEY, version, {"sequence": 1}))
    stored = api_server.get("trtmodels", "ml", "magika")
    assert stored is not None
    assert "status" not in stored


def test_status_of_a_model_that_is_gone_is_a_conflict(api_server: FakeApiServer) -> None:
    with pytest.raises(Conflict):
        on(api_server, lambda c: c.write_status(KEY, {"phase": "Serving"}))


def test_a_job_is_created_once_however_often_it_is_asked_for(api_server: FakeApiServer) -> None:
    async def scene(cluster: KubernetesCluster) -> None:
        await cluster.create_job(job())
        await cluster.create_job(job())

    on(api_server, scene)
    assert len(api_server.all("jobs")) == 1


def test_a_namesake_of_a_deleted_model_does_not_pass_for_its_job(api_server: FakeApiServer) -> None:
    api_server.put(job(uid="uid-of-the-deleted"))
    with pytest.raises(ClusterError, match=r"belongs to a deleted TRTModel .* garbage collector"):
        on(api_server, lambda c: c.create_job(job()))


def test_a_job_is_deleted_with_its_pods_and_a_missing_one_is_success(api_server: FakeApiServer) -> None:
    api_server.put(job())

    async def scene(cluster: KubernetesCluster) -> None:
        await cluster.delete_job(KEY, "magika-resolve-1")
        await cluster.delete_job(KEY, "magika-resolve-1")

    on(api_server, scene)
    assert api_server.all("jobs") == []
    (removal,) = api_server.writes()
    assert removal.body["propagationPolicy"] == "Background"
    assert removal.body["preconditions"].keys() == {"resourceVersion"}


def test_children_are_applied_and_what_is_no_longer_in_the_manifest_goes(api_server: FakeApiServer) -> None:
    manifest = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"namespace": "ml", "name": "magika-keys"},
        "data": {"a": "1", "b": "2"},
    }

    async def scene(cluster: KubernetesCluster) -> None:
        await cluster.apply(manifest)
        await cluster.apply({**manifest, "data": {"a": "1"}})

    on(api_server, scene)
    (stored,) = api_server.all("configmaps")
    assert stored["data"] == {"a": "1"}
    assert stored["metadata"]["managedFields"] == [{"manager": "trtmodel-children", "operation": "Apply"}]
    assert [s.query.get("force") for s in api_server.writes()] == [None, "false", None, "true"], "a look before each"


def test_an_event_is_posted_as_events_k8s_io_wants_it(api_server: FakeApiServer) -> None:
    regarding = api_server.put(model())
    on(api_server, lambda c: c.post_event(regarding, "GateFailed", "é" * 2000, warning=True))
    (event,) = api_server.all("events")
    assert event["apiVersion"] == "events.k8s.io/v1"
    assert (event["type"], event["reason"], event["action"]) == ("Warning", "GateFailed", "Reconcile")
    assert (event["reportingController"], event["reportingInstance"]) == ("trtmodel.io/operator", "operator-1")
    assert event["regarding"]["uid"] == "uid-1"
    assert len(event["note"].encode()) <= 1024
    assert event["eventTime"].endswith("Z")


def test_nobody_waits_for_events_and_more_than_can_wait_are_dropped(
    api_server: FakeApiServer, monkeypatch: Any
) -> None:
    monkeypatch.setattr("trtmodel_operator.adapters.events.WAITING_MOST", 3)
    monkeypatch.setattr("trtmodel_operator.adapters.events.DRAIN_SECONDS", 0.3)
    regarding = api_server.put(model())
    api_server.fault = lambda seen: asyncio.sleep(60) if seen.method == "POST" else None

    async def scene(cluster: KubernetesCluster) -> None:
        async with asyncio.timeout(0.2):
            for n in range(10):
                await cluster.post_event(regarding, f"Reason{n}", "said", warning=False)

    on(api_server, scene)
    assert [s.body["reason"] for s in api_server.writes()] == ["Reason0"]


def test_an_event_that_cannot_be_posted_fails_nothing(api_server: FakeApiServer) -> None:
    api_server.fault = lambda seen: refusal(403) if seen.method == "POST" else None
    on(api_server, lambda c: c.post_event(model(), "Promoted", "done", warning=False))
    assert api_server.all("events") == []


def test_errors_name_verb_resource_and_cause_and_carry_the_servers_wish_to_wait(api_server: FakeApiServer) -> None:
    api_server.fault = lambda _: refusal(429, "too many requests", Retry_After="7")
    with pytest.raises(ClusterError) as caught:
        on(api_server, lambda c: c.get_model(KEY))
    assert str(caught.value) == (
        "cannot GET /apis/trtmodel.io/v1alpha1/namespaces/ml/trtmodels/magika: too many requests"
    )
    assert (caught.value.status, caught.value.retry_after) == (429, 7)
    assert calls == [("GET", "trtmodels", "429")]


def test_all_calls_wait_when_the_server_says_429_to_one_and_the_lease_does_not(api_server: FakeApiServer) -> None:
    answers = iter([refusal(429, Retry_After="1")])
    api_server.fault = lambda _: next(answers, None)
    lease = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"namespace": "ops", "name": "trtmodel-operator"},
        "spec": {},
    }

    async def scene(cluster: KubernetesCluster) -> None:
        with pytest.raises(ClusterError):
            await cluster.get_model(KEY)
        calls = asyncio.gather(*(cluster.get_model(KEY) for _ in range(20)), cluster.list_models())
        await asyncio.sleep(0)
        await cluster.replace_lease(await cluster.create_lease(lease))
        assert await cluster.get_lease("ops", "trtmodel-operator")
        await calls

    on(api_server, scene)
    leases = [i for i, s in enumerate(api_server.seen) if "/leases" in s.path]
    assert leases == [1, 2, 3]
    assert len(api_server.seen) == 1 + 3 + 21


def test_a_server_error_without_a_status_object_is_told_as_it_is(api_server: FakeApiServer) -> None:
    from aiohttp import web

    api_server.fault = lambda _: web.Response(status=500, text="etcdserver: leader changed")
    with pytest.raises(ClusterError, match="leader changed") as caught:
        on(api_server, lambda c: c.children(KEY))
    assert caught.value.status == 500


def test_a_server_that_hangs_is_given_up_in_time(api_server: FakeApiServer) -> None:
    api_server.fault = lambda _: asyncio.sleep(60)
    with pytest.raises(ClusterError, match="no answer in time"):
        on(api_server, lambda c: c.get_model(KEY), timeout=0.2)
    assert calls == [("GET", "trtmodels", "timeout")]


def test_a_server_that_is_not_there_is_a_cluster_error(api_server: FakeApiServer) -> None:
    class Nowhere(FakeApiServer):
        url = "http://127.0.0.1:9"

    nowhere = object.__new__(Nowhere)
    with pytest.raises(ClusterError, match=r"cannot GET .*: ClientConnectorError"):
        on(nowhere, lambda c: c.get_model(KEY))
    assert calls == [("GET", "trtmodels", "error")]


def test_a_write_that_hangs_is_given_up_and_not_sent_twice(api_server: FakeApiServer) -> None:
    api_server.fault = lambda seen: asyncio.sleep(60) if seen.method == "POST" else None
    with pytest.raises(ClusterError, match="no answer in time"):
        on(api_server, lambda c: c.create_job(job()), timeout=0.2)
    assert len(api_server.writes()) == 1


def test_writes_are_limited_after_a_burst_and_keep_their_order() -> None:
    async def go() -> list[float]:
        now, waits = [0.0], []

        async def sleep(seconds: float) -> None:
            waits.append(round(seconds, 3))

        bucket = TokenBucket(20, 3, now=lambda: now[0], sleep=sleep)
        for _ in range(5):
            await bucket.take()
        now[0] = 10.0
        for _ in range(4):
            await bucket.take()
        return waits

    assert asyncio.run(go()) == [0.05, 0.1, 0.05]


def test_a_lease_does_not_wait_behind_other_writes(api_server: FakeApiServer) -> None:
    async def scene(cluster: KubernetesCluster) -> None:
        metadata = {"namespace": "ops", "name": "trtmodel-operator"}
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": {}}
        async with asyncio.timeout(2):
            await cluster.replace_lease(await cluster.create_lease(lease))

    on(api_server, scene, bucket=TokenBucket(0.0001, 0))
    assert len(api_server.all("leases")) == 1


@pytest.mark.parametrize(
    ("path", "resource"),
    [
        ("/apis/batch/v1/namespaces/ml/jobs/x", "jobs"),
        ("/apis/trtmodel.io/v1alpha1/namespaces/ml/trtmodels/x/status", "trtmodels/status"),
        ("/apis/trtmodel.io/v1alpha1/trtmodels", "trtmodels"),
        ("/api/v1/namespaces/ml/pods", "pods"),
        ("/apis/trtmodel.io/v1alpha1", ""),
    ],
)
def test_metrics_name_resources_and_no_objects(path: str, resource: str) -> None:
    assert resource_of(path) == resource


def test_who_may_lead_no_more_sends_no_write_and_still_fights_for_its_lease(api_server: FakeApiServer) -> None:
    metadata = {"namespace": "ops", "name": "trtmodel-operator"}
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": {}}
    api_server.put(model())

    async def scene(cluster: KubernetesCluster) -> None:
        cluster._api.may_write = lambda: False
        await cluster.replace_lease(await cluster.create_lease(lease))
        assert await cluster.get_model(KEY) is not None
        for write in (cluster.create_job(job()), cluster.write_status(KEY, {}), cluster.delete_workload(KEY, "x")):
            with pytest.raises(ClusterError, match="another may lead by now"):
                await write

    on(api_server, scene)
    assert {s.path.rpartition("/")[0].rpartition("/")[2] for s in api_server.writes()} == {"ops", "leases"}
