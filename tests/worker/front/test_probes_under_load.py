"""The kubelet's probes while a worker has all the work that it can take."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path

import pytest
from protocol_harness import INFER, serve
from trtmodel_contract.identity import Profile, ShapeRange
from trtmodel_contract.manifest import TensorSpec
from worker_harness import REVISION_1, WorkerProcess, eventually, request

KUBELETS_PATIENCE = 5.0  # seconds: timeoutSeconds of the probes. Of the front's own work, as this machine may be busy
ANSWER_SECONDS = 90.0
WAITING, LARGE_BODIES = 50, 3
LARGE = 3_000_000  # numbers: 30 MB of JSON


def body(numbers: int) -> bytes:
    data = ",".join(["7.2512345"] * numbers)
    return f'{{"inputs":[{{"name":"x","datatype":"FP32","shape":[1,{numbers}],"data":[{data}]}}]}}'.encode()


def asked(worker: WorkerProcess, text: bytes) -> socket.socket:
    """A request whose answer nobody waits for."""
    head = f"POST {INFER} HTTP/1.1\r\nHost: m\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    sock = socket.create_connection(("127.0.0.1", worker.port), timeout=ANSWER_SECONDS)
    sock.sendall(head.encode() + text)
    return sock


def worked(pid: int) -> float:
    """Seconds of processor time that the process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_G06_probes_are_answered_in_time_while_fifty_requests_wait_and_bodies_of_30_MB_come(tmp_path: Path) -> None:
    environment = {
        "TRTMODEL_REQUEST_TIMEOUT_SECONDS": "600", "TRTMODEL_CONTEXTS": "1",
        "TRTMODEL_MAX_BODY_BYTES": str(64 << 20), "TRTMODEL_MAX_JSON_BYTES": str(64 << 20),
    }  # fmt: skip
    shapes = Profile({"x": ShapeRange((1, 1), (1, 4), (1, LARGE))})
    inputs, outputs = ([TensorSpec(name, "FP32", (-1, -1))] for name in ("x", "y"))
    published = {"inputs": inputs, "outputs": outputs, "profiles": (shapes,), "max_rows": 1}
    behaviour = {"slow": {"width": 4, "seconds": 3.0}}
    large = body(LARGE)
    assert len(large) >= 30_000_000
    running = serve(tmp_path, behaviour, environment, **published)
    worker = next(running)
    with contextlib.closing(running), contextlib.ExitStack() as stack:
        pid, hosts = worker.pid, worker.host_pids()
        for _ in range(1 + WAITING):
            stack.enter_context(asked(worker, body(4)))
        waiting = f'trtmodel_queue_length{{revision="{REVISION_1}"}} {WAITING}.0'
        eventually(lambda: waiting in worker.metrics(), "they wait")

        def send() -> None:
            stack.enter_context(asked(worker, large))

        senders = [threading.Thread(target=send) for _ in range(LARGE_BODIES)]
        for sender in senders:
            sender.start()
        probes = 0
        while probes < 20 or any(sender.is_alive() for sender in senders):
            for path in ("/v2/health/live", "/v2/health/ready"):
                before = worked(pid)
                assert request(worker.port, "GET", path, b"", {}, timeout=ANSWER_SECONDS).status == 200
                assert worked(pid) - before < KUBELETS_PATIENCE
            probes += 1
        for sender in senders:
            sender.join()
        assert (worker.pid, worker.host_pids()) == (pid, hosts)
