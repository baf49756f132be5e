"""`trtmodel bench` against a small server that counts what it is asked."""

from __future__ import annotations

import argparse
import json
import stat
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cli_scene import Typed, put
from decide_scene import A, serving
from fakes.api_server import FakeApiServer
from trtmodel_operator.cli import bench, load
from trtmodel_operator.cli.words import Failed

Type = Callable[..., Typed]
INPUTS = [{"name": "bytes", "datatype": "INT32", "shape": [-1, 2048]}, {"name": "on", "datatype": "BOOL", "shape": [1]}]


class Model:
    """Answers every `failing`-th request with 503, after `takes` seconds; the revision changes after `changes`
    requests."""

    def __init__(self) -> None:
        self.bodies: list[tuple[bytes, Any]] = []
        self.failing, self.changes, self.takes = 0, 0, 0.0
        model, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def do_GET(self) -> None:
                known = self.path == "/v2/models/magika"
                self._answer(200 if known else 404, {"inputs": INPUTS} if known else {"error": "no such model"})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with lock:
                    model.bodies.append((body, self.headers))
                    count = len(model.bodies)
                time.sleep(model.takes)
                bad = model.failing and count % model.failing == 0
                self._answer(503 if bad else 200, {}, "second" if model.changes and count > model.changes else "first")

            def _answer(self, status: int, document: object, revision: str = "") -> None:
                data = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("x-trtmodel-revision", revision)
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def model() -> Iterator[Model]:
    found = Model()
    yield found
    found.close()


def measured(trtmodel: Type, *words: str) -> tuple[int, dict[str, Any]]:
    found = trtmodel("bench", "magika", "--duration", "300ms", *words, "-o", "json")
    assert found.out, found.err
    return found.code, json.loads(found.out)


def test_every_answer_is_counted_with_its_revision(model: Model, trtmodel: Type) -> None:
    model.changes = 5
    code, found = measured(trtmodel, "--url", model.url, "--concurrency", "2")
    assert code == 0
    assert found["answered"] == len(model.bodies)
    assert found["revisions"] == {"first": 5, "second": found["answered"] - 5}
    latency = found["latencyMs"]
    assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["max"]


def test_a_request_has_the_shapes_of_the_model_in_binary(model: Model, trtmodel: Type) -> None:
    measured(trtmodel, "--url", model.url, "--rows", "3")
    body, headers = model.bodies[0]
    length = int(headers["Inference-Header-Content-Length"])
    head = json.loads(body[:length])
    assert [(i["shape"], i["parameters"]["binary_data_size"]) for i in head["inputs"]] == [
        ([3, 2048], 3 * 2048 * 4), ([1], 1),
    ]  # fmt: skip
    assert body[length:] == bytes(3 * 2048 * 4 + 1)


def test_failures_are_told_with_their_reason_and_are_the_exit_code(model: Model, trtmodel: Type) -> None:
    model.failing = 2
    code, found = measured(trtmodel, "--url", model.url)
    assert code == 1
    assert list(found["failures"]) == ["503 Service Unavailable"]
    assert found["failed"] + found["answered"] == len(model.bodies)
    shown = trtmodel("bench", "magika", "--url", model.url, "--duration", "100ms")
    assert "failed: 503 Service Unavailable" in shown.out


def test_a_body_of_ones_own_is_sent_as_it_is(model: Model, trtmodel: Type, tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    file.write_text('{"inputs": []}')
    measured(trtmodel, "--url", model.url, "--data", str(file))
    assert model.bodies[0][0] == b'{"inputs": []}'


def test_without_an_address_kubectl_forwards_a_port_and_the_profile_knows_the_sizes(
    model: Model,
    trtmodel: Type,
    api_server: FakeApiServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(api_server, serving(A))
    kubectl = tmp_path / "kubectl"
    said = f"Forwarding from 127.0.0.1:{model.port} -> 8080"
    kubectl.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\necho "{said}"\nexec sleep 60\n')
    kubectl.chmod(kubectl.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("KUBECTL", str(kubectl))
    code, found = measured(trtmodel)
    assert (code, found["answered"] > 0) == (0, True)
    assert (tmp_path / "words").read_text().split() == ["port-forward", "-n", "ml", "service/magika", ":http"]


def test_what_kubectl_tells_of_connections_does_not_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl, told = tmp_path / "kubectl", tmp_path / "told"
    more_than_a_pipe = "head -c 300000 /dev/zero >&2\nhead -c 300000 /dev/zero"
    kubectl.write_text(
        f'#!/bin/sh\necho "Forwarding from 127.0.0.1:1 -> 8080"\n{more_than_a_pipe}\ntouch {told}\nexec sleep 60\n'
    )
    kubectl.chmod(kubectl.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("KUBECTL", str(kubectl))
    options = argparse.Namespace(name="magika", kubeconfig="", context="")
    with bench._forwarded("ml", {}, options):
        deadline = time.monotonic() + 20
        while not told.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert told.exists()


def test_answers_that_come_after_the_last_request_count_with_their_time(model: Model, trtmodel: Type) -> None:
    model.takes = 1.0
    _, found = measured(trtmodel, "--url", model.url)
    assert found["seconds"] >= found["latencyMs"]["max"] / 1e3 >= 1.0


def test_what_cannot_be_reached_is_told(model: Model, trtmodel: Type) -> None:
    port = model.port
    unknown = trtmodel("bench", "other", "--url", model.url)
    assert (unknown.code, "404: no such model" in unknown.err) == (1, True)
    model.close()
    gone = trtmodel("bench", "magika", "--url", f"http://127.0.0.1:{port}")
    assert (gone.code, "cannot be asked" in gone.err) == (1, True)
    assert trtmodel("bench", "magika", "--url", "magika:8080").code == 2


@pytest.mark.parametrize(
    ("shape", "usual", "given", "found"),
    [
        ([2, 3], {}, {}, (2, 3)),
        ([-1, 3], {}, {}, (7, 3)),
        ([-1, -1], {"x": [4, 9]}, {}, (7, 9)),
        ([-1, -1], {"x": [4, 9]}, {"x": (1, 2)}, (1, 2)),
        ([-1, -1], {}, {}, None),
    ],
)
def test_sizes_are_those_of_the_hand_the_model_and_the_profile(
    shape: list[int], usual: dict[str, list[int]], given: dict[str, tuple[int, ...]], found: tuple[int, ...] | None
) -> None:
    metadata = {"inputs": [{"name": "x", "datatype": "FP32", "shape": shape}]}
    if found is None:
        with pytest.raises(Failed, match=r"say --shape x:7x\?"):
            bench.tensors(metadata, usual, given, 7)
    else:
        assert bench.tensors(metadata, usual, given, 7) == [bench.Tensor("x", "FP32", found)]


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [load.percentile(values, p) for p in (50, 90, 99)] == [50.0, 90.0, 99.0]
    assert load.percentile([3.0], 99) == 3.0
