"""Tensors in shared memory: read and written where the client says, and nowhere else."""

from __future__ import annotations

import gzip
import json
import os
import resource
import struct
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from protocol_harness import INFER, parts, serve
from trtmodel_contract.manifest import TensorSpec
from trtmodel_worker.front.calls import Unreadable
from trtmodel_worker.front.models import Invalid
from trtmodel_worker.front.sharedmemory import MAX_REGIONS, MemoryRef, Regions
from worker_harness import Answer, WorkerProcess, binary_request, fp32

BASE = "/v2/systemsharedmemory"
PREFIX = f"trtmodel-test-{uuid.uuid4().hex[:8]}-"
ROW = struct.pack("<4f", 1, 2, 3, 4)
DOUBLED = struct.pack("<4f", 2, 4, 6, 8)


@pytest.fixture(scope="module")
def doubler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """x:FP32[1..8, 4] -> y = 2x; files that begin with PREFIX may be named."""
    environment = {"TRTMODEL_SHARED_MEMORY_PREFIX": PREFIX, "TRTMODEL_STAGING_BYTES": "100000"}
    yield from serve(tmp_path_factory.mktemp("doubler"), {"factor": 2.0}, environment)


@pytest.fixture
def memory(doubler: WorkerProcess) -> Iterator[Path]:
    """A file of 1000 bytes; no region is registered before and after."""
    path = Path(f"/dev/shm/{PREFIX}{uuid.uuid4().hex}")
    path.write_bytes(bytes(1000))
    yield path
    assert doubler.post(f"{BASE}/unregister", b"").status == 200
    path.unlink(missing_ok=True)


def register(worker: WorkerProcess, name: str, key: Any, byte_size: Any = 1000, **more: Any) -> Answer:
    document = {"key": key, "byte_size": byte_size, **more}
    return worker.post(f"{BASE}/region/{name}/register", json.dumps(document).encode())


def place(region: str, size: int, offset: int | None = None) -> dict[str, Any]:
    where: dict[str, Any] = {"shared_memory_region": region, "shared_memory_byte_size": size}
    return where if offset is None else {**where, "shared_memory_offset": offset}


def written(region: str, size: int, offset: int | None = None) -> dict[str, Any]:
    """As an answer says where an output is: none of it in the body."""
    return {**place(region, size, offset), "binary_data_size": 0}


def ask(worker: WorkerProcess, source: dict[str, Any], target: dict[str, Any] | None = None) -> Answer:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": source}
    document: dict[str, Any] = {"inputs": [tensor]}
    if target is not None:
        document["outputs"] = [{"name": "y", "parameters": target}]
    return worker.infer(document)


@pytest.mark.parametrize("slash", ["", "/"])
def test_an_input_is_read_and_an_output_written_where_the_request_says(
    doubler: WorkerProcess, memory: Path, slash: str
) -> None:
    assert register(doubler, "r", slash + memory.name, 900, offset=100).status == 200
    with memory.open("r+b") as file:
        file.seek(116)
        file.write(ROW)
    answer = ask(doubler, place("r", 16, 16), place("r", 500, 200))
    assert answer.json["outputs"] == [
        {"name": "y", "datatype": "FP32", "shape": [1, 4], "parameters": written("r", 16, 200)}
    ]
    expected = bytes(116) + ROW + bytes(300 - 132) + DOUBLED + bytes(1000 - 316)
    assert memory.read_bytes() == expected


def test_shared_memory_goes_with_json_and_binary_data_on_the_other_side(doubler: WorkerProcess, memory: Path) -> None:
    register(doubler, "r", memory.name)
    memory.write_bytes(ROW + bytes(984))
    assert ask(doubler, place("r", 16)).json["outputs"][0]["data"] == [2, 4, 6, 8]
    assert parts(ask(doubler, place("r", 16), {"binary_data": True}))[1] == DOUBLED
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
    body, headers = binary_request({"inputs": [tensor], "outputs": [{"name": "y", "parameters": place("r", 16)}]}, ROW)
    assert doubler.post(INFER, body, **headers).json["outputs"][0]["parameters"] == written("r", 16)
    assert memory.read_bytes()[:16] == DOUBLED


def test_the_same_request_again_reads_what_is_there_now(doubler: WorkerProcess, memory: Path) -> None:
    register(doubler, "r", memory.name)
    for i in range(20):
        with memory.open("r+b") as file:
            file.write(struct.pack("<4f", i, i, i, i))
        assert ask(doubler, place("r", 16)).json["outputs"][0]["data"] == [2 * i] * 4


