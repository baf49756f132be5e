"""Batches of requests that came together, in real hosts: they form, are never mixed up, and keep nobody waiting."""

from __future__ import annotations

import ast
import http.client
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clients import Clients, Start, ask_once, counts, metric, row, serve, values
from worker_harness import REVISION_1, Bucket, Operator, WorkerProcess, eventually

FACTORS = {REVISION_1: 2.0}


@pytest.fixture
def begin(start_worker: Start, operator: Operator, bucket: Bucket, tmp_path: Path) -> Callable[..., WorkerProcess]:
    """The engine writes the shapes that it saw to tmp_path / "record"."""

    def start(behaviour: dict[str, Any], *, dynamic: bool = False, **environment: str) -> WorkerProcess:
        plan = {"record": str(tmp_path / "record"), **behaviour}
        return serve(start_worker, operator, bucket, plan, dynamic=dynamic, **environment).worker

    return start


def shapes(tmp_path: Path) -> list[list[int]]:
    return [ast.literal_eval(line) for line in (tmp_path / "record").read_text().splitlines()]


def test_under_many_clients_batches_form_and_every_answer_is_right(
    begin: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    worker = begin({"work": 0.005})
    with Clients(worker.port, FACTORS, 16, rows=(1, 2, 3)) as clients:
        clients.wait_for(600)
    assert clients.bad == []
    batches, rows = metric(worker, "batches_total"), metric(worker, "rows_total")
    assert batches < rows / 3
    assert metric(worker, "padded_rows_total") == 0
    seen = shapes(tmp_path)
    assert len(seen) == batches
    assert sum(n for n, _ in seen) == rows
    assert max(n for n, _ in seen) <= 8
    assert counts(worker).ok == len(clients.seen)


def test_shapes_other_than_the_rows_are_never_mixed(begin: Callable[..., WorkerProcess], tmp_path: Path) -> None:
    worker = begin({"work": 0.005}, dynamic=True)
    with Clients(worker.port, FACTORS, 16, rows=(1, 2, 3), widths=(2, 3, 4, 6)) as clients:
        clients.wait_for(500)
    assert clients.bad == []
    seen = shapes(tmp_path)
    assert {width for _, width in seen} == {2, 3, 4, 6}
    assert metric(worker, "batches_total") < metric(worker, "rows_total") / 2


def test_a_slow_shape_keeps_no_fast_one_waiting_behind_its_queue(
    begin: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    worker = begin({"slow": {"width": 6, "seconds": 0.3}}, dynamic=True, TRTMODEL_CONTEXTS="1")
    with ThreadPoolExecutor(30) as pool:
        slow = [pool.submit(ask_once, worker, row(2000.0 + n, 8, 6)) for n in range(16)]
        eventually(lambda: metric(worker, "queue_length") >= 12, "the slow ones wait")
        fast = pool.submit(ask_once, worker, row(1000.0, 1, 3)).result()
        unanswered = sum(not each.done() for each in slow)
        answers = [each.result() for each in slow]
    assert fast.status == 200
    assert unanswered >= 3  # it ran after one or two of them, not after all
    assert {a.status for a in answers} == {200}
    for n, answer in enumerate(answers):
        assert values(answer, (8, 6)).tolist() == row(2 * (2000.0 + n), 8, 6).tolist()  # type: ignore[union-attr]


def test_with_a_delay_batches_are_full_although_lanes_are_free(
    begin: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    worker = begin({}, TRTMODEL_BATCH_DELAY_SECONDS="5", TRTMODEL_CONTEXTS="2")
    with ThreadPoolExecutor(8) as pool:
        for turn in range(3):
            answers = list(pool.map(lambda n, t=turn: ask_once(worker, row(1000.0 + 10 * t + n)), range(8)))
            assert {a.status for a in answers} == {200}
    assert shapes(tmp_path) == [[8, 4]] * 3


def test_a_delay_ends_when_it_is_over(begin: Callable[..., WorkerProcess], tmp_path: Path) -> None:
    worker = begin({}, TRTMODEL_BATCH_DELAY_SECONDS="0.2")
    for n in range(2):
        assert ask_once(worker, row(1000.0 + n)).status == 200
    assert shapes(tmp_path) == [[1, 4]] * 2


def test_batches_are_padded_to_the_sizes_that_were_asked_for_and_answers_are_not(
    begin: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    worker = begin({"work": 0.005}, TRTMODEL_BATCH_BUCKETS="4,8")
    with Clients(worker.port, FACTORS, 12, rows=(1, 2, 3, 5)) as clients:
        clients.wait_for(300)
    assert clients.bad == []
    seen = shapes(tmp_path)
    assert {n for n, _ in seen} <= {4, 8}
    padded = sum(n for n, _ in seen) - metric(worker, "rows_total")
    assert metric(worker, "padded_rows_total") == padded > 0
    assert set(counts(worker).compute) <= {"4", "8"}


def test_a_model_whose_rows_see_each_other_is_never_batched(
    start_worker: Start, operator: Operator, bucket: Bucket, tmp_path: Path
) -> None:
    behaviour = {"mode": "centred", "record": str(tmp_path / "record"), "work": 0.005, "factor": 0.0}
    worker = serve(start_worker, operator, bucket, behaviour).worker
    x = np.array([[1000, 1000, 1000, 1000], [1002, 1004, 1006, 1008]], np.float32)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda n: ask_once(worker, x + n), range(100)))
    for answer in answers:
        assert values(answer, (2, 4)).tolist() == [[-1, -2, -3, -4], [1, 2, 3, 4]]  # type: ignore[union-attr]
    assert shapes(tmp_path) == [[2, 4]] * 100
    assert metric(worker, "batches_total") == 100


def test_a_client_that_goes_away_frees_its_place_and_its_request_is_not_run(
    begin: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    worker = begin({"slow": {"width": 4, "seconds": 2.5}}, TRTMODEL_CONTEXTS="1", TRTMODEL_QUEUE_LIMIT="3")
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(ask_once, worker, row(1000.0))
        eventually(lambda: metric(worker, "lanes_busy") == 1, "it runs")
        leaving = [waiter(worker, 2000.0 + n) for n in range(3)]
        eventually(lambda: metric(worker, "queue_length") == 3, "three wait")
        assert ask_once(worker, row(5000.0)).status == 503
        for connection in leaving:
            connection.close()
        eventually(lambda: metric(worker, "queue_length") == 0, "their places are free")
        last = pool.submit(ask_once, worker, row(3000.0))
        assert (first.result().status, last.result().status) == (200, 200)
    assert shapes(tmp_path) == [[1, 4]] * 2


def waiter(worker: WorkerProcess, value: float) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=60)
    body = f'{{"inputs": [{{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": {[value] * 4}}}]}}'
    connection.request("POST", "/v2/models/m/infer", body, {"content-type": "application/json"})
    return connection


def test_a_full_queue_is_said_at_once_and_when_to_come_again(
    begin: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    worker = begin(
        {"slow": {"width": 4, "seconds": 2.0}, "mode": "centred", "factor": 0.0},  # one by one
        TRTMODEL_CONTEXTS="1", TRTMODEL_QUEUE_LIMIT="2",
    )  # fmt: skip
    with ThreadPoolExecutor(4) as pool:
        running = pool.submit(ask_once, worker, row(1000.0))
        eventually(lambda: metric(worker, "lanes_busy") == 1, "it runs")
        waiting = [pool.submit(ask_once, worker, row(1001.0 + n)) for n in range(2)]
        eventually(lambda: metric(worker, "queue_length") == 2, "two wait")
        refused = ask_once(worker, row(1003.0))
        assert not running.done()
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert {f.result().status for f in (running, *waiting)} == {200}
    assert metric(worker, "refused_requests_total") == 1


def test_a_request_whose_time_is_over_gets_503_in_time_whether_it_waits_or_runs(
    begin: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    worker = begin(
        {"slow": {"width": 4, "seconds": 5.0}}, TRTMODEL_CONTEXTS="1", TRTMODEL_REQUEST_TIMEOUT_SECONDS="1",
        TRTMODEL_HANG_SECONDS="60", TRTMODEL_DRAIN_SECONDS="0",
    )  # fmt: skip
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda n: ask_once(worker, row(1000.0 + n)), range(2)))
    assert [(a.status, a.headers["retry-after"]) for a in answers] == [(503, "1")] * 2
    assert time.monotonic() - began < 4.5  # before the engine was done
    assert metric(worker, "timeouts_total") == 2
    assert counts(worker).abandoned >= 1


def test_four_times_too_much_load_is_refused_in_time_and_then_all_is_as_before(
    begin: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    """Open loop: requests come whether earlier ones were answered or not. Two lanes of 50 ms do 40 in a second at
    most, one by one."""
    worker = begin(
        {"slow": {"width": 4, "seconds": 0.05}, "mode": "centred", "factor": 0.0},
        TRTMODEL_REQUEST_TIMEOUT_SECONDS="2", TRTMODEL_QUEUE_LIMIT="20",
    )  # fmt: skip
    longest, answers, lock = 0.0, [], threading.Lock()

    def one(number: int) -> None:
        began = time.monotonic()
        answer = ask_once(worker, row(1000.0 + number))
        with lock:
            answers.append((answer, time.monotonic() - began))

    threads = []
    for number in range(320):
        thread = threading.Thread(target=one, args=(number,))
        thread.start()
        threads.append(thread)
        if number % 20 == 19:
            longest = max(longest, metric(worker, "queue_length"))
            time.sleep(0.125)
    for thread in threads:
        thread.join()
    good = [a for a, _ in answers if a.status == 200]
    refused = [a for a, _ in answers if a.status == 503]
    assert len(good) + len(refused) == 320
    assert len(good) >= 20
    assert len(refused) >= 20
    assert {a.headers["retry-after"] for a in refused} == {"1"}
    assert all(values(a, (1, 4)).tolist() == [[0.0] * 4] for a in good)  # type: ignore[union-attr]
    assert longest <= 20
    total = [line for line in worker.metrics().splitlines() if line.startswith("trtmodel_request_seconds_bucket")]
    within = max(float(line.rpartition(" ")[2]) for line in total if float(line.split('le="')[1].split('"')[0]) <= 3.8)
    assert within == len(good)  # who was admitted was answered within the limit
    assert metric(worker, "queue_length") == 0
    assert ask_once(worker, row(5000.0)).status == 200
