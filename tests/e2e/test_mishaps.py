"""What should never happen in the middle of a rollout, and does: status is lost, a process dies of the candidate. Under
steady traffic: no request fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from . import models
from .install import Images
from .rolling import COMMAND_SECONDS, NAME, ONE, Rolling, newest, served
from .world import World, condition, revision, until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.night, pytest.mark.timeout(900)]

NAMESPACE = "e2e-mishaps"
REPLICAS = 3
FOR_EVER = {**ONE, "hold": "1h"}
# The engine's own process is the youngest: it was started last.
KILL_THE_YOUNGEST_HOST = """
import os, pathlib, signal
others = [p for p in pathlib.Path("/proc").glob("[0-9]*") if int(p.name) != os.getpid()]
hosts = [p for p in others if b"trtmodel_worker.host" in (p / "cmdline").read_bytes()]
youngest = max(hosts, key=lambda p: int((p / "stat").read_text().rpartition(")")[2].split()[19]))
os.kill(int(youngest.name), signal.SIGKILL)
"""
END_THE_CONTAINER = "import os, signal; os.kill(1, signal.SIGTERM)"


@pytest.fixture(scope="module")
def rolling(world_of: Callable[[str], World], images: Images, files: Path, endpoint: str) -> Iterator[Rolling]:
    manifest = models.magika(NAME, endpoint, REPLICAS)
    manifest["spec"]["rollout"] = {}
    with served(world_of(NAMESPACE), images, files, manifest, REPLICAS) as found:
        yield found


def answering_with(rolling: Rolling, candidate: str) -> str:
    """A worker that has answered with the candidate."""
    series = f'trtmodel_responses_total{{revision="{candidate}",status="200"}}'

    def found() -> list[str]:
        return [p for p in rolling.world.ready_workers(NAME) if rolling.world.metrics(p).get(series)]

    return str(until("a worker answers with it", 20, found)[0])


def test_status_that_is_lost_in_mid_canary_is_made_up_from_what_runs_and_the_rollout_goes_on(rolling: Rolling) -> None:
    world, begin, before = rolling.world, rolling.traffic.now(), rolling.stable()
    candidate = rolling.roll_out(steps=[FOR_EVER])
    rolling.wait_canary()
    jobs = world.jobs(NAME)
    lost = '[{"op": "remove", "path": "/status/rollout"}]'
    world.kubectl("patch", "trtmodel", NAME, "--subresource=status", "--type=json", "-p", lost)
    world.command(NAME, "launch it!")
    found = world.wait(NAME, "stable is known again", lambda m: revision(m, "stable") == before, COMMAND_SECONDS)
    assert condition(found, "Available")["status"] == "True"
    until("it is told", 20, lambda: "Adopted" in {reason for _, reason, _ in world.events(NAME)})
    world.wait(NAME, "it is tried anew", lambda m: revision(m, "candidate") == candidate, 90)
    rolling.wait_canary()
    world.patch(NAME, {"rollout": {"steps": [{**ONE, "hold": "2s"}]}})
    rolling.wait_promoted(candidate)
    assert world.jobs(NAME) == jobs
    rolling.traffic.assert_none_failed(begin, least=100)


@pytest.mark.parametrize(
    ("how", "reason"),
    [(KILL_THE_YOUNGEST_HOST, "EngineDied"), (END_THE_CONTAINER, "WorkerDied")],
    ids=["host", "worker"],
)
def test_what_dies_while_it_has_the_candidate_takes_it_back(rolling: Rolling, how: str, reason: str) -> None:
    world, begin, before = rolling.world, rolling.traffic.now(), rolling.stable()
    assert not revision(world.model(NAME), "candidate")
    candidate = rolling.roll_out(steps=[FOR_EVER])
    rolling.wait_canary()
    member = answering_with(rolling, candidate)
    world.kubectl("exec", member, "--", "python", "-c", how)
    found = world.wait_condition(NAME, "Stalled", "True", reason, 60)
    assert revision(found, "stable") == before
    assert newest(found) == (candidate, "RolledBack")
    assert member in condition(found, "Stalled")["message"]
    rolling.wait_quiet(candidate)
    world.wait(NAME, "all serve stable", lambda m: m["status"]["targets"][0]["workers"]["onStable"] == REPLICAS, 90)
    rolling.traffic.assert_none_failed(begin, least=100)