def test_regions_are_listed_and_forgotten(doubler: WorkerProcess, memory: Path) -> None:
    register(doubler, "a", memory.name, 10)
    register(doubler, "b%2F", "/" + memory.name, 20, offset=5)
    a, b = ({"name": "a", "key": memory.name, "offset": 0, "byte_size": 10},
            {"name": "b/", "key": "/" + memory.name, "offset": 5, "byte_size": 20})  # fmt: skip
    assert doubler.get(f"{BASE}/status").json == [a, b]
    assert doubler.get(f"{BASE}/region/b%2F/status").json == [b]
    assert doubler.get(f"{BASE}/region/c/status").status == 400
    assert register(doubler, "a", memory.name).status == 400
    for _ in range(2):
        assert doubler.post(f"{BASE}/region/a/unregister", b"").status == 200
        assert doubler.get(f"{BASE}/status").json == [b]
    assert ask(doubler, place("a", 16)).status == 400
    assert doubler.post(f"{BASE}/unregister", b"").status == 200
    assert doubler.get(f"{BASE}/status").json == []


@pytest.mark.parametrize(
    "change",
    [
        {"key": "other"}, {"key": "/etc/passwd"}, {"key": f"../shm/{PREFIX}"}, {"key": f"{PREFIX}/../x"},
        {"key": f"//{PREFIX}"}, {"key": ""}, {"key": "/"}, {"key": 7}, {"key": None}, {"key": f"{PREFIX}\0"},
        {"key": PREFIX + "is-not-there"}, {"key": PREFIX + "x" * 300}, {"byte_size": 0}, {"byte_size": -1},
        {"byte_size": "9"}, {"byte_size": 1001}, {"byte_size": 2**70}, {"byte_size": True}, {"offset": -1},
        {"offset": 1, "byte_size": 1000}, {"offset": 2**62, "byte_size": 2**62}, {"offset": 1.0},
    ],
)  # fmt: skip
def test_what_is_no_shared_memory_of_ours_is_not_opened(
    doubler: WorkerProcess, memory: Path, change: dict[str, Any]
) -> None:
    answer = register(doubler, "r", **{"key": memory.name, "byte_size": 1000, **change})
    assert answer.status == 400
    assert answer.json["error"]
    assert doubler.get(f"{BASE}/status").json == []


@pytest.mark.parametrize("kind", ["link", "directory", "pipe"])
def test_only_regular_files_are_opened(doubler: WorkerProcess, memory: Path, tmp_path: Path, kind: str) -> None:
    path = Path(f"/dev/shm/{PREFIX}{kind}-{uuid.uuid4().hex}")
    if kind == "link":
        path.symlink_to(memory)
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    try:
        assert register(doubler, "r", path.name, 1).status == 400
    finally:
        path.rmdir() if kind == "directory" else path.unlink()


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"key":"a","key":"b"}', b"\xff"])
def test_a_registration_that_is_no_json_object_is_refused(doubler: WorkerProcess, body: bytes) -> None:
    assert doubler.post(f"{BASE}/region/r/register", body).status == 400


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (place("r", 16, 985), None),
        (place("r", 16, 2**60), None),
        (place("r", 12), None),
        (place("r", 20), None),
        (place("no", 16), None),
        (place("r", 16), place("r", 16, 985)),
        (place("r", 16), place("r", 15)),
        (place("r", 16), place("no", 16)),
    ],
)
def test_what_lies_outside_a_region_or_does_not_fit_is_refused(
    doubler: WorkerProcess, memory: Path, source: dict[str, Any], target: dict[str, Any] | None
) -> None:
    register(doubler, "r", memory.name)
    answer = ask(doubler, source, target)
    assert answer.status == 400, answer.body
    assert memory.read_bytes() == bytes(1000)


def test_a_file_that_became_shorter_is_told_and_kills_nobody(doubler: WorkerProcess, memory: Path) -> None:
    register(doubler, "r", memory.name)
    os.truncate(memory, 8)
    for source, target in ((place("r", 16), None), (place("r", 16, 500), None)):
        assert ask(doubler, source, target).status == 400
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    answer = doubler.infer({"inputs": [tensor], "outputs": [{"name": "y", "parameters": place("r", 16)}]})
    assert answer.status == 400
    assert memory.stat().st_size == 8, "it must not be made longer"
    os.truncate(memory, 1000)
    assert ask(doubler, place("r", 16), place("r", 16)).status == 200


def test_a_client_that_changes_its_file_all_the_time_only_harms_itself(doubler: WorkerProcess, memory: Path) -> None:
    register(doubler, "r", memory.name)
    stop = threading.Event()

    def restless() -> None:
        while not stop.is_set():
            os.truncate(memory, 0)
            os.truncate(memory, 1000)

    thread = threading.Thread(target=restless)
    thread.start()
    try:
        statuses = {ask(doubler, place("r", 16), place("r", 16, 500)).status for _ in range(200)}
        assert doubler.infer(fp32([1, 2, 3, 4], [1, 4])).json["outputs"][0]["data"] == [2, 4, 6, 8]
    finally:
        stop.set()
        thread.join()
    assert statuses <= {200, 400}


def test_memory_outlives_its_name_until_it_is_unregistered(doubler: WorkerProcess, memory: Path) -> None:
    memory.write_bytes(ROW + bytes(984))
    register(doubler, "r", memory.name)
    memory.unlink()
    assert ask(doubler, place("r", 16)).json["outputs"][0]["data"] == [2, 4, 6, 8]
    doubler.post(f"{BASE}/unregister", b"")
    fds = Path(f"/proc/{doubler.pid}/fd")
    assert not any(PREFIX in str(fd.readlink()) for fd in fds.iterdir() if fd.is_symlink())


