"""Other workers for the same model, under steady traffic: other pod settings, another image and the way back from it,
an image that does not exist, settings with which no worker starts, and a person who ends it. Whatever happens, no
request fails."""

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
from .other_image import OTHER_RUNTIME, of_another_runtime
from .traffic import Traffic
from .world import World, condition, job_result, revision, until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(420)]

NAME = "magika"
REPLICAS = 2
FIRST_SECONDS = 150
CHANGE_SECONDS = 240  # two workers come one after the other, and the first is watched
COMMAND_SECONDS = 30
TRAFFIC_SECONDS = 2400
PLAN: Json = {
    "steps": [{"workers": 1, "hold": "4s"}],
    # Workers, builds and whatever else runs share two cores: a ratio would say nothing about the workers.
    "analysis": {"interval": "2s", "minRequests": 60, "maxErrorRateIncrease": 0.05, "maxLatencyRatio": 20},
    "progressDeadline": "2m",
}


@dataclass
class Served:
    """Magika in service, and those who ask it."""

    world: World
    traffic: Traffic
    commands: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def change(self, **serving: Any) -> None:
        self.world.patch(NAME, {"serving": serving})

    def deployments(self) -> dict[str, int]:
        """Hash of the platform -> replicas that are wanted of it."""
        found = self.world.children("Deployment", NAME, "role=worker")
        return {d["metadata"]["labels"]["trtmodel.io/platform"]: d["spec"]["replicas"] for d in found}

    def platform(self) -> str:
        """What serves, when nothing else is there."""
        (found,) = self.deployments()
        return found

    def wait_only(self, platform: str) -> None:
        """Its Deployment is the only one, and its workers alone are ready."""
        done = lambda: self.deployments() == {platform: REPLICAS} and self._made_of() == [platform] * REPLICAS  # noqa: E731
        until("the others have left", 90, done, lambda: self.world.describe(NAME))

    def _made_of(self) -> list[str]:
        """Of workers that are not on their way out."""
        return [p["metadata"]["labels"]["trtmodel.io/platform"] for p in self.world.workers(NAME)]

    def wait_tried(self) -> str:
        """Workers of another platform answer, beside those of before; its hash."""

        def done(model: Json) -> bool:
            on_trial = model["status"]["targets"][0]["workers"]["onCandidate"]
            return model["status"]["phase"] == "Canary" and on_trial > 0

        return revision(self.world.wait(NAME, "new workers answer", done, CHANGE_SECONDS), "candidate")

    def images(self) -> set[str]:
        """What the workers are made of."""
        return {p["spec"]["containers"][0]["image"] for p in self.world.workers(NAME)}

    def builds_of(self, image: str) -> list[tuple[str, bool]]:
        """Of each Job of this image that brought an engine: its load key, and whether it was in the bucket already."""
        jobs = self.world.children("Pod", NAME, "kind=build")
        results = [job_result(p) for p in jobs if p["spec"]["containers"][0]["image"] == image]
        return [(str(r.build.artifact.load_key), r.build.reused) for r in results if r is not None and r.build]

    def events(self) -> set[str]:
        return {reason for _, reason, _ in self.world.events(NAME)}


@pytest.fixture(scope="module")
def served(world_of: Callable[[str], World], images: Images, files: Path, endpoint: str) -> Served:
    world = world_of("e2e-platform")
    manifest = models.magika(NAME, endpoint, REPLICAS)
    manifest["spec"]["rollout"] = {**PLAN, "historyLimit": 20}
    manifest["spec"]["build"]["deadline"] = "1m"
    world.apply(manifest)
    world.wait_condition(NAME, "Ready", "True", "Serving", FIRST_SECONDS)
    traffic = Traffic(world)
    traffic.start(images.worker, NAME, files / "magika" / "requests.npz", TRAFFIC_SECONDS)
    return Served(world, traffic)


