"""Requests and engines that fail, in real hosts, beside many others: who is answered, who is not, and how often it was
tried."""

from __future__ import annotations

import http.client
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from clients import Clients, Start, ask_once, counts, lanes_are, metric, row, serve, values
from trtmodel_contract.control import EngineState
from worker_harness import REVISION_1, Bucket, Operator, WorkerProcess, eventually

POISON = 666.0
FACTORS = {REVISION_1: 2.0}


@pytest.fixture
def begin(start_worker: Start, operator: Operator, bucket: Bucket) -> Any:
    def start(behaviour: dict[str, Any], **environment: str) -> WorkerProcess:
        return serve(start_worker, operator, bucket, {"work": 0.002, **behaviour}, **environment).worker

    return start


@pytest.mark.parametrize("how", ["segv", "abort", "exit"])
def test_a_request_that_crashes_every_host_fails_alone_and_is_refused_afterwards(begin: Any, how: str) -> None:
    """Without hedging: a host that takes long to die makes its request overdue, and the hedge takes it to the other."""
    fault = {"fault": {"when": POISON, "do": how, "anywhere": True}}
    worker = begin(fault, TRTMODEL_HOSTS="2", TRTMODEL_HEDGE_AFTER_SECONDS="60")
    with Clients(worker.port, FACTORS, 8, rows=(1, 2), pause=0.003) as clients:
        clients.wait_for(50)
        answer = ask_once(worker, row(POISON))
        assert answer.status == 500, answer.body
        assert "2 engine hosts died" in answer.json["error"]
        assert len(worker.host_pids()) >= 1
        assert metric(worker, "lanes") >= 2
        again = ask_once(worker, row(POISON))
        assert (again.status, "refused" in again.json["error"]) == (500, True)
        clients.wait_for(50)
    assert clients.bad == []
    assert metric(worker, "host_deaths_total") == 2
    lanes_are(worker, 4)


def test_a_poisonous_request_does_not_end_the_only_host_for_the_others(begin: Any) -> None:
    worker = begin({"fault": {"when": POISON, "do": "segv", "anywhere": True}})
    with Clients(worker.port, FACTORS, 4, pause=0.003) as clients:
        clients.wait_for(20)
        assert ask_once(worker, row(POISON)).status == 500
        clients.wait_for(20)
    assert clients.bad == []


def test_one_fault_in_a_hundred_runs_fails_no_request(begin: Any) -> None:
    worker = begin({"sometimes": {"share": 0.01, "do": "recoverable"}}, TRTMODEL_CONTEXTS="3")
    with Clients(worker.port, FACTORS, 8, rows=(1, 2, 3)) as clients:
        eventually(lambda: metric(worker, "rebuilt_lanes_total") >= 5 or clients.bad, "lanes were rebuilt", 60)
        clients.wait_for(100)
    assert clients.bad == []
    assert metric(worker, "retries_total") >= 5
    assert metric(worker, "host_deaths_total") == 0
    assert counts(worker).failed["Recoverable"] >= 5


def test_an_engine_that_fails_everything_is_not_tried_more_than_its_budget_says(begin: Any) -> None:
    # No hedges: a busy machine would make some, and each is an attempt more.
    worker = begin(
        {"sometimes": {"share": 1.0, "do": "recoverable"}}, TRTMODEL_HOSTS="2", TRTMODEL_HEDGE_AFTER_SECONDS="60"
    )
    with Clients(worker.port, FACTORS, 6, allowed=(500, 503)) as clients:
        eventually(lambda: len(clients.seen) >= 1000 or clients.bad, "a thousand answers", 60)
    assert clients.bad == []
    assert not clients.by_revision()
    failed = sum(a.status == 500 for a in clients.refusals)
    attempts = counts(worker).failed
    assert failed > 0
    assert metric(worker, "retries_total") <= 100 + 8 + 0.1 * len(clients.seen)
    assert attempts["Recoverable"] <= 1.1 * len(clients.seen) + 108
    assert {a.headers["retry-after"] for a in clients.refusals if a.status == 503} <= {"1"}


def test_without_a_budget_each_request_is_tried_once(begin: Any) -> None:
    worker = begin({"fault": {"when": POISON, "do": "recoverable"}}, TRTMODEL_RETRY_BUDGET_PERCENT="0")
    assert ask_once(worker, row(POISON)).status == 500
    assert dict(counts(worker).failed) == {"Recoverable": 1}
    assert (metric(worker, "retries_total"), metric(worker, "retries_denied_total")) == (0, 1)


