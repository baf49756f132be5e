"""A storage that does not answer holds up nobody but who waits for it, and not for ever."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trtmodel_contract.control import EngineState, SignedArtifact
from trtmodel_contract.identity import Storage
from trtmodel_worker.front.artifacts import Refused
from trtmodel_worker.front.reading import THREADS, Reading
from worker_harness import REVISION_1, REVISION_2, REVISION_3, Bucket, Operator, WorkerProcess, eventually

PATIENCE_SECONDS = 30.0


def ignore(_: object) -> None:
    pass


async def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    for _ in iter(what, True):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_what_is_read_is_returned_and_what_is_raised_is_raised() -> None:
    async def scene() -> None:
        reading = Reading("test")
        assert await reading.run(PATIENCE_SECONDS, "it", lambda: 7, ignore) == 7
        with pytest.raises(TimeoutError, match="of its own"):
            await reading.run(PATIENCE_SECONDS, "it", lambda: raise_(TimeoutError("of its own")), ignore)
        assert reading.hanging == 0
        reading.close()

    asyncio.run(scene())


def raise_(error: Exception) -> Any:
    raise error


def test_reads_that_hang_are_given_up_then_refused_and_forgotten_when_they_end_after_all() -> None:
    async def scene() -> None:
        reading, gate, late = Reading("test"), threading.Event(), []

        def hang() -> str:
            gate.wait(PATIENCE_SECONDS)
            return "late"

        for number in range(1, THREADS + 1):
            with pytest.raises(Refused) as caught:
                await reading.run(0.05, "the artifact", hang, late.append)
            assert (caught.value.reason, caught.value.transient) == ("FetchTimeout", True)
            assert reading.hanging == number
        with pytest.raises(Refused) as caught:
            await reading.run(PATIENCE_SECONDS, "the artifact", lambda: "never", ignore)
        assert caught.value.reason == "StorageStuck"
        assert await asyncio.to_thread(lambda: "free") == "free", "the loop's own threads are none of these"
        gate.set()
        await until(lambda: reading.hanging == 0)
        assert late == ["late"] * THREADS, "who owns the result can let go of it"
        assert await reading.run(PATIENCE_SECONDS, "it", lambda: "again", ignore) == "again"
        reading.close()

    asyncio.run(scene())


def test_a_read_that_only_waited_for_a_thread_hangs_nothing_and_a_cancelled_one_gives_its_result_back() -> None:
    async def scene() -> None:
        reading, gate, late = Reading("test"), threading.Event(), []
        started = [threading.Event() for _ in range(THREADS)]

        def hang(number: int) -> int:
            started[number].set()
            gate.wait(PATIENCE_SECONDS)
            return number

        running = [
            asyncio.create_task(reading.run(PATIENCE_SECONDS, "it", lambda i=i: hang(i), late.append))  # type: ignore[misc]
            for i in range(THREADS)
        ]
        await until(lambda: all(event.is_set() for event in started))
        with pytest.raises(Refused, match="was not read"):
            await reading.run(0.05, "it", lambda: raise_(AssertionError("it never runs")), ignore)
        assert reading.hanging == 0
        running[0].cancel()
        await asyncio.wait({running[0]})
        assert reading.hanging == 1
        gate.set()
        assert await running[1] == 1
        await until(lambda: late == [0] and reading.hanging == 0)
        reading.close()

    asyncio.run(scene())


@pytest.mark.long
def test_a_storage_that_hangs_keeps_neither_the_serving_engine_nor_the_pointer_nor_its_own_repair_waiting(
    start_worker: Callable[..., WorkerProcess], bucket: Bucket, operator: Operator, tmp_path: Path
) -> None:
    made = [bucket.publish(r, {"factor": f}) for r, f in ((REVISION_1, 1.0), (REVISION_2, 2.0), (REVISION_3, 3.0))]
    v1, v2, v3 = (operator.artifact(m.revision, digest) for digest, m in made)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        (tmp_path / name).write_text("key")
    worker = start_worker(TRTMODEL_PREPARE_SECONDS="5", TRTMODEL_CREDENTIALS_DIR=str(tmp_path))
    worker.point(v1)
    worker.start()
    worker.wait_ready()
    good = bucket.storage
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, says nothing
        bucket.storage = Storage("engines", endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}", region="here")
        follow(worker, v1)
        worker.desire(v1, v2, weight=100)
        assert worker.wait_engine(v2.manifest_digest, EngineState.FAILED).reason == "FetchTimeout"
        eventually(lambda: reason(worker, v2) == "StorageStuck", "both threads hang")
        worker.desire(v1, v3)
        assert worker.wait_engine(v3.manifest_digest, EngineState.FAILED).reason == "StorageStuck"
        assert worker.infer_rows([[1] * 4]).revision == REVISION_1
        follow(worker, v1)
        os.kill(worker.host_pids()[0], 9)
        eventually(lambda: worker.infer_rows([[1] * 4]).status == 200, "its host is replaced, from the cache")
        bucket.storage = good
        follow(worker, v1)
    worker.desire(v1, v3)
    worker.wait_engine(v3.manifest_digest)


def follow(worker: WorkerProcess, artifact: SignedArtifact) -> None:
    worker.point(artifact)
    eventually(lambda: worker.report().pointer_sequence == worker.sequence, "the pointer is read")


def reason(worker: WorkerProcess, artifact: Any) -> str:
    found = worker.engine(artifact.manifest_digest)
    return found.reason if found is not None else ""
