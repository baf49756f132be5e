"""What the worker says about its model: configuration, statistics, index, and the document that describes its paths."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from protocol_harness import INFER, serve
from trtmodel_contract.manifest import TensorSpec
from trtmodel_worker.front.openapi import openapi
from trtmodel_worker.front.paths import POSTED, Path, parse_path
from worker_harness import REVISION_1, WorkerProcess, eventually, fp32, request

ONE = f"/v2/models/m/versions/{REVISION_1}"


@pytest.fixture(scope="module")
def doubler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """x:FP32[1..8, 4] -> y = 2x."""
    yield from serve(tmp_path_factory.mktemp("doubler"), {"factor": 2.0}, {})


def test_the_configuration_says_what_tritons_clients_want_to_know(doubler: WorkerProcess) -> None:
    for path in ("/v2/models/m/config", f"{ONE}/config"):
        config = doubler.get(path).json
        assert config["name"] == "m"
        assert config["platform"] == "test"
        assert config["max_batch_size"] == 8
        assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}]
        assert config["output"] == [{"name": "y", "data_type": "TYPE_FP32", "dims": [4]}]
    assert doubler.get("/v2/models/m/versions/9999999999/config").status == 404


def test_a_model_without_a_batch_says_its_whole_shapes(tmp_path_factory: pytest.TempPathFactory) -> None:
    inputs, outputs = [TensorSpec("x", "INT64", (1, 4))], [TensorSpec("y", "INT64", (2, -1))]
    for worker in serve(tmp_path_factory.mktemp("fixed"), {"mode": "nonzero"}, {}, inputs=inputs, outputs=outputs):
        config = worker.get("/v2/models/m/config").json
        assert config["max_batch_size"] == 0
        assert config["input"] == [{"name": "x", "data_type": "TYPE_INT64", "dims": [1, 4]}]
        assert config["output"] == [{"name": "y", "data_type": "TYPE_INT64", "dims": [2, -1]}]


@pytest.mark.parametrize("path", ["/v2/models/stats", "/v2/models/m/stats", f"{ONE}/stats"])
def test_statistics_count_what_was_answered_and_what_failed(doubler: WorkerProcess, path: str) -> None:
    def stats() -> Any:
        (found,) = doubler.get(path).json["model_stats"]
        return found

    before = stats()
    for _ in range(5):
        assert doubler.infer_rows([[1.0] * 4, [2.0] * 4]).status == 200
    for _ in range(2):
        assert doubler.infer(fp32([1], [1, 1])).status == 400
    after = stats()
    assert (after["name"], after["version"]) == ("m", REVISION_1)
    assert after["inference_count"] - before["inference_count"] == 10, "rows, not requests"
    assert after["execution_count"] - before["execution_count"] == 5
    for name in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        assert after["inference_stats"][name]["count"] - before["inference_stats"][name]["count"] == 5, name
    assert after["inference_stats"]["fail"]["count"] - before["inference_stats"]["fail"]["count"] == 2
    for name in ("success", "compute_infer"):
        assert after["inference_stats"][name]["ns"] > before["inference_stats"][name]["ns"]


def test_the_repository_lists_each_revision_and_changes_at_nobodys_request(doubler: WorkerProcess) -> None:
    entry = {"name": "m", "version": REVISION_1, "state": "READY", "reason": ""}
    assert doubler.post("/v2/repository/index", b"").json == [entry]
    assert doubler.post("/v2/repository/index", b'{"ready":true}').json == [entry]
    for change in ("load", "unload"):
        answer = doubler.post(f"/v2/repository/models/m/{change}", b"{}")
        assert (answer.status, "TRTModel" in answer.json["error"]) == (400, True)
        assert doubler.post(f"/v2/repository/models/other/{change}", b"{}").status == 404


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v2", "GET, HEAD"), ("/v2/health/live", "GET, HEAD"), ("/v2/models/m", "GET, HEAD"), (INFER, "POST"),
        ("/v2/models/m/config", "GET, HEAD"), ("/v2/models/stats", "GET, HEAD"), ("/v2/repository/index", "POST"),
        ("/v2/repository/models/m/load", "POST"), ("/openapi.json", "GET, HEAD"),
    ],
)  # fmt: skip
def test_each_path_says_how_it_may_be_asked(doubler: WorkerProcess, path: str, allowed: str) -> None:
    for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        answer = request(doubler.port, method, path, b"", {})
        assert (answer.status == 405) == (method not in allowed), method
        if answer.status == 405:
            assert answer.headers["allow"] == allowed
            assert method == "HEAD" or answer.json["error"]


def test_a_head_request_gets_the_head_of_the_answer(doubler: WorkerProcess) -> None:
    whole, head = doubler.get("/v2/models/m"), request(doubler.port, "HEAD", "/v2/models/m", b"", {})
    assert (head.status, head.body) == (200, b"")
    assert head.headers == whole.headers


def test_the_openapi_document_is_served_and_each_of_its_paths_is_there(doubler: WorkerProcess) -> None:
    document = doubler.get("/openapi.json").json
    assert document["openapi"] == "3.1.0"
    for template, item in document["paths"].items():
        path = template.replace("{model}", "m").replace("{revision}", REVISION_1)
        (method,) = set(item) - {"parameters"}
        answer = request(doubler.port, method.upper(), path, b"{}" if method == "post" else b"", {})
        assert str(answer.status) in item[method]["responses"], path
        assert answer.status == (400 if template.endswith(("infer", "load")) else 200), path


@pytest.mark.parametrize("shared_memory", [False, True])
def test_the_openapi_document_names_exactly_the_paths_that_there_are(shared_memory: bool) -> None:
    document = openapi("1", "m", ["r"], shared_memory)
    names = {"{model}": "m", "{revision}": "r", "{region}": "s"}
    actions = set()
    for template, item in document["paths"].items():
        path = template
        for name, value in names.items():
            path = path.replace(name, value)
            assert (name in template) == any(f"{{{p['name']}}}" == name for p in item.get("parameters", []))
        action = parse_path(path.encode(), "m").action
        assert ("post" if action in POSTED else "get") in item
        actions.add(action)
    memory = {"memory-status", "memory-register", "memory-unregister"} if shared_memory else set()
    assert actions == memory | {
        "server", "live", "ready", "model", "model-ready", "infer", "config", "stats", "repository-index",
        "repository-change", "openapi",
    }  # fmt: skip
    text = json.dumps(document)
    for part in text.split("#/components/schemas/")[1:]:
        assert part.partition('"')[0] in document["components"]["schemas"]


@pytest.mark.parametrize(
    ("path", "model", "expected"),
    [
        (b"/v2/models/m/infer", "m", Path("infer", "m")),
        (b"/v2/models/a%2Fb/versions/r%20x/infer", "m", Path("infer", "a/b", "r x")),
        (b"/v2/", "m", Path("server")),
        (b"/v2/models/stats", "m", Path("stats")),
        (b"/v2/models/stats", "stats", Path("model", "stats")),
        (b"/v2/models/stats/stats", "stats", Path("stats", "stats")),
        (b"/v2/models/versions/versions/versions/infer", "m", Path("infer", "versions", "versions")),
        (b"/v2/systemsharedmemory/region/a%2Fb/status", "m", Path("memory-status", name="a/b")),
        (b"/v2/systemsharedmemory/status", "m", Path("memory-status")),
        (b"", "m", Path("")), (b"/", "m", Path("")), (b"/v2/models//infer", "m", Path("")),
        (b"/v2/models/m/versions//infer", "m", Path("")), (b"/v2/models/%ff", "m", Path("")),
        (b"/v2/models/m/infer/more", "m", Path("")), (b"/v2/models", "m", Path("")), (b"/v3", "m", Path("")),
        (b"/v2/systemsharedmemory/register", "m", Path("")), (b"/v2/health", "m", Path("")),
    ],
)  # fmt: skip
def test_paths_are_taken_apart(path: bytes, model: str, expected: Path) -> None:
    assert parse_path(path, model) == expected


def test_a_revision_is_ready_in_the_index_again_when_its_host_was_replaced(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    behaviour = {"factor": 2.0, "fault": {"when": 13.0, "do": "die"}}
    for worker in serve(tmp_path_factory.mktemp("dying"), behaviour, {"TRTMODEL_CONTEXTS": "1"}):
        assert worker.infer(fp32([13.0] * 4, [1, 4])).status >= 500
        eventually(lambda w=worker: index_state(w) == "READY", "another host was started")
        assert worker.infer_rows([[1.0] * 4]).status == 200


def index_state(worker: WorkerProcess) -> str:
    (entry,) = worker.post("/v2/repository/index", b"").json
    return str(entry["state"])
