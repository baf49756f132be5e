"""What goes wrong in an engine host, with real processes, and what a client then sees."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trtmodel_contract.control import EngineState, WorkerState
from worker_harness import REVISION_1, REVISION_2, Bucket, Load, Operator, WorkerProcess, eventually

GOOD, BAD = 7.0, 666.0
Start = Callable[..., WorkerProcess]


@pytest.fixture
def start(start_worker: Start, bucket: Bucket, operator: Operator) -> Start:
    """A ready worker whose engine doubles its input, and does `fault` at the input BAD."""

    def begin(fault: str, behaviour: dict[str, Any] | None = None, **environment: str) -> WorkerProcess:
        worker = start_worker(**environment)
        plan = {"factor": 2.0, "fault": {"when": BAD, "do": fault}, **(behaviour or {})}
        worker.point(operator.artifact(REVISION_1, bucket.publish(REVISION_1, plan)[0]))
        worker.start()
        worker.wait_ready()
        return worker

    return begin


def counts(worker: WorkerProcess) -> Any:
    (window,) = worker.report().models["m"].windows.values()
    (found,) = window.values()
    return found


def answers_well(worker: WorkerProcess) -> None:
    answer = worker.infer_rows([[GOOD] * 4])
    assert (answer.status, answer.json["outputs"][0]["data"]) == (200, [2 * GOOD] * 4)


@pytest.mark.parametrize(
    ("fault", "status", "kind", "tries"),
    [
        ("invalid", 400, None, 1),
        ("recoverable", 500, "Recoverable", 3),
        ("memory", 500, "OutOfMemory", 3),
        ("crash", 500, "Internal", 3),
        ("too-large", 500, "OutputTooLarge", 1),
    ],
)
def test_an_error_that_comes_again_fails_that_request_alone_and_every_attempt_is_counted_by_its_class(
    start: Start, fault: str, status: int, kind: str | None, tries: int
) -> None:
    worker = start(fault)
    (pid,) = worker.host_pids()
    answer = worker.infer_rows([[BAD] * 4])
    assert (answer.status, answer.revision) == (status, REVISION_1)
    assert answer.json["error"]
    answers_well(worker)
    found = counts(worker)
    assert (dict(found.failed), found.ok) == ({kind: tries} if kind else {}, 1)
    assert worker.host_pids() == [pid]


@pytest.mark.parametrize("fault", ["segv", "sticky", "lost"])
def test_a_request_that_kills_its_host_twice_gets_500_and_nobody_else_suffers(start: Start, fault: str) -> None:
    worker = start(fault)
    answer = worker.infer_rows([[BAD] * 4])
    assert answer.status == 500
    assert "2 engine hosts died" in answer.json["error"]
    answers_well(worker)
    assert dict(counts(worker).failed) == {"HostDeath": 2}
    (engine,) = worker.report().models["m"].engines
    assert (engine.state, engine.deaths) == (EngineState.READY, 2)


def test_a_killed_host_fails_no_request(start: Start) -> None:
    worker = start("die", {"work": 0.005})
    with Load(worker.port, {REVISION_1: 2.0}, clients=6) as load:
        for death in range(1, 4):
            load.wait_for(50)
            (pid,) = worker.host_pids()
            os.kill(pid, signal.SIGKILL)
            eventually(lambda d=death: worker.report().models["m"].engines[0].deaths == d, "the death is reported")
            eventually(lambda: worker.report().models["m"].engines[0].state is EngineState.READY, "it was replaced")
        load.wait_for(50)
    assert load.failures == []
    assert worker.get("/v2/health/ready").status == 200
    assert "trtmodel_host_deaths_total" in worker.metrics()


def test_a_host_that_dies_idle_counts_as_a_failed_attempt_of_what_is_routed_only(
    start: Start, bucket: Bucket, operator: Operator
) -> None:
    worker = start("die")
    (first,) = worker.host_pids()
    stable = operator.artifact(
        REVISION_1, bucket.publish(REVISION_1, {"factor": 2.0, "fault": {"when": BAD, "do": "die"}})[0]
    )
    standby = operator.artifact(REVISION_2, bucket.publish(REVISION_2, {"factor": 3.0})[0])
    worker.desire(stable, standby=standby)
    worker.wait_engine(standby.manifest_digest)
    (second,) = [pid for pid in worker.host_pids() if pid != first]
    for pid in (first, second):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: [e.deaths for e in worker.report().models["m"].engines] == [1, 1], "both deaths are seen")
    window = worker.report().models["m"].windows["w1"]
    assert {digest: dict(c.failed) for digest, c in window.items()} == {stable.manifest_digest: {"HostDeath": 1}}


def test_a_host_that_hangs_is_replaced_and_its_request_does_not_hang(start: Start) -> None:
    worker = start("hang", TRTMODEL_HANG_SECONDS="0.5", TRTMODEL_REQUEST_TIMEOUT_SECONDS="3")
    assert worker.infer_rows([[BAD] * 4]).status in (500, 503)
    answers_well(worker)


def test_a_host_that_hangs_does_not_outlive_its_front(start: Start) -> None:
    worker = start("hang", TRTMODEL_HANG_SECONDS="60")
    (pid,) = worker.host_pids()
    client = threading.Thread(target=lambda: suppressed(worker.infer_rows, [[BAD] * 4]))
    client.start()
    eventually(lambda: "trtmodel_lanes_busy{" in worker.metrics() and busy(worker) == 1, "it hangs")
    assert worker.process is not None
    worker.process.kill()
    eventually(lambda: not alive(pid), "the host is gone", 5.0)
    client.join()


def test_a_stopped_host_that_wakes_up_late_changes_no_answer(start: Start) -> None:
    """Its regions stay its own until it was reaped, so what it writes late is read by nobody."""
    worker = start("die", {"work": 0.02}, TRTMODEL_HANG_SECONDS="1", TRTMODEL_REQUEST_TIMEOUT_SECONDS="20")
    with Load(worker.port, {REVISION_1: 2.0}, clients=4) as load:
        load.wait_for(20)
        (pid,) = worker.host_pids()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(pid, signal.SIGCONT)
        load.wait_for(50)
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda: pid not in worker.host_pids(), "it was replaced")
        load.wait_for(50)
    assert load.failures == []


def test_a_host_that_lies_about_its_output_is_ended_and_no_foreign_byte_is_sent(start: Start) -> None:
    worker = start("lie")
    (pid,) = worker.host_pids()
    answer = worker.infer_rows([[BAD] * 4])  # run again by an honest host, which then lies for good as well
    assert answer.status == 500
    assert pid not in worker.host_pids()
    eventually(lambda: "an output lies outside its region" in worker.log.read_text(), "it says so")
    answers_well(worker)


def test_an_engine_whose_hosts_keep_dying_is_given_up_and_the_worker_leaves_the_service(start: Start) -> None:
    worker = start("die")
    stop = threading.Event()

    def poison() -> None:
        for number in itertools.count():  # the same one again would be refused
            if stop.is_set():
                return
            worker.infer_rows([[BAD, number, 0.0, 0.0]])

    thread = threading.Thread(target=poison)
    thread.start()
    try:
        eventually(lambda: worker.report().models["m"].engines[0].state is EngineState.FAILED, "it is given up")
        assert worker.get("/v2/health/ready").status == 503
        assert worker.get("/v2/health/live").status == 200
        assert worker.report().state is WorkerState.NOT_SERVING
        answer = worker.infer_rows([[GOOD] * 4])
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    finally:
        stop.set()
        thread.join()


def test_E09_every_client_gets_its_own_answer_whatever_the_shapes(start: Start) -> None:
    worker = start("die")
    wrong: list[Any] = []

    def client(number: int) -> None:
        for turn in range(40):
            rows = 1 + (number + turn) % 8
            answer = worker.infer_rows([[float(number)] * 4] * rows)
            if answer.json["outputs"][0]["data"] != [2.0 * number] * 4 * rows:
                wrong.append(answer)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert counts(worker).ok == 640


def test_a_full_queue_answers_503_at_once_and_the_others_are_answered(start: Start) -> None:
    worker = start("die", {"slow": {"width": 4, "seconds": 1.0}}, TRTMODEL_QUEUE_LIMIT="4", TRTMODEL_BATCH_BUCKETS="1")
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(worker.infer_rows([[GOOD] * 4]))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statuses = sorted(a.status for a in answers)
    assert statuses == [200] * 6 + [503] * 6
    assert all(a.headers["retry-after"] == "1" for a in answers if a.status == 503)


def test_what_waits_too_long_for_a_lane_gets_503(start: Start) -> None:
    worker = start(
        "die",
        {"slow": {"width": 4, "seconds": 1.5}},
        TRTMODEL_CONTEXTS="1",
        TRTMODEL_BATCH_BUCKETS="1",
        TRTMODEL_REQUEST_TIMEOUT_SECONDS="2.5",
    )
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(worker.infer_rows([[GOOD] * 4]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(a.status for a in answers) == [200, 503, 503, 503]


def busy(worker: WorkerProcess) -> int:
    (line,) = [text for text in worker.metrics().splitlines() if text.startswith("trtmodel_lanes_busy{")]
    return int(float(line.rpartition(" ")[2]))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def suppressed(call: Callable[..., Any], *arguments: Any) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        call(*arguments)
