"""The collector, killed at every operation, and beside a build at every operation of either."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

import onnx_models as models
import pytest
from kill_harness import Ran, World, visible
from kill_scenarios import CLUSTER, build_task, built
from trtmodel_contract import storelayout as layout
from trtmodel_contract.identity import ModelRef
from trtmodel_contract.jobs import BuildTask, CollectTask
from trtmodel_contract.keeping import Cause, Revocation
from trtmodel_worker.builder import pins

LONG_AGO = 1_600_000_000
pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
SHARES = 2


@dataclasses.dataclass(frozen=True)
class Case:
    """`alive` is pinned. `task` builds what was made before, was collected as far as the marker, and lies there yet."""

    alive: str
    task: BuildTask
    collect: CollectTask


@pytest.fixture
def case(world: World) -> Case:
    gone = built(world)
    task = build_task(world)
    world.jobs.source = f"file://{models.linear(world.folder / 'other.onnx', seed=1)}"
    alive = built(world)
    store = world.store
    for key in list(store.objects.list(layout.pins_prefix(store.root))):
        store.objects.delete(key)
    pins.pin(store, CLUSTER, ModelRef("ml", "test", "uid-1"), [alive])
    manifest = store.get_manifest(gone)
    store.revoke(manifest.revision, manifest.load_key, gone, Revocation(Cause.COLLECTED, "a test"))
    store.objects.put(layout.blob_key(store.root, "d" * 64), b"of a Job that was killed long ago")
    store.objects.put(layout.gate_key(store.root, "e" * 64, "f" * 64, "Raw", 1, 1), b"{}")
    for path in (world.run / "bucket").rglob("*"):
        os.utime(path, (LONG_AGO, LONG_AGO))
    world.keep_as("before")
    return Case(alive, task, CollectTask("ml", world.jobs.storage, CLUSTER, delete=True, grace_seconds=3600))


def test_a_collector_that_is_killed_anywhere_removes_nothing_in_use_and_the_next_one_removes_the_rest(
    world: World, case: Case, record_property: Callable[..., None]
) -> None:
    whole = world.job("collect", case.collect)
    assert whole.result is not None
    assert whole.result.collect is not None, whole.result.message
    assert (whole.result.collect.deleted, whole.result.collect.kept) == (1, 1)
    assert [digest for _, digest, _ in world.committed()] == [case.alive]
    world.load(case.alive)
    left = sorted(world.store.objects.list(""))
    assert not [key for key in left if "d" * 64 in key or "e" * 64 in key or "/trash/" in key]
    shown = set[str]()
    for at in range(len(whole.operations)):
        world.put_back("before")
        assert world.job("collect", case.collect, at) == Ran(-9, (), None), (at, whole.operations[at])
        state = world.state()
        if state not in shown:
            world.load(case.alive)
            assert world.job("collect", case.collect).status == 0
            world.load(case.alive)
            assert sorted(world.store.objects.list("")) == left
            shown.add(state)
    record_property("killed Jobs", len(whole.operations))


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("first", ["build", "collect"])
def test_an_engine_that_is_built_again_while_its_forerunner_is_collected_stays_whole(
    world: World, case: Case, first: str, share: int, record_property: Callable[..., None]
) -> None:
    """The bytes are the same, so the collector removes blobs that the build publishes at that moment."""
    tasks = {"build": case.task, "collect": case.collect}
    second = "collect" if first == "build" else "build"
    whole = world.job(first, tasks[first])
    assert whole.status == 0, whole
    points = visible(whole.operations)[share::SHARES]
    for at in points:
        world.put_back("before")
        assert world.begin(first, tasks[first], at, first), (at, whole.operations[at])
        ended = {second: world.job(second, tasks[second], pod=second)}
        ended[first] = world.finish(first)
        where = (at, whole.operations[at])
        assert (ended["build"].status, ended["collect"].status) == (0, 0), (where, ended)
        result = ended["build"].result
        assert result is not None
        assert result.build is not None
        world.load(case.alive)
        world.load(result.build.artifact.manifest_digest)
        in_use = {digest for _, digest, revoked in world.committed() if not revoked}
        assert in_use == {case.alive, result.build.artifact.manifest_digest}, where
    record_property("races of two Jobs", len(points))
