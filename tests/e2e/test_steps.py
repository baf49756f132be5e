"""Steps and commands under steady traffic: mirrored, then a share, then all; pauses, a person's promotion, and ways
back. Whatever a person asks for, no request fails."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from . import models
from .cluster import Json
from .install import Images
from .traffic import Traffic
from .world import World, condition, revision, until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(420)]

NAME = "magika"
REPLICAS = 2
ROLLOUT_SECONDS = 150
COMMAND_SECONDS = 30
TRAFFIC_SECONDS = 2400
MOST_ROWS = 8  # of the first revision's profile; each further revision takes fewer
ONE = {"workers": 1, "hold": "4s"}
PLAN: Json = {
    "steps": [ONE],
    # Workers, builds and whatever else runs share two cores: a ratio would say nothing about the engine.
    "analysis": {"interval": "2s", "minRequests": 60, "maxErrorRateIncrease": 0.05, "maxLatencyRatio": 20},
    "promotion": "Automatic",
}
NO_AGREEMENT: Json = {**PLAN["analysis"], "minAgreement": None}  # a merge patch takes away what the last one gave


@dataclass
class Served:
    """Magika in service, and those who ask it."""

    world: World
    traffic: Traffic
    rows: Iterator[int] = field(default_factory=lambda: itertools.count(MOST_ROWS - 1, -1))
    commands: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def roll_out(self, **rollout: Any) -> str:
        """Another revision of the same model, by this plan; its name, when workers are told of it."""
        shapes = {"min": [1, 2048], "opt": [1, 2048], "max": [next(self.rows), 2048]}
        self.world.patch(
            NAME,
            {
                "engine": {"profiles": [{"inputs": {"bytes": shapes}}]},
                "rollout": {**PLAN, "analysis": NO_AGREEMENT, **rollout},
            },
        )
        found = self.world.wait(NAME, "a candidate", lambda m: bool(revision(m, "candidate")), ROLLOUT_SECONDS)
        return revision(found, "candidate")

    def command(self, verb: str, name: str) -> None:
        self.world.command(NAME, f"{verb}@{name}#{next(self.commands)}")

    def stable(self) -> str:
        return revision(self.world.model(NAME), "stable")

    def wait_summary(self, *words: str, seconds: float = ROLLOUT_SECONDS) -> Json:
        """The column CANARY says all of these."""
        what = " and ".join(words)
        return self.world.wait(NAME, what, lambda m: all(w in m["status"]["summary"] for w in words), seconds)

    def wait_canary(self) -> Json:
        """A worker answers with the candidate, and the step is held."""

        def done(model: Json) -> bool:
            return model["status"]["phase"] == "Canary" and model["status"]["targets"][0]["workers"]["onCandidate"] > 0

        return self.world.wait(NAME, "a canary", done, ROLLOUT_SECONDS)

    def wait_progressing(self, reason: str, seconds: float) -> Json:
        """Nothing moves, for this reason."""
        return self.world.wait_condition(NAME, "Progressing", "False", reason, seconds)

    def wait_promoted(self, name: str, seconds: float = ROLLOUT_SECONDS) -> Json:
        found = self.world.wait_condition(NAME, "Ready", "True", "Serving", seconds)
        assert revision(found, "stable") == name, self.world.describe(NAME)
        assert newest(found) == (name, "Promoted")
        assert found["status"]["targets"][0]["workers"]["onStable"] == REPLICAS
        return found

    def answers(self, name: str, begin: float) -> int:
        """How many requests that revision has answered since then."""
        found = self.traffic.between(begin, self.traffic.now())["revisions"].get(name, {})
        return int(found.get("ok", 0))

    def quiet(self, name: str) -> bool:
        """Nobody has answered with it in the last second."""
        now = self.traffic.now()
        return name not in self.traffic.between(now - 1, now)["revisions"]


def newest(model: Json) -> tuple[str, str]:
    """The last rollout that ended."""
    entry = model["status"]["history"][0]
    return entry["revision"], entry["outcome"]


@pytest.fixture(scope="module")
def served(world_of: Callable[[str], World], images: Images, files: Path, endpoint: str) -> Served:
    world = world_of("e2e-steps")
    manifest = models.magika(NAME, endpoint, REPLICAS)
    manifest["spec"]["rollout"] = {**models.ROLLOUT, **PLAN, "historyLimit": 20}
    world.apply(manifest)
    world.wait_condition(NAME, "Ready", "True", "Serving", ROLLOUT_SECONDS)
    traffic = Traffic(world)
    traffic.start(images.worker, NAME, files / "magika" / "requests.npz", TRAFFIC_SECONDS)
    return Served(world, traffic)


def test_a_candidate_is_mirrored_first_and_then_answers_half_and_then_all(served: Served) -> None:
    before, begin = served.stable(), served.traffic.now()
    mirror, half = {**ONE, "weight": 0, "shadow": 100}, {**ONE, "weight": 50}
    candidate = served.roll_out(steps=[mirror, half], analysis={**PLAN["analysis"], "minAgreement": 0.9})
    served.wait_summary("step 1/2", "mirrors 100%")
    told = "mirrored answers agree"
    found = served.world.wait(NAME, told, lambda m: told in condition(m, "Progressing")["message"], ROLLOUT_SECONDS)
    assert found["status"]["targets"][0]["workers"]["onCandidate"] == 1
    assert condition(found, "Available")["status"] == "True"
    assert set(served.traffic.between(begin, served.traffic.now())["revisions"]) == {before}

    opened = served.traffic.now()
    served.wait_summary("step 2/2 1 of 2 workers at 50%")
    until("both answer", 30, lambda: served.answers(candidate, opened) > 20)
    served.wait_promoted(candidate)
    summary = served.traffic.assert_none_failed(begin, least=100)
    assert set(summary["revisions"]) == {before, candidate}


def test_a_rollout_that_a_person_pauses_goes_on_when_the_person_says_so(served: Served) -> None:
    begin = served.traffic.now()
    candidate = served.roll_out()
    served.wait_canary()
    served.command("pause", candidate)
    served.wait_progressing("Paused", COMMAND_SECONDS)
    paused = served.traffic.now()
    until("it answers for longer than its hold", 60, lambda: served.answers(candidate, paused) > 100)
    model = served.world.model(NAME)
    assert (model["status"]["phase"], revision(model, "candidate")) == ("Paused", candidate)
    assert condition(model, "Available")["status"] == "True"
    served.command("resume", candidate)
    served.wait_promoted(candidate)
    served.traffic.assert_none_failed(begin, least=100)


def test_a_step_that_pauses_waits_for_resume_and_a_manual_promotion_for_promote(served: Served) -> None:
    before, begin = served.stable(), served.traffic.now()
    candidate = served.roll_out(steps=[{**ONE, "pause": True}], promotion="Manual")
    found = served.wait_progressing("StepPaused", ROLLOUT_SECONDS)
    assert f"use the command resume@{candidate}" in condition(found, "Progressing")["message"]
    assert found["status"]["targets"][0]["workers"]["onCandidate"] == 1

    served.command("resume", candidate)
    found = served.wait_progressing("AwaitingPromotion", ROLLOUT_SECONDS)
    assert f"use the command promote@{candidate}" in condition(found, "Progressing")["message"]
    assert (revision(found, "stable"), revision(found, "candidate")) == (before, candidate)
    assert condition(found, "Stalled")["status"] == "False"

    served.command("promote", candidate)
    served.wait_promoted(candidate, COMMAND_SECONDS)
    served.traffic.assert_none_failed(begin, least=100)


def test_a_person_promotes_in_mid_canary_and_the_steps_that_are_left_are_skipped(served: Served) -> None:
    begin = served.traffic.now()
    candidate = served.roll_out(steps=[{"workers": 1, "hold": "1h"}, {"workers": 1, "hold": "1h"}])
    served.wait_canary()
    served.command("promote", candidate)
    served.wait_promoted(candidate, COMMAND_SECONDS)
    served.traffic.assert_none_failed(begin, least=100)


def test_a_person_aborts_in_mid_canary_and_everybody_is_back_at_once(served: Served) -> None:
    before, begin = served.stable(), served.traffic.now()
    candidate = served.roll_out(steps=[{"workers": 1, "hold": "1h"}])
    served.wait_canary()
    served.command("abort", candidate)
    found = served.world.wait_condition(NAME, "Stalled", "True", "Aborted", COMMAND_SECONDS)
    assert (revision(found, "stable"), revision(found, "candidate")) == (before, "")
    assert newest(found) == (candidate, "Aborted")
    assert condition(found, "Available")["status"] == "True"
    until("no worker answers with it", 20, lambda: served.quiet(candidate))
    served.traffic.assert_none_failed(begin, least=50)


def test_a_person_goes_back_to_a_revision_of_the_history_without_a_job(served: Served) -> None:
    for _ in range(2):  # the first is then neither stable nor standby
        served.wait_promoted(served.roll_out())
    model = served.world.model(NAME)
    near = {revision(model, "stable"), revision(model, "standby")}
    promoted = [h["revision"] for h in model["status"]["history"] if h["outcome"] == "Promoted"]
    goal, left = next(r for r in promoted if r not in near), revision(model, "stable")
    jobs, begin = served.world.jobs(NAME), served.traffic.now()

    served.command("rollback", goal)
    found = served.world.wait_condition(NAME, "Stalled", "True", "RolledBackByCommand", 60)
    assert (revision(found, "stable"), revision(found, "standby")) == (goal, left)
    assert newest(found) == (left, "RolledBack")
    until("every worker answers with it", 20, lambda: served.quiet(left))
    assert served.world.model(NAME)["status"]["targets"][0]["workers"]["onStable"] == REPLICAS
    assert served.world.jobs(NAME) == jobs
    summary = served.traffic.assert_none_failed(begin, least=30)
    assert set(summary["revisions"]) == {goal, left}
    reasons = {reason for _, reason, _ in served.world.events(NAME)}
    assert {"CommandTaken", "RolledBackByCommand"} <= reasons
