"""What a host does about its lanes, as the clients of a whole worker see it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from trtmodel_contract.control import EngineState
from worker_harness import REVISION_1, Bucket, Load, Operator, WorkerProcess, eventually

GOOD, BAD = 7.0, 666.0


@pytest.fixture
def start(start_worker: Any, bucket: Bucket, operator: Operator) -> Callable[..., WorkerProcess]:
    def begin(behaviour: dict[str, Any], golden: Any = None, **environment: str) -> WorkerProcess:
        worker: WorkerProcess = start_worker(**environment)
        worker.point(operator.artifact(REVISION_1, bucket.publish(REVISION_1, behaviour, golden=golden)[0]))
        worker.start()
        worker.wait_ready()
        return worker

    return begin


def engine(worker: WorkerProcess) -> Any:
    return worker.report().models["m"].engines[0]


def test_lanes_that_break_are_made_anew_while_others_answer_and_no_request_fails(start: Any) -> None:
    worker = start({"factor": 2.0, "fault": {"when": BAD, "do": "break"}}, TRTMODEL_CONTEXTS="4")
    (pid,) = worker.host_pids()
    with Load(worker.port, {REVISION_1: 2.0}, clients=4) as load:
        for _ in range(10):
            worker.infer_rows([[BAD] * 4])  # breaks each lane that tries it
            load.wait_for(20)
    assert load.failures == []
    assert worker.host_pids() == [pid]
    assert engine(worker).deaths == 0


def test_an_engine_that_goes_wrong_is_found_by_the_probe_and_replaced(start: Any) -> None:
    worker = start(
        {"factor": 2.0, "fault": {"when": BAD, "do": "drift"}},
        TRTMODEL_HEALTH_INTERVAL_SECONDS="0.2",
    )
    (pid,) = worker.host_pids()
    first = worker.infer_rows([[GOOD] * 4])
    assert first.status == 200, (first.body, worker.tail())
    worker.infer_rows([[BAD] * 4])
    eventually(lambda: pid not in worker.host_pids(), "the host is ended")
    eventually(lambda: engine(worker).state is EngineState.READY and engine(worker).deaths == 1, "it was replaced")
    assert "output 'y' at [0, 0] is 3.0, it was 2.0 when built" in worker.log.read_text()
    assert worker.infer_rows([[GOOD] * 4]).json["outputs"][0]["data"] == [2 * GOOD] * 4


def test_rows_of_different_clients_are_never_run_together_where_they_would_see_each_other(start: Any) -> None:
    """A row less the mean of its batch is zero, if it is alone."""
    worker = start(
        {"mode": "centred", "work": 0.005}, golden=lambda x: x - x.mean(axis=0, keepdims=True), TRTMODEL_CONTEXTS="2"
    )
    wrong: list[Any] = []

    def client(number: int) -> None:
        for turn in range(15):
            answer = worker.infer_rows([[float(number + turn)] * 4])
            if answer.json.get("outputs", [{}])[0].get("data") != [0.0] * 4:
                wrong.append(answer.body)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert "its rows are not run together" in worker.log.read_text()
