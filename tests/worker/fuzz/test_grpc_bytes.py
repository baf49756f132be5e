"""Bytes that are no HTTP/2, or bad HTTP/2, on the gateway's port: it lives, and calls between them are answered."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from free_ports import free_port
from fuzz_harness import held, serve
from worker_harness import WorkerProcess

sys.path.append(str(Path(__file__).parents[1] / "gateway"))

from gateway_harness import calling, infer_request, wait_gateway

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
# :method POST, :scheme http, :path and more as literals without names of the tables
HEADERS = (
    b"\x83\x86\x04\x29/inference.GRPCInferenceService/ModelInfer\x0f\x10\x10application/grpc\x00\x02te\x08trailers"
)
CONNECTIONS, ROUNDS = 20, 40


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    size = len(payload) if length is None else length
    return struct.pack(">I", size & 0xFFFFFF)[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def garbage(choice: random.Random) -> bytes:
    """A connection's bytes: often a good beginning, then frames of any kind, flags, stream and length."""
    found = PREFACE + SETTINGS if choice.random() < 0.8 else b""
    if choice.random() < 0.5:
        found += frame(1, 4, 1, HEADERS)
    for _ in range(choice.randint(1, 6)):
        payload = choice.randbytes(choice.choice([0, 1, 4, 5, 8, 40, 400]))
        if choice.random() < 0.3:  # a message of gRPC that says another length than it has
            payload = struct.pack(">BI", choice.randrange(3), choice.choice([0, 4, 1 << 31])) + payload
        length = None if choice.random() < 0.8 else choice.randrange(1 << 24)
        found += frame(
            choice.randrange(12), choice.randrange(256), choice.choice([0, 1, 1, 2, 3, 1 << 31]), payload, length
        )
    if choice.random() < 0.3:
        cut = bytearray(found)
        cut[choice.randrange(len(cut))] = choice.randrange(256)
        found = bytes(cut[: choice.randint(1, len(cut))])
    return found


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[WorkerProcess, int]]:
    port = free_port()
    worker = serve(tmp_path, TRTMODEL_GRPC_PORT=str(port))
    yield worker, port
    assert worker.stop() == 0, worker.tail()


def test_bad_bytes_on_the_grpc_port_neither_end_the_gateway_nor_disturb_a_call(
    served: tuple[WorkerProcess, int],
) -> None:
    worker, port = served
    pid = wait_gateway(worker)
    choice = random.Random(1)
    row = np.array([[1, 2, 3, 4]], np.float32)
    before = None
    with calling(port) as caller:
        for turn in range(ROUNDS):
            with contextlib.ExitStack() as stack:
                for _ in range(CONNECTIONS):
                    s = stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
                    with contextlib.suppress(ConnectionError):
                        s.sendall(garbage(choice))
                answer, _ = caller.infer(infer_request((turn * row).tobytes()))
                assert list(answer.raw_output_contents) == [(2 * turn * row).tobytes()]
            before = before or (held(pid) if turn == ROUNDS // 4 else None)
    assert wait_gateway(worker) == pid
    assert before is not None
    assert held(pid).resident < before.resident + (48 << 20)
    assert worker.get("/v2/health/ready").status == 200
    assert b"Traceback" not in worker.log.read_bytes()
