"""What a Job may find in the bucket when it starts: each gives the digests of engines that must never be loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from job_harness import save_npz
from kill_harness import RANDOM, World
from trtmodel_contract.jobs import BuildTask, ResolveResult, ResolveTask
from trtmodel_contract.storelayout import blob_key
from trtmodel_worker.storage.cache import digest_of

CLUSTER = "c-1"
Scenario = Callable[[World], frozenset[str]]


def resolved(world: World, keep: tuple[str, ...] = ()) -> tuple[ResolveTask, ResolveResult]:
    task = world.jobs.resolve_task(cluster=CLUSTER, keep=keep)
    ran = world.job("resolve", task)
    assert ran.result is not None, (world.folder / "log-pod").read_text()[-3000:]
    assert ran.result.resolve is not None, ran.result.message
    return task, ran.result.resolve


def build_task(world: World) -> BuildTask:
    _, found = resolved(world)
    return dataclasses.replace(world.jobs.build_task(found), cluster=CLUSTER)


def nothing_there(_world: World) -> frozenset[str]:
    return frozenset()


def built(world: World) -> str:
    ran = world.job("build", build_task(world))
    assert ran.result is not None, (world.folder / "log-pod").read_text()[-3000:]
    assert ran.result.build is not None, ran.result.message
    return ran.result.build.artifact.manifest_digest


def engine_there(world: World) -> frozenset[str]:
    built(world)
    return frozenset()


def engine_of_another_data_set(world: World) -> frozenset[str]:
    built(world)
    world.jobs.dataset = save_npz(world.folder / "other.npz", x=RANDOM.normal(size=(20, 8)).astype("f4"))
    return frozenset()


def damaged_engine(world: World) -> frozenset[str]:
    """Of the right length, so that only its digest can tell."""
    digest = built(world)
    plan = world.path(blob_key(world.store.root, world.load(digest).plan.digest))
    data = bytearray(plan.read_bytes())
    data[len(data) // 2] ^= 1
    plan.write_bytes(data)
    return frozenset([digest])


def engine_without_its_plan(world: World) -> frozenset[str]:
    digest = built(world)
    world.path(blob_key(world.store.root, world.load(digest).plan.digest)).unlink()
    return frozenset([digest])


def still_damaged(world: World, digests: frozenset[str]) -> frozenset[str]:
    """A build that makes the very same plan again heals the blob, and the engine with it. Both are right."""
    found = set()
    for digest in digests:
        plan = world.store.get_manifest(digest).plan.digest
        path = world.path(blob_key(world.store.root, plan))
        if not path.exists() or digest_of(path)[0] != plan:
            found.add(digest)
    return frozenset(found)


SCENARIOS: tuple[Scenario, ...] = (
    nothing_there,
    engine_there,
    engine_of_another_data_set,
    damaged_engine,
    engine_without_its_plan,
)
