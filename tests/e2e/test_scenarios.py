"""What people and the cluster do in the middle of a rollout, under steady traffic: no request fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import models
from .cluster import Cluster, Json
from .install import Images
from .rolling import COMMAND_SECONDS, NAME, ONE, ROLLOUT_SECONDS, Rolling, available, newest, served
from .s3 import endpoints_of_s3
from .world import CHILDREN, World, condition, revision, until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.night, pytest.mark.timeout(900)]

NAMESPACE = "e2e-scenarios"
REPLICAS = 3
STORE = "store"  # our Service before S3, so that S3 can be taken away
FOR_EVER = {**ONE, "hold": "1h"}
OTHER = "other"


@pytest.fixture(scope="module")
def world(world_of: Callable[[str], World], cluster: Cluster) -> World:
    found = world_of(NAMESPACE)
    ports = [{"name": "s3", "port": 7070}]
    service: Json = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": STORE}, "spec": {"ports": ports}}
    found.apply(service, endpoints_of_s3(cluster, STORE))
    return found


@pytest.fixture(scope="module")
def rolling(world: World, images: Images, files: Path) -> Iterator[Rolling]:
    manifest = models.magika(NAME, f"http://{STORE}.{NAMESPACE}.svc:7070", REPLICAS)
    manifest["spec"]["rollout"] = {}
    with served(world, images, files, manifest, REPLICAS) as found:
        yield found


def test_a_plan_that_is_edited_in_mid_step_begins_anew_and_makes_no_job(rolling: Rolling) -> None:
    world, begin = rolling.world, rolling.traffic.now()
    candidate = rolling.roll_out(steps=[FOR_EVER])
    rolling.wait_canary()
    jobs = world.jobs(NAME)
    world.patch(NAME, {"rollout": {"steps": [{"workers": 2, "hold": "8s"}, FOR_EVER]}})
    found = rolling.wait_canary(least=2)
    assert "step 1/2 2 of 3 workers" in found["status"]["summary"]
    world.patch(NAME, {"rollout": {"steps": [{"workers": 2, "hold": "2s"}]}})
    rolling.wait_promoted(candidate)
    assert world.jobs(NAME) == jobs
    rolling.traffic.assert_none_failed(begin, least=100)


def test_replicas_are_scaled_in_and_out_in_mid_step_and_the_trial_goes_on(rolling: Rolling) -> None:
    world, begin = rolling.world, rolling.traffic.now()
    candidate = rolling.roll_out(steps=[FOR_EVER])
    rolling.wait_canary()
    for replicas in (REPLICAS - 1, REPLICAS):
        world.kubectl("scale", f"trtmodel/{NAME}", f"--replicas={replicas}")

        def scaled(model: Json, wanted: int = replicas) -> bool:
            there = model["status"]["targets"][0]["workers"]
            return there["ready"] == there["desired"] == wanted and there["onCandidate"] == 1

        found = world.wait(NAME, f"{replicas} workers, one on trial", scaled, ROLLOUT_SECONDS)
        assert (found["status"]["phase"], revision(found, "candidate")) == ("Canary", candidate)
    rolling.command("promote", candidate)
    rolling.wait_promoted(candidate)
    rolling.traffic.assert_none_failed(begin, least=100)


def test_a_to_b_to_a_in_mid_canary_goes_back_without_a_job(rolling: Rolling) -> None:
    world, begin, before = rolling.world, rolling.traffic.now(), rolling.stable()
    engine = world.model(NAME)["spec"]["engine"]
    candidate = rolling.roll_out(steps=[FOR_EVER])
    rolling.wait_canary()
    jobs = world.jobs(NAME)
    world.patch(NAME, {"engine": engine})
    found = world.wait_condition(NAME, "Ready", "True", "Serving", COMMAND_SECONDS)
    assert (revision(found, "stable"), revision(found, "candidate")) == (before, "")
    assert newest(found) == (candidate, "Superseded")
    rolling.wait_quiet(candidate)
    assert world.jobs(NAME) == jobs
    rolling.traffic.assert_none_failed(begin, least=50)


def test_what_was_aborted_is_tried_again_by_retry_with_the_engine_that_is_there(rolling: Rolling) -> None:
    world, begin = rolling.world, rolling.traffic.now()
    candidate = rolling.roll_out(steps=[FOR_EVER])
    rolling.wait_canary()
    rolling.command("abort", candidate)
    world.wait_condition(NAME, "Stalled", "True", "Aborted", COMMAND_SECONDS)
    rolling.wait_quiet(candidate)
    builds = [j["metadata"]["uid"] for j in world.children("Job", NAME, "kind=build")]
    rolling.command("retry", candidate)
    assert revision(rolling.wait_canary(), "candidate") == candidate
    rolling.command("skip-step", candidate)
    rolling.wait_promoted(candidate)
    assert [j["metadata"]["uid"] for j in world.children("Job", NAME, "kind=build")] == builds
    rolling.traffic.assert_none_failed(begin, least=100)


def test_s3_goes_away_in_mid_canary_and_stable_serves_on_until_it_is_back(rolling: Rolling, cluster: Cluster) -> None:
    world, begin, before = rolling.world, rolling.traffic.now(), rolling.stable()
    candidate = rolling.roll_out(steps=[{**ONE, "pause": True}])
    rolling.wait_canary()
    world.wait(NAME, "a pause", lambda m: condition(m, "Progressing")["reason"] == "StepPaused", ROLLOUT_SECONDS)
    world.kubectl("delete", "endpointslice", STORE)
    rolling.command("resume", candidate)
    # The other two have no engine yet, and nowhere to get it.
    told = world.wait(NAME, "S3 is missed", lambda m: "cannot be reached" in text(m), ROLLOUT_SECONDS)
    assert available(told)
    assert (revision(told, "stable"), revision(told, "candidate")) == (before, candidate), world.describe(NAME)
    world.apply(endpoints_of_s3(cluster, STORE))
    rolling.wait_promoted(candidate)
    rolling.traffic.assert_none_failed(begin, least=100)


def text(model: Json) -> str:
    """What its conditions say of the rollout."""
    return " ".join(condition(model, kind)["message"] for kind in ("Progressing", "Ready", "Degraded"))


@pytest.mark.parametrize("phase", ["Resolving", "Building", "Canary", "Stalled"])
def test_a_model_is_deleted_in_this_phase_and_everything_of_it_goes_while_others_serve(
    rolling: Rolling, endpoint: str, phase: str
) -> None:
    world, begin = rolling.world, rolling.traffic.now()
    spec: dict[str, Any] = {}
    if phase == "Stalled":
        spec["source"] = {"uri": f"s3://{models.MODELS}/tiny/nothing.onnx"}
    world.apply(models.tiny(OTHER, endpoint, **spec))
    if phase == "Canary":
        world.wait_ready(OTHER, ROLLOUT_SECONDS)
        rollout = {"steps": [FOR_EVER]}
        world.patch(OTHER, {"source": {"uri": f"s3://{models.MODELS}/tiny/b.onnx"}, "rollout": rollout})
    if phase == "Stalled":
        world.wait_condition(OTHER, "Stalled", "True", "", ROLLOUT_SECONDS)
    else:
        world.wait(OTHER, phase, lambda m: m.get("status", {}).get("phase") == phase, ROLLOUT_SECONDS)
    world.kubectl("delete", f"trtmodel/{OTHER}", "--timeout=30s")

    def left() -> list[tuple[str, str]]:
        return [(kind, c["metadata"]["name"]) for kind in CHILDREN for c in world.children(kind, OTHER)]

    until("all children are gone", 90, lambda: not left(), lambda: str(left()))
    rolling.traffic.assert_none_failed(begin, least=20)
