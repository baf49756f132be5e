"""Clients' files that a (simulated) device reads by itself: answers are those of what is in the file at the time of the
request, whatever its client does to it in between."""

from __future__ import annotations

import json
import mmap
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from protocol_harness import INFER, serve
from trtmodel_contract.manifest import TensorSpec
from trtmodel_worker.host.reading import WORTH_BYTES
from worker_harness import Answer, WorkerProcess, eventually

PREFIX = f"trtmodel-device-{uuid.uuid4().hex[:8]}-"
WIDTH = WORTH_BYTES // 4
ROWS = 3
PLUGIN = Path(__file__).parents[1] / "plugin"
BASE = "/v2/systemsharedmemory"


@pytest.fixture(scope="module")
def doubler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """x:FP32[1..4, WIDTH] -> y = 2x, in batches of 4 rows: one of them is padding."""
    environment = {
        "TRTMODEL_SHARED_MEMORY_PREFIX": PREFIX, "TRTMODEL_BATCH_BUCKETS": "4",
        "PYTHONPATH": os.pathsep.join([str(PLUGIN), str(PLUGIN / "simulated")]),
    }  # fmt: skip
    specs = {"inputs": (TensorSpec("x", "FP32", (-1, WIDTH)),), "outputs": (TensorSpec("y", "FP32", (-1, WIDTH)),)}
    yield from serve(tmp_path_factory.mktemp("device"), {"factor": 2.0}, environment, max_rows=4, **specs)


class Client:
    def __init__(self, worker: WorkerProcess, name: str) -> None:
        self._worker, self.name = worker, name
        self.path = Path("/dev/shm", PREFIX + name)
        self.x = np.random.default_rng(len(name)).standard_normal((ROWS, WIDTH)).astype(np.float32)
        self.path.write_bytes(b"ahead" + self.x.tobytes())
        region = json.dumps({"key": self.path.name, "byte_size": self.x.nbytes, "offset": 5}).encode()
        assert worker.post(f"{BASE}/region/{name}/register", region).status == 200
        place = {"shared_memory_region": name, "shared_memory_byte_size": self.x.nbytes}
        tensor = {"name": "x", "datatype": "FP32", "shape": list(self.x.shape), "parameters": place}
        self.body = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()

    def ask(self) -> Answer:
        return self._worker.post(INFER, self.body, content_type="application/json")

    def is_right(self) -> bool:
        answer = self.ask()
        at = int(answer.headers["inference-header-content-length"])
        found = np.frombuffer(answer.body[at:], np.float32).reshape(self.x.shape)
        return answer.status == 200 and np.array_equal(found, 2 * self.x)

    def store(self) -> None:
        """As into shared memory that a client has mapped."""
        self.x = self.x[::-1] + np.float32(1)
        with self.path.open("rb+") as file, mmap.mmap(file.fileno(), 5 + self.x.nbytes) as mapped:
            mapped[5:] = self.x.tobytes()

    def write(self) -> None:
        """Cut off first, so that its pages are others."""
        self.x = self.x[::-1] + np.float32(1)
        self.path.write_bytes(b"ahead" + self.x.tobytes())

    @property
    def is_mapped(self) -> bool:
        (pid,) = self._worker.host_pids()
        return self.path.name in Path(f"/proc/{pid}/maps").read_text()

    @property
    def is_open(self) -> bool:
        (pid,) = self._worker.host_pids()
        return any(self.path.name in str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink())


@pytest.fixture
def client(doubler: WorkerProcess) -> Iterator[Client]:
    made = Client(doubler, uuid.uuid4().hex[:8])
    yield made
    made.path.unlink()
    assert doubler.post(f"{BASE}/unregister", b"").status == 200


def test_an_input_is_read_where_it_lies_once_its_file_is_pinned(client: Client) -> None:
    assert client.is_right()
    eventually(lambda: client.is_mapped, "its host has mapped it")
    for _ in range(3):
        assert client.is_right()


@pytest.mark.parametrize("change", [Client.store, Client.write])
def test_each_request_is_answered_for_what_is_in_the_file_then(
    change: Callable[[Client], None], client: Client
) -> None:
    eventually(lambda: client.is_mapped, "its host has mapped it")
    for _ in range(5):
        change(client)
        assert client.is_right()


def test_a_file_that_became_shorter_ends_no_host(doubler: WorkerProcess, client: Client) -> None:
    eventually(lambda: client.is_mapped, "its host has mapped it")
    assert client.is_right()
    hosts = doubler.host_pids()
    os.truncate(client.path, 5 + client.x.nbytes - 1)
    assert client.ask().status == 400
    client.path.write_bytes(b"ahead" + client.x.tobytes())
    assert client.is_right()
    assert doubler.host_pids() == hosts


def test_a_host_that_is_started_later_knows_the_files_too(doubler: WorkerProcess, client: Client) -> None:
    eventually(lambda: client.is_mapped, "its host has mapped it")
    (pid,) = doubler.host_pids()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: doubler.host_pids() not in ([], [pid]), "another host is there")
    assert client.is_right()
    eventually(lambda: client.is_mapped, "that host has mapped it")
    assert client.is_right()


def test_a_host_lets_go_of_what_is_unregistered(doubler: WorkerProcess, client: Client) -> None:
    eventually(lambda: client.is_mapped, "its host has mapped it")
    assert client.is_right()
    assert doubler.post(f"{BASE}/region/{client.name}/unregister", b"").status == 200
    eventually(lambda: not client.is_mapped and not client.is_open, "its host has let go of it")
