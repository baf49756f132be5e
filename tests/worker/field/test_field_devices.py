"""Cases from the field (group E): a device that is poisoned, lost, of another kind, or has another driver."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trtmodel_contract.control import DEVICE_LOST, EngineReport, EngineState, WorkerState
from trtmodel_contract.exitcodes import HostExit
from trtmodel_contract.identity import LoadKey
from worker_harness import (
    REVISION_1,
    REVISION_2,
    Answer,
    Bucket,
    Load,
    Operator,
    WorkerProcess,
    eventually,
)

GOOD, BAD = 7.0, 666.0
AMPERE, HOPPER = LoadKey("TensorRT", "10.3", "sm86"), LoadKey("TensorRT", "10.3", "sm90")
OLD, NEW = LoadKey("Test", "1", "cpu"), LoadKey("Test", "2", "cpu")
Start = Callable[..., WorkerProcess]


@pytest.fixture
def begin(start_worker: Start, operator: Operator, bucket: Bucket) -> Callable[..., WorkerProcess]:
    """A ready worker whose stable engine doubles its input."""

    def make(behaviour: dict[str, Any] | None = None, **environment: str) -> WorkerProcess:
        worker = start_worker(**environment)
        digest, _ = bucket.publish(REVISION_1, {"factor": 2.0, **(behaviour or {})})
        worker.stable = operator.artifact(REVISION_1, digest)  # type: ignore[attr-defined]
        worker.point(worker.stable)  # type: ignore[attr-defined]
        worker.start()
        worker.wait_ready()
        return worker

    return make


def stable(worker: WorkerProcess) -> EngineReport:
    return worker.report().models["m"].engines[0]


def counts(worker: WorkerProcess, digest: str) -> Any:
    windows = worker.report().models["m"].windows
    return windows[list(windows)[-1]].get(digest)


def answers_well(worker: WorkerProcess) -> None:
    answer = worker.infer_rows([[GOOD] * 4])
    assert (answer.status, answer.json["outputs"][0]["data"]) == (200, [2 * GOOD] * 4)


# -- E-01, E-03: engines that were built for something else


def test_E01_an_engine_of_another_gpu_is_refused_from_its_manifest_and_stable_serves_on(
    begin: Any, operator: Operator, bucket: Bucket
) -> None:
    worker = begin()
    digest, manifest = bucket.publish(REVISION_2, {"factor": 3.0}, load_key=AMPERE)
    bucket.blob_path(manifest.plan.digest).unlink()  # had it been asked for, the reason would be another one
    candidate = operator.artifact(REVISION_2, digest)
    with Load(worker.port, {REVISION_1: 2.0}, clients=2) as load:
        worker.desire(worker.stable, candidate, weight=100)
        found = worker.wait_engine(digest, EngineState.FAILED)
        load.wait_for(20)
    assert load.failures == []
    assert set(load.seen) == {REVISION_1}
    assert found.reason == "LoadKeyMismatch"
    assert f"was built for {AMPERE}, this worker is {OLD}" in found.message
    assert counts(worker, digest) is None  # not one attempt: nothing speaks against the model
    assert worker.get("/v2/health/ready").status == 200


def test_E03_a_worker_of_another_runtime_version_takes_its_own_engine_or_says_that_there_is_none(
    start_worker: Start, operator: Operator, bucket: Bucket
) -> None:
    newer = operator.artifact(REVISION_1, bucket.publish(REVISION_1, {"factor": 2.0}, load_key=NEW)[0])
    own = operator.artifact(REVISION_1, bucket.publish(REVISION_1, {"factor": 2.0}, load_key=OLD)[0])
    worker = start_worker()
    worker.point(newer, load_key=NEW)  # the chart was upgraded before anything was built for this version
    worker.start()
    worker.wait_listening()
    eventually(lambda: worker.report().state is WorkerState.NO_ENGINE, "it says that there is none")
    assert f"names no engine for {OLD}" in worker.report().message
    assert worker.get("/v2/health/ready").status == 503
    assert worker.host_pids() == []  # nothing of another version is tried
    worker.point(own)
    worker.wait_ready()
    answers_well(worker)
    worker.stop()
    worker.point(own)  # rolled back: a pod that restarts finds the old artifact
    worker.start()
    worker.wait_ready()
    answers_well(worker)


# -- E-07: a poisoned context


def test_E07_one_request_never_walks_through_all_contexts_of_a_poisoned_device(begin: Any) -> None:
    worker = begin({"fault": {"when": BAD, "do": "sticky"}}, TRTMODEL_CONTEXTS="4")
    answer = worker.infer_rows([[BAD] * 4])
    assert answer.status == 500
    eventually(lambda: stable(worker).state is EngineState.READY, "the host was replaced")
    assert stable(worker).deaths == 2  # it was tried once more, by a fresh process
    assert worker.log.read_text().count(f"exit code {HostExit.STICKY_ERROR:d}") >= 2
    answers_well(worker)


@pytest.mark.long
def test_E07_a_device_that_stays_poisoned_takes_the_worker_out_of_service_until_it_is_well(
    begin: Any, tmp_path: Path
) -> None:
    file = tmp_path / "poisoned"
    worker = begin({"sick": {"path": str(file), "run": "sticky", "proof": "sticky"}})
    answers_well(worker)
    file.touch()
    assert worker.infer_rows([[GOOD] * 4]).status in (500, 503)
    eventually(lambda: stable(worker).state is EngineState.FAILED, "it is given up")
    assert worker.get("/v2/health/ready").status == 503
    assert worker.get("/v2/health/live").status == 200
    answer = worker.infer_rows([[GOOD] * 4])
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert f"its device context was poisoned (exit code {HostExit.STICKY_ERROR:d})" in worker.log.read_text()
    assert "trtmodel_host_deaths_total" in worker.metrics()
    file.unlink()
    worker.wait_ready()
    answers_well(worker)


def test_E07_a_candidate_that_poisons_its_device_fails_and_stable_answers(
    begin: Any, operator: Operator, bucket: Bucket
) -> None:
    worker = begin()
    behaviour = {"factor": 3.0, "sometimes": {"share": 1.0, "do": "sticky"}}
    candidate = operator.artifact(REVISION_2, bucket.publish(REVISION_2, behaviour)[0])
    worker.desire(worker.stable, candidate, weight=50)
    worker.wait_engine(candidate.manifest_digest)
    eventually(lambda: worker.report().models["m"].routes.candidate, "it is routed to")
    answers: list[Answer] = []
    stop = threading.Event()

    def client() -> None:
        while not stop.is_set():
            answers.append(worker.infer_rows([[GOOD, float(len(answers)), 0, 0]]))

    thread = threading.Thread(target=client)
    thread.start()
    try:
        failed = eventually(lambda: worker.engine(candidate.manifest_digest).state is EngineState.FAILED, "given up")
        assert failed
    finally:
        stop.set()
        thread.join()
    found = counts(worker, candidate.manifest_digest)
    assert found.ok == 0
    assert found.failed["HostDeath"] >= 2
    assert dict(counts(worker, worker.stable.manifest_digest).failed) == {}
    good = [a for a in answers if a.status == 200]
    assert {a.revision for a in good} == {REVISION_1}
    assert len(good) >= len(answers) // 2
    for _ in range(4):
        answers_well(worker)


# -- E-10: a container that lost its device


@pytest.mark.long
def test_E10_the_probe_finds_that_the_device_is_gone_and_the_container_is_made_anew(begin: Any, tmp_path: Path) -> None:
    file = tmp_path / "gone"
    worker = begin(
        {"sick": {"path": str(file), "proof": "lost", "load": "lost"}}, TRTMODEL_HEALTH_INTERVAL_SECONDS="0.3"
    )
    answers_well(worker)
    file.touch()  # what runs goes on running, nothing new can be done: no request would have shown it
    assert worker.process is not None
    code = worker.process.wait(60)
    log = worker.log.read_text()
    assert code == 1
    assert f"it lost its device (exit code {HostExit.DEVICE_LOST:d})" in log
    assert "this worker ends, so that its container is made anew" in log
    worker.start()  # a container that has no device yet
    worker.wait_listening()
    found = worker.wait_engine(worker.stable.manifest_digest, EngineState.FAILED)
    assert (found.reason, worker.get("/v2/health/ready").status) == (DEVICE_LOST, 503)
    assert worker.report().load_key == OLD  # of the runtime that was asked for, and of no other
    file.unlink()
    worker.wait_ready()
    answers_well(worker)


# -- E-16: the driver was upgraded under running pods


def test_E16_a_driver_that_loads_nothing_new_stops_the_swap_and_not_what_serves(
    begin: Any, operator: Operator, bucket: Bucket, tmp_path: Path
) -> None:
    file = tmp_path / "mismatch"
    worker = begin()
    file.touch()
    behaviour = {"factor": 3.0, "sick": {"path": str(file), "load": "mismatch"}}
    candidate = operator.artifact(REVISION_2, bucket.publish(REVISION_2, behaviour)[0])
    with Load(worker.port, {REVISION_1: 2.0, REVISION_2: 3.0}, clients=2) as load:
        worker.desire(worker.stable, candidate, weight=100)
        found = worker.wait_engine(candidate.manifest_digest, EngineState.FAILED)
        load.wait_for(20)
        assert found.reason == DEVICE_LOST  # which the operator waits for, instead of judging the model
        assert "driver/library version mismatch" in found.message
        assert set(load.seen) == {REVISION_1}
        assert counts(worker, candidate.manifest_digest) is None
        file.unlink()  # the node came back: the same engine is proved again and serves, nothing is built
        worker.wait_engine(candidate.manifest_digest)
        eventually(lambda: REVISION_2 in load.seen or load.failures, "the candidate answers")
    assert load.failures == []
