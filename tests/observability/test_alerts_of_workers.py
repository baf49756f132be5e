"""Each alert about workers is caused: real workers get into trouble, a real Prometheus scrapes them, and says so."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hurried
import pytest
from debian_prometheus import Missing, programs
from prometheus_server import Prometheus, discovered
from trtmodel_contract.control import REPORT_PATH

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "worker"))

from worker_harness import REVISION_1, Bucket, Operator, WorkerProcess, eventually, fp32, started

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

SECONDS = 120.0
QUIET_SCRAPES = 8
ASKED = [[7.0] * 4]  # above 2: no warm-up, self-test or probe
POISON = 13.0


@dataclass(frozen=True)
class Trouble:
    """How a worker is set up, and the alerts that its trouble raises."""

    behaviour: dict[str, Any]
    settings: dict[str, str]
    alerts: frozenset[str]
    most_rows: int = 8


TROUBLES = {
    "well": Trouble({}, {}, frozenset()),
    "fails": Trouble(
        {"fault": {"when": POISON, "do": "recoverable"}},
        {},
        frozenset({"TRTModelRequestsFail", "TRTModelRetryBudgetSpent"}),
    ),
    "dies": Trouble({}, {}, frozenset({"TRTModelHostRestarts"})),
    "waits": Trouble(
        {"slow": {"width": 4, "seconds": 1.0}},
        {"TRTMODEL_CONTEXTS": "1", "TRTMODEL_REQUEST_TIMEOUT_SECONDS": "900"},
        frozenset({"TRTModelQueueGrowing"}),
        most_rows=1,
    ),
    # What is refused is an error to the client, too.
    "full": Trouble(
        {"slow": {"width": 4, "seconds": 0.5}},
        {"TRTMODEL_CONTEXTS": "1", "TRTMODEL_QUEUE_LIMIT": "1", "TRTMODEL_REQUEST_TIMEOUT_SECONDS": "60"},
        frozenset({"TRTModelRequestsRefused", "TRTModelRequestsFail"}),
        most_rows=1,
    ),
    "forged": Trouble({}, {}, frozenset({"TRTModelSignatureRefused"})),
}


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, WorkerProcess]]:
    """By the name of their trouble. All are well yet."""
    operator = Operator()
    with contextlib.ExitStack() as stack:
        found = {}
        for name, trouble in TROUBLES.items():
            folder = tmp_path_factory.mktemp(name)
            bucket = Bucket(folder / "bucket")
            digest = bucket.publish(REVISION_1, trouble.behaviour, max_rows=trouble.most_rows)[0]
            worker = WorkerProcess(folder, operator, bucket, **trouble.settings)
            stack.callback(worker.stop)
            found[name] = started(worker, operator.artifact(REVISION_1, digest))
        yield found


@pytest.fixture(scope="module")
def prometheus(workers: dict[str, WorkerProcess], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    try:
        program = programs()["prometheus"]
    except Missing as e:
        pytest.fail(str(e))
    folder = tmp_path_factory.mktemp("prometheus")
    pods = [hurried.pod(f"{name}-0", name, "worker", w.metrics_port) for name, w in workers.items()]
    (folder / "pods.json").write_text(discovered(pods))
    found = Prometheus(program, hurried.config(folder, hurried.rules("trtmodel-workers")), folder)
    yield found
    found.close()


def test_each_alert_about_workers_fires_for_the_worker_whose_trouble_causes_it_and_for_no_other(
    workers: dict[str, WorkerProcess], prometheus: Prometheus
) -> None:
    def scrapes() -> float:
        found = prometheus.query("min(count_over_time(trtmodel_ready[1h]))")
        counted = prometheus.query("count(trtmodel_ready)")
        complete = bool(counted) and float(counted[0]["value"][1]) == len(workers)
        return float(found[0]["value"][1]) if found and complete else 0.0

    for worker in workers.values():
        assert worker.infer_rows(ASKED).status == 200
    eventually(lambda: scrapes() >= QUIET_SCRAPES, f"scrapes\n{prometheus.log()}", SECONDS)
    assert prometheus.alerts() == []

    wanted = {(alert, name) for name, trouble in TROUBLES.items() for alert in trouble.alerts}
    assert {alert for alert, _ in wanted} == {
        rule["alert"] for group in hurried.rules("trtmodel-workers")["groups"] for rule in group["rules"]
    }
    over, seen = threading.Event(), set[tuple[str, str]]()
    causes = [threading.Thread(target=cause, args=(workers[name], over), name=name) for name, cause in CAUSES.items()]
    for thread in causes:
        thread.start()
    try:

        def all_there() -> bool:
            seen.update(hurried.fired(prometheus))
            return wanted <= seen

        eventually(all_there, "every alert", SECONDS)
    except AssertionError as e:
        raise AssertionError(f"{e}: missing {wanted - seen}, seen {seen}\n{prometheus.log()}") from None
    finally:
        over.set()
        for thread in causes:
            thread.join(60)
    assert seen == wanted
    assert prometheus.broken_rules() == {}


def fail(worker: WorkerProcess, over: threading.Event) -> None:
    while not over.wait(0.05):
        worker.infer_rows([[POISON] * 4])


def die(worker: WorkerProcess, over: threading.Event) -> None:
    """An engine is given up after so many deaths in a row; each host gets to answer something."""
    while not over.wait(1.0):
        (pid,) = worker.host_pids()
        os.kill(pid, signal.SIGKILL)
        eventually(lambda pid=pid: worker.host_pids() not in ([], [pid]), "another host", SECONDS)  # type: ignore[misc]
        eventually(lambda: worker.infer_rows(ASKED).status == 200, "an answer", SECONDS)


def wait(worker: WorkerProcess, over: threading.Event) -> None:
    """Three requests come in the time of one."""
    with contextlib.ExitStack() as stack:
        while not over.wait(0.3):
            stack.enter_context(asked_and_left(worker))


def overflow(worker: WorkerProcess, over: threading.Event) -> None:
    def ask() -> None:
        while not over.wait(0.05):
            worker.infer_rows(ASKED)

    clients = [threading.Thread(target=ask) for _ in range(4)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()


def forge(worker: WorkerProcess, over: threading.Event) -> None:
    while not over.wait(0.5):
        worker.control("GET", REPORT_PATH, headers=Operator().request_headers("GET", REPORT_PATH, b""))


CAUSES: dict[str, Callable[[WorkerProcess, threading.Event], None]] = {
    "fails": fail, "dies": die, "waits": wait, "full": overflow, "forged": forge,
}  # fmt: skip


def asked_and_left(worker: WorkerProcess) -> socket.socket:
    """A request whose answer is not waited for, until the socket is closed."""
    body = json.dumps(fp32(ASKED[0], [1, 4])).encode()
    head = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: m\r\nContent-Length: {len(body)}\r\n\r\n"
    sock = socket.create_connection(("127.0.0.1", worker.port), timeout=20)
    sock.sendall(head.encode() + body)
    return sock
