"""The release under models that serve: it is tested, upgraded in mid-rollout, removed and put back."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from . import models, sources
from .cluster import Cluster, Json, Refused
from .install import CHART, RELEASE, ROOT, SYSTEM, Operator
from .world import World, revision, until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(400)]

NAMESPACE = "e2e-watched"
NAME = "released"
HELM_SECONDS = 180
ROLLOUT: Json = {  # it outlasts an upgrade, and no busy machine ends it
    **models.ROLLOUT,
    "steps": [{"workers": 1, "hold": "25s"}],
    "analysis": {**models.ROLLOUT["analysis"], "maxLatencyRatio": 10.0},
}
ROW = sources.samples(1)[0].tolist()


def helm(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [cluster.environment["HELM"], *arguments, "--namespace", SYSTEM],
        capture_output=True, text=True, timeout=HELM_SECONDS, check=False, env=cluster.environment,
    )  # fmt: skip


class Client:
    """Asks the model's Service, one request after the other."""

    def __init__(self, world: World) -> None:
        self.answers, self.failures = 0, list[str]()
        self._world, self._over = world, threading.Event()
        self._thread = threading.Thread(target=self._ask, name="asks")
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(60)

    def asks_on(self, least: int = 20) -> None:
        """Returns when so many more were answered, none of them with an error."""
        wanted = self.answers + least
        until("answers", 60, lambda: self.answers >= wanted or self.failures)
        assert self.failures == []

    def _ask(self) -> None:
        while not self._over.wait(0.02):
            try:
                self._world.infer(f"services/{NAME}:http", NAME, models.tiny_inputs(ROW))
                self.answers += 1
            except Refused as e:
                self.failures.append(str(e))


@pytest.fixture(scope="module")
def world(world_of: Callable[[str], World]) -> World:
    return world_of(NAMESPACE)


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart of the commit before this one. In a clone without it: this one, with another version."""
    out = tmp_path_factory.mktemp("former")
    path = str(CHART.relative_to(ROOT))
    found = subprocess.run(["git", "-C", ROOT, "archive", "HEAD^", path], capture_output=True, timeout=60, check=False)
    if found.returncode == 0:
        with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
            archive.extractall(out, filter="data")
        return out / path
    shutil.copytree(CHART, out / "chart")
    text = (out / "chart" / "Chart.yaml").read_text()
    (out / "chart" / "Chart.yaml").write_text(re.sub(r"^version: .*$", "version: 0.0.1", text, flags=re.MULTILINE))
    return out / "chart"


@pytest.fixture(scope="module")
def client(world: World, endpoint: str) -> Iterator[Client]:
    world.apply(models.tiny(NAME, endpoint, rollout=ROLLOUT))
    world.wait_ready(NAME, 120)
    found = Client(world)
    yield found
    found.close()
    world.kubectl("delete", f"trtmodel/{NAME}", "--wait=false")


def worker_uids(world: World) -> set[str]:
    return {p["metadata"]["uid"] for p in world.workers(NAME)}


def test_helm_test_passes_where_the_operator_leads(cluster: Cluster, operator: Operator) -> None:
    done = helm(cluster, "test", RELEASE, "--timeout", "2m")
    pods = cluster.kubectl("get", "pods", "-n", SYSTEM, "-o", "wide")
    log = cluster.kubectl("logs", "-n", SYSTEM, f"{RELEASE}-test", "--ignore-errors") if done.returncode else ""
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{pods}\n{log}"
    assert "Succeeded" in done.stdout


def test_an_upgrade_from_the_former_chart_in_mid_rollout_lets_it_go_on_and_fails_no_request(
    world: World, client: Client, operator: Operator, former: Path
) -> None:
    operator.install(chart=former)
    before, pods = operator.pods(), worker_uids(world)
    world.patch(NAME, {"source": {"uri": f"s3://{models.MODELS}/tiny/b.onnx"}})
    trial = world.wait(NAME, "b is on trial", lambda m: m["status"]["phase"] == "Canary", 90)
    candidate = revision(trial, "candidate")
    operator.install()
    done = helm(
        world.cluster, "upgrade", RELEASE, str(CHART), "--reuse-values", "--set", "logLevel=DEBUG", "--wait",
        "--timeout", "2m",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    until("another operator", 60, lambda: operator.pods() and not set(operator.pods()) & set(before))
    found = world.wait_condition(NAME, "Ready", "True", "Serving", 120)
    assert revision(found, "stable") == candidate
    assert worker_uids(world) == pods
    client.asks_on()


def test_a_rollback_of_the_release_brings_the_former_operator_back_and_fails_no_request(
    world: World, client: Client, operator: Operator
) -> None:
    stable, pods, before = revision(world.wait_ready(NAME, 60), "stable"), worker_uids(world), operator.pods()
    done = helm(world.cluster, "rollback", RELEASE, "--wait", "--timeout", "2m")
    assert done.returncode == 0, done.stderr
    until("the operator of before", 60, lambda: operator.pods() and not set(operator.pods()) & set(before))
    assert "logLevel: DEBUG" not in helm(world.cluster, "get", "values", RELEASE).stdout
    world.patch(NAME, {"rollout": {"historyLimit": 6}})
    world.wait_observed(NAME, 60)
    assert revision(world.wait_ready(NAME, 60), "stable") == stable
    assert worker_uids(world) == pods
    client.asks_on()


def test_models_serve_while_the_release_is_gone_and_nothing_is_made_anew_when_it_is_back(
    world: World, client: Client, operator: Operator
) -> None:
    stable = revision(world.wait_ready(NAME, 60), "stable")
    children = {kind: names(world, kind) for kind in ("Deployment", "ConfigMap", "Service", "Job")}
    pods = worker_uids(world)
    gone = helm(world.cluster, "uninstall", RELEASE, "--wait", "--timeout", "2m")
    try:
        assert gone.returncode == 0, gone.stderr
        until("no operator", 60, lambda: not operator.pods())
        client.asks_on(100)
        secret = world.cluster.kubectl("get", "secret", "-n", SYSTEM, f"{RELEASE}-signing", "-o", "name")
        assert secret.strip() == f"secret/{RELEASE}-signing"
    finally:
        operator.install()
    world.patch(NAME, {"rollout": {"historyLimit": 7}})
    world.wait_observed(NAME, 60)
    found = world.wait_condition(NAME, "Ready", "True", "Serving", 60)
    assert revision(found, "stable") == stable
    assert worker_uids(world) == pods
    assert {kind: names(world, kind) for kind in children} == children
    client.asks_on()


def names(world: World, kind: str) -> set[str]:
    found: list[Json] = world.children(kind, NAME)
    return {c["metadata"]["name"] for c in found}
