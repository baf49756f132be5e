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
GONE_SECONDS = 60


@pytest.fixture
def world(world_of: Callable[[str], World], cluster: Cluster, operator: Operator) -> Iterator[World]:
    """The namespace is made again afterwards: the operator has a Role in it."""
    yield world_of(NAMESPACE)
    if not cluster.kubectl("get", "namespace", NAMESPACE, "--ignore-not-found"):
        cluster.kubectl("create", "namespace", NAMESPACE)
        make_secrets(cluster, NAMESPACE)
    operator.install()


def serving_and_building(world: World, endpoint: str) -> None:
    """One model that serves, one in the middle of its Job, one that waits for a node."""
    lost: Json = {"nodeSelector": {"e2e": "nobody"}, "resources": models.SMALL}
    world.apply(models.tiny("serves", endpoint), models.tiny("waits", endpoint, build=lost))
    world.wait_ready("serves", 90)
    world.apply(models.tiny("begins", endpoint, source={"uri": f"s3://{models.MODELS}/tiny/b.onnx"}))
    world.wait("begins", "its Job runs", lambda m: bool(world.jobs("begins")), 30)
    world.wait_condition("waits", "Progressing", "False", "Unschedulable", 30)


def delete_namespace(cluster: Cluster) -> float:
    """Seconds until it is gone."""
    began = time.monotonic()
    cluster.kubectl("delete", "namespace", NAMESPACE, "--wait", f"--timeout={GONE_SECONDS}s", seconds=GONE_SECONDS + 10)
    return time.monotonic() - began


def test_a_namespace_with_models_goes_without_an_operator(
    world: World, cluster: Cluster, operator: Operator, endpoint: str
) -> None:
    serving_and_building(world, endpoint)
    operator.stop()
    took = delete_namespace(cluster)
    assert took < GONE_SECONDS
    print(f"\ngone after {took:.1f} s")


def test_a_namespace_with_models_goes_while_the_operator_runs_and_it_looks_after_the_others(
    world: World, world_of: Callable[[str], World], cluster: Cluster, operator: Operator, endpoint: str
) -> None:
    serving_and_building(world, endpoint)
    delete_namespace(cluster)
    other = world_of("e2e-first")
    other.apply(models.tiny("after", endpoint))
    other.wait_ready("after", 90)
    other.kubectl("delete", "trtmodel/after", "--timeout=30s")
