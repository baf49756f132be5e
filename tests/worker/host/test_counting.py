"""`contexts: Auto`: how many lanes are enough."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from trtmodel_worker.host import counting
from trtmodel_worker.host.counting import fewest_lanes, throughput
from worker_harness import REVISION_1, Bucket, Operator, WorkerProcess


@pytest.mark.parametrize(
    ("rates", "enough", "tried"),
    [
        ({1: 100.0, 2: 199.0, 4: 398.0, 8: 790.0}, 8, {1, 2, 4, 8}),
        ({1: 100.0, 2: 190.0, 4: 191.0, 8: 500.0}, 2, {1, 2, 4}),
        ({1: 100.0, 2: 101.0}, 1, {1, 2}),
        ({1: 100.0, 2: 60.0}, 1, {1, 2}),
        ({1: 100.0, 2: 120.0, 4: 121.0}, 2, {1, 2, 4}),
    ],
)
def test_the_fewest_lanes_within_five_percent_of_the_best_are_taken(
    monkeypatch: pytest.MonkeyPatch, rates: dict[int, float], enough: int, tried: set[int]
) -> None:
    monkeypatch.setattr(counting, "throughput", lambda runs, _: rates[len(runs)])
    found, measured = fewest_lanes([lambda: None] * 8, 0.001)
    assert (found, set(measured)) == (enough, tried)


def test_lanes_run_side_by_side_while_they_are_counted() -> None:
    """Each run waits for the other lane's: one after the other they would wait for ever."""
    together = threading.Barrier(2)
    counted = [0, 0]

    def lane(index: int) -> Callable[[], object]:
        def run() -> None:
            if counted[index] < 3:
                together.wait(timeout=30)
            counted[index] += 1

        return run

    assert throughput([lane(0), lane(1)], 1.0) > 0
    assert min(counted) >= 3


def test_a_lane_that_fails_while_it_is_counted_is_heard() -> None:
    def run() -> None:
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        throughput([lambda: None, run], 0.01)


def test_a_worker_with_contexts_auto_serves_with_as_many_lanes_as_are_worth_it(tmp_path: Path) -> None:
    operator, bucket = Operator(), Bucket(tmp_path / "bucket")
    digest = bucket.publish(REVISION_1, {"factor": 2.0, "work": 0.05}, max_rows=1)[0]
    worker = WorkerProcess(tmp_path / "worker", operator, bucket, TRTMODEL_CONTEXTS="Auto", TRTMODEL_HOSTS="2")
    worker.point(operator.artifact(REVISION_1, digest))
    worker.start()
    try:
        worker.wait_ready()
        # The engine sleeps, so that each lane is worth as much as the first one, however busy the machine is.
        (lanes,) = re.findall(r'trtmodel_lanes{revision="aaaaaaaaaa"} (\d+)', worker.metrics())
        assert int(lanes) >= 4
        assert worker.infer_rows([[1.0] * 4]).json["outputs"][0]["data"] == [2.0] * 4
    finally:
        assert worker.stop() == 0
