"""Where too few requests come, golden samples run in their place: as attempts, one at a time, and beside nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trtmodel_contract.control import AttemptCounts, Routes
from trtmodel_worker.front.golden import _body
from worker_harness import REVISION_1, REVISION_2, Bucket, Operator, WorkerProcess, eventually

WANTED = 40


@pytest.fixture
def tried(
    start_worker: Callable[..., WorkerProcess], bucket: Bucket, operator: Operator
) -> Callable[..., tuple[WorkerProcess, Any, Any]]:
    """A worker whose requests a candidate answers that behaves so; nobody sends any."""

    def start(behaviour: dict[str, Any] | None = None, **publish: Any) -> tuple[WorkerProcess, Any, Any]:
        worker = start_worker()
        stable = operator.artifact(REVISION_1, bucket.publish(REVISION_1, {"factor": 1.0}, **publish)[0])
        candidate = operator.artifact(REVISION_2, bucket.publish(REVISION_2, behaviour or {}, **publish)[0])
        worker.point(stable)
        worker.start()
        worker.wait_ready()
        worker.desire(stable, candidate, weight=100)
        worker.wait_engine(candidate.manifest_digest)
        eventually(lambda: worker.report().models["m"].routes.candidate, "the candidate answers")
        return worker, stable, candidate

    return start


def counts(worker: WorkerProcess, artifact: Any, window: str = "w1") -> AttemptCounts:
    return worker.report().models["m"].windows.get(window, {}).get(artifact.manifest_digest, AttemptCounts())


def attempts(found: AttemptCounts) -> int:
    return found.ok + sum(found.failed.values()) + found.abandoned


def reached(worker: WorkerProcess, artifact: Any, window: str = "w1") -> AttemptCounts:
    def there() -> AttemptCounts | None:
        found = counts(worker, artifact, window)
        return found if attempts(found) >= WANTED else None

    return eventually(there, f"{WANTED} attempts")


def test_stable_and_candidate_each_get_as_many_attempts_as_are_wanted_and_no_more(tried: Any) -> None:
    worker, stable, candidate = tried()
    assert attempts(counts(worker, candidate)) == 0
    worker.desire(stable, candidate, weight=100, synthetic=WANTED)
    for artifact in (stable, candidate):
        found = reached(worker, artifact)
        assert (found.failed, found.abandoned) == ({}, 0)
        assert list(found.compute) == ["1"]  # one row each, though the samples have two
        assert sum(found.compute["1"].values()) == found.ok
    assert worker.infer_rows([[1.0, 2.0, 3.0, 4.0]]).status == 200
    found = counts(worker, candidate)
    assert (found.ok, found.synthetic) == (WANTED + 1, WANTED)


def test_none_run_that_nobody_asked_for(tried: Any) -> None:
    worker, stable, candidate = tried()
    worker.desire(stable, candidate, weight=100, synthetic=WANTED)
    reached(worker, candidate)
    worker.desire(stable, candidate, weight=100, window="w2")
    for _ in range(10):
        assert worker.infer_rows([[1.0, 2.0, 3.0, 4.0]]).status == 200
    found = counts(worker, candidate, "w2")
    assert (found.ok, found.synthetic) == (10, 0)
    assert attempts(counts(worker, stable, "w2")) == 0


def test_what_clients_send_counts_towards_them(tried: Any) -> None:
    worker, stable, candidate = tried()
    for _ in range(WANTED - 5):
        assert worker.infer_rows([[1.0, 2.0, 3.0, 4.0]]).status == 200
    worker.desire(stable, candidate, weight=100, synthetic=WANTED)
    found = reached(worker, candidate)
    assert (found.ok, found.synthetic) == (WANTED, 5)


def test_another_number_of_them_changes_no_engine(tried: Any) -> None:
    worker, stable, candidate = tried()
    before = worker.host_pids()
    worker.desire(stable, candidate, weight=100, synthetic=WANTED)
    reached(worker, candidate)
    assert worker.host_pids() == before
    assert worker.report().models["m"].routes == Routes(stable.manifest_digest, candidate.manifest_digest, 100)


def test_a_candidate_that_fails_is_seen_to_fail(tried: Any, tmp_path: Path) -> None:
    sick = tmp_path / "sick"
    worker, stable, candidate = tried({"sick": {"path": str(sick), "proof": "recoverable"}})
    sick.touch()
    worker.desire(stable, candidate, weight=100, synthetic=WANTED)
    eventually(lambda: sum(counts(worker, candidate).failed.values()), "failed attempts")
    assert counts(worker, candidate).ok == 0


def test_text_goes_as_the_protocol_has_it_with_its_length_before_it() -> None:
    texts = np.array([[b"ab"], [b""]], dtype="S2").astype(object)
    assert bytes(_body("BYTES", texts)) == b"\x02\x00\x00\x00ab\x00\x00\x00\x00"
    assert bytes(_body("FP32", np.ones((1, 2), np.float32))) == np.ones(2, np.float32).tobytes()
