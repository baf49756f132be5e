"""Shorter slices for what a request passes through, where the kernel gives them."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from free_ports import free_port
from host_harness import HostProcess
from trtmodel_worker.front.reading import Reading
from trtmodel_worker.slices import FRONT_SECONDS, HOST_SECONDS, PREPARING_SECONDS, ask_for_slices, slice_seconds
from worker_harness import REVISION_1, Bucket, Operator, WorkerProcess, eventually


def in_a_thread(work: Callable[[], object]) -> object:
    """What asks for slices there asks for itself only."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


GIVEN = in_a_thread(lambda: ask_for_slices(FRONT_SECONDS))
USUAL = slice_seconds()


def test_what_is_asked_for_is_given_or_refused_and_can_be_given_back() -> None:
    def ask() -> tuple[bool, float, bool, float]:
        return ask_for_slices(0.0005), slice_seconds(), ask_for_slices(0.0), slice_seconds()

    assert in_a_thread(ask) in ((True, 0.0005, True, USUAL), (False, USUAL, True, USUAL), (False, 0.0, False, 0.0))


def test_a_machine_whose_calls_are_not_known_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert (ask_for_slices(0.0005), slice_seconds()) == (False, 0.0)


@pytest.mark.skipif(not GIVEN, reason="this kernel, or this process's policy, knows no slices")
def test_threads_that_read_a_storage_have_none_of_the_fronts() -> None:
    async def read() -> float:
        ask_for_slices(FRONT_SECONDS)
        reading = Reading("test")
        try:
            return await reading.run(60.0, "it", slice_seconds, lambda _: None)
        finally:
            reading.close()

    assert in_a_thread(lambda: asyncio.run(read())) == USUAL


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerProcess]:
    operator, bucket = Operator(), Bucket(tmp_path / "bucket")
    made = WorkerProcess(tmp_path / "worker", operator, bucket, TRTMODEL_GRPC_PORT=str(free_port()))
    made.point(operator.artifact(REVISION_1, bucket.publish(REVISION_1)[0]))
    made.start()
    try:
        made.wait_ready()
        yield made
    finally:
        assert made.stop() == 0


@pytest.mark.skipif(not GIVEN, reason="this kernel, or this process's policy, knows no slices")
def test_front_and_lanes_have_short_slices_and_the_gateway_has_not(worker: WorkerProcess) -> None:
    (host,) = worker.host_pids()
    (gateway,) = children(worker.pid) - {host}
    assert slice_seconds(worker.pid) == FRONT_SECONDS
    assert slice_seconds(gateway) == USUAL
    lanes = {int(task.name) for task in Path(f"/proc/{host}/task").iterdir()}
    eventually(lambda: HOST_SECONDS in map(slice_seconds, lanes), "lanes have theirs")
    assert FRONT_SECONDS not in map(slice_seconds, lanes)


@pytest.mark.skipif(not GIVEN, reason="this kernel, or this process's policy, knows no slices")
def test_what_is_prepared_beside_requests_is_interrupted_by_everybody_and_what_serves_is_not(bucket: Bucket) -> None:
    _, manifest = bucket.publish(REVISION_1, {"load": 0.5, "helper": True})
    with HostProcess(bucket, manifest, pulsed=True) as host:
        eventually(
            lambda: slices(host.process.pid).count(PREPARING_SECONDS) > 1, "it and its helper ask for the longest"
        )
        host.ready()
        assert PREPARING_SECONDS not in slices(host.process.pid)


def slices(pid: int) -> list[float]:
    """Of all threads of a process."""
    return [slice_seconds(int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()]


def children(pid: int) -> set[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return set(map(int, found.stdout.split()))
