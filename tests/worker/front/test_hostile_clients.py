"""Clients that mean harm, or are broken: what they cost is bounded, and nobody else has the trouble."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from http_harness import Client, Recorder
from trtmodel_contract.manifest import TensorSpec
from trtmodel_worker.front.http import HttpServer
from worker_harness import REVISION_1, Bucket, Operator, WorkerProcess, eventually, fp32

BODY = json.dumps(fp32([1, 2, 3, 4], [1, 4])).encode()
POST = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: m\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
WHOLE = POST + b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
MIB = 1 << 20

Start = Callable[..., WorkerProcess]


@pytest.fixture
def start(start_worker: Start, operator: Operator, bucket: Bucket) -> Start:
    def begin(publish: dict[str, Any] | None = None, **environment: str) -> WorkerProcess:
        digest, _ = bucket.publish(REVISION_1, {"factor": 2.0}, **(publish or {}))
        worker = start_worker(**environment)
        worker.point(operator.artifact(REVISION_1, digest))
        worker.start().wait_ready()
        return worker

    return begin


def connect(worker: WorkerProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", worker.port), timeout=10)


def resident(worker: WorkerProcess) -> int:
    status = Path(f"/proc/{worker.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def read_until(s: socket.socket, end: Callable[[bytes], bool]) -> bytes:
    said = b""
    while not end(said) and (more := s.recv(65536)):
        said += more
    return said


def test_trailers_change_nothing_of_an_admitted_request_and_are_bounded(start: Start) -> None:
    worker = start()
    chunk = b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)
    with connect(worker) as s:
        s.sendall(CHUNKED + chunk + b"Inference-Header-Content-Length: 3\r\n\r\n")
        assert read_until(s, lambda said: said.endswith(b"]}]}")).startswith(b"HTTP/1.1 200 ")
    before = resident(worker)
    with connect(worker) as s, contextlib.suppress(OSError):
        s.sendall(CHUNKED + chunk)
        for i in range(32):
            s.sendall(b"".join(b"T%d-%d: %b\r\n" % (i, j, b"v" * 1000) for j in range(1000)))
        assert read_until(s, lambda said: b"\r\n\r\n" in said).startswith(b"HTTP/1.1 431 ")
    assert resident(worker) - before < 8 * MIB


def test_a_body_in_tiny_chunks_takes_no_more_memory_than_its_size(start: Start) -> None:
    worker = start()
    before = resident(worker)
    with connect(worker) as s:
        s.sendall(POST + b"Transfer-Encoding: chunked\r\nInference-Header-Content-Length: 10\r\n\r\n")
        for _ in range(20):
            s.sendall(b"2\r\nab\r\n" * 100_000)
        eventually(lambda: "staged_bytes 4e+06" in worker.metrics(), "4 MB have come")
        assert resident(worker) - before < 24 * MIB


def test_a_client_that_never_reads_is_not_answered_ahead(start: Start) -> None:
    name = "x" * 20_000  # its metadata are a large answer to a small request
    worker = start({"inputs": [TensorSpec(name, "FP32", (-1, 1))], "outputs": [TensorSpec("y", "FP32", (-1, 1))]})
    before = resident(worker)
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            s = stack.enter_context(connect(worker))
            s.settimeout(0.5)
            with contextlib.suppress(TimeoutError):
                for _ in range(20):
                    s.sendall(b"GET /v2/models/m HTTP/1.1\r\n\r\n" * 9000)
        assert worker.get("/v2/health/live").status == 200
        assert resident(worker) - before < 48 * MIB


def test_a_client_that_reads_late_gets_every_answer_in_order(start: Start) -> None:
    worker = start(
        {"inputs": [TensorSpec("x" * 20_000, "FP32", (-1, 1))], "outputs": [TensorSpec("y", "FP32", (-1, 1))]}
    )
    with connect(worker) as s:
        s.sendall(b"GET /v2/models/m HTTP/1.1\r\n\r\n" * 500 + b"GET /v2/health/live HTTP/1.1\r\n\r\n")
        said = read_until(s, lambda said: said.endswith(b'{"live":true}'))
    assert said.count(b"HTTP/1.1 200 OK") == 501


def test_an_offered_upgrade_is_ignored_also_before_a_chunked_body(start: Start) -> None:
    worker = start()
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    chunked = POST + offer + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    with connect(worker) as s:
        for piece in (chunked + WHOLE, chunked[:150], chunked[150:]):
            s.sendall(piece)
        said = read_until(s, lambda said: said.count(b'"outputs"') == 3 and said.endswith(b"]}]}"))
    assert said.count(b"HTTP/1.1 200 OK") == 3


def test_thousands_of_offered_upgrades_in_one_piece_are_answered(start: Start) -> None:
    worker = start()
    one = b"GET /v2/health/live HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    with connect(worker) as s:
        s.sendall(one * 3000)
        said = read_until(s, lambda said: said.count(b'{"live":true}') == 3000)
    assert said.count(b"HTTP/1.1 200 OK") == 3000


def test_what_follows_a_refusal_that_ends_the_connection_is_not_run(start: Start) -> None:
    worker = start()
    refused = b"POST /v2/models/other/infer HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\nabc"
    with connect(worker) as s:
        s.sendall(refused + WHOLE * 3)
        said = read_until(s, lambda _: False)
    assert said.startswith(b"HTTP/1.1 404 ")
    assert said.count(b"HTTP/1.1") == 1
    assert 'trtmodel_lane_hits_total{revision="aaaaaaaaaa"} 0.0' in worker.metrics()
    assert "Traceback" not in worker.tail()


def test_what_follows_the_last_request_of_a_connection_is_dropped_whatever_it_is(start: Start) -> None:
    worker = start()
    last = POST + b"Connection: close\r\nContent-Length: 2\r\n\r\n{}"  # answered at once, when its turn has come
    for rest in (b"\0\0\0 this is not HTTP\r\n\r\n", WHOLE, b"GET / HTTP/9.9\r\n\r\n"):
        with connect(worker) as s:
            s.sendall(WHOLE + last + rest)
            said = read_until(s, lambda _: False)
        assert re.findall(rb"HTTP/1.1 (\d+)", said) == [b"200", b"400"]
    assert "Traceback" not in worker.log.read_text()


def test_idle_connections_give_way_before_descriptors_run_out(
    start_worker: Start, operator: Operator, bucket: Bucket
) -> None:
    digest, _ = bucket.publish(REVISION_1, {"factor": 2.0})
    worker = start_worker()
    worker.point(operator.artifact(REVISION_1, digest))
    worker.start(descriptors=200).wait_ready()
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connect(worker))
        assert worker.get("/v2/health/live").status == 200
        assert worker.infer_rows([[1, 2, 3, 4]]).status == 200
        assert worker.report().models


@pytest.mark.parametrize(("per_second", "answered"), [(100, True), (80_000, False)])
def test_a_body_that_drips_in_gives_its_room_back_and_one_that_flows_does_not(per_second: int, answered: bool) -> None:
    server = HttpServer(Recorder(8 * MIB), 10 * MIB, 10)
    client = Client(server)
    loop, transport = client.loop, client.transport
    client.send(POST + b"Content-Length: %d\r\n\r\n" % (8 * MIB))
    assert server.staged == 8 * MIB
    for _ in range(60):
        loop.now += 1.0
        client.connection.check(loop.now)
        if transport.written:
            break
        client.send(b" " * per_second)
    assert transport.written.startswith(b"HTTP/1.1 408 ") == answered
    assert server.staged == (0 if answered else 8 * MIB)


@pytest.mark.parametrize(("per_second", "cut"), [(0, True), (1_000, True), (200_000, False)])
def test_a_large_answer_is_cut_off_when_nobody_takes_it_and_not_because_it_takes_long(
    per_second: int, cut: bool
) -> None:
    client = Client(HttpServer(Recorder(at_once=True), 10 * MIB, 10))
    loop, transport = client.loop, client.transport
    client.send(WHOLE)
    transport.left = 60 * per_second + MIB
    client.connection.pause_writing()
    for _ in range(60):
        loop.now += 1.0
        transport.left -= per_second
        client.connection.check(loop.now)
    assert transport.closed == cut