@pytest.fixture(scope="module")
def other(images: Images, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The worker with another version of ONNX Runtime."""
    return of_another_runtime(images.worker, tmp_path_factory.mktemp("image"))


def newest(model: Json) -> tuple[str, str]:
    """The last rollout that ended."""
    entry = model["status"]["history"][0]
    return entry["revision"], entry["outcome"]


def test_other_pod_settings_are_tried_beside_the_old_ones_and_then_the_old_ones_leave(served: Served) -> None:
    before, begin = served.platform(), served.traffic.now()
    stable = revision(served.world.model(NAME), "stable")
    served.change(pod={"annotations": {"team": "search"}})
    on_trial = served.wait_tried()
    assert on_trial != before
    assert set(served.deployments()) == {before, on_trial}
    found = served.world.wait_condition(NAME, "Ready", "True", "Serving", CHANGE_SECONDS)
    assert newest(found) == (on_trial, "Promoted")
    assert revision(found, "stable") == stable
    served.wait_only(on_trial)
    assert all(p["metadata"]["annotations"]["team"] == "search" for p in served.world.workers(NAME))
    assert {"PlatformChanges", "Promoted"} <= served.events()
    summary = served.traffic.assert_none_failed(begin, least=100)
    assert set(summary["revisions"]) == {stable}


def test_another_image_with_another_runtime_has_its_engines_built_is_tried_promoted_and_left_again(
    served: Served, images: Images, other: str
) -> None:
    world, before, begin = served.world, served.platform(), served.traffic.now()
    stable = revision(world.model(NAME), "stable")
    served.change(image=other)
    on_trial = served.wait_tried()
    assert on_trial != before
    assert set(served.deployments()) == {before, on_trial}
    assert served.images() == {images.worker, other}
    ((key, reused),) = served.builds_of(other)  # before there was a worker that needs it
    assert (OTHER_RUNTIME in key, reused) == (True, False)
    found = world.wait_condition(NAME, "Ready", "True", "Serving", CHANGE_SECONDS)
    assert newest(found) == (on_trial, "Promoted")
    assert f"workers of image {other}" in found["status"]["history"][0]["reason"]
    assert "compared with the workers of before in the same time" in found["status"]["history"][0]["reason"]
    assert (revision(found, "stable"), found["status"]["rollout"]["platform"]["image"]) == (stable, other)
    served.wait_only(on_trial)
    assert served.images() == {other}

    # The way back is a rollout like any other, with the engine that is in the bucket.
    builds = len(served.builds_of(images.worker))
    served.change(image="")
    assert served.wait_tried() == before
    found = world.wait_condition(NAME, "Ready", "True", "Serving", CHANGE_SECONDS)
    assert newest(found) == (before, "Promoted")
    assert (revision(found, "stable"), found["status"]["rollout"]["platform"]["image"]) == (stable, images.worker)
    served.wait_only(before)
    assert served.images() == {images.worker}
    assert [reused for _, reused in served.builds_of(images.worker)[builds:]] in ([], [True])
    summary = served.traffic.assert_none_failed(begin, least=200)
    assert set(summary["revisions"]) == {stable}


def test_a_person_ends_it_in_the_middle_and_the_old_workers_are_all_back(served: Served) -> None:
    before, begin = served.platform(), served.traffic.now()
    served.change(pod={"annotations": {"team": "ads"}})
    on_trial = served.wait_tried()
    served.world.command(NAME, f"abort@{on_trial}#{next(served.commands)}")
    found = served.world.wait_condition(NAME, "Stalled", "True", "Aborted", COMMAND_SECONDS)
    assert newest(found) == (on_trial, "Aborted")
    assert condition(found, "Available")["status"] == "True"
    served.wait_only(before)
    served.traffic.assert_none_failed(begin, least=50)
    served.change(pod={"annotations": {"team": "search"}})
    served.world.wait_condition(NAME, "Ready", "True", "Serving", COMMAND_SECONDS)


def test_settings_with_which_no_worker_starts_are_taken_back_by_themselves(served: Served) -> None:
    before, begin = served.platform(), served.traffic.now()
    served.change(pod={"env": [{"name": "PYTHONHOME", "value": "/nowhere"}]})
    found = served.world.wait_condition(NAME, "Stalled", "True", "", CHANGE_SECONDS)
    entry = found["status"]["history"][0]
    assert entry["outcome"] == "RolledBack"
    assert condition(found, "Stalled")["reason"] in ("WorkerDied", "CrashLoopBackOff")
    served.wait_only(before)
    assert condition(served.world.model(NAME), "Available")["status"] == "True"
    served.traffic.assert_none_failed(begin, least=50)
    served.change(pod={"env": None})
    served.world.wait_condition(NAME, "Ready", "True", "Serving", COMMAND_SECONDS)


def test_an_image_that_does_not_exist_makes_no_worker_and_is_taken_back_with_the_cause(served: Served) -> None:
    before, begin = served.platform(), served.traffic.now()
    served.change(image="localhost/not-there:1")
    served.world.wait_condition(NAME, "Progressing", "False", "ImagePullBackOff", CHANGE_SECONDS)
    found = served.world.wait_condition(NAME, "Stalled", "True", "DeadlineExceeded", CHANGE_SECONDS)
    assert found["status"]["history"][0]["outcome"] == "RolledBack"
    assert "not-there" in condition(found, "Stalled")["message"]
    assert served.deployments() == {before: REPLICAS}
    served.change(image="")
    served.world.wait_condition(NAME, "Ready", "True", "Serving", COMMAND_SECONDS)
    served.traffic.assert_none_failed(begin, least=100)
