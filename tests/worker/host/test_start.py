"""Starting hosts, and giving them up at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_harness import HostProcess
from trtmodel_worker.front.artifacts import Artifacts
from trtmodel_worker.front.hostproc import EngineHost, HostFailed, Hosts, is_killed
from trtmodel_worker.front.regions import Arenas
from worker_harness import PLUGIN, REVISION_1, Bucket, eventually


def children() -> list[str]:
    tasks = Path("/proc/self/task").iterdir()
    return [pid for task in tasks for pid in (task / "children").read_text().split()]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextlib.contextmanager
def many_descriptors(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * count)), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]
    try:
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_host_has_no_threads_that_multiply_matrices(bucket: Bucket) -> None:
    """NumPy's BLAS made one for each processor but the first, and each of them was busy for 0.1 s."""
    _, manifest = bucket.publish(REVISION_1, {})
    mine, found = os.sched_getaffinity(0), []
    for processors in ({min(mine)}, mine):
        try:
            os.sched_setaffinity(0, processors)
            process = HostProcess(bucket, manifest)
        finally:
            os.sched_setaffinity(0, mine)
        with process as host:
            host.ready()
            found.append(len(list(Path(f"/proc/{host.process.pid}/task").iterdir())))
    assert found[0] == found[1]


def test_an_arena_that_nobody_uses_is_given_back_beside_the_loop(bucket: Bucket) -> None:
    """To unmap one of 64 MiB takes 12 ms."""
    _, manifest = bucket.publish(REVISION_1, {})
    threads: list[int] = []

    async def run() -> None:
        arenas = Arenas(2, 1000)
        arena, _ = arenas.acquire(manifest), arenas.acquire(manifest)
        given_back, memory = arena.memory.close, arena.memory
        memory.close = lambda: (threads.append(threading.get_ident()), given_back())  # type: ignore[method-assign, func-returns-value]
        for _ in range(2):
            arenas.release(arena)
        assert arenas.total_bytes == 0
        await asyncio.get_running_loop().shutdown_default_executor()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(memory.fd)

    asyncio.run(run())
    assert threads
    assert threading.get_ident() not in threads


def test_a_host_of_a_front_with_a_thousand_clients_ends_when_it_is_told(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", PLUGIN)
    _, manifest = bucket.publish(REVISION_1, {})
    artifacts = Artifacts(bucket.store, tmp_path / "cache")

    async def run() -> None:
        hosts, arenas = Hosts("Test"), Arenas(2, 1000)
        arena, payload = arenas.acquire(manifest), artifacts.payload(manifest)
        with many_descriptors(1100):
            host = await hosts.start(manifest, payload, arena.memory, 2, 30.0, (), 1.0)
        await host.end(20.0)
        assert host.exited.result() == 0
        payload.close()
        arenas.release(arena)
        hosts.close()

    asyncio.run(run())


def test_a_start_that_is_cancelled_at_any_moment_leaves_no_process_and_no_descriptor(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()  # descriptors that earlier tests left to it
    monkeypatch.setenv("PYTHONPATH", PLUGIN)
    _, manifest = bucket.publish(REVISION_1, {"load": 60.0})
    artifacts = Artifacts(bucket.store, tmp_path / "cache")

    async def run() -> None:
        hosts, arenas = Hosts("Test"), Arenas(2, 1000)
        before = children()
        figures = []
        for turn in range(16):
            arena, payload = arenas.acquire(manifest), artifacts.payload(manifest)
            starting = asyncio.create_task(hosts.start(manifest, payload, arena.memory, 2, 30.0, (), 1.0))
            for _ in range(turn):
                await asyncio.sleep(0)
            if turn > 8:
                await asyncio.sleep((turn - 8) * 0.002)
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
            payload.close()
            arenas.release(arena)
            await asyncio.to_thread(eventually, lambda: children() == before, "the process is gone")
            figures.append(descriptors())
        assert figures[0] == figures[-1], figures
        hosts.close()

    asyncio.run(run())


def test_a_host_that_is_not_ready_in_time_is_ended(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", PLUGIN)
    _, manifest = bucket.publish(REVISION_1, {"load": 60.0})

    async def run() -> None:
        hosts, arenas = Hosts("Test"), Arenas(2, 1000)
        arena, payload = arenas.acquire(manifest), Artifacts(bucket.store, tmp_path / "cache").payload(manifest)
        before = children()
        with pytest.raises(HostFailed, match="not ready within 1 s") as failed:
            await hosts.start(manifest, payload, arena.memory, 2, 1.0, (), 1.0)
        assert (failed.value.reason, failed.value.refused) == ("PrepareTimeout", False)
        assert children() == before
        payload.close()
        arenas.release(arena)

    asyncio.run(run())


def test_a_runtime_that_does_not_exist_is_named_with_those_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PLUGIN)
    with pytest.raises(HostFailed, match="'Nothing' is not in this image: it has ONNXRuntime, TensorRT, Test"):
        asyncio.run(Hosts("Nothing").describe())


@pytest.mark.parametrize(("end", "killed"), [("kill -9 $$", True), ("exit 9", False), ("kill -15 $$", False)])
def test_a_process_that_was_killed_is_known_before_it_is_reaped(end: str, killed: bool) -> None:
    with subprocess.Popen(["sh", "-c", f"read line; {end}"], stdin=subprocess.PIPE) as process:
        assert not is_killed(process.pid)
        assert process.stdin is not None
        process.stdin.close()
        eventually(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z", "ended")
        assert is_killed(process.pid) == killed
    assert not is_killed(process.pid)


def test_a_host_that_was_stopped_is_told_from_one_that_works() -> None:
    process = subprocess.Popen(["sh", "-c", "while read line; do kill -STOP $$; done"], stdin=subprocess.PIPE)

    async def run() -> None:
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        host = EngineHost(process, control, [])
        assert process.stdin is not None
        assert not host.is_stopped()
        process.stdin.write(b"\n")
        process.stdin.flush()
        eventually(host.is_stopped, "it is stopped")
        host.signal(signal.SIGCONT)
        eventually(lambda: not host.is_stopped(), "it goes on")
        process.stdin.close()
        await asyncio.wait_for(host.exited, 30)
        assert not host.is_stopped()
        theirs.close()

    asyncio.run(run())


@pytest.mark.parametrize(("end", "killed"), [("kill -9 $$", True), ("kill -11 $$", False), ("exec cat", False)])
def test_a_host_that_was_killed_is_given_up_though_its_lanes_are_open(end: str, killed: bool) -> None:
    process = subprocess.Popen(["sh", "-c", f"read line; {end}"], stdin=subprocess.PIPE)

    async def run() -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]  # open until the end
        host, dying = EngineHost(process, pairs[0][0], [pairs[1][0]]), list[EngineHost]()
        host.on_dying = dying.append
        assert not host.is_lingering()
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        if end.startswith("kill"):
            stat = Path(f"/proc/{process.pid}/stat")
            eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "ended")
        assert (host.is_lingering(), host.innocent, dying) == (killed, killed, [host] if killed else [])
        assert not host.is_lingering(), "it is told once"
        process.stdin.close()
        await asyncio.wait_for(host.exited, 30)
        for _, theirs in pairs:
            theirs.close()

    asyncio.run(run())
