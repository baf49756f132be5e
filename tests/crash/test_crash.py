"""The operator is killed before and after every one of its effects, and the world ends as if it had not been.

The real reconciler, observation, rules and manifests over `world`. Each scenario is run once undisturbed; then once for
every effect with a crash right after it, and once for the beginning of every pass with a crash before anything, from a
copy of the world as it was when that pass began. (Right before an effect is right after the one before it.)
"""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from trtmodel_contract.jobs import Reason
from trtmodel_operator.reconcile import Reconciler
from world import KEY, Crash, Source, World

SPEC: dict[str, Any] = {
    "source": {"uri": "s3://m/a"},
    "storage": {"bucket": "engines"},
    "engine": {"runtime": "ONNXRuntime"},
    "verify": {"task": "Classification", "dataset": {"uri": "s3://data/eval.npz"}},
    "serving": {"replicas": 4},
    "rollout": {
        "steps": [{"workers": 1, "hold": "15s"}, {"workers": "50%", "hold": "10s"}],
        "analysis": {"interval": "5s", "minRequests": 150, "maxErrorRateIncrease": 0.02},
        "progressDeadline": "5m",
    },
}
SOURCES = {
    "s3://m/a": Source("a"),
    "s3://m/b": Source("b", seconds=0.007),
    "s3://m/c": Source("c"),
    "s3://m/slow": Source("slow", seconds=0.032),
    "s3://m/failing": Source("failing", failing=0.1),
    "s3://m/unloadable": Source("unloadable", loads=False),
    "s3://m/wrong": Source("wrong", differs=100),
    "s3://m/unbuildable": Source("unbuildable", build_fails=Reason.OPERATOR_UNSUPPORTED),
}
MOST_PASSES = 400
LOOP = asyncio.new_event_loop()


@dataclasses.dataclass
class Run:
    """A world with a script of what people do to it: each entry acts once its condition holds."""

    world: World
    script: list[tuple[Callable[[World], bool], Callable[[World], None]]]
    idle: int = 0

    def over(self) -> bool:
        return self.idle >= 3 and not self.script

    def step(self) -> None:
        """What people do, one pass, and time until the next. A crash costs a second of time."""
        if self.script and self.script[0][0](self.world):
            self.script.pop(0)[1](self.world)
        reconciler = Reconciler(self.world, self.world, self.world, self.world, self.world, "worker:1")
        try:
            wanted = LOOP.run_until_complete(reconciler.reconcile(KEY))
        except Crash:
            self.idle = 0
            self.world.tick(1.0)
            return
        self.idle = self.idle + 1 if wanted is None else 0
        self.world.tick(max(1.0, min(wanted or 5.0, 5.0)))

    def to_the_end(self) -> None:
        for _ in range(MOST_PASSES):
            if self.over():
                return
            self.step()
        raise AssertionError(f"no end after {MOST_PASSES} passes: {self.world.model['status']['conditions']}")


def serving(revision_of: str) -> Callable[[World], bool]:
    """The source at this address is stable everywhere."""

    def holds(world: World) -> bool:
        stable = world.rollout.get("stable")
        wanted = world.by_digest.get(stable["artifacts"][0]["manifestDigest"]) if stable else None
        return wanted == SOURCES[revision_of] and world.condition("Ready")[0] == "True"

    return holds


def on_canary(world: World) -> bool:
    return world.on_candidate() > 0


def applies(address: str) -> Callable[[World], None]:
    return lambda world: world.edit(source__uri=address)


SCENARIOS: dict[str, list[tuple[Callable[[World], bool], Callable[[World], None]]]] = {
    "first rollout": [],
    "good update": [(serving("s3://m/a"), applies("s3://m/b"))],
    "slow update": [(serving("s3://m/a"), applies("s3://m/slow"))],
    "failing update": [(serving("s3://m/a"), applies("s3://m/failing"))],
    "update that no worker can load": [(serving("s3://m/a"), applies("s3://m/unloadable"))],
    "update that fails its gate": [(serving("s3://m/a"), applies("s3://m/wrong"))],
    "build that fails": [(serving("s3://m/a"), applies("s3://m/unbuildable"))],
    "spec changed in mid-canary": [(serving("s3://m/a"), applies("s3://m/b")), (on_canary, applies("s3://m/c"))],
    "a to b to a": [(serving("s3://m/a"), applies("s3://m/b")), (on_canary, applies("s3://m/a"))],
    "bad, then fixed": [
        (serving("s3://m/a"), applies("s3://m/slow")),
        (lambda w: w.condition("Stalled")[0] == "True", applies("s3://m/b")),
    ],
    "scaled in mid-canary": [
        (serving("s3://m/a"), applies("s3://m/b")),
        (on_canary, lambda w: w.edit(serving__replicas=2)),
    ],
}


def outcome(world: World) -> dict[str, Any]:
    """The state of the world, without times, counters and names that the number of passes decides."""
    rollout = world.rollout
    return {
        "stable": rollout.get("stable"),
        "candidate": rollout.get("candidate"),
        "standby": rollout.get("standby"),
        "rejected": [(r["revision"], r["reason"]) for r in rollout["rejected"]],
        "history": [(h["revision"], h["outcome"]) for h in rollout["history"]],
        "failure": (rollout.get("failure") or {}).get("reason"),
        "conditions": [(c["type"], c["status"], c["reason"]) for c in world.model["status"]["conditions"]],
        "jobs": sorted(world.jobs_created),
        "routes": sorted((w.routes.stable, w.routes.candidate) for w in world.workers.values()),
        "held": sorted(sorted((d, str(e[1].value)) for d, e in w.engines.items()) for w in world.workers.values()),
        "objects": sorted(key for key in world.objects if key[0] != "Pod"),
        "spec": world.model["spec"],
    }


def check_always(world: World) -> None:
    """What must hold however it ends."""
    assert len(world.jobs_created) == len(set(world.jobs_created)), "a Job was created twice"
    assert world.most_on_candidate <= max(1, len(world.workers) - 1), "the candidate took every worker"
    assert "annotations" not in world.model["metadata"], "the operator wrote annotations"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_crash_before_or_after_any_effect_changes_nothing_about_the_end(scenario: str) -> None:
    run = Run(World(SPEC, SOURCES), list(SCENARIOS[scenario]))
    script = SCENARIOS[scenario]
    beginnings: list[tuple[int, bytes, int]] = []  # effects done when a pass began; the world and the script then
    while not run.over():
        assert len(beginnings) < MOST_PASSES
        if not script or len(run.script) < len(script):  # the first rollout is a scenario of its own
            beginnings.append((run.world.calls, pickle.dumps(run.world), len(run.script)))
        run.step()
    check_always(run.world)
    expected = outcome(run.world)
    ends = [first for first, _, _ in beginnings[1:]] + [run.world.calls]
    for (first, before_pass, left), last in zip(beginnings, ends, strict=True):
        for call, before in [(first + 1, True), *((call, False) for call in range(first + 1, last + 1))]:
            crashed = Run(pickle.loads(before_pass), script[len(script) - left :])
            crashed.world.crash_at = (call, before)
            crashed.to_the_end()
            check_always(crashed.world)
            where = f"{'before' if before else 'after'} effect {call} ({crashed.world.done[call - 1]})"
            assert outcome(crashed.world) == expected, where
