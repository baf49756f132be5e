"""Callers of the gRPC gateway, and a front that says what a test wants."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from free_ports import free_port
from trtmodel_worker.gateway import health_pb2, inference_pb2
from worker_harness import WorkerProcess, eventually

INFERENCE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"
SECONDS = 20.0
STARTED_SECONDS = 30.0


def tensor(name: str, datatype: str, shape: Sequence[int], **more: Any) -> Any:
    return inference_pb2.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape, **more)


def infer_request(values: bytes, shape: Sequence[int] = (1, 4), model: str = "m", **more: Any) -> Any:
    return inference_pb2.ModelInferRequest(
        model_name=model, inputs=[tensor("x", "FP32", shape)], raw_input_contents=[values], **more
    )


class Caller:
    """A client with one connection of its own."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._connected = False
        self.left = 0  # how often the server asked the connection to leave
        self.channel = grpc.insecure_channel(
            f"127.0.0.1:{port}",
            options=[
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_receive_message_length", -1),
                ("grpc.max_reconnect_backoff_ms", 200),
            ],
        )
        self.channel.subscribe(self._changed)

    def _changed(self, state: grpc.ChannelConnectivity) -> None:
        if state is grpc.ChannelConnectivity.READY:
            self._connected = True
        elif state is grpc.ChannelConnectivity.IDLE and self._connected:
            self._connected = False
            self.left += 1

    def call_until_asked_to_leave(self, call: Callable[[], bool], oldest: float) -> None:
        """`call` again and again, each time well answered, until the connection was asked to leave. That it was may go
        unseen, as the next one is there at once: it has been when it is `oldest` seconds old."""
        begun, deadline = self.left, time.monotonic() + oldest
        while self.left == begun and time.monotonic() < deadline:
            assert call()

    def method(self, name: str, service: str = INFERENCE) -> tuple[Any, Any]:
        messages = health_pb2 if service == HEALTH else inference_pb2
        described = messages.DESCRIPTOR.services_by_name[service.rpartition(".")[2]].methods_by_name[name]
        return tuple(getattr(messages, d.name) for d in (described.input_type, described.output_type))  # type: ignore[return-value]

    def unary(self, name: str, service: str = INFERENCE) -> Any:
        asked, answered = self.method(name, service)
        return self.channel.unary_unary(
            f"/{service}/{name}", request_serializer=asked.SerializeToString, response_deserializer=answered.FromString
        )

    def call(self, name: str, /, *, service: str = INFERENCE, **fields: Any) -> Any:
        asked, _ = self.method(name, service)
        return self.unary(name, service)(asked(**fields), timeout=SECONDS)

    def infer(self, request: Any, timeout: float = SECONDS, metadata: Any = ()) -> tuple[Any, dict[str, str]]:
        """(answer, trailing metadata)."""
        answer, call = self.unary("ModelInfer").with_call(request, timeout=timeout, metadata=metadata)
        return answer, dict(call.trailing_metadata())

    def refused(self, request: Any, timeout: float = SECONDS) -> grpc.RpcError:
        try:
            answer, _ = self.infer(request, timeout)
        except grpc.RpcError as e:
            return e
        raise AssertionError(f"it was answered: {answer}")

    def stream(self, requests: Iterator[Any]) -> Any:
        return self.channel.stream_stream(
            f"/{INFERENCE}/ModelStreamInfer",
            request_serializer=inference_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=inference_pb2.ModelStreamInferResponse.FromString,
        )(requests, timeout=SECONDS)

    def wait_answers(self, worker: WorkerProcess | None) -> None:
        said: list[str] = []

        def live() -> bool:
            try:
                return bool(self.call("ServerLive").live)
            except grpc.RpcError as e:
                said.append(f"{e.code()} {e.details()}")
                return False

        try:
            eventually(live, "the gateway answers")
        except AssertionError as e:
            raise AssertionError(f"{e}: {said[-1]}\n{worker.tail() if worker else ''}") from None


@contextmanager
def calling(port: int, worker: WorkerProcess | None = None) -> Iterator[Caller]:
    caller = Caller(port)
    with caller.channel:
        caller.wait_answers(worker)
        yield caller


def gateway_pids(worker: WorkerProcess) -> list[int]:
    """Children of the worker's process that are gateways."""
    tasks = Path(f"/proc/{worker.pid}/task")
    children = [int(c) for t in tasks.iterdir() for c in (t / "children").read_text().split()]
    return [c for c in children if b"trtmodel_worker.gateway" in _command(c)]


def wait_gateway(worker: WorkerProcess, other_than: int = 0) -> int:
    found = eventually(lambda: [p for p in gateway_pids(worker) if p != other_than], "a gateway runs")
    return int(found[0])


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


class Asked:
    """A request as the front got it."""

    def __init__(self, head: bytes, body: bytes) -> None:
        first, *lines = head.decode().split("\r\n")
        self.method, self.target, _ = first.split(" ")
        self.headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        length = int(self.headers.get("inference-header-content-length", len(body)))
        self.json = json.loads(body[:length]) if body else None
        self.tail = body[length:]


class ScriptedFront:
    """Listens where a front would. `answer` makes the bytes that are sent for a request; None closes the connection,
    and so does every answer that says so."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.asked: list[Asked] = []
        self.connections = 0
        self.left = 0  # connections that their client closed while it waited for an answer
        self.answer: Callable[[Asked], bytes | None] = lambda _: http_answer(200, {"live": True, "ready": True})
        self._lock = threading.Lock()
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(self.path)
        self._listening.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        got = b""
        with connection:
            while True:
                while b"\r\n\r\n" not in got:
                    data = connection.recv(65536)
                    if not data:
                        return
                    got += data
                head, _, got = got.partition(b"\r\n\r\n")
                length = next(
                    (int(line[15:]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"), 0
                )
                while len(got) < length:
                    got += connection.recv(1 << 20)
                asked, got = Asked(head, got[:length]), got[length:]
                self.asked.append(asked)
                answer = self.answer(asked)
                if answer is None:
                    return
                if answer == b"":  # never answers
                    if connection.recv(1) == b"":
                        with self._lock:
                            self.left += 1
                    return
                connection.sendall(answer)
                if b"connection: close" in answer:
                    return


def http_answer(status: int, document: Any, tail: bytes = b"", **headers: str) -> bytes:
    body = json.dumps(document).encode()
    if tail:
        headers["inference_header_content_length"] = str(len(body))
    lines = [f"HTTP/1.1 {status} Whatever", *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items())]
    return "\r\n".join((*lines, f"content-length: {len(body) + len(tail)}", "", "")).encode() + body + tail


@contextmanager
def gateway_before(
    front: ScriptedFront, *, request_seconds: float = 5.0, finish_seconds: float = 10.0
) -> Iterator[tuple[Caller, int]]:
    """A gateway process in front of it: (caller, pid)."""
    port = free_port()
    config = {
        "address": f"127.0.0.1:{port}", "front": front.path, "body_bytes": 1 << 20,
        "request_seconds": request_seconds, "drain_seconds": 0.0,
        "finish_seconds": finish_seconds, "parent_pid": os.getpid(),
    }  # fmt: skip
    with subprocess.Popen([sys.executable, "-m", "trtmodel_worker.gateway", json.dumps(config)]) as process:
        try:
            with calling(port) as caller:
                yield caller, process.pid
        finally:
            process.terminate()
            process.wait(STARTED_SECONDS + finish_seconds)
