"""Workers whose memory holds one engine: each leaves service to change it, one after the other, under steady load."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from . import models
from .install import Images
from .rolling import NAME, ONE, Rolling, served
from .world import World, is_ready, revision

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.night, pytest.mark.timeout(900)]

NAMESPACE = "e2e-memory"
REPLICAS = 3
LOOK_SECONDS = 0.2


@dataclass
class Looks:
    """What is seen of the workers, again and again, until it is closed."""

    world: World
    least_ready: int = REPLICAS
    were_away: set[str] = field(default_factory=set)
    allowed: set[int] = field(default_factory=set)  # by the PodDisruptionBudget's own count, evictions at a time
    count: int = 0

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="looks")
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(30)

    def _look(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            workers = self.world.workers(NAME)
            away = {p["metadata"]["name"] for p in workers if not is_ready(p)}
            self.least_ready = min(self.least_ready, len(workers) - len(away))
            self.were_away |= away
            for budget in self.world.children("PodDisruptionBudget", NAME):
                self.allowed.add(budget["status"].get("disruptionsAllowed", 0))
            self.count += 1


@pytest.fixture(scope="module")
def rolling(world_of: Callable[[str], World], images: Images, files: Path, endpoint: str) -> Iterator[Rolling]:
    manifest = models.magika(NAME, endpoint, REPLICAS)
    manifest["spec"]["rollout"] = {"memoryPolicy": "Resource"}
    with served(world_of(NAMESPACE), images, files, manifest, REPLICAS) as found:
        yield found


def test_every_worker_changes_its_engine_while_all_others_answer_and_no_request_fails(rolling: Rolling) -> None:
    world, begin = rolling.world, rolling.traffic.now()
    pods = {p["metadata"]["name"] for p in world.workers(NAME)}
    looks = Looks(world)
    try:
        candidate = rolling.roll_out(steps=[{"workers": 2, "hold": "4s"}])
        rolling.wait_promoted(candidate)
    finally:
        looks.close()
    print(
        f"\n{looks.count} looks: at least {looks.least_ready} ready, away were {len(looks.were_away)}, {looks.allowed}"
    )
    assert looks.least_ready == REPLICAS - 1
    assert looks.were_away == pods
    assert looks.allowed == {0, 1}  # while one is away nobody else may be evicted
    assert {p["metadata"]["name"] for p in world.workers(NAME)} == pods
    rolling.traffic.assert_none_failed(begin, least=100)


def test_a_candidate_is_aborted_and_who_held_it_comes_back_to_stable_and_no_request_fails(rolling: Rolling) -> None:
    world, begin, before = rolling.world, rolling.traffic.now(), rolling.stable()
    candidate = rolling.roll_out(steps=[{**ONE, "hold": "1h"}])
    rolling.wait_canary()
    rolling.command("abort", candidate)
    found = world.wait_condition(NAME, "Stalled", "True", "Aborted", 60)
    assert revision(found, "stable") == before
    rolling.wait_quiet(candidate)
    world.wait(NAME, "all serve stable", lambda m: m["status"]["targets"][0]["workers"]["onStable"] == REPLICAS, 60)
    rolling.traffic.assert_none_failed(begin, least=100)
