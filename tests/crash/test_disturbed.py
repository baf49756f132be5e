"""A good update ends promoted, whatever is done to its workers, and whenever. What dies of the candidate takes it back.

Each disturbance strikes once, at every pass of the rollout in turn.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
from scenarios import Ends, Run, begun, check_always, essence
from world import World


def on(world: World, candidate: bool) -> list[str]:
    return [w.uid for w in world.workers.values() if bool(w.routes.candidate) is candidate]


def kill_a_member(world: World) -> None:
    for uid in on(world, True)[:1]:
        world.kill_pod(uid)


def kill_a_stable_worker(world: World) -> None:
    for uid in on(world, False)[:1]:
        world.kill_pod(uid)


def kill_every_worker(world: World) -> None:
    for uid in list(world.workers):
        world.kill_pod(uid)


def restart_a_stable_container(world: World) -> None:
    step = world.rollout["step"]
    if step and step.get("restarts"):
        return  # in the last preparation every worker has the candidate: its death counts against it
    for uid in on(world, False)[:1]:
        world.kill_container(uid)


def cut_a_worker_off(world: World) -> None:
    for worker in list(world.workers.values())[-1:]:
        worker.reachable = False


def lie(world: World) -> None:
    for worker in list(world.workers.values())[-1:]:
        worker.lie = "strange"


def forget(world: World) -> None:
    if (world.model or {}).get("status"):
        world.lose_status()


def end_it(world: World) -> None:
    for worker in world.workers.values():
        worker.reachable, worker.lie = True, ""


DISTURBANCES: dict[str, Callable[[World], None]] = {
    "a member's pod is deleted": kill_a_member,
    "a stable worker's pod is deleted": kill_a_stable_worker,
    "all pods are deleted": kill_every_worker,
    "a stable worker's container restarts": restart_a_stable_container,
    "a worker cannot be reached for a minute": cut_a_worker_off,
    "a worker answers with a strange engine for a minute": lie,
    "status is lost": forget,
}


@functools.lru_cache(maxsize=1)
def good_update() -> tuple[list[Run], dict[str, Any]]:
    """The run at the beginning of every pass of a good update, after it was applied; and how it ends."""
    run, runs = begun("good update"), []
    while not run.over():
        run.people()
        if not run.script:
            runs.append(run.fork())
        run.step()
    return runs, essence(run.world)


@pytest.mark.long
@pytest.mark.parametrize("name", DISTURBANCES)
def test_a_good_update_ends_the_same_whatever_is_done_to_it_and_when(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    runs, expected = good_update()
    ends = Ends(essence)
    for i, before in enumerate(runs):
        run = before.fork()
        run.idle = 0
        DISTURBANCES[name](run.world)
        if "for a minute" in name:
            for _ in range(12):
                run.step()
            end_it(run.world)
        end = ends.of(run)
        check_always(run.world)
        wanted = expected
        if name == "status is lost":  # with it, what was promoted before is lost, and what the gate said of it
            kept = ("stable", "candidate", "rejected", "failure", "running", "routes", "spec")
            end, wanted = ({k: e[k] for k in kept} for e in (end, expected))
        assert end == wanted, f"at pass {i}"
    record_property("simulated rollouts", ends.runs)


def test_a_candidate_that_goes_bad_while_nobody_watches_is_never_promoted() -> None:
    """Also when every step was passed before, and only the last worker was still being prepared."""
    tried = set()
    for before in good_update()[0]:
        run, candidate = before.fork(), before.world.rollout["candidate"]
        if candidate is None or before.world.rollout["step"] is None:
            continue
        digest = candidate["artifacts"][0]["manifestDigest"]
        run.world.by_digest[digest] = dataclasses.replace(run.world.by_digest[digest], failing=0.2)
        run.idle = 0
        run.pass_time(3600)
        while not run.over():
            run.step()
        assert run.world.rollout["stable"] != candidate, candidate
        assert [r["reason"] for r in run.world.rollout["rejected"]] == ["ErrorRateTooHigh"]
        tried.add(before.world.rollout["step"]["index"])
    assert tried == {0, 1, 2}


def test_without_an_operator_workers_return_to_stable_by_themselves_and_answer_on() -> None:
    tried = 0
    for before in good_update()[0]:
        run = before.fork()
        if run.world.on_candidate() == 0:
            continue
        run.world.tick(299.0)
        for _ in range(3):
            run.world.tick(1.0)
        assert run.world.on_candidate() == 0
        stable = run.world.rollout["stable"]["artifacts"][0]["manifestDigest"]
        assert {w.routes.stable for w in run.world.workers.values()} == {stable}
        assert all(w.serves(run.world) for w in run.world.workers.values())
        tried += 1
    assert tried > 5


def test_a_member_whose_container_dies_takes_the_candidate_back() -> None:
    tried = 0
    for before in good_update()[0]:
        run = before.fork()
        for uid in on(run.world, True)[:1]:
            run.idle = 0
            run.world.kill_container(uid)
            while not run.over():
                run.step()
            assert run.world.rollout["rejected"][0]["reason"] == "WorkerDied"
            assert run.world.on_candidate() == 0
            assert run.world.condition("Available")[0] == "True"
            tried += 1
    assert tried > 5
