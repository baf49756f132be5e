"""Rollouts under steady traffic. Whatever becomes of a revision, no request fails."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from . import models
from .cluster import Json
from .install import Images, Operator
from .traffic import Traffic
from .world import World, condition, revision, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

NAME = "magika"
REPLICAS = 3
FLIP_SECONDS = 0.005
UPGRADE_SECONDS = 10.0
ROLLOUT_SECONDS = 120
TRAFFIC_SECONDS = 1800


@dataclass(frozen=True)
class Served:
    """Magika in service, and those who ask it."""

    world: World
    traffic: Traffic

    def engine_under(self, source: str, engine: Json) -> None:
        self.world.patch(NAME, {"source": models.magika_source(source), "engine": engine})

    def stable(self) -> str:
        return revision(self.world.model(NAME), "stable")

    def trusted(self) -> set[str]:
        """What may answer outside a rollout: stable, and the standby to which a request is hedged when it is late."""
        found = self.world.model(NAME)
        return {revision(found, "stable"), revision(found, "standby")}

    def wait_canary(self, seconds: float = ROLLOUT_SECONDS) -> Json:
        """A worker answers with the candidate, and the step is held."""

        def done(model: Json) -> bool:
            return model["status"]["phase"] == "Canary" and model["status"]["targets"][0]["workers"]["onCandidate"] > 0

        return self.world.wait(NAME, "a canary", done, seconds)

    def wait_promoted(self, candidate: str) -> Json:
        found = self.world.wait_condition(NAME, "Ready", "True", "Serving", ROLLOUT_SECONDS)
        assert revision(found, "stable") == candidate, self.world.describe(NAME)
        assert outcome(found) == (candidate, "Promoted")
        assert found["status"]["targets"][0]["workers"]["onStable"] == REPLICAS
        return found

    def answering_with(self, candidate: str) -> list[str]:
        """Workers that have answered with a revision."""
        series = f'trtmodel_responses_total{{revision="{candidate}",status="200"}}'
        return [p for p in self.world.ready_workers(NAME) if self.world.metrics(p).get(series)]


def outcome(model: Json) -> tuple[str, str]:
    """Of the last rollout that ended."""
    newest = model["status"]["history"][0]
    return newest["revision"], newest["outcome"]


@pytest.fixture(scope="module")
def served(world_of: Callable[[str], World], images: Images, files: Path, endpoint: str) -> Served:
    """FP32 on three workers, under load."""
    world = world_of("e2e-canary")
    world.apply(models.magika(NAME, endpoint, REPLICAS))
    world.wait_condition(NAME, "Ready", "True", "Serving", ROLLOUT_SECONDS)
    traffic = Traffic(world)
    traffic.start(images.worker, NAME, files / "magika" / "requests.npz", TRAFFIC_SECONDS)
    return Served(world, traffic)


@pytest.fixture(scope="module")
def int8(served: Served) -> Served:
    """INT8 serves, whichever test is the first to need it."""
    if served.world.model(NAME)["spec"]["engine"]["precision"] != "INT8":
        served.engine_under("model", models.INT8)
    served.world.wait_condition(NAME, "Ready", "True", "Serving", ROLLOUT_SECONDS)
    return served


@pytest.fixture
def back(int8: Served) -> Callable[[], None]:
    """Back to the spec of what serves, at the end of a test whose revision was refused."""

    def go() -> None:
        int8.engine_under("model", models.INT8)
        int8.world.wait_condition(NAME, "Ready", "True", "Serving", 30)

    return go


def test_a_good_revision_is_promoted_by_canary_in_time_and_no_request_fails(served: Served) -> None:
    world, traffic = served.world, served.traffic
    before, begin = served.stable(), traffic.now()
    served.engine_under("model", models.INT8)
    trial = served.wait_canary()
    candidate = revision(trial, "candidate")
    assert trial["status"]["targets"][0]["workers"]["onCandidate"] == 1
    assert condition(trial, "Available")["status"] == "True"
    found = served.wait_promoted(candidate)
    summary = traffic.assert_none_failed(begin, least=100)

    assert set(summary["revisions"]) == {before, candidate}
    committed = datetime.datetime.fromisoformat(world.build_result(NAME, candidate).published_at).timestamp()
    took = summary["revisions"][candidate]["first"] - committed
    assert 0 < took < UPGRADE_SECONDS
    flips = {pod: world.metrics(pod)["trtmodel_flip_seconds"] for pod in world.ready_workers(NAME)}
    assert len(flips) == REPLICAS
    assert max(flips.values()) < FLIP_SECONDS, flips
    assert revision(found, "standby") == before
    world.wait(NAME, "standbys", lambda m: m["status"]["targets"][0]["workers"]["withStandby"] == REPLICAS, 20)
    print(f"\nfirst answer {took:.2f} s after the commit, flips {flips}, {summary}")


def test_a_damaged_graph_is_stopped_by_the_gate_and_stable_serves_on(int8: Served, back: Callable[[], None]) -> None:
    world, traffic = int8.world, int8.traffic
    stable, trusted, begin = int8.stable(), int8.trusted(), traffic.now()
    int8.engine_under("damaged", models.INT8)
    found = world.wait_condition(NAME, "Stalled", "True", "GateFailed", ROLLOUT_SECONDS)
    for kind in ("Ready", "Verified"):
        told = condition(found, kind)
        assert (told["status"], told["reason"]) == ("False", "GateFailed")
    message = condition(found, "Ready")["message"]
    assert "failed its accuracy gate: output target_label" in message or "accuracy loss" in message
    assert f"{stable} serves on; change the model, the engine or the limits" in message
    assert condition(found, "Available")["status"] == "True"
    assert revision(found, "stable") == stable
    assert revision(found, "candidate") == ""
    assert outcome(found)[1] == "GateFailed"
    assert any(e[:2] == ("Warning", "GateFailed") for e in world.events(NAME))
    assert_not_tried_again(world)
    answered = set(traffic.assert_none_failed(begin, least=100)["revisions"])
    assert stable in answered
    assert answered <= trusted
    assert outcome(found)[0] not in trusted
    back()


def test_a_slow_revision_is_rolled_back_by_the_analysis_and_not_tried_again(
    int8: Served, back: Callable[[], None]
) -> None:
    world, traffic = int8.world, int8.traffic
    stable, trusted, begin = int8.stable(), int8.trusted(), traffic.now()
    int8.engine_under("slow", models.INT8)
    candidate = revision(int8.wait_canary(), "candidate")
    found = world.wait_condition(NAME, "Stalled", "True", "TooSlow", ROLLOUT_SECONDS)
    message = condition(found, "Ready")["message"]
    assert "times the baseline's, limit 1.5" in message
    assert f"{stable} serves" in message
    assert "retry" in message
    assert condition(found, "Available")["status"] == "True"
    assert (revision(found, "stable"), revision(found, "candidate")) == (stable, "")
    assert outcome(found) == (candidate, "RolledBack")
    until("no worker answers with it", 20, lambda: quiet(int8, candidate))
    assert_not_tried_again(world)
    answered = set(traffic.assert_none_failed(begin, least=100)["revisions"])
    assert {stable, candidate} <= answered <= trusted | {candidate}
    back()


def test_the_operator_dies_in_mid_canary_and_the_rollout_ends_the_same(int8: Served, operator: Operator) -> None:
    begin = int8.traffic.now()
    int8.engine_under("tagged", models.INT8)
    candidate = revision(int8.wait_canary(), "candidate")
    (killed,) = operator.pods()
    operator.kill()
    assert revision(int8.world.model(NAME), "candidate") == candidate
    int8.wait_promoted(candidate)
    assert killed not in operator.pods()
    int8.traffic.assert_none_failed(begin, least=100)


def test_a_worker_dies_in_mid_canary_and_the_rollout_ends_the_same(int8: Served) -> None:
    world, begin = int8.world, int8.traffic.now()
    wanted = "model" if int8.world.model(NAME)["spec"]["source"] == models.magika_source("tagged") else "tagged"
    int8.engine_under(wanted, models.INT8)
    candidate = revision(int8.wait_canary(), "candidate")
    canary = until("a worker answers with it", 20, lambda: int8.answering_with(candidate))[0]
    world.kubectl("delete", "pod", canary, "--wait=false")
    assert revision(world.model(NAME), "candidate") == candidate
    int8.wait_promoted(candidate)
    assert canary not in world.ready_workers(NAME)
    int8.traffic.assert_none_failed(begin, least=100)


def quiet(served: Served, candidate: str) -> bool:
    """Nobody has answered with it in the last second."""
    now = served.traffic.now()
    return candidate not in served.traffic.between(now - 1, now)["revisions"]


def assert_not_tried_again(world: World) -> None:
    """A further pass, caused by a change that has nothing to do with it, makes neither Job nor candidate."""
    before = world.jobs(NAME)
    was = condition(world.model(NAME), "Stalled")["reason"]
    world.patch(NAME, {"rollout": {"historyLimit": world.model(NAME)["spec"]["rollout"]["historyLimit"] + 1}})
    found = world.wait_observed(NAME)
    assert (condition(found, "Stalled")["reason"], revision(found, "candidate")) == (was, ""), world.describe(NAME)
    assert world.jobs(NAME) == before
