"""The metrics port while engine hosts die: nothing piles up, nothing falls back, and no file can spoil it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from trtmodel_worker.front.stats import RevisionStats
from worker_harness import REVISION_1, Bucket, Operator, WorkerProcess, eventually, started

KILLS = 4
COUNTERS = ("_total", "_count", "_bucket")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a library that shares counters by files would keep them: with a damaged one."""
    folder = tmp_path_factory.mktemp("multiprocess")
    for name in ("counter_1.db", "gauge_all_1.db", "histogram_1.db"):
        (folder / name).write_bytes(os.urandom(4096))
    return folder


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, files: Path) -> Iterator[WorkerProcess]:
    folder, operator = tmp_path_factory.mktemp("metrics"), Operator()
    bucket = Bucket(folder / "bucket")
    stable = operator.artifact(REVISION_1, bucket.publish(REVISION_1)[0])
    found = WorkerProcess(folder / "worker", operator, bucket, PROMETHEUS_MULTIPROC_DIR=str(files))
    try:
        yield started(found, stable)
    finally:
        assert found.stop() == 0, found.tail()


def series(worker: WorkerProcess) -> dict[str, float]:
    lines = [line for line in worker.metrics().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def is_counter(name: str) -> bool:
    return name.startswith("trtmodel_") and name.partition("{")[0].endswith(COUNTERS)


def test_G01_hosts_that_die_again_and_again_leave_no_series_and_no_counter_falls(
    worker: WorkerProcess, files: Path
) -> None:
    assert worker.infer_rows([[1.0, 2.0, 3.0, 4.0]]).status == 200
    before = first = series(worker)
    there = sorted(files.iterdir())
    for kill in range(1, KILLS + 1):
        (pid,) = worker.host_pids()
        os.kill(pid, signal.SIGKILL)
        eventually(lambda pid=pid: worker.host_pids() not in ([], [pid]), "another host")  # type: ignore[misc]
        eventually(lambda: worker.infer_rows([[1.0, 2.0, 3.0, 4.0]]).status == 200, "an answer")
        now = series(worker)
        assert now.keys() == first.keys()
        assert not {name for name, value in before.items() if is_counter(name) and now[name] < value}
        assert now[f'trtmodel_host_deaths_total{{revision="{REVISION_1}"}}'] == kill
        before = now
    assert sorted(files.iterdir()) == there


def test_batches_are_told_apart_by_their_rows(worker: WorkerProcess) -> None:
    def told() -> list[float]:
        now, of = series(worker), f'revision="{REVISION_1}"'
        sizes = [now[f'trtmodel_batch_rows_bucket{{le="{le}",{of}}}'] for le in ("1", "2", "4", "8")]
        return [*sizes, now[f"trtmodel_batch_rows_sum{{{of}}}"], now[f"trtmodel_batch_rows_count{{{of}}}"]]

    before = told()
    assert worker.infer_rows([[1.0, 2.0, 3.0, 4.0]] * 3).status == 200
    assert [b - a for a, b in zip(before, told(), strict=True)] == [0, 0, 1, 1, 3, 1]
    assert series(worker)[f'trtmodel_fetch_seconds{{revision="{REVISION_1}"}}'] > 0


@pytest.mark.parametrize(
    ("rows", "place"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (1024, 10), (1025, 11), (1_000_000, 11)]
)
def test_a_batch_counts_under_the_next_power_of_two(rows: int, place: int) -> None:
    stats = RevisionStats()
    stats.dispatched(rows, 0)
    assert stats.sizes.index(1) == place
    assert (stats.batches, stats.rows) == (1, rows)


def test_G03_a_damaged_file_of_counters_spoils_nothing_since_none_is_read(worker: WorkerProcess) -> None:
    assert worker.infer_rows([[1] * 4]).status == 200
    answer = series(worker)
    assert answer["trtmodel_ready"] == 1
    assert answer[f'trtmodel_responses_total{{revision="{REVISION_1}",status="200"}}'] >= 1
