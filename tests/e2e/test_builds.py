"""Engines are built once: found again, shared, watched in the making, and removed with the last that needs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from . import models
from .cluster import Cluster, Json, Refused
from .recorder import Recorder
from .s3 import ENGINES, MODELS, Store
from .world import CHILDREN, World, job_result, revision, until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(300)]

NAMESPACE = "e2e-builds"
ROOT = f"trtmodel/{NAMESPACE}/"
READY_SECONDS = 120
REMOVED_SECONDS = 540  # five minutes of them the collector waits: see docs/artifacts.md


@pytest.fixture(scope="module")
def world(world_of: Callable[[str], World]) -> World:
    return world_of(NAMESPACE)


def tiny_of(name: str, variant: str, endpoint: str, **spec: Any) -> Json:
    return models.tiny(name, endpoint, source={"uri": f"s3://{MODELS}/tiny/{variant}.onnx"}, **spec)


def builds(world: World, names: tuple[str, ...]) -> set[str]:
    """Build Jobs that any of these models waits for."""
    jobs = world.cluster.items(CHILDREN["Job"].format(NAMESPACE), "trtmodel.io/kind=build")
    labels = {f"model.trtmodel.io/{name}" for name in names}
    return {job["metadata"]["name"] for job in jobs if labels & set(job["metadata"]["labels"])}


def engines(store: Store, revision_: str) -> list[str]:
    """An engine exists if its manifest does; the mark of one that was taken out of use stays for a while."""
    return [key for key in store.keys(ENGINES, f"{ROOT}engines/{revision_}/") if key.endswith("/manifest.json")]


def pins(store: Store, uid: str) -> list[str]:
    return [key for key in store.keys(ENGINES, f"{ROOT}pins/") if f"/{uid}/" in key]


def is_gone(world: World, name: str) -> bool:
    try:
        world.model(name)
    except Refused as e:
        return e.status == 404
    return False


@pytest.fixture(scope="module")
def recorder(world: World) -> Iterator[Recorder]:
    """What was made in the namespace, in the order of its making."""
    found = Recorder(world, ("Job", "ConfigMap", "Deployment", "Pod"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def first(world: World, recorder: Recorder, endpoint: str) -> Json:
    """A model that serves, its engine in the bucket."""
    world.apply(tiny_of("first", "a", endpoint))
    return world.wait_ready("first", READY_SECONDS)


def test_a_second_model_of_the_same_recipe_is_served_by_what_was_built_before_and_no_builder_starts(
    world: World, recorder: Recorder, first: Json, endpoint: str
) -> None:
    known = len(recorder.order())
    began = time.monotonic()
    world.apply(tiny_of("second", "a", endpoint))
    world.wait("second", "its engine is known", lambda m: bool(revision(m, "candidate") or revision(m, "stable")), 60)
    resolved = time.monotonic() - began
    world.wait_condition("second", "Available", "True", "", READY_SECONDS)
    serves = time.monotonic() - began
    found = world.wait_ready("second", READY_SECONDS)
    print(f"\ncache hit: resolved after {resolved:.1f} s, serves after {serves:.1f} s")
    for pod in world.children("Pod", "second"):
        print(f"  {pod['metadata']['name']}: {timeline(pod)}")
    assert revision(found, "stable") == revision(first, "stable")
    assert builds(world, ("second",)) == set()
    assert found["status"]["targets"][0]["engines"] == first["status"]["targets"][0]["engines"]
    (workload,) = (d["metadata"]["name"] for d in world.children("Deployment", "second"))
    made = [f"{kind} {name}" for kind, name in recorder.order()[known:]]
    wanted = ["Job second-resolve-", "Pod second-resolve-", "ConfigMap second-keys", f"ConfigMap {workload}",
              f"Deployment {workload}", f"Pod {workload}-"]  # fmt: skip
    assert [thing for thing, start in zip(made, wanted, strict=True) if not thing.startswith(start)] == [], made


def timeline(pod: Json) -> str:
    """When what happened, as the cluster noted it (whole seconds)."""
    status = pod["status"]
    states = [s for c in status.get("containerStatuses", ()) for s in (c.get("state") or {}).values()]
    started = [s.get("startedAt", "") for s in states]
    ended = [s["finishedAt"] for s in states if "finishedAt" in s]
    ready = [
        c["lastTransitionTime"] for c in status.get("conditions", ()) if (c["type"], c["status"]) == ("Ready", "True")
    ]
    marks = {"made": [pod["metadata"]["creationTimestamp"]], "started": started, "ended": ended, "ready": ready}
    return ", ".join(f"{what} {times[0][11:19]}" for what, times in marks.items() if times)


def test_two_models_of_one_recipe_that_are_applied_at_once_wait_for_one_build(world: World, endpoint: str) -> None:
    names = ("twin-a", "twin-b")
    world.apply(*(tiny_of(name, "b", endpoint) for name in names))
    found = [world.wait_ready(name, READY_SECONDS) for name in names]
    assert revision(found[0], "stable") == revision(found[1], "stable")
    assert len(builds(world, names)) == 1, world.describe("twin-a")
    digests = {engine["digest"] for model in found for engine in model["status"]["targets"][0]["engines"]}
    assert len(digests) == 1


def test_how_far_a_build_is_stands_in_status_while_it_runs(world: World, endpoint: str) -> None:
    world.apply(models.magika("watched", endpoint, replicas=1))
    told: dict[str, str] = {}

    def ready(found: Json) -> bool:
        for target in found.get("status", {}).get("targets", ()):
            job = target.get("job") or {}
            if job.get("name", "").startswith("build-") and job.get("message"):
                told.setdefault(job["stage"], job["message"])
        return bool(revision(found, "stable"))

    world.wait("watched", "it is promoted", ready, READY_SECONDS)
    print(f"\nstages that were seen: {told}")
    assert set(told) & {"fetch", "build", "prove", "publish"}, told
    world.kubectl("delete", "trtmodel/watched", "--timeout=30s")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_artifacts_go_with_the_last_model_that_needs_them_and_stay_where_retain_is_asked_for(
    world: World, cluster: Cluster, store: Store, first: Json, endpoint: str
) -> None:
    """`goes` has an engine of its own, `shares` that of `first`."""
    world.apply(
        tiny_of("goes", "c", endpoint, deletionPolicy="Delete"),
        tiny_of("shares", "a", endpoint, deletionPolicy="Delete"),
    )
    goes, shares = world.wait_ready("goes", READY_SECONDS), world.wait_ready("shares", READY_SECONDS)
    assert all(model["metadata"]["finalizers"] == ["trtmodel.io/artifacts"] for model in (goes, shares))
    kept = engines(store, revision(first, "stable"))
    assert kept
    assert engines(store, revision(goes, "stable"))
    began = time.monotonic()
    world.kubectl("delete", "trtmodel", "goes", "shares", "--wait=false")
    world.wait_condition("goes", "Ready", "False", "RemovingArtifacts", 60)
    until("its workers are gone", 90, lambda: not world.workers("goes"), lambda: world.describe("goes"))
    until("it is gone", REMOVED_SECONDS, lambda: is_gone(world, "goes"), lambda: world.describe("goes"))
    until("the other, too", REMOVED_SECONDS, lambda: is_gone(world, "shares"), lambda: world.describe("shares"))
    print(f"\ngone after {time.monotonic() - began:.0f} s; {[said(pod) for pod in collectors(world)]}")
    assert engines(store, revision(goes, "stable")) == []
    assert pins(store, goes["metadata"]["uid"]) == []
    assert pins(store, shares["metadata"]["uid"]) == []
    assert engines(store, revision(first, "stable")) == kept
    assert not [owned for kind in ("Deployment", "ConfigMap") for owned in world.children(kind, "goes")]
    uid = first["metadata"]["uid"]
    world.kubectl("delete", "trtmodel/first", "--timeout=30s")
    assert engines(store, revision(first, "stable")) == kept
    assert pins(store, uid)


def collectors(world: World) -> list[Json]:
    return world.cluster.items(CHILDREN["Pod"].format(NAMESPACE), "trtmodel.io/kind=collect")


def said(pod: Json) -> str:
    result = job_result(pod)
    return result.message if result else "nothing"
