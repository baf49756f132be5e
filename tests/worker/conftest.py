"""Workers for tests: each test that asks for one gets its own process, ended afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from worker_harness import FACTORS, Bucket, Operator, WorkerProcess

sys.path.append(str(Path(__file__).parent / "builder"))  # job_harness: engines that are built as Jobs build them


@pytest.fixture
def operator() -> Operator:
    return Operator()


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path / "bucket")


@pytest.fixture
def engines(bucket: Bucket, operator: Operator) -> list[Any]:
    """Signed engines of three revisions: y = x, 2x, 3x."""
    return [operator.artifact(r, bucket.publish(r, {"factor": f})[0]) for r, f in FACTORS.items()]


@pytest.fixture
def start_worker(tmp_path: Path, operator: Operator, bucket: Bucket) -> Iterator[Callable[..., WorkerProcess]]:
    """Makes workers; `start()` is the test's to call. All are ended, and all must end well."""
    made: list[WorkerProcess] = []

    def make(**environment: str) -> WorkerProcess:
        worker = WorkerProcess(tmp_path / f"worker-{len(made)}", operator, bucket, **environment)
        made.append(worker)
        return worker

    yield make
    codes = [w.stop() for w in made if w.process is not None]
    assert all(code in (0, -9) for code in codes), f"exit codes {codes}\n" + "\n".join(w.tail() for w in made)


@pytest.fixture
def worker(start_worker: Callable[..., WorkerProcess]) -> WorkerProcess:
    return start_worker()
