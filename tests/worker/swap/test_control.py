"""The control port: who may speak, whose word counts, and how changes are told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from trtmodel_contract.codec import dumps, encode, loads
from trtmodel_contract.control import DESIRED_PATH, REPORT_PATH, ControlError, DesiredRequest, Fence, Report, Routes
from worker_harness import MODEL, REVISION_1, REVISION_2, REVISION_3, Bucket, Operator, WorkerProcess, request


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WorkerProcess, list[Any]]]:
    """A worker that follows a pointer of sequence 1, and three engines."""
    tmp = tmp_path_factory.mktemp("control")
    operator, bucket = Operator(), Bucket(tmp / "bucket")
    worker = WorkerProcess(tmp / "worker", operator, bucket)
    factors = {REVISION_1: 1.0, REVISION_2: 2.0, REVISION_3: 3.0}
    engines = [operator.artifact(r, bucket.publish(r, {"factor": f})[0]) for r, f in factors.items()]
    worker.point(engines[0])
    worker.start()
    try:
        worker.wait_ready()
        yield worker, engines
    finally:
        assert worker.stop() == 0, worker.tail()


def test_nobody_but_the_operator_is_heard(served: tuple[WorkerProcess, list[Any]]) -> None:
    worker, _ = served
    good = worker.operator.request_headers("GET", REPORT_PATH, b"")
    assert worker.control("GET", REPORT_PATH, headers=good).status == 200
    now = int(time.time())
    refused = refused_requests(worker)
    for headers in (
        {},
        Operator().request_headers("GET", REPORT_PATH, b""),
        worker.operator.request_headers("GET", REPORT_PATH, b"", uid="another pod"),
        worker.operator.request_headers("PUT", REPORT_PATH, b""),
        worker.operator.request_headers("GET", REPORT_PATH + "?after=1", b""),
        worker.operator.request_headers("GET", REPORT_PATH, b"other body"),
        worker.operator.request_headers("GET", REPORT_PATH, b"", expires=now - 1),
        worker.operator.request_headers("GET", REPORT_PATH, b"", expires=now + 3600),
        {**good, "x-trtmodel-expires": str(now + 31)},
        {**good, "x-trtmodel-signature": "!!!"},
        {**good, "x-trtmodel-expires": "soon"},
    ):
        answer = worker.control("GET", REPORT_PATH, headers=headers)
        assert answer.status == 401, headers
        assert loads(ControlError, answer.body).reason == "Unauthorized"
        refused += 1
    assert refused_requests(worker) == refused


def refused_requests(worker: WorkerProcess) -> float:
    (line,) = [x for x in worker.metrics().splitlines() if x.startswith('trtmodel_untrusted_total{what="request"}')]
    return float(line.split()[-1])


def test_a_request_cannot_be_made_with_another_body(served: tuple[WorkerProcess, list[Any]]) -> None:
    worker, _ = served
    headers = worker.operator.request_headers("PUT", DESIRED_PATH, b"{}")
    assert worker.control("PUT", DESIRED_PATH, b"{ }", headers).status == 401
    assert worker.control("PUT", DESIRED_PATH, b"{}", headers).status == 400


def test_the_port_has_two_paths(served: tuple[WorkerProcess, list[Any]]) -> None:
    worker, _ = served
    assert request(worker.control_port, "GET", "/", b"", {}).status == 404
    assert request(worker.control_port, "POST", DESIRED_PATH, b"{}", {}).status == 405
    assert request(worker.port, "GET", REPORT_PATH, b"", {}).status == 404


def test_the_fence_keeps_old_words_out(served: tuple[WorkerProcess, list[Any]]) -> None:
    worker, (v1, v2, v3) = served

    def say(stable: Any, sequence: int, **more: Any) -> tuple[int, Fence | None]:
        answer = worker.desire(stable, sequence=sequence, **more)
        held = loads(ControlError, answer.body).held if answer.status == 409 else loads(Report, answer.body).fence
        return answer.status, held

    fence = worker.report().fence
    base = fence.sequence
    assert say(v1, base)[0] == 200, "a request may say more than the pointer of the same sequence"
    assert say(v1, base)[0] == 200, "the same again is a renewal"
    assert say(v2, base) == (409, Fence(MODEL.uid, base)), "other content under a used sequence"
    assert say(v1, base, window="other") == (409, Fence(MODEL.uid, base))
    assert say(v2, base + 5) == (200, Fence(MODEL.uid, base + 5))
    assert say(v3, base + 4) == (409, Fence(MODEL.uid, base + 5))
    assert say(v3, base + 9, uid="another TRTModel") == (409, Fence(MODEL.uid, base + 5))
    worker.wait_routed(v2.manifest_digest)
    worker.point(v3, sequence=base + 5)
    time.sleep(1.5)
    assert worker.report().models["m"].routes.stable == v2.manifest_digest, "a pointer that is not newer"
    worker.point(v1, sequence=base + 6)
    worker.wait_routed(v1.manifest_digest)
    assert worker.report().fence == Fence(MODEL.uid, base + 6)


def test_routes_that_make_no_sense_are_refused(served: tuple[WorkerProcess, list[Any]]) -> None:
    worker, (v1, v2, _) = served
    held = worker.report().fence.sequence
    one, unknown = v1.manifest_digest, "f" * 64
    for routes in (
        Routes(unknown), Routes(one, unknown, 10), Routes(one, "", 101), Routes(one, "", 0, 101), Routes(one, "", 0, -1)
    ):  # fmt: skip
        answer = worker.desire(v1, v2, sequence=held + 1, routes=routes)
        assert answer.status == 400
    assert worker.report().fence.sequence == held


def test_a_long_poll_answers_when_something_changes_or_its_time_is_over(
    served: tuple[WorkerProcess, list[Any]],
) -> None:
    worker, (v1, v2, _) = served
    version = worker.report().version
    started = time.monotonic()
    assert worker.report(f"?after={version}&wait=1").version == version
    assert time.monotonic() - started > 0.9
    assert worker.report(f"?after={version - 1}&wait=30").version == version, "already newer"
    found: list[Report] = []
    thread = threading.Thread(target=lambda: found.append(worker.report(f"?after={version}&wait=30s")))
    thread.start()
    time.sleep(0.3)  # so that it most likely waits by then
    worker.desire(v1, v2, sequence=worker.report().fence.sequence + 1)
    thread.join(20.0)  # before the wait is over
    assert found[0].version > version


def test_attempts_are_counted_by_window_and_only_the_newest_windows_are_kept(
    served: tuple[WorkerProcess, list[Any]],
) -> None:
    worker, (v1, _, _) = served
    sequence = worker.report().fence.sequence
    for i in range(6):
        worker.desire(v1, sequence=sequence + 1 + i, window=f"step-{i}")
        for _ in range(i + 1):
            assert worker.infer_rows([[1] * 4] * 3).status == 200
    windows = worker.report().models["m"].windows
    assert list(windows)[-4:] == ["step-2", "step-3", "step-4", "step-5"]
    assert len(windows) == 4
    counts = windows["step-5"][v1.manifest_digest]
    assert (counts.ok, dict(counts.failed), counts.abandoned) == (6, {}, 0)
    assert {bucket: sum(h.values()) for bucket, h in counts.compute.items()} == {"4": 6}


def test_bad_documents_are_refused_with_what_is_wrong(served: tuple[WorkerProcess, list[Any]]) -> None:
    worker, _ = served
    for body in (b"", b"[]", b'{"schema":"trtmodel.io/desired/v9"}', dumps(ControlError("a", "b"))):
        answer = worker.control("PUT", DESIRED_PATH, body)
        assert answer.status == 400
        assert loads(ControlError, answer.body).message
    assert worker.control("GET", REPORT_PATH + "?after=x&wait=1").status == 400


@pytest.mark.parametrize(
    "change",
    [
        {"candidateTtlSeconds": 10**400},
        {"candidateTtlSeconds": -5},
        {"sequence": 10**400},
        {"sequence": -1},
        {"uid": "\ud800"},
        {"window": "\ud800"},
        {"window": "w" * 900_000},
        {"engines": 2000},
    ],
    ids=str,
)  # fmt: skip
def test_a_signed_request_beyond_all_bounds_is_refused_and_nothing_of_it_is_held(
    served: tuple[WorkerProcess, list[Any]], change: dict[str, Any]
) -> None:
    worker, (v1, _, _) = served
    before = worker.report()
    engine = {"role": "Stable", "artifact": encode(v1)}
    fence = {"uid": change.get("uid", MODEL.uid), "sequence": change.get("sequence", before.fence.sequence + 1)}
    model = {
        "engines": [engine] * change.get("engines", 1),
        "routes": {"stable": v1.manifest_digest},
        "window": change.get("window", "w"),
    }
    document = {
        "schema": DesiredRequest.SCHEMA,
        "candidateTtlSeconds": change.get("candidateTtlSeconds", 300),
        "desired": {"fence": fence, "models": {MODEL.name: model}},
    }
    answer = worker.control("PUT", DESIRED_PATH, json.dumps(document).encode())
    assert (answer.status, loads(ControlError, answer.body).message != "") in ((400, True), (409, True))
    after = worker.report()
    assert (after.fence, after.models["m"].routes) == (before.fence, before.models["m"].routes)
    assert worker.metrics().startswith("# HELP")


def test_a_long_poll_for_a_version_of_a_former_process_is_answered_at_once(
    served: tuple[WorkerProcess, list[Any]],
) -> None:
    worker, _ = served
    version = worker.report().version
    started = time.monotonic()
    assert worker.report(f"?after={version + 1000}&wait=30").version == version
    assert time.monotonic() - started < 20.0
