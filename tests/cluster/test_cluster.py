"""The local cluster keeps its promises: names resolve, S3 is conditional, Jobs fail fast, status tells the truth."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

pytestmark = pytest.mark.e2e

HERE = Path(__file__).resolve().parent
TOOL = HERE / "cluster"
local_only = pytest.mark.skipif(
    os.environ.get("CLUSTER", "") not in ("", "local"), reason="about the processes of the default mode"
)


def cluster(*args: str, tool: Path = TOOL) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tool, *args], check=False, capture_output=True, text=True, timeout=110)


def until(condition: Callable[[], bool], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.fixture(scope="module")
def env() -> dict[str, str]:
    up = cluster("up")
    assert up.returncode == 0, up.stderr
    lines = cluster("env").stdout.splitlines()
    pairs = (line.removeprefix("export ").partition("=") for line in lines)
    return {name: value.strip("'") for name, _, value in pairs}


class Kubectl:
    def __init__(self, env: dict[str, str], namespace: str) -> None:
        self._base = [env["KUBECTL"], "--kubeconfig", env["KUBECONFIG"], "-n", namespace]

    def __call__(self, *args: str, stdin: str | None = None) -> str:
        done = subprocess.run(
            [*self._base, *args], check=False, input=stdin, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def get(self, *args: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self("get", *args, "-o", "json"))
        return found

    def create(self, manifest: dict[str, Any]) -> None:
        self("create", "-f", "-", stdin=json.dumps(manifest))


@pytest.fixture
def kubectl(env: dict[str, str]) -> Iterator[Kubectl]:
    namespace = f"cluster-test-{uuid.uuid4().hex[:8]}"
    kubectl = Kubectl(env, namespace)
    kubectl("create", "namespace", namespace)
    yield kubectl
    kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.fixture
def bucket(env: dict[str, str]) -> Iterator[Any]:
    s3 = boto3.resource(
        "s3",
        endpoint_url=env["S3_ENDPOINT"],
        aws_access_key_id=env["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
        region_name=env["AWS_REGION"],
        config=Config(s3={"addressing_style": "path"}, connect_timeout=5, read_timeout=10, retries={"max_attempts": 2}),
    )
    bucket = s3.create_bucket(Bucket=f"cluster-test-{uuid.uuid4().hex[:8]}")
    yield bucket
    bucket.objects.all().delete()
    bucket.delete()


def job(name: str, image: str, code: str, **spec: Any) -> dict[str, Any]:
    container = {"name": "c", "image": image, "command": ["python3", "-c", code]}
    template = {"spec": {"restartPolicy": "Never", "automountServiceAccountToken": False, "containers": [container]}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"backoffLimit": 4, "template": template, **spec},
    }


def condition(kubectl: Kubectl, name: str, kind: str) -> dict[str, str] | None:
    conditions = kubectl.get("job", name)["status"].get("conditions", [])
    return next((c for c in conditions if c["type"] == kind and c["status"] == "True"), None)


@local_only
def test_a_pod_reaches_a_service_by_its_name(env: dict[str, str], kubectl: Kubectl) -> None:
    code = f"import urllib.request as u; print(u.urlopen('{env['S3_ENDPOINT_IN_CLUSTER']}/health', timeout=5).status)"
    kubectl.create(job("dns", env["BASE_IMAGE"], code))
    assert until(lambda: condition(kubectl, "dns", "Complete") is not None)
    assert kubectl("logs", "job/dns").strip() == "200"


def test_the_second_conditional_write_of_an_object_is_refused(bucket: Any) -> None:
    bucket.put_object(Key="manifest.json", Body=b"first", IfNoneMatch="*")
    with pytest.raises(ClientError) as refused:
        bucket.put_object(Key="manifest.json", Body=b"second", IfNoneMatch="*")
    assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 412
    assert bucket.Object("manifest.json").get()["Body"].read() == b"first"


@local_only
def test_a_job_that_exits_with_42_fails_at_once_and_is_not_retried(env: dict[str, str], kubectl: Kubectl) -> None:
    policy = {"rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42]}}]}
    kubectl.create(job("rejected", env["BASE_IMAGE"], "raise SystemExit(42)", podFailurePolicy=policy))
    assert until(lambda: condition(kubectl, "rejected", "Failed") is not None)
    failed = condition(kubectl, "rejected", "Failed")
    assert failed is not None
    assert failed["reason"] == "PodFailurePolicy"
    assert len(kubectl.get("pods")["items"]) == 1


@local_only
def test_a_pod_that_asks_for_a_gpu_of_the_labelled_kind_is_scheduled(env: dict[str, str], kubectl: Kubectl) -> None:
    wanted = job("gpu", env["BASE_IMAGE"], "pass")
    pod = wanted["spec"]["template"]["spec"]
    pod["nodeSelector"] = {"nvidia.com/gpu.product": "NVIDIA-A10"}
    pod["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
    kubectl.create(wanted)
    assert until(lambda: condition(kubectl, "gpu", "Complete") is not None)


def statuses() -> dict[str, tuple[bool, str]]:
    rows = (line.split(None, 2) for line in cluster("status").stdout.splitlines())
    return {name: (mark == "ok", detail) for mark, name, detail in rows}


@local_only
def test_status_tells_that_a_component_was_killed_and_up_heals_it(env: dict[str, str]) -> None:
    before = statuses()
    assert all(well for well, _ in before.values())
    os.kill(int(before["kube-scheduler"][1].removeprefix("pid ")), signal.SIGKILL)
    assert until(lambda: not statuses()["kube-scheduler"][0])
    assert cluster("status").returncode == 3
    assert cluster("up").returncode == 0
    after = statuses()
    assert cluster("status").returncode == 0
    assert after["kube-scheduler"] != before["kube-scheduler"]
    untouched = set(before) - {"kube-scheduler"}
    assert {n: after[n] for n in untouched} == {n: before[n] for n in untouched}


@local_only
@pytest.mark.parametrize("command", [["up"], ["down", "--purge"], ["images"], ["env"]], ids=" ".join)
def test_another_clone_can_neither_take_nor_end_the_cluster(
    env: dict[str, str], tmp_path: Path, command: list[str]
) -> None:
    other = shutil.copytree(HERE, tmp_path / "clone" / "tests" / "cluster")
    before = statuses()
    refused = cluster(*command, tool=other / "cluster")
    assert refused.returncode == 1
    assert f"belongs to the clone {HERE.parent.parent}" in refused.stderr
    assert statuses() == before


@local_only
def test_two_commands_of_one_clone_take_turns(env: dict[str, str]) -> None:
    run = Path(env["KUBECONFIG"]).parents[1]
    with run.with_name(f"{run.name}.owner").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = subprocess.Popen([TOOL, "up"], stderr=subprocess.PIPE, text=True)
        assert waiting.stderr is not None
        assert "waiting for another command" in waiting.stderr.readline()
        assert waiting.poll() is None
    waiting.communicate(timeout=60)
    assert waiting.returncode == 0


@local_only
def test_the_current_context_is_not_used_without_leave_by_its_name(env: dict[str, str], tmp_path: Path) -> None:
    foreign = tmp_path / "kubeconfig"
    foreign.write_text(Path(env["KUBECONFIG"]).read_text().replace("trtmodel-local", "production"))
    variables = {**os.environ, "CLUSTER": "current", "KUBECONFIG": str(foreign), "PATH": env["PATH"]}

    def up(allowed: str) -> subprocess.CompletedProcess[str]:
        allow = {**variables, "TRTMODEL_ALLOW_CONTEXT": allowed}
        return subprocess.run(
            [TOOL, "up"], check=False, env=allow, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )

    refused = up("staging,productio")
    assert refused.returncode == 1
    assert "the context 'production' is not allowed" in refused.stderr
    assert up("staging, production").returncode == 0
