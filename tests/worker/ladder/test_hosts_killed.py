"""Hosts that are killed or stopped under load. Every answer is compared: none fails, none is wrong."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import threading
from collections.abc import Iterator

import pytest
from clients import (
    Clients,
    Start,
    alive,
    ask,
    counts,
    held,
    kill,
    lanes_are,
    metric,
    row,
    serve,
    settled,
    stopped,
    values,
)
from trtmodel_contract.control import EngineState
from worker_harness import REVISION_1, REVISION_2, Bucket, Operator, WorkerProcess, eventually

BOTH = {REVISION_1: 2.0, REVISION_2: 3.0}
SLOW = {"slow": {"width": 4, "seconds": 1.5}}


def with_standby(
    start_worker: Start, operator: Operator, bucket: Bucket, **environment: str
) -> tuple[WorkerProcess, int]:
    """One host for stable, one for the standby; its process."""
    served = serve(start_worker, operator, bucket, {"work": 0.002}, **environment)
    worker = served.worker
    (stable,) = worker.host_pids()
    standby = operator.artifact(REVISION_2, bucket.publish(REVISION_2, {"factor": 3.0, "work": 0.002})[0])
    worker.desire(operator.artifact(REVISION_1, served.digest), standby=standby)
    worker.wait_engine(standby.manifest_digest)
    (pid,) = [pid for pid in worker.host_pids() if pid != stable]
    return worker, pid


@pytest.mark.long
def test_of_two_hosts_one_is_killed_twenty_times(start_worker: Start, operator: Operator, bucket: Bucket) -> None:
    worker = serve(start_worker, operator, bucket, {"work": 0.002}, TRTMODEL_HOSTS="2").worker
    with Clients(worker.port, BOTH, 6, rows=(1, 2, 3), pause=0.003) as clients:
        for turn in range(20):
            lanes_are(worker, 4)
            clients.wait_for(5)
            kill(worker.host_pids()[turn % 2])
            eventually(lambda n=turn + 1: metric(worker, "host_deaths_total") == n, "the death is seen")
        clients.wait_for(20)
    assert clients.bad == []
    found = counts(worker)
    assert found.failed["HostDeath"] >= 20
    assert "Down" not in found.failed
    assert worker.get("/v2/health/ready").status == 200


def test_of_two_hosts_one_is_stopped_and_wakes_up_late(start_worker: Start, operator: Operator, bucket: Bucket) -> None:
    worker = serve(
        start_worker, operator, bucket, {"work": 0.002}, TRTMODEL_HOSTS="2", TRTMODEL_HANG_SECONDS="30"
    ).worker
    with Clients(worker.port, BOTH, 6, rows=(1, 2, 3), pause=0.002) as clients:
        for turn in range(6):
            clients.wait_for(20)
            with stopped(worker.host_pids()[turn % 2]):
                clients.wait_for(60)  # nothing waits for the one that was stopped
        clients.wait_for(20)
    assert clients.bad == []
    assert metric(worker, "hedge_wins_total") >= 1
    assert metric(worker, "host_deaths_total") == 0
    assert counts(worker).abandoned >= 1


def test_a_host_that_stays_stopped_is_replaced(start_worker: Start, operator: Operator, bucket: Bucket) -> None:
    worker = serve(
        start_worker, operator, bucket, {"work": 0.002}, TRTMODEL_HOSTS="2", TRTMODEL_HANG_SECONDS="2"
    ).worker
    with Clients(worker.port, BOTH, 6, pause=0.002) as clients:
        clients.wait_for(20)
        pid = worker.host_pids()[0]
        with stopped(pid):
            eventually(lambda: pid not in worker.host_pids(), "it is replaced")
            lanes_are(worker, 4)
        clients.wait_for(20)
    assert clients.bad == []


def test_while_the_only_host_is_replaced_the_standby_answers(
    start_worker: Start, operator: Operator, bucket: Bucket
) -> None:
    worker, standby = with_standby(start_worker, operator, bucket)
    with Clients(worker.port, BOTH, 4, rows=(1, 2, 3), pause=0.003) as clients:
        for _ in range(5):
            lanes_are(worker, 2)
            clients.wait_for(200)  # a host that dies at once is replaced more slowly
            before = clients.by_revision().get(REVISION_2, 0)
            kill(next(pid for pid in worker.host_pids() if pid != standby))
            eventually(lambda n=before: clients.by_revision().get(REVISION_2, 0) > n + 5, "the standby answers")
        lanes_are(worker, 2)
        before = clients.by_revision()[REVISION_1]
        eventually(lambda: clients.by_revision()[REVISION_1] > before, "stable answers again")
    assert clients.bad == []
    assert counts(worker, worker.report().models["m"].routes.stable).failed["Down"] > 0


def test_while_the_only_host_is_stopped_the_standby_answers(
    start_worker: Start, operator: Operator, bucket: Bucket
) -> None:
    worker, standby = with_standby(start_worker, operator, bucket, TRTMODEL_HANG_SECONDS="2")
    with Clients(worker.port, BOTH, 4, rows=(1, 2, 3), pause=0.003) as clients:
        for turn in range(3):
            lanes_are(worker, 2)
            clients.wait_for(10)
            pid = next(pid for pid in worker.host_pids() if pid != standby)
            with stopped(pid):
                if turn == 2:
                    eventually(lambda p=pid: p not in worker.host_pids(), "it is replaced")
                else:
                    eventually(lambda n=turn: metric(worker, "hedge_wins_total") > n, "the standby answers")
    assert clients.bad == []


def test_without_fallback_the_standby_answers_nothing(start_worker: Start, operator: Operator, bucket: Bucket) -> None:
    worker, standby = with_standby(start_worker, operator, bucket, TRTMODEL_FALLBACK="Error")
    with Clients(worker.port, BOTH, 2, pause=0.003) as clients:
        clients.wait_for(10)
        kill(next(pid for pid in worker.host_pids() if pid != standby))
        eventually(lambda: metric(worker, "host_deaths_total") == 1, "the death is seen")
        lanes_are(worker, 2)
        clients.wait_for(10)
    assert clients.bad == []
    assert set(clients.by_revision()) == {REVISION_1}


def test_a_candidate_whose_host_is_gone_is_answered_for_by_stable_and_has_failed(
    start_worker: Start, operator: Operator, bucket: Bucket
) -> None:
    served = serve(start_worker, operator, bucket)
    worker = served.worker
    (stable,) = worker.host_pids()
    candidate = operator.artifact(REVISION_2, bucket.publish(REVISION_2, {"factor": 3.0, "load": 0.5})[0])
    worker.desire(operator.artifact(REVISION_1, served.digest), candidate, weight=50)
    worker.wait_engine(candidate.manifest_digest)
    with Clients(worker.port, BOTH, 4, pause=0.003) as clients:
        eventually(lambda: clients.by_revision().get(REVISION_2, 0) > 10, "the candidate answers")
        (pid,) = [pid for pid in worker.host_pids() if pid != stable]
        kill(pid)
        eventually(lambda: "Down" in counts(worker, candidate.manifest_digest).failed, "its requests are stable's")
        worker.wait_engine(candidate.manifest_digest, EngineState.READY)
        before = clients.by_revision()[REVISION_2]
        eventually(lambda: clients.by_revision()[REVISION_2] > before, "the candidate answers again")
    assert clients.bad == []
    failed = counts(worker, candidate.manifest_digest).failed
    assert failed["HostDeath"] >= 1
    assert failed["Down"] >= 1
    assert dict(counts(worker, served.digest).failed) == {}


@contextlib.contextmanager
def asked(worker: WorkerProcess, value: float) -> Iterator[list[object]]:
    """A client waits for its answer meanwhile, which is there afterwards."""
    connection = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=60)
    answers: list[object] = []
    client = threading.Thread(target=lambda: answers.append(ask(connection, "/v2/models/m/infer", row(value))))
    client.start()
    yield answers
    client.join()
    connection.close()


def test_a_request_whose_hosts_are_killed_from_outside_is_not_taken_for_the_reason(
    start_worker: Start, operator: Operator, bucket: Bucket
) -> None:
    worker = serve(start_worker, operator, bucket, SLOW, TRTMODEL_HANG_SECONDS="60").worker
    with asked(worker, 5000.0) as answers:
        for death in range(1, 4):
            eventually(lambda: "trtmodel_lanes_busy{" in worker.metrics() and busy(worker) == 1, "it runs")
            kill(worker.host_pids()[0])
            eventually(lambda n=death: metric(worker, "host_deaths_total") == n, "the death is seen")
    (answer,) = answers
    assert answer.status == 200, answer.body[:200]  # type: ignore[attr-defined]
    assert values(answer, (1, 4)).tolist() == row(10000.0).tolist()  # type: ignore[arg-type, union-attr]
    eventually(lambda: "died: ended by signal SIGKILL" in worker.log.read_text(), "it says so")


def test_a_request_beside_a_lane_that_cannot_be_made_anew_is_not_taken_for_the_reason(
    start_worker: Start, operator: Operator, bucket: Bucket
) -> None:
    behaviour = {"work": 0.25, "lanes": 2, "fault": {"when": 6000.0, "do": "break"}}
    times = {"TRTMODEL_RETRY_ATTEMPTS": "1", "TRTMODEL_REQUEST_TIMEOUT_SECONDS": "60"}
    worker = serve(start_worker, operator, bucket, behaviour, **times).worker
    with asked(worker, 5000.0) as answers:
        for death in range(1, 4):
            eventually(lambda: "trtmodel_lanes_busy{" in worker.metrics() and busy(worker) == 1, "it runs")
            other = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=60)
            assert ask(other, "/v2/models/m/infer", row(6000.0)).status == 500
            other.close()
            eventually(lambda n=death: metric(worker, "host_deaths_total") == n, "the death is seen")
    (answer,) = answers
    assert answer.status == 200, answer.body[:200]  # type: ignore[attr-defined]


@pytest.mark.parametrize("hosts", ["1", "3"])
def test_a_front_that_is_killed_leaves_no_host(
    start_worker: Start, operator: Operator, bucket: Bucket, hosts: str
) -> None:
    worker = serve(start_worker, operator, bucket, TRTMODEL_HOSTS=hosts).worker
    pids = worker.host_pids()
    assert len(pids) == int(hosts)
    os.kill(pids[0], signal.SIGSTOP)  # one that cannot react by itself
    os.kill(worker.pid, signal.SIGKILL)
    eventually(lambda: not any(alive(pid) for pid in pids), "all hosts are gone")


def test_restarts_of_hosts_leave_nothing_behind(start_worker: Start, operator: Operator, bucket: Bucket) -> None:
    """A hundred times and more: bench/faults.py."""
    worker = serve(start_worker, operator, bucket, TRTMODEL_HOSTS="2").worker

    def replace(times: int) -> None:
        for _ in range(times):
            lanes_are(worker, 4)
            deaths = metric(worker, "host_deaths_total")
            kill(worker.host_pids()[0])
            eventually(lambda n=deaths: metric(worker, "host_deaths_total") == n + 1, "the death is seen")
        lanes_are(worker, 4)

    replace(3)
    before = settled(lambda: held(worker))
    replace(8)
    assert settled(lambda: held(worker)) == before


def busy(worker: WorkerProcess) -> int:
    (line,) = [text for text in worker.metrics().splitlines() if text.startswith("trtmodel_lanes_busy{")]
    return int(float(line.rpartition(" ")[2]))
