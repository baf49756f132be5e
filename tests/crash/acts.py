"""What people and the cluster do to a model, and when: the words that scenarios are written in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from machines import Source
from trtmodel_contract.jobs import Reason
from world import World

Condition = Callable[[World], bool]
Act = Callable[[World], None]
Script = tuple[tuple[Condition, Act], ...]

A, B = "s3://m/a", "s3://m/b"
SPEC: dict[str, Any] = {
    "source": {"uri": A},
    "storage": {"bucket": "engines"},
    "engine": {"runtime": "ONNXRuntime"},
    "verify": {"task": "Classification", "dataset": {"uri": "s3://data/eval.npz"}},
    "serving": {"replicas": 4},
    "rollout": {
        "steps": [{"workers": 1, "hold": "15s"}, {"workers": "50%", "hold": "10s"}],
        "analysis": {"interval": "5s", "minRequests": 150, "maxErrorRateIncrease": 0.02},
        "progressDeadline": "2m",
    },
}
SOURCES = {
    A: Source("a"),
    B: Source("b", seconds=0.007),
    "s3://m/c": Source("c"),
    "s3://m/slow": Source("slow", seconds=0.032),
    "s3://m/failing": Source("failing", failing=0.1),
    "s3://m/half": Source("half", failing=0.1, fails_on="two"),
    "s3://m/unloadable": Source("unloadable", loads=False),
    "s3://m/deadly": Source("deadly", dies=True),
    "s3://m/wrong": Source("wrong", differs=100),
    "s3://m/scarce": Source("scarce", differs=2),
    "s3://m/unbuildable": Source("unbuildable", build_fails=Reason.OPERATOR_UNSUPPORTED),
    "s3://m/broken": Source("broken", build_fails=Reason.BUILD_FAILED),
}

# ---------------------------------------------------------------------------------------------------------------
# Conditions
# ---------------------------------------------------------------------------------------------------------------


def serving(address: str) -> Condition:
    """The source at this address is stable everywhere."""

    def holds(world: World) -> bool:
        return stable(address)(world) and world.condition("Ready")[0] == "True"

    return holds


def stable(address: str) -> Condition:
    def holds(world: World) -> bool:
        deployed = world.rollout["stable"]
        return deployed is not None and _source(world, deployed) == SOURCES[address].content

    return holds


def _source(world: World, deployed: Mapping[str, Any]) -> str:
    return world.by_digest[deployed["artifacts"][0]["manifestDigest"]].content


def on_canary(world: World) -> bool:
    return world.on_candidate() > 0


def in_step(index: int) -> Condition:
    """The step is open, and its members answer with the candidate."""

    def holds(world: World) -> bool:
        step = world.rollout["step"]
        return step is not None and step["index"] == index and step["routed"] and on_canary(world)

    return holds


def stalled(*reasons: str) -> Condition:
    return lambda world: world.condition("Stalled")[0] == "True" and world.condition("Stalled")[1] in reasons


def job(kind: str) -> Condition:
    """A Job of this kind runs."""
    return lambda world: any(f"{kind}-" in name for name in world.due)


def phase(*names: str) -> Condition:
    return lambda world: (world.model or {}).get("status", {}).get("phase") in names


def about_to_pass(world: World) -> bool:
    """Step 1 was held for its time, a look was just taken, and the next one will have the requests that are lacking.
    (Or it is too late: where time passes otherwise, the moment may be missed.)"""
    if stable(B)(world):
        return True
    step, window = world.rollout["step"], world.rollout["window"]
    if step is None or step["index"] != 1 or step["held"] < 10 or step["seenAt"] != world.time:
        return False
    tried = [w.windows.get(window, {}).get(w.routes.candidate) for w in world.workers.values() if w.routes.candidate]
    return 130 <= sum(counts.ok for counts in tried if counts is not None) < 150


def awaiting(world: World) -> bool:
    return world.condition("Progressing")[1] == "AwaitingConfirmation"


def waited(seconds: float) -> Condition:
    return lambda world: world.rollout["waited"] > seconds


def at_once(_: World) -> bool:
    return True


# ---------------------------------------------------------------------------------------------------------------
# Acts
# ---------------------------------------------------------------------------------------------------------------


def applies(address: str) -> Act:
    return lambda world: world.edit(source__uri=address)


def edits(**changes: object) -> Act:
    return lambda world: world.edit(**changes)


def commands(text: str) -> Act:
    return lambda world: world.command(text)


def sets(**changes: object) -> Act:
    def act(world: World) -> None:
        world.changes += 1
        for name, value in changes.items():
            setattr(world, name, value)

    return act


def heals(address: str) -> Act:
    def act(world: World) -> None:
        world.changes += 1
        world.sources[address] = dataclasses.replace(world.sources[address], build_fails=None)

    return act


def replaces(address: str, source: Source) -> Act:
    def act(world: World) -> None:
        world.changes += 1
        world.sources[address] = source

    return act


def last_worker(**changes: object) -> Act:
    """The youngest worker begins or ceases to behave so."""

    def act(world: World) -> None:
        world.changes += 1
        for name, value in changes.items():
            setattr(list(world.workers.values())[-1], name, value)

    return act


def kills(candidate: bool, how: str = "kill_pod") -> Act:
    """One that answers with the candidate, or one that does not."""

    def act(world: World) -> None:
        for uid in [w.uid for w in world.workers.values() if bool(w.routes.candidate) is candidate][:1]:
            getattr(world, how)(uid)

    return act


def goes_back_to(address: str) -> Act:
    """By the name of its revision, as history has it."""

    def act(world: World) -> None:
        sources = {d["manifestDigest"]: h["revision"] for h in world.rollout["history"] for d in h["engines"]}
        found = [r for d, r in sources.items() if world.by_digest[d].content == SOURCES[address].content]
        world.command(f"rollback@{found[0]}#1")

    return act


def deletes(foreground: bool) -> Act:
    return lambda world: world.delete(foreground=foreground)


def loses_status(world: World) -> None:
    world.lose_status()


def restores_status(world: World) -> None:
    """A memory from before the last promotion, when the sequence was low and the standby was stable."""
    before = world.rollout
    old = {"sequence": 1, "plan": "", "stable": before["standby"], "standby": None, "candidate": None, "step": None}
    world.lose_status({**before, **old})
