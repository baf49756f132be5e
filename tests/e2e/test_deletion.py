"""Nothing that the operator does, or does not do any more, keeps a namespace from going."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from . import models
from .cluster import Cluster, Json
from .conftest import make_secrets
from .install import Operator
from .world import World

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

NAMESPACE = "e2e-gone"
GONE_SECONDS = 60  # the namespace controller looks again after half of the longest grace period of a pod: 30 s


@pytest.fixture
def world(world_of: Callable[[str], World], cluster: Cluster, operator: Operator) -> Iterator[World]:
    """The namespace is made again afterwards: the operator has a Role in it."""
    yield world_of(NAMESPACE)
    if not cluster.kubectl("get", "namespace", NAMESPACE, "--ignore-not-found"):
        cluster.kubectl("create", "namespace", NAMESPACE)
        make_secrets(cluster, NAMESPACE)
    operator.install()


def in_the_making(world: World, endpoint: str) -> None:
    """One model that waits for a node, and one in the middle of its Job."""
    lost: Json = {"nodeSelector": {"e2e": "nobody"}, "resources": models.SMALL}
    world.apply(models.tiny("waits", endpoint, build=lost))
    world.wait_condition("waits", "Progressing", "False", "Unschedulable", 30)
    world.apply(models.tiny("begins", endpoint, source={"uri": f"s3://{models.MODELS}/tiny/b.onnx"}))
    world.wait("begins", "its Job runs", lambda m: bool(world.jobs("begins")), 30)


def delete_namespace(cluster: Cluster) -> float:
    """Seconds until it is gone."""
    began = time.monotonic()
    cluster.kubectl("delete", "namespace", NAMESPACE, "--wait", f"--timeout={GONE_SECONDS}s", seconds=GONE_SECONDS + 10)
    return time.monotonic() - began


@pytest.mark.long
def test_a_namespace_with_models_goes_without_an_operator(
    world: World, cluster: Cluster, operator: Operator, endpoint: str
) -> None:
    world.apply(models.tiny("serves", endpoint))
    world.wait_ready("serves", 90)
    in_the_making(world, endpoint)
    operator.stop()
    assert delete_namespace(cluster) < GONE_SECONDS


@pytest.mark.long
def test_a_namespace_with_models_goes_while_the_operator_runs_and_it_looks_after_the_others(
    world: World, world_of: Callable[[str], World], cluster: Cluster, operator: Operator, endpoint: str
) -> None:
    in_the_making(world, endpoint)
    # Its artifacts cannot be removed any more, since no Job can be made: it holds up nothing all the same.
    world.apply(models.tiny("held", endpoint, deletionPolicy="Delete"))
    world.wait("held", "a finalizer holds it", lambda m: bool(m["metadata"].get("finalizers")), 30)
    assert delete_namespace(cluster) < GONE_SECONDS
    other = world_of("e2e-bad")
    other.apply(models.tiny("after", endpoint))
    other.wait_ready("after", 90)
    other.kubectl("delete", "trtmodel/after", "--timeout=30s")
