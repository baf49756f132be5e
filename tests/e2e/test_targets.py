"""One model on two kinds of nodes: a Job, an engine and workers for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from . import models
from .cluster import Cluster, Json
from .world import World, revision

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(400)]

NAME = "wide"
POOL = "e2e.trtmodel.io/pool"  # the label that makes the node one of the second kind
READY_SECONDS = 150


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[str]:
    name: str = cluster.items("/api/v1/nodes")[0]["metadata"]["name"]
    cluster.kubectl("label", "--overwrite", "node", name, f"{POOL}=b")
    yield name
    cluster.kubectl("label", "node", name, f"{POOL}-")


@pytest.fixture(scope="module")
def world(world_of: Callable[[str], World], node: str, endpoint: str) -> Iterator[World]:
    found = world_of("e2e-targets")
    targets: Any = [{"name": "a"}, {"name": "b", "nodeSelector": {POOL: "b"}}]
    found.apply(models.tiny(NAME, endpoint, targets=targets))
    found.wait_ready(NAME, READY_SECONDS)
    yield found
    found.kubectl("delete", f"trtmodel/{NAME}", "--ignore-not-found", "--wait=false")


def builds(world: World, name: str) -> dict[str, bool]:
    """For each target, whether the build of the revision has ended well."""
    return {
        job["metadata"]["labels"]["trtmodel.io/target"]: bool(job["status"].get("succeeded"))
        for job in world.children("Job", NAME, "kind=build")
        if job["metadata"]["name"].startswith(f"build-{name}-")
    }


def on_stable(found: Json) -> dict[str, int]:
    """How many workers of each target answer with stable."""
    return {target["name"]: target["workers"]["onStable"] for target in found["status"]["targets"]}


def test_each_target_has_a_build_an_engine_and_workers_of_its_own(world: World) -> None:
    found = world.model(NAME)
    assert builds(world, revision(found, "stable")) == {"a": True, "b": True}
    assert all(len(target["engines"]) == 1 for target in found["status"]["targets"])
    workloads = {w["metadata"]["labels"]["trtmodel.io/target"]: w for w in world.children("Deployment", NAME)}
    assert sorted(workloads) == ["a", "b"]
    assert workloads["b"]["spec"]["template"]["spec"]["nodeSelector"] == {POOL: "b"}
    assert len(world.workers(NAME)) == 2
    assert on_stable(found) == {"a": 1, "b": 1}
