"""The gateway's process beside a real worker: it may die, HTTP may not notice; it ends when its worker does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
from free_ports import free_port
from gateway_harness import HEALTH, Caller, calling, gateway_pids, infer_request, wait_gateway
from trtmodel_worker.gateway import health_pb2
from worker_harness import PLUGIN, REVISION_1, Bucket, Load, Operator, WorkerProcess, eventually

ROW = np.array([[1, 2, 3, 4]], np.float32)
Start = Callable[..., WorkerProcess]


def worker_with(start_worker: Start, operator: Operator, bucket: Bucket, port: int, **more: str) -> WorkerProcess:
    """It serves y = 2x, gRPC on `port`."""
    worker = start_worker(TRTMODEL_GRPC_PORT=str(port), **more)
    digest, _ = bucket.publish(REVISION_1, {"factor": 2.0})
    worker.point(operator.artifact(REVISION_1, digest))
    worker.start()
    worker.wait_ready()
    return worker


def doubles(caller: Caller) -> bool:
    answer, _ = caller.infer(infer_request(ROW.tobytes()))
    return list(answer.raw_output_contents) == [(2 * ROW).tobytes()]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_a_killed_gateway_comes_back_and_http_does_not_notice(
    start_worker: Start, operator: Operator, bucket: Bucket
) -> None:
    port = free_port()
    worker = worker_with(start_worker, operator, bucket, port)
    with Load(worker.port, {REVISION_1: 2.0}, clients=2) as load:
        former = 0
        for _ in range(3):
            pid = wait_gateway(worker, other_than=former)
            with calling(port, worker) as caller:
                assert doubles(caller)
            load.wait_for(50)
            os.kill(pid, signal.SIGKILL)
            former = pid
        pid = wait_gateway(worker, other_than=former)
        with calling(port, worker) as caller:
            assert doubles(caller)
    assert load.failures == []


def test_a_worker_is_ready_no_sooner_than_its_grpc_port(
    start_worker: Start, operator: Operator, bucket: Bucket, tmp_path: Path
) -> None:
    slow = "import sys, time\nif 'trtmodel_worker.gateway' in sys.orig_argv: time.sleep(3)\n"
    (tmp_path / "sitecustomize.py").write_text(slow)
    port = free_port()
    worker_with(start_worker, operator, bucket, port, PYTHONPATH=f"{tmp_path}:{PLUGIN}")
    with Caller(port).channel as channel:
        method = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        assert method(b"", timeout=20) == b"\x08\x01"


def test_a_front_that_is_killed_leaves_no_gateway(start_worker: Start, operator: Operator, bucket: Bucket) -> None:
    worker = worker_with(start_worker, operator, bucket, free_port())
    pid = wait_gateway(worker)
    os.kill(worker.pid, signal.SIGKILL)
    eventually(lambda: is_gone(pid), "the gateway is gone")


@pytest.mark.long
def test_a_worker_that_is_told_to_end_fails_no_call_and_leaves_nothing(
    start_worker: Start, operator: Operator, bucket: Bucket, tmp_path: Path
) -> None:
    port = free_port()
    temporary = tmp_path / "t"
    temporary.mkdir()
    short = Path(f"/proc/{os.getpid()}/fd")  # a socket's path is short: the long directory is reached by a descriptor
    held = os.open(temporary, os.O_RDONLY)
    worker = worker_with(start_worker, operator, bucket, port, TMPDIR=str(short / str(held)))
    pid = wait_gateway(worker)
    (made,) = [p for p in temporary.iterdir() if p.name.startswith("trtmodel-grpc-")]
    assert made.stat().st_mode & 0o777 == 0o700
    with calling(port, worker) as caller:
        assert worker.process is not None
        worker.process.send_signal(signal.SIGTERM)
        caller.call_until_asked_to_leave(lambda: doubles(caller), oldest=17.0)  # then a Service would lead elsewhere
    assert worker.process.wait(60) == 0
    assert is_gone(pid)
    assert list(temporary.glob("trtmodel-grpc-*")) == []
    os.close(held)


def test_a_taken_port_stops_grpc_only_until_it_is_free(start_worker: Start, operator: Operator, bucket: Bucket) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as another gRPC server might
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        worker = worker_with(start_worker, operator, bucket, port)
        eventually(lambda: "the gRPC gateway ended with code 1" in worker.log.read_text(), "it says so")
        assert worker.infer_rows([[1, 2, 3, 4]]).status == 200
    with calling(port, worker) as caller:
        assert doubles(caller)


def test_without_a_port_there_is_no_gateway(start_worker: Start, operator: Operator, bucket: Bucket) -> None:
    worker = worker_with(start_worker, operator, bucket, 0)
    assert gateway_pids(worker) == []


def test_a_worker_without_an_engine_is_unavailable_and_not_serving(start_worker: Start) -> None:
    port = free_port()
    worker = start_worker(TRTMODEL_GRPC_PORT=str(port)).start()
    worker.wait_listening()
    with calling(port, worker) as caller:
        assert not caller.call("ServerReady").ready
        assert not caller.call("ModelReady", name="m").ready
        checked = caller.unary("Check", HEALTH)(health_pb2.HealthCheckRequest(), timeout=20)
        assert checked.status == health_pb2.HealthCheckResponse.NOT_SERVING
        error = caller.refused(infer_request(ROW.tobytes()))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "grpc-retry-pushback-ms" in dict(error.trailing_metadata())


def test_a_call_that_is_given_up_frees_its_place_in_the_queue(
    start_worker: Start, operator: Operator, bucket: Bucket
) -> None:
    port = free_port()
    limits = {"TRTMODEL_CONTEXTS": "1", "TRTMODEL_QUEUE_LIMIT": "1", "TRTMODEL_REQUEST_TIMEOUT_SECONDS": "60"}
    worker = start_worker(TRTMODEL_GRPC_PORT=str(port), TRTMODEL_HANG_SECONDS="60", **limits)
    digest, _ = bucket.publish(REVISION_1, {"factor": 2.0, "fault": {"when": 7.0, "do": "hang"}})
    worker.point(operator.artifact(REVISION_1, digest))
    worker.start()
    worker.wait_ready()
    hangs = np.array([[7, 0, 0, 0]], np.float32).tobytes()
    with calling(port, worker) as caller:
        calls = [caller.unary("ModelInfer").future(infer_request(hangs), timeout=60)]
        calls.append(caller.unary("ModelInfer").future(infer_request(ROW.tobytes()), timeout=60))

        def is_full() -> bool:
            try:
                caller.infer(infer_request(ROW.tobytes()), timeout=0.5)
            except grpc.RpcError as e:
                return e.code() is grpc.StatusCode.UNAVAILABLE
            return False

        eventually(is_full, "the queue is full")
        calls[1].cancel()
        eventually(lambda: not is_full(), "its place is free")
    os.kill(worker.pid, signal.SIGKILL)  # its lane hangs, and it would wait for it


@pytest.mark.parametrize("arguments", [[], ["one", "two"]])
def test_it_is_started_by_the_front_only(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trtmodel_worker.gateway", *arguments], capture_output=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert b"usage" in done.stderr