def test_batches_that_do_not_fit_into_memory_are_made_smaller_and_no_request_fails(begin: Any) -> None:
    worker = begin({"most_rows": 3, "work": 0.01}, TRTMODEL_CONTEXTS="1")
    with Clients(worker.port, FACTORS, 8) as clients:
        clients.wait_for(300)
    assert clients.bad == []
    assert metric(worker, "split_batches_total") >= 1
    assert counts(worker).failed["OutOfMemory"] < 100


def test_an_invalid_request_in_a_batch_is_refused_alone(begin: Any) -> None:
    worker = begin({"work": 0.05, "fault": {"when": POISON, "do": "invalid", "anywhere": True}}, TRTMODEL_CONTEXTS="1")
    with ThreadPoolExecutor(12) as pool:
        sent = [POISON if n == 5 else 1000.0 + n for n in range(12)]
        answers = list(pool.map(lambda value: ask_once(worker, row(value)), sent))
    assert [a.status for a in answers] == [400 if value == POISON else 200 for value in sent]
    for value, answer in zip(sent, answers, strict=True):
        if value != POISON:
            assert values(answer, (1, 4)).tolist() == row(2 * value).tolist()  # type: ignore[union-attr]
    assert "no such token" in answers[5].json["error"]
    assert metric(worker, "split_batches_total") >= 1
    assert dict(counts(worker).failed) == {}


def test_an_engine_whose_answers_change_is_found_by_its_probe_and_replaced(begin: Any, tmp_path: Path) -> None:
    drifting = tmp_path / "drifting"
    worker = begin({"drifting": str(drifting)}, TRTMODEL_HEALTH_INTERVAL_SECONDS="0.2")
    (pid,) = worker.host_pids()
    eventually(lambda: metric(worker, "probes_total") >= 2, "it is probed")
    assert metric(worker, "probe_failures_total") == 0
    drifting.write_text(str(pid))
    eventually(lambda: pid not in worker.host_pids(), "it is replaced")
    lanes_are(worker, 2)
    assert metric(worker, "probe_failures_total") == 1
    assert counts(worker).failed["WrongOutput"] == 1
    (engine,) = worker.report().models["m"].engines
    assert (engine.state, engine.deaths) == (EngineState.READY, 1)
    assert values(ask_once(worker, row(5.0)), (1, 4)).tolist() == row(10.0).tolist()  # type: ignore[union-attr]
    eventually(lambda: "its probe failed" in worker.log.read_text(), "it says so")


def test_a_busy_engine_is_probed_when_it_is_idle_again(begin: Any) -> None:
    worker = begin({"work": 0.02}, TRTMODEL_HEALTH_INTERVAL_SECONDS="0.2")
    with Clients(worker.port, FACTORS, 8) as clients:
        clients.wait_for(50)
    before = metric(worker, "probes_total")
    eventually(lambda: metric(worker, "probes_total") > before, "it is probed")
    assert clients.bad == []


def test_a_lane_that_fails_from_now_on_is_rebuilt_and_serves_again(begin: Any) -> None:
    worker = begin({"fault": {"when": POISON, "do": "break"}}, TRTMODEL_CONTEXTS="1")
    (pid,) = worker.host_pids()
    for _ in range(3):
        answer = ask_once(worker, row(POISON))  # the lane breaks at it, is rebuilt, breaks again
        assert answer.status in (200, 500)
        good = ask_once(worker, row(5.0))
        assert values(good, (1, 4)).tolist() == row(10.0).tolist()  # type: ignore[union-attr]
    assert worker.host_pids() == [pid]
    assert metric(worker, "rebuilt_lanes_total") >= 1


def test_a_client_that_goes_away_costs_the_others_of_its_batch_nothing(begin: Any) -> None:
    worker = begin({"work": 0.1}, TRTMODEL_CONTEXTS="1")
    with Clients(worker.port, FACTORS, 4) as clients:
        for _ in range(10):
            connection = http.client.HTTPConnection("127.0.0.1", worker.port)
            connection.request("POST", "/v2/models/m/infer", b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": '
                               b'[1, 4], "data": [9, 9, 9, 9]}]}', {"content-type": "application/json"})  # fmt: skip
            clients.wait_for(2)
            connection.close()
    assert clients.bad == []
