"""The operator's signing key is exchanged while everything serves. See docs/operations.md, "The signing key"."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trtmodel_contract.control import KEYS_FILE, POINTER_SIGNATURE_FILE

from . import models
from .cluster import Json
from .install import RELEASE, SYSTEM, Images
from .traffic import POD, Traffic
from .world import World, is_ready, revision, until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

NAME = "magika"
SECRET = f"{RELEASE}-signing"
READY_SECONDS = 150
TRAFFIC_SECONDS = 900
SHOWN_SECONDS = (
    240  # a kubelet shows a changed ConfigMap to a pod within a minute or two, and the operator looks each 15 s
)


@pytest.fixture(scope="module")
def world(world_of: Callable[[str], World], endpoint: str) -> Iterator[World]:
    found = world_of("e2e-keys")
    manifest = models.magika(NAME, endpoint, replicas=2)
    manifest["spec"]["rollout"] = models.PATIENT
    found.apply(manifest)
    found.wait_ready(NAME, READY_SECONDS)
    yield found
    found.kubectl("delete", f"trtmodel/{NAME}", f"pod/{POD}", "--ignore-not-found", "--wait=false")


def config_map(world: World, name: str, file: str) -> Json:
    """What a file of a ConfigMap of the model holds."""
    (found,) = [c for c in world.children("ConfigMap", NAME) if c["metadata"]["name"] == name]
    held: Json = json.loads(found["data"][file])
    return held


def published(world: World) -> set[str]:
    """Ids of the keys that workers are to trust."""
    return set(config_map(world, f"{NAME}-keys", KEYS_FILE)["keys"])


def signed_by(world: World) -> str:
    """Id of the key that signed what workers boot from."""
    (workload,) = world.children("Deployment", NAME)
    return str(config_map(world, workload["metadata"]["name"], POINTER_SIGNATURE_FILE)["keyId"])


def lives(world: World) -> dict[str, tuple[str, int]]:
    """Each worker's pod and how often its container started anew."""
    return {
        pod["metadata"]["name"]: (
            pod["metadata"]["uid"],
            sum(status["restartCount"] for status in pod["status"]["containerStatuses"]),
        )
        for pod in world.workers(NAME)
    }


def refused(world: World, pod: str) -> float:
    """Signatures that a worker did not accept."""
    return sum(value for name, value in world.metrics(pod).items() if name.startswith("trtmodel_untrusted_total"))


def test_the_next_key_signs_once_every_worker_lists_it_and_nobody_notices(
    world: World, images: Images, files: Path
) -> None:
    traffic = Traffic(world)
    traffic.start(images.worker, NAME, files / "magika" / "requests.npz", TRAFFIC_SECONDS)
    begin, before, workers = traffic.now(), signed_by(world), lives(world)
    assert published(world) == {before}

    world.cluster.kubectl("annotate", "--overwrite", "-n", SYSTEM, f"secret/{SECRET}", "trtmodel.io/rotate=once")
    until("two keys are published", 60, lambda: len(published(world)) == 2, lambda: world.describe(NAME))
    assert before in published(world)
    until("the next key signs", SHOWN_SECONDS, lambda: signed_by(world) != before, lambda: world.describe(NAME))
    after = signed_by(world)
    assert published(world) == {before, after}
    world.wait_ready(NAME, 30)
    assert lives(world) == workers

    stable = revision(world.model(NAME), "stable")
    world.patch(NAME, {"source": models.magika_source("tagged")})
    found = world.wait(NAME, "it is promoted", lambda m: revision(m, "stable") not in ("", stable), READY_SECONDS)
    world.kubectl("delete", "pod", next(iter(workers)), "--wait=false")  # its successor boots under the new key

    def replaced() -> bool:
        pods = world.workers(NAME)
        return len(pods) == 2 and all(is_ready(p) for p in pods) and lives(world).keys() != workers.keys()

    until("the successor serves", 60, replaced, lambda: world.describe(NAME))
    assert revision(world.wait_ready(NAME, 60), "stable") == revision(found, "stable")
    assert {pod: refused(world, pod) for pod in world.ready_workers(NAME)} == dict.fromkeys(
        world.ready_workers(NAME), 0.0
    )
    traffic.assert_none_failed(begin, least=500)
