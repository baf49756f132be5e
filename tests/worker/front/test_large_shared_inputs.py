"""Large inputs in shared memory are read by the host that runs them: into the right rows, and nobody else's."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from protocol_harness import INFER, serve
from trtmodel_contract.manifest import TensorSpec
from trtmodel_worker.host.reading import WORTH_BYTES
from worker_harness import SIMULATED, Answer, WorkerProcess, eventually

PREFIX = f"trtmodel-large-{uuid.uuid4().hex[:8]}-"
WIDTH = 5 * WORTH_BYTES // 8  # 8 rows are read by the host in any case
MOST_ROWS = 8
LANES = 2  # as the harness has them


@pytest.fixture(scope="module")
def doubler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """x:FP32[1..8, WIDTH] -> y = 2x, in batches of 4 or 8 rows."""
    environment = {"TRTMODEL_SHARED_MEMORY_PREFIX": PREFIX, "TRTMODEL_BATCH_BUCKETS": "4,8"}
    specs = {"inputs": (TensorSpec("x", "FP32", (-1, WIDTH)),), "outputs": (TensorSpec("y", "FP32", (-1, WIDTH)),)}
    behaviour = {"factor": 2.0, "work": 0.01}  # long enough for others to come meanwhile
    yield from serve(tmp_path_factory.mktemp("doubler"), behaviour, environment, **specs)


class Client:
    """A file with `rows` rows of numbers that nobody else has, registered."""

    def __init__(self, worker: WorkerProcess, number: int, rows: int) -> None:
        self._worker = worker
        self.path = Path(f"/dev/shm/{PREFIX}{number}")
        self.x = np.arange(rows * WIDTH, dtype=np.float32).reshape(rows, WIDTH) % 1000 + 10_000 * number
        self.path.write_bytes(b"ahead" + self.x.tobytes())
        region = json.dumps({"key": self.path.name, "byte_size": self.x.nbytes, "offset": 5}).encode()
        assert worker.post(f"/v2/systemsharedmemory/region/{number}/register", region).status == 200
        place = {"shared_memory_region": str(number), "shared_memory_byte_size": self.x.nbytes}
        tensor = {"name": "x", "datatype": "FP32", "shape": list(self.x.shape), "parameters": place}
        self.body = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()

    def ask(self) -> Answer:
        return self._worker.post(INFER, self.body, content_type="application/json")

    def is_right(self, answer: Answer) -> bool:
        at = int(answer.headers["inference-header-content-length"])
        found = np.frombuffer(answer.body[at:], np.float32)
        return answer.status == 200 and np.array_equal(found.reshape(self.x.shape), 2 * self.x)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)


@pytest.fixture
def clients(doubler: WorkerProcess) -> Iterator[Any]:
    made: list[Client] = []

    def make(*rows: int) -> list[Client]:
        made.extend(Client(doubler, len(made), n) for n in rows)
        return made

    yield make
    for client in made:
        client.close()
    assert doubler.post("/v2/systemsharedmemory/unregister", b"").status == 200


def test_each_of_several_clients_at_once_gets_its_own_rows(doubler: WorkerProcess, clients: Any) -> None:
    callers = clients(1, 3, 8, 1, 2, 1)
    with ThreadPoolExecutor(len(callers)) as pool:
        for _ in range(10):
            answers = list(pool.map(Client.ask, callers))
            assert [client.is_right(answer) for client, answer in zip(callers, answers, strict=True)] == [True] * 6


def test_a_file_that_became_shorter_is_told_to_its_client_and_costs_nobody_else_an_answer(
    doubler: WorkerProcess, clients: Any
) -> None:
    good, bad = clients(1, 7)
    hosts = doubler.host_pids()
    os.truncate(bad.path, 5 + bad.x.nbytes)
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(Client.ask, (good, bad)))
        assert good.is_right(both[0])
        assert bad.is_right(both[1])
        waiting = [pool.submit(good.ask) for _ in range(5)]
        os.truncate(bad.path, 5 + bad.x.nbytes - 1)
        refused = bad.ask()
        assert refused.status == 400
        assert "shorter" in refused.json["error"]
        assert all(good.is_right(each.result()) for each in waiting)
    assert doubler.host_pids() == hosts


def test_no_descriptor_is_left_behind(doubler: WorkerProcess, clients: Any) -> None:
    (client,) = clients(8)
    for _ in range(20):
        assert client.is_right(client.ask())
    front, host = (_opened(pid).count(str(client.path)) for pid in (doubler.pid, *doubler.host_pids()))
    assert front == 2, "to write and to read"
    assert 1 <= host <= LANES + SIMULATED, "of each lane that has read it, and of a device that reads by itself"
    assert doubler.post("/v2/systemsharedmemory/unregister", b"").status == 200
    pids = (doubler.pid, *doubler.host_pids())
    eventually(lambda: not any(str(client.path) in _opened(pid) for pid in pids), "it is closed")


def _opened(pid: int) -> list[str]:
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # others come and go
            found.append(str(fd.readlink()))
    return found
