"""Who answers: exact shares for any weight, a named revision directly, and every answer names its one revision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trtmodel_worker.front.engine import Engine
from trtmodel_worker.front.router import Router, Table
from worker_harness import FACTORS, REVISION_1, REVISION_2, REVISION_3, Bucket, Operator, WorkerProcess, eventually


class Stand:
    """An engine as the router sees it."""

    def __init__(self, name: str) -> None:
        self.digest = self.revision = name
        self.alive = True
        self.routed = False
        self.missed: list[str] = []

    def count_failed(self, kind: str) -> None:
        self.missed.append(kind)


def router(weight: int, shadow: int = 0) -> tuple[Router, Stand, Stand]:
    stable, candidate = Stand("s"), Stand("c")
    found = Router()
    found.flip(Table(cast("Engine", stable), cast("Engine", candidate), weight, shadow))
    return found, stable, candidate


@given(st.integers(0, 100), st.integers(1, 500), st.integers(0, 300))
def test_after_any_number_of_requests_the_share_is_right_to_within_one(weight: int, count: int, skipped: int) -> None:
    routed, _, candidate = router(weight)
    for _ in range(skipped):
        routed.choose()
    given_to = sum(cast("Any", routed.choose()) is candidate for _ in range(count))
    assert abs(given_to - count * weight / 100) < 1


@given(st.integers(0, 100), st.integers(1, 3))
def test_of_every_hundred_exactly_the_weight_goes_to_the_candidate(weight: int, hundreds: int) -> None:
    routed, _, candidate = router(weight)
    for _ in range(hundreds):
        assert sum(cast("Any", routed.choose()) is candidate for _ in range(100)) == weight


@given(st.integers(1, 100))
def test_a_candidate_that_is_down_is_answered_for_by_stable_and_owes_each_answer(weight: int) -> None:
    routed, stable, candidate = router(weight)
    candidate.alive = False
    assert {cast("Any", routed.choose()) for _ in range(100)} == {stable}
    assert candidate.missed == ["Down"] * weight


def test_routes_in_force_are_told_as_they_are_asked_for() -> None:
    routed, _, candidate = router(20, 5)
    assert (routed.routes().stable, routed.routes().candidate) == ("s", "c")
    assert (routed.routes().weight, routed.routes().shadow) == (20, 5)
    routed.flip(Table(cast("Engine", candidate), cast("Engine", candidate), 100))
    assert (routed.routes().stable, routed.routes().candidate, routed.routes().weight) == ("", "c", 100)
    assert routed.table is not None
    assert len(routed.table.engines()) == 1
    routed.unroute()
    assert routed.choose() is None
    assert not candidate.routed


@pytest.fixture
def engines(bucket: Bucket, operator: Operator) -> list[Any]:
    fault = {"when": 666.0, "do": "crash"}
    return [operator.artifact(r, bucket.publish(r, {"factor": f, "fault": fault})[0]) for r, f in FACTORS.items()]


@pytest.mark.parametrize("weight", [0, 1, 33, 100])
def test_a_worker_gives_exact_shares_and_each_revision_can_be_named(
    start_worker: Callable[..., WorkerProcess], engines: list[Any], weight: int
) -> None:
    v1, v2, v3 = engines
    worker = start_worker()
    worker.point(v1)
    worker.start()
    worker.wait_ready()
    worker.desire(v1, v2, v3, weight=weight)
    for artifact in (v2, v3):
        worker.wait_engine(artifact.manifest_digest)
    eventually(lambda: worker.report().models["m"].routes.weight == weight, "the weight is in force")
    answers = [worker.infer_rows([[1] * 4]) for _ in range(100)]
    factors = {REVISION_1: 1, REVISION_2: 2, REVISION_3: 3}
    assert [a.revision for a in answers].count(REVISION_2) == weight
    assert all(a.json["outputs"][0]["data"] == [factors[str(a.revision)]] * 4 for a in answers)
    for revision, factor in factors.items():
        path = f"/v2/models/m/versions/{revision}"
        answer = worker.infer_rows([[1] * 4], f"{path}/infer")
        assert (answer.revision, answer.json["model_version"]) == (revision, revision)
        assert answer.json["outputs"][0]["data"] == [factor] * 4
        assert worker.get(path).revision == revision
        assert worker.infer({"inputs": []}, f"{path}/infer").revision == revision, "also where the request is bad"
        failed = worker.infer_rows([[666.0] * 4], f"{path}/infer")
        assert (failed.status, failed.revision) == (500, revision), "and where the engine fails"
    assert worker.infer_rows([[1] * 4], "/v2/models/m/versions/nonesuch/infer").status == 404