def test_a_request_that_waits_reads_its_own_file_although_its_region_is_unregistered_meanwhile(tmp_path: Path) -> None:
    path = Path(f"/dev/shm/{PREFIX}{uuid.uuid4().hex}")
    path.write_bytes(ROW + bytes(84))
    try:
        regions = Regions(PREFIX)
        regions.register("r", {"key": path.name, "byte_size": 100})
        waits, place = regions.at(MemoryRef("r", 0, 16)), bytearray(16)
        regions.unregister("r")
        others = [(tmp_path / str(i)).open("wb") for i in range(5)]  # one of them would get the number of a closed file
        waits.read_into(memoryview(place))
        assert place == ROW == waits.copy()
        os.truncate(path, 10)
        with pytest.raises(Unreadable, match="shorter"):
            waits.read_into(memoryview(place))
        del waits
        assert not any(str(path) == str(f.readlink()) for f in Path("/proc/self/fd").iterdir() if f.is_symlink())
        for other in others:
            other.close()
    finally:
        path.unlink()


@pytest.mark.parametrize("size", [4 << 20, (9 << 20) + 3])
def test_large_inputs_are_read_in_parts_that_make_a_whole(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    path = Path(f"/dev/shm/{PREFIX}{uuid.uuid4().hex}")
    data = os.urandom(1 << 20) * (size // (1 << 20) + 1)
    path.write_bytes(b"ahead" + data[:size])
    try:
        regions = Regions(PREFIX)
        regions.register("r", {"key": path.name, "byte_size": size, "offset": 5})
        found = regions.at(MemoryRef("r", 0, size))
        assert found.copy() == data[:size]
        os.truncate(path, size - 1)
        with pytest.raises(Unreadable):
            found.copy()
    finally:
        path.unlink()


def test_the_number_of_regions_is_bounded(doubler: WorkerProcess, memory: Path) -> None:
    for i in range(MAX_REGIONS):
        assert register(doubler, str(i), memory.name).status == 200
    answer = register(doubler, "one-more", memory.name)
    assert (answer.status, str(MAX_REGIONS) in answer.json["error"]) == (400, True)


@pytest.mark.parametrize(("files", "most"), [(resource.RLIM_INFINITY, MAX_REGIONS), (65536, MAX_REGIONS), (1024, 128)])
def test_regions_leave_files_to_open_for_connections_and_everything_else(
    files: int, most: int, monkeypatch: pytest.MonkeyPatch, memory: Path
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, resource.RLIM_INFINITY))
    regions = Regions(PREFIX)
    document = {"key": memory.name, "byte_size": 1}
    for i in range(most):
        regions.register(str(i), document)
    with pytest.raises(Invalid, match=f"{most} regions are registered already"):
        regions.register("one-more", document)


def test_what_is_read_counts_among_the_bodies_that_are_held(doubler: WorkerProcess, memory: Path) -> None:
    register(doubler, "r", memory.name)
    for _ in range(10_000 // 16):
        assert ask(doubler, place("r", 16)).status == 200
    assert "trtmodel_staged_bytes 0.0" in doubler.metrics()


def test_what_is_held_for_a_request_is_bounded_however_it_comes(tmp_path: Path, memory: Path) -> None:
    os.truncate(memory, 8000)
    wide = {"inputs": [TensorSpec("x", "FP32", (-1, 1000))], "outputs": [TensorSpec("y", "FP32", (-1, 1000))]}
    environment = {"TRTMODEL_SHARED_MEMORY_PREFIX": PREFIX, "TRTMODEL_STAGING_BYTES": "3000"}
    for worker in serve(tmp_path, {}, environment, **wide):
        register(worker, "r", memory.name, 8000)
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1000]}
        head = json.dumps({"inputs": [{**tensor, "parameters": place("r", 4000)}]}).encode()
        packed = gzip.compress(json.dumps({"inputs": [{**tensor, "data": [0.5] * 1000}]}).encode())
        assert len(packed) < 1000
        for answer in (worker.post(INFER, head), worker.post(INFER, packed, content_encoding="gzip")):
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert worker.get("/v2/health/ready").status == 200
        assert "trtmodel_staged_bytes 0.0" in worker.metrics()


def test_it_is_offered_where_it_is_enabled_only(doubler: WorkerProcess, tmp_path: Path, memory: Path) -> None:
    assert "system_shared_memory" in doubler.get("/v2").json["extensions"]
    for worker in serve(tmp_path, {}, {}):
        assert "system_shared_memory" not in worker.get("/v2").json["extensions"]
        answer = register(worker, "r", memory.name)
        assert (answer.status, "TRTMODEL_SHARED_MEMORY_PREFIX" in answer.json["error"]) == (404, True)
        assert worker.get(f"{BASE}/status").status == 404
        answer = ask(worker, place("r", 16))
        assert (answer.status, "not enabled" in answer.json["error"]) == (400, True)
