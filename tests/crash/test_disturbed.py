"""A good update ends promoted, whatever is done to its workers or its operator, and whenever. What dies of the
candidate takes it back.

Each disturbance strikes once, at every pass of the rollout in turn.
"""

from __future__ import annotations

import asyncio
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
from test_crash import MOST_PASSES, SCENARIOS, SOURCES, SPEC, Run, check_always, outcome
from trtmodel_operator.ports import Conflict
from trtmodel_operator.reconcile import Reconciler
from world import KEY, World


def on(world: World, candidate: bool) -> list[str]:
    return [w.uid for w in world.workers.values() if bool(w.routes.candidate) is candidate]


def kill_a_member(world: World) -> None:
    for uid in on(world, True)[:1]:
        world.kill_pod(uid)


def kill_a_stable_worker(world: World) -> None:
    for uid in on(world, False)[:1]:
        world.kill_pod(uid)


def restart_a_stable_container(world: World) -> None:
    step = world.rollout.get("step")
    told = set(step["told"]) if step else set()
    if told:
        return  # in the last preparation every worker has the candidate: its death counts against it
    for uid in on(world, False)[:1]:
        world.kill_container(uid)


def stay_away(world: World) -> None:
    """The operator is gone for ten minutes, twice the candidate's time to live in the workers."""
    for _ in range(60):
        world.tick(10.0)


def cut_a_worker_off(world: World) -> None:
    for worker in list(world.workers.values())[-1:]:
        worker.reachable = False


def reconnect(world: World) -> None:
    for worker in world.workers.values():
        worker.reachable = True


DISTURBANCES: dict[str, Callable[[World], None]] = {
    "a member's pod is deleted": kill_a_member,
    "a stable worker's pod is deleted": kill_a_stable_worker,
    "a stable worker's container restarts": restart_a_stable_container,
    "the operator is away": stay_away,
    "a worker cannot be reached for a minute": cut_a_worker_off,
}


def good_update() -> tuple[list[bytes], dict[str, Any]]:
    """The world at the beginning of every pass of a good update, after it was applied; and how it ends."""
    run, worlds = Run(World(SPEC, SOURCES), list(SCENARIOS["good update"])), []
    while not run.over():
        if not run.script:
            worlds.append(pickle.dumps(run.world))
        run.step()
    return worlds, essence(run.world)


def essence(world: World) -> dict[str, Any]:
    """The end, without what is another pod's by right."""
    return {k: v for k, v in outcome(world).items() if k != "held"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", DISTURBANCES)
def test_a_good_update_ends_the_same_whatever_is_done_to_it_and_when(name: str) -> None:
    worlds, expected = good_update()
    for i, world in enumerate(worlds):
        run = Run(pickle.loads(world), [])
        DISTURBANCES[name](run.world)
        if name.startswith("a worker cannot"):
            for _ in range(12):
                run.step()
            reconnect(run.world)
        run.to_the_end()
        check_always(run.world)
        assert essence(run.world) == expected, f"at pass {i}"


def test_a_member_whose_container_dies_takes_the_candidate_back() -> None:
    worlds, _ = good_update()
    tried = 0
    for world in worlds:
        run = Run(pickle.loads(world), [])
        for uid in on(run.world, True)[:1]:
            run.world.kill_container(uid)
            run.to_the_end()
            assert run.world.rollout["rejected"][0]["reason"] == "WorkerDied"
            assert run.world.on_candidate() == 0
            assert run.world.condition("Available")[0] == "True"
            tried += 1
    assert tried > 5


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", ["first rollout", "good update", "slow update", "a to b to a"])
@pytest.mark.parametrize("seed", range(4))
def test_two_operators_at_once_end_as_one_alone_would(scenario: str, seed: int) -> None:
    """A stale leader that goes on for a while: preconditions stop its memory, fences its signals, names its Jobs."""
    alone = Run(World(SPEC, SOURCES), list(SCENARIOS[scenario]))
    alone.to_the_end()
    both = Run(World(SPEC, SOURCES), list(SCENARIOS[scenario]))
    world = both.world
    world.interleave = random.Random(seed)

    async def one_pass() -> float | None:
        operator = Reconciler(world, world, world, world, world, "worker:1")
        try:
            return await operator.reconcile(KEY)
        except Conflict:
            return 1.0

    async def passes() -> list[float | None]:
        return list(await asyncio.gather(one_pass(), one_pass()))

    for _ in range(MOST_PASSES):
        if both.over():
            break
        if both.script and both.script[0][0](world):
            both.script.pop(0)[1](world)
        wanted = [w for w in asyncio.run(passes()) if w is not None]
        both.idle = 0 if wanted else both.idle + 1
        world.tick(max(1.0, min([*wanted, 5.0])))
    check_always(world)
    assert world.conflicts > 3, "they did not meet"
    assert essence(world) == essence(alone.world)
