"""A share of stable's requests also runs on the candidate: clients never see it, and only differences are kept."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from trtmodel_contract.control import AttemptCounts, Routes, ShadowCounts
from trtmodel_contract.manifest import TensorSpec
from worker_harness import REVISION_1, REVISION_2, Bucket, Operator, WorkerProcess, eventually

POISON = 666.0


@pytest.fixture
def stable(bucket: Bucket, operator: Operator) -> Any:
    return operator.artifact(REVISION_1, bucket.publish(REVISION_1, {"factor": 1.0})[0])


@pytest.fixture
def shadowing(
    start_worker: Callable[..., WorkerProcess], bucket: Bucket, operator: Operator, stable: Any
) -> Callable[..., tuple[WorkerProcess, str]]:
    """A worker that runs `percent` of stable's requests on a candidate which behaves so."""

    def start(
        percent: int, behaviour: dict[str, Any], weight: int = 0, buckets: str = "", **publish: Any
    ) -> tuple[WorkerProcess, str]:
        worker = start_worker(TRTMODEL_BATCH_BUCKETS=buckets)
        candidate = operator.artifact(REVISION_2, bucket.publish(REVISION_2, behaviour, **publish)[0])
        digest = candidate.manifest_digest
        worker.point(stable)
        worker.start()
        worker.wait_ready()
        worker.desire(stable, candidate, routes=Routes(stable.manifest_digest, digest, weight, percent))
        worker.wait_engine(digest)
        eventually(lambda: worker.report().models["m"].routes.shadow == percent, "the shadow is on")
        return worker, digest

    return start


def counts(worker: WorkerProcess, digest: str) -> AttemptCounts:
    return worker.report().models["m"].windows["w1"].get(digest, AttemptCounts())


def shadow(worker: WorkerProcess, digest: str) -> ShadowCounts:
    return counts(worker, digest).shadow or ShadowCounts()


def settled(worker: WorkerProcess, digest: str, number: int) -> ShadowCounts:
    """When so many were chosen and have come to an end."""

    def ended() -> ShadowCounts | None:
        found = shadow(worker, digest)
        return found if found.mirrored + found.dropped + sum(found.failed.values()) == number else None

    return eventually(ended, f"{number} shadow requests have ended, not {shadow(worker, digest)}")


def test_the_candidate_runs_stables_requests_and_the_difference_is_reported(shadowing: Any) -> None:
    worker, digest = shadowing(100, {"factor": 2.0})
    rows = 0
    for number in range(1, 21):
        answer = worker.infer_rows([[1, 2, 3, number]] * (1 + number % 3))
        assert (answer.status, answer.revision) == (200, REVISION_1)
        found = settled(worker, digest, number)
        rows = found.outputs["y"].rows
    assert (found.mirrored, found.dropped, found.failed) == (20, 0, {})
    output = found.outputs["y"]
    assert rows == 41 == output.ranked == output.top1_equal
    assert output.cosine == pytest.approx(41.0)
    assert output.relative_error == pytest.approx(41.0), "twice the value is an error of one"
    assert sum(n for h in found.compute.values() for n in h.values()) == 20
    own = counts(worker, digest)
    assert (own.ok, own.failed, own.abandoned, own.compute) == (0, {}, 0, {}), "no client's request was the candidate's"
    text = worker.metrics()
    assert f'trtmodel_mirrored_requests_total{{revision="{REVISION_2}"}} 20.0' in text
    assert f'trtmodel_agreement_top1_equal_total{{output="y",revision="{REVISION_2}"}} 41.0' in text
    assert f'trtmodel_responses_total{{revision="{REVISION_2}"' not in text


@pytest.mark.parametrize(("percent", "weight", "chosen"), [(7, 0, 14), (50, 50, 50)])
def test_the_share_is_exact_and_of_the_requests_that_stable_answers(
    shadowing: Any, percent: int, weight: int, chosen: int
) -> None:
    worker, digest = shadowing(percent, {"factor": 1.0}, weight)
    for _ in range(200):
        assert worker.infer_rows([[1, 2, 3, 4]]).status == 200
    settled(worker, digest, chosen)
    assert counts(worker, digest).ok == 2 * weight
    assert worker.infer_rows([[1] * 4], f"/v2/models/m/versions/{REVISION_2}/infer").revision == REVISION_2
    settled(worker, digest, chosen)


