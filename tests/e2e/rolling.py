"""One model in service under steady traffic, and rollout after rollout of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import models
from .cluster import Json
from .install import Images
from .traffic import POD, Traffic
from .world import World, condition, revision, until

NAME = "magika"
ROLLOUT_SECONDS = 150
COMMAND_SECONDS = 30
TRAFFIC_SECONDS = 2400
MOST_ROWS = 8
ONE: Json = {"workers": 1, "hold": "4s"}
PLAN: Json = {
    "steps": [ONE],
    # Workers, builds and whatever else runs share two cores: a ratio would say nothing about the engine.
    "analysis": {"interval": "2s", "minRequests": 60, "maxErrorRateIncrease": 0.05, "maxLatencyRatio": 20},
    "promotion": "Automatic",
    "historyLimit": 20,
}


def shapes_of_revisions() -> Iterator[tuple[int, int]]:
    """Optimum and most rows of a profile: each pair is another revision of the same model."""
    return ((opt, most) for opt in range(1, MOST_ROWS) for most in range(MOST_ROWS - 1, opt - 1, -1))


@dataclass
class Rolling:
    """`workers` is how many there are, of all targets."""

    world: World
    traffic: Traffic
    workers: int
    shapes: Iterator[tuple[int, int]] = field(default_factory=shapes_of_revisions)
    commands: Iterator[int] = field(default_factory=lambda: iter(range(1, 1000)))

    def change(self, **rollout: Any) -> None:
        """Asks for another revision of the same model, by this plan."""
        opt, most = next(self.shapes)
        shapes = {"min": [1, 2048], "opt": [opt, 2048], "max": [most, 2048]}
        engine = {"profiles": [{"inputs": {"bytes": shapes}}]}
        self.world.patch(NAME, {"engine": engine, "rollout": {**PLAN, **rollout}})

    def roll_out(self, **rollout: Any) -> str:
        """As `change`; the revision's name, when workers are told of it."""
        self.change(**rollout)
        found = self.world.wait(NAME, "a candidate", lambda m: bool(revision(m, "candidate")), ROLLOUT_SECONDS)
        return revision(found, "candidate")

    def command(self, verb: str, name: str) -> None:
        self.world.command(NAME, f"{verb}@{name}#{next(self.commands)}")

    def stable(self) -> str:
        return revision(self.world.model(NAME), "stable")

    def on_candidate(self, model: Json) -> int:
        """How many workers answer with it."""
        return sum(t["workers"]["onCandidate"] for t in model["status"]["targets"])

    def wait_canary(self, least: int = 1) -> Json:
        """So many workers answer with the candidate, and the step is held."""

        def done(model: Json) -> bool:
            return model["status"]["phase"] == "Canary" and self.on_candidate(model) >= least

        return self.world.wait(NAME, "a canary", done, ROLLOUT_SECONDS)

    def wait_promoted(self, name: str, seconds: float = ROLLOUT_SECONDS) -> Json:
        found = self.world.wait_condition(NAME, "Ready", "True", "Serving", seconds)
        assert revision(found, "stable") == name, self.world.describe(NAME)
        assert newest(found) == (name, "Promoted")
        assert sum(t["workers"]["onStable"] for t in found["status"]["targets"]) == self.workers
        return found

    def quiet(self, name: str) -> bool:
        """Nobody has answered with it in the last second."""
        now = self.traffic.now()
        return name not in self.traffic.between(now - 1, now)["revisions"]

    def wait_quiet(self, name: str) -> None:
        until("no worker answers with it", 20, lambda: self.quiet(name))


def newest(model: Json) -> tuple[str, str]:
    """The last rollout that ended."""
    entry = model["status"]["history"][0]
    return entry["revision"], entry["outcome"]


def available(model: Json) -> bool:
    return condition(model, "Available")["status"] == "True"


@contextlib.contextmanager
def served(world: World, images: Images, files: Path, manifest: Json, workers: int) -> Iterator[Rolling]:
    """The model of this manifest is Ready and asked all the time. Both are gone afterwards: the node is small."""
    manifest["spec"]["rollout"] = {**models.ROLLOUT, **PLAN, **manifest["spec"]["rollout"]}
    world.apply(manifest)
    try:
        world.wait_condition(NAME, "Ready", "True", "Serving", ROLLOUT_SECONDS)
        traffic = Traffic(world)
        traffic.start(images.worker, NAME, files / "magika" / "requests.npz", TRAFFIC_SECONDS)
        yield Rolling(world, traffic, workers)
    finally:
        world.kubectl("delete", f"trtmodel/{NAME}", f"pod/{POD}", "--ignore-not-found", "--wait=false")
