"""The wiring: a real process against a small API server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.api_server import FakeApiServer, refusal
from free_ports import free_port
from trtmodel_contract.control import CONTROL_PORT
from trtmodel_operator.adapters.informing import informer_settings

Start = Callable[..., "Operator"]


class Operator:
    """`python -m trtmodel_operator.main` with free ports."""

    def __init__(self, server: FakeApiServer, folder: Path, name: str, **environment: str) -> None:
        self.port = 0
        self._log = folder / f"{name}.log"
        kept = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG", "PYTHONPATH")}
        settings = {
            "KUBECONFIG": str(server.kubeconfig(folder)),
            "POD_NAME": name,
            "TRTMODEL_NAMESPACE": "ops",
            "TRTMODEL_WORKER_IMAGE": "worker:1",
            "TRTMODEL_HOST": "127.0.0.1",
            "TRTMODEL_HTTP_PORT": str(free_port()),
            "TRTMODEL_METRICS_PORT": str(free_port()),
        }
        self.settings = settings | environment
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trtmodel_operator.main"], env=kept | self.settings, stderr=log
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def get(self, path: str, port: str = "TRTMODEL_HTTP_PORT") -> tuple[int, str]:
        url = f"http://127.0.0.1:{self.settings[port]}{path}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as e:
            return e.code, e.read().decode()
        except OSError as e:
            return 0, str(e)

    def until(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < deadline, f"not within {seconds} s:\n{self.log}"
            time.sleep(0.02)

    def leads(self) -> bool:
        return "trtmodel_operator_leader 1.0" in self.get("/metrics", "TRTMODEL_METRICS_PORT")[1]

    def ends(self, seconds: float = 20) -> int:
        return self.process.wait(seconds)


@pytest.fixture
def start(api_server: FakeApiServer, tmp_path: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def begin(name: str = "operator-1", **environment: str) -> Operator:
            operator = Operator(api_server, tmp_path, name, **environment)
            stack.callback(operator.process.wait)
            stack.callback(operator.process.kill)
            return operator

        yield begin


def put_model(server: FakeApiServer, name: str = "magika", namespace: str = "ml", source: str = "") -> None:
    metadata = {"namespace": namespace, "name": name}
    spec = SPEC | ({"source": {"uri": source}} if source else {})
    server.put({"apiVersion": "trtmodel.io/v1alpha1", "kind": "TRTModel", "metadata": metadata, "spec": spec})


def put_pod(server: FakeApiServer, name: str, labels: dict[str, str]) -> None:
    server.put({"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "ml", "name": name, "labels": labels}})


SPEC = {
    "source": {"uri": "s3://models/model.onnx"},
    "storage": {"bucket": "engines"},
    "engine": {"runtime": "ONNXRuntime"},
    "verify": {"task": "Classification", "dataset": {"uri": "s3://data/eval.npz", "samples": 1000}},
    "serving": {"replicas": 1},
}


def passes(operator: Operator) -> int:
    """How often it looked at a model."""
    lines = operator.get("/metrics", "TRTMODEL_METRICS_PORT")[1].splitlines()
    done = 'trtmodel_operator_reconcile_total{result="done"} '
    return next((int(float(line.removeprefix(done))) for line in lines if line.startswith(done)), 0)


def test_kopf_is_an_informer_only() -> None:
    settings = informer_settings()
    assert settings.peering.standalone
    assert settings.scanning.disabled
    assert not settings.posting.enabled
    assert settings.persistence.finalizer == "kopf.trtmodel.io/unused"


def test_children_are_listed_and_watched_by_label_in_pages_and_models_wholly(
    api_server: FakeApiServer, start: Start
) -> None:
    put_model(api_server)
    operator = start()
    plurals = ("pods", "jobs", "deployments", "configmaps", "services", "trtmodels")

    def watched() -> set[str]:
        return {s.path.rpartition("/")[2] for s in api_server.seen if s.query.get("watch")}

    operator.until(lambda: watched() >= set(plurals))
    for plural in plurals:
        selector = None if plural == "trtmodels" else "trtmodel.io/model"
        path = next(s.path for s in api_server.seen if s.query.get("watch") and s.path.endswith(f"/{plural}"))
        asked = [s for s in api_server.seen if s.path == path]
        assert {s.query.get("labelSelector") for s in asked} == {selector}, plural
        assert {s.query.get("limit") for s in asked if not s.query.get("watch")} == {"100"}, plural


def test_passes_list_no_children_for_themselves(api_server: FakeApiServer, start: Start) -> None:
    put_model(api_server)
    operator = start()
    operator.until(lambda: len(api_server.all("jobs")) == 1)
    put_pod(api_server, "magika-worker", {"trtmodel.io/model": "magika"})
    operator.until(lambda: passes(operator) > 1)
    assert {s.query.get("labelSelector") for s in api_server.seen if "limit" in s.query} == {None, "trtmodel.io/model"}


def test_nothing_is_written_but_by_our_own_field_managers(api_server: FakeApiServer, start: Start) -> None:
    put_model(api_server)
    put_pod(api_server, "magika-worker", {"trtmodel.io/model": "magika"})
    operator = start()
    operator.until(lambda: bool(((api_server.get("trtmodels", "ml", "magika") or {}).get("status") or {}).get("phase")))
    assert {s.agent for s in api_server.writes()} == {"trtmodel-operator"}
    model, pod = api_server.get("trtmodels", "ml", "magika"), api_server.get("pods", "ml", "magika-worker")
    assert model is not None
    assert pod is not None
    managers = {entry["manager"] for entry in model["metadata"]["managedFields"]}
    assert managers <= {"trtmodel-rollout", "trtmodel-status"}
    for obj in (model, pod):
        assert "annotations" not in obj["metadata"]
        assert "finalizers" not in obj["metadata"]
    assert pod["metadata"]["managedFields"] == []


def test_an_event_of_a_child_leads_to_a_pass_of_its_model_also_when_that_is_gone(
    api_server: FakeApiServer, start: Start
) -> None:
    operator = start()
    operator.until(lambda: any(s.query.get("watch") and s.path.endswith("/pods") for s in api_server.seen))
    put_pod(api_server, "stranger", {"app": "x"})
    put_pod(api_server, "left-behind", {"trtmodel.io/model": "gone"})  # no event of the model itself will come
    operator.until(lambda: passes(operator) == 1)


def test_a_model_leads_to_its_resolve_job_and_a_deleted_one_to_no_more_series(
    api_server: FakeApiServer, start: Start
) -> None:
    operator = start()
    operator.until(operator.leads)
    put_model(api_server)
    operator.until(lambda: len(api_server.all("jobs")) == 1)
    (job,) = api_server.all("jobs")
    assert job["metadata"]["labels"]["trtmodel.io/kind"] == "resolve"
    assert job["metadata"]["managedFields"] == [{"manager": "trtmodel-children", "operation": "Update"}]
    series = 'trtmodel_operator_model_stage{name="magika",namespace="ml",stage="Resolving"} 1.0'
    operator.until(lambda: series in operator.get("/metrics", "TRTMODEL_METRICS_PORT")[1])
    api_server.delete("trtmodels", "ml", "magika")
    operator.until(lambda: "magika" not in operator.get("/metrics", "TRTMODEL_METRICS_PORT")[1])


def test_the_standby_is_ready_and_takes_over_at_once_when_the_leader_is_told_to_end(
    api_server: FakeApiServer, start: Start
) -> None:
    put_model(api_server)
    first = start("operator-1")
    first.until(first.leads)
    second = start("operator-2")
    second.until(lambda: second.get("/readyz")[0] == 200)
    assert second.get("/livez")[0] == 200
    assert not second.leads()
    assert first.get("/readyz")[0] == first.get("/livez")[0] == 200
    first.process.send_signal(signal.SIGTERM)
    assert first.ends() == 0
    second.until(second.leads, seconds=8)  # a lease that was not released lasts 15 s
    assert len(api_server.all("secrets")) == 1


def test_a_standby_ends_cleanly_when_it_is_told_to(api_server: FakeApiServer, start: Start) -> None:
    leader = start("operator-1")
    leader.until(leader.leads)
    standby = start("operator-2")
    standby.until(lambda: standby.get("/readyz")[0] == 200)
    standby.process.send_signal(signal.SIGTERM)
    assert standby.ends() == 0
    (lease,) = api_server.all("leases")
    assert lease["spec"]["holderIdentity"].startswith("operator-1_")


def test_only_the_given_namespaces_are_listed_and_watched(api_server: FakeApiServer, start: Start) -> None:
    put_model(api_server, namespace="ml")
    put_model(api_server, namespace="other")
    operator = start(TRTMODEL_WATCH_NAMESPACES="ml")
    operator.until(lambda: len([s for s in api_server.seen if s.query.get("watch")]) == 6)
    operator.until(lambda: len(api_server.all("jobs")) == 1)
    asked = [s for s in api_server.seen if s.method == "GET" and ("watch" in s.query or "limit" in s.query)]
    assert all("/namespaces/ml/" in s.path for s in asked)
    assert api_server.all("jobs")[0]["metadata"]["namespace"] == "ml"


def test_open_long_polls_do_not_hold_up_the_end(api_server: FakeApiServer, start: Start) -> None:
    with socket.create_server(("127.0.0.77", CONTROL_PORT)) as silent:  # accepts, and never answers
        put_model(api_server)
        operator = start()
        operator.until(operator.leads)
        uid = (api_server.get("trtmodels", "ml", "magika") or {})["metadata"]["uid"]
        api_server.put(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "namespace": "ml",
                    "name": "magika-worker",
                    "labels": {"trtmodel.io/model": "magika", "trtmodel.io/role": "worker"},
                },
                "spec": {"containers": [{"env": [{"name": "TRTMODEL_MODEL_UID", "value": uid}]}]},
                "status": {"podIP": "127.0.0.77", "containerStatuses": [{"state": {"running": {}}}]},
            }
        )
        series = "trtmodel_operator_followed_workers 1.0"
        operator.until(lambda: series in operator.get("/metrics", "TRTMODEL_METRICS_PORT")[1])
        operator.process.send_signal(signal.SIGTERM)
        assert operator.ends(seconds=20) == 0, "a long poll takes 30 s"
        assert silent.fileno() > 0
    (lease,) = api_server.all("leases")
    assert lease["spec"]["holderIdentity"] == ""


def test_without_the_crd_it_ends_with_an_error_that_says_so(api_server: FakeApiServer, start: Start) -> None:
    api_server.kinds["trtmodel.io", "v1alpha1"] = {}
    operator = start()
    assert operator.ends() == 1
    assert "the CRD of TRTModels is not installed" in operator.log


def test_a_setting_that_is_not_understood_ends_the_start_with_exit_code_2(
    api_server: FakeApiServer, start: Start
) -> None:
    operator = start(TRTMODEL_HTTP_PORT="http", TRTMODEL_WORKERIMAGE="x")
    assert operator.ends() == 2
    assert "TRTMODEL_HTTP_PORT must be a port" in operator.log
    assert "TRTMODEL_WORKERIMAGE is no setting of the operator" in operator.log


def test_a_key_secret_without_a_key_ends_the_start_with_exit_code_2(api_server: FakeApiServer, start: Start) -> None:
    metadata = {"namespace": "ops", "name": "trtmodel-operator-signing"}
    api_server.put({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {}})
    operator = start()
    assert operator.ends() == 2
    assert "has no usable key" in operator.log


def test_it_survives_an_api_server_that_refuses_and_fails_for_a_while(api_server: FakeApiServer, start: Start) -> None:
    put_model(api_server)
    operator = start()
    operator.until(lambda: len(api_server.all("jobs")) == 1)
    first = api_server.all("jobs")[0]["metadata"]["name"]
    answers = [refusal(429, Retry_After="1"), refusal(500), refusal(503)]
    path = "/apis/batch/v1/namespaces/ml/jobs"
    asked = ("POST", path)
    api_server.fault = lambda seen: answers.pop() if answers and (seen.method, seen.path) == asked else None
    put_model(api_server, source="s3://models/another.onnx")
    operator.until(lambda: not answers)
    operator.until(lambda: any(job["metadata"]["name"] != first for job in api_server.all("jobs")))
    assert operator.get("/livez")[0] == 200


def test_every_line_of_the_log_is_json_and_names_its_model(api_server: FakeApiServer, start: Start) -> None:
    put_model(api_server)
    operator = start(TRTMODEL_LOG_LEVEL="DEBUG")
    operator.until(lambda: len(api_server.all("jobs")) == 1)
    operator.process.send_signal(signal.SIGTERM)
    assert operator.ends() == 0
    lines = [json.loads(line) for line in operator.log.splitlines()]
    assert {"time", "level", "logger", "message"} <= lines[0].keys()
    assert any(line.get("key") == "ml/magika" for line in lines)