def test_a_candidate_that_is_slow_is_left_out_of_most_and_delays_nobody(shadowing: Any) -> None:
    worker, digest = shadowing(100, {"factor": 1.0, "work": 0.3})
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda i: worker.infer_rows([[i] * 4]), range(100)))
    assert {a.revision for a in answers} == {REVISION_1}
    found = settled(worker, digest, 100)
    assert found.dropped >= 50
    assert found.failed == {}


def test_what_fails_in_the_candidate_is_counted_as_the_shadows_and_reaches_no_client(shadowing: Any) -> None:
    worker, digest = shadowing(100, {"factor": 1.0, "fault": {"when": POISON, "do": "recoverable"}})
    for number in range(1, 4):
        assert worker.infer_rows([[POISON, 1, 2, 3]]).status == 200
        found = settled(worker, digest, number)
    assert found.failed == {"Recoverable": 3}, "each ran once"
    assert found.mirrored == 0
    own = counts(worker, digest)
    assert (own.ok, own.failed, own.abandoned) == (0, {}, 0)


def test_a_request_that_kills_the_candidate_is_run_nowhere_else_and_stays_welcome_to_stable(
    shadowing: Any, stable: Any
) -> None:
    worker, digest = shadowing(100, {"factor": 1.0, "fault": {"when": POISON, "do": "die"}})
    assert worker.infer_rows([[POISON, 1, 2, 3]]).status == 200
    found = settled(worker, digest, 1)
    assert (sum(found.failed.values()), found.compute) == (1, {})
    died = worker.engine(digest)
    assert died is not None
    assert died.deaths == 1, "it was not tried again"
    assert worker.infer_rows([[POISON, 1, 2, 3]]).status == 200
    standing = worker.engine(stable.manifest_digest)
    assert standing is not None
    assert standing.deaths == 0


def test_a_candidate_with_other_tensors_cannot_be_compared_and_that_is_said(shadowing: Any) -> None:
    specs = {"inputs": [TensorSpec("x", "FP32", (-1, 4))], "outputs": [TensorSpec("z", "FP32", (-1, 4))]}
    worker, digest = shadowing(100, {"factor": 1.0}, **specs)
    assert worker.infer_rows([[1] * 4]).status == 200
    assert settled(worker, digest, 1).failed == {"OtherSignature": 1}


def test_a_request_that_is_too_large_for_the_candidate_is_not_given_to_it(shadowing: Any) -> None:
    worker, digest = shadowing(100, {"factor": 1.0}, max_rows=2)
    assert worker.infer_rows([[1] * 4] * 3).status == 200
    assert settled(worker, digest, 1).failed == {"InvalidInput": 1}
    assert worker.infer_rows([[1] * 4] * 2).status == 200
    assert settled(worker, digest, 2).mirrored == 1


def test_of_a_padded_batch_the_requests_own_rows_are_compared(shadowing: Any) -> None:
    worker, digest = shadowing(100, {"factor": 2.0}, buckets="4,8")
    assert worker.infer_rows([[1, 2, 3, 4]] * 3).status == 200
    found = settled(worker, digest, 1)
    assert (found.mirrored, found.outputs["y"].rows) == (1, 3)
    assert list(found.compute) == ["4"]


def test_a_new_window_and_the_end_of_the_shadow_begin_with_nothing(shadowing: Any, stable: Any) -> None:
    worker, digest = shadowing(100, {"factor": 1.0})
    worker.infer_rows([[1] * 4])
    settled(worker, digest, 1)
    worker.desire(stable, window="w2")
    eventually(lambda: worker.report().models["m"].routes == Routes(stable.manifest_digest), "no shadow")
    worker.infer_rows([[1] * 4])
    windows = worker.report().models["m"].windows
    assert windows["w1"][digest].shadow.mirrored == 1
    assert digest not in windows["w2"]
    for following in ("w3", "w4", "w5", "w6"):
        worker.desire(stable, window=following, baseline="w2")
    assert set(worker.report().models["m"].windows) == {"w2", "w3", "w4", "w5", "w6"}
