"""What has the name of a child and is somebody else's is left alone, and the TRTModel's status says so."""

from __future__ import annotations

import asyncio
import contextlib
import copy

import pytest
from decide_scene import RAW, changed_raw
from fakes.api_server import FakeApiServer, Seen
from test_shared_jobs import on, raw_model
from trtmodel_contract.identity import ModelRef
from trtmodel_operator import manifests
from trtmodel_operator import spec as specs
from trtmodel_operator.adapters.api import Api
from trtmodel_operator.adapters.children import KeptChildren
from trtmodel_operator.adapters.cluster import KubernetesCluster, owner_uids
from trtmodel_operator.adapters.signing import Ed25519Signer, Keys
from trtmodel_operator.adapters.workers import HttpWorkers
from trtmodel_operator.main import SystemClock
from trtmodel_operator.metrics import OperatorMetrics
from trtmodel_operator.model import ApplyService, Decision, Memory, Observed, Situation, Stage
from trtmodel_operator.ports import ClusterError, Conflict, Json
from trtmodel_operator.reconcile import Reconciler
from with_api import with_api

MODEL = ModelRef("ml", "magika", "uid-1")
OTHER = ModelRef("ml", "other", "uid-2")
SPEC = specs.parse(changed_raw(RAW, serving__replicas=2))
PLURALS = {"Service": "services", "ConfigMap": "configmaps", "PodDisruptionBudget": "poddisruptionbudgets"}


def child(kind: str, model: ModelRef = MODEL) -> Json:
    made = {
        "Service": lambda: manifests.service(model, SPEC),
        "ConfigMap": lambda: manifests.keys_config_map(model, {"k1": "cHVi"}),
        "PodDisruptionBudget": lambda: manifests.pod_disruption_budget(model, SPEC),
    }[kind]()
    assert made is not None
    return made


def users(kind: str) -> Json:
    """What a person made under the same name."""
    ours = child(kind)
    meta = {"namespace": "ml", "name": ours["metadata"]["name"], "labels": {"app": "magika"}}
    spec = {"type": "LoadBalancer", "selector": {"app": "magika"}}
    return {"apiVersion": ours["apiVersion"], "kind": kind, "metadata": meta, "spec": spec}


def applied(server: FakeApiServer, *children: Json) -> None:
    async def scene(cluster: KubernetesCluster) -> None:
        for one in children:
            await cluster.apply(copy.deepcopy(one))

    on(server, scene)


def the_only(server: FakeApiServer, kind: str) -> Json:
    (found,) = server.all(PLURALS[kind])
    return found


@pytest.mark.parametrize("kind", PLURALS)
def test_what_a_person_made_under_the_name_of_a_child_is_left_alone(api_server: FakeApiServer, kind: str) -> None:
    before = api_server.put(users(kind))
    with pytest.raises(ClusterError, match=f"a {kind} of this name exists and is not this TRTModel's") as caught:
        applied(api_server, child(kind))
    assert the_only(api_server, kind) == before
    assert caught.value.status == 422
    assert ("set spec.serving.service.name" in str(caught.value)) == (kind == "Service")


def test_two_models_that_name_one_service_do_not_take_it_from_each_other(api_server: FakeApiServer) -> None:
    first, second = child("Service"), child("Service", OTHER)
    second["metadata"]["name"] = first["metadata"]["name"]
    applied(api_server, first)
    for _ in range(2):
        with pytest.raises(ClusterError, match=r"is that of TRTModel magika: set spec\.serving\.service\.name"):
            applied(api_server, second)
        applied(api_server, first)
    assert owner_uids(the_only(api_server, "Service")) == (MODEL.uid,)


@pytest.mark.parametrize("kind", PLURALS)
def test_what_is_ours_is_written_again_and_what_a_hand_changed_in_it_is_taken_back(
    api_server: FakeApiServer, kind: str
) -> None:
    applied(api_server, child(kind))
    made = the_only(api_server, kind)
    made["metadata"]["labels"] = {}  # not even its label tells
    api_server.put(made)
    applied(api_server, child(kind))
    assert the_only(api_server, kind)["metadata"]["labels"] == child(kind)["metadata"]["labels"]


@pytest.mark.parametrize("left", ["without an owner", "of a deleted namesake"])
@pytest.mark.parametrize("kind", PLURALS)
def test_what_a_deleted_model_of_the_same_name_left_is_adopted(api_server: FakeApiServer, kind: str, left: str) -> None:
    applied(api_server, child(kind, ModelRef("ml", "magika", "uid-of-the-deleted")))
    if left == "without an owner":
        orphan = the_only(api_server, kind)
        orphan["metadata"]["ownerReferences"] = []
        api_server.put(orphan)
    applied(api_server, child(kind))
    assert MODEL.uid in owner_uids(the_only(api_server, kind))


def test_what_somebody_makes_between_our_look_and_our_write_stays_theirs(api_server: FakeApiServer) -> None:
    def fault(seen: Seen) -> None:
        if seen.query.get("force") == "false":
            api_server.fault = None
            theirs = users("Service")
            theirs["metadata"] |= {"uid": "theirs", "resourceVersion": "1"}
            key = ("", "services", "ml", "magika")
            api_server._objects[key] = api_server._bases[key] = theirs

    api_server.fault = fault
    with pytest.raises(Conflict):
        applied(api_server, child("Service"))
    assert the_only(api_server, "Service")["spec"] == users("Service")["spec"]


def test_what_the_watch_shows_as_ours_is_written_without_a_look(api_server: FakeApiServer) -> None:
    async def scene(api: Api) -> None:
        kept = KeptChildren(api, ())
        watching = asyncio.create_task(kept.run())
        try:
            await kept.ready()
            cluster = KubernetesCluster(api, kept=kept)
            for _ in range(3):
                await cluster.apply(child("Service"))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    with_api(api_server, scene)
    assert [s.query.get("force") for s in api_server.writes()] == [None, "false", "true", "true"]


def test_the_status_says_whose_the_service_is_and_what_to_do(api_server: FakeApiServer) -> None:
    before = api_server.put(users("Service"))
    api_server.put(raw_model(MODEL))

    def decide(_: Observed) -> Decision:
        return Decision("test", Memory(), (ApplyService(),), Situation(Stage.DEPLOYING, "Deploying", "it is made"))

    async def scene(cluster: KubernetesCluster) -> None:
        signer, clock = Ed25519Signer(Keys.made()), SystemClock()
        workers = HttpWorkers(signer, clock, lambda _: None)
        reconciler = Reconciler(cluster, workers, signer, clock, OperatorMetrics(), "worker:1", decide=decide)
        with contextlib.suppress(ClusterError):
            await reconciler.reconcile(("ml", "magika"))
        await workers.close()

    on(api_server, scene)
    assert the_only(api_server, "Service") == before
    model = api_server.get("trtmodels", "ml", "magika")
    assert model is not None
    told = [c["message"] for c in model["status"]["conditions"] if c["reason"] == "ClusterRefused"]
    assert any("set spec.serving.service.name, or remove it" in text for text in told)
