"""Engines changed under traffic, on a real worker with real hosts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trtmodel_contract.control import EngineState, WorkerState
from trtmodel_contract.histogram import upper_bound
from trtmodel_contract.identity import LoadKey
from trtmodel_contract.manifest import TensorSpec
from worker_harness import (
    FACTORS,
    MODEL,
    REVISION_1,
    REVISION_2,
    SIMULATED,
    Bucket,
    Load,
    Operator,
    WorkerProcess,
    eventually,
    started,
)

FAULT = "too many resources requested" if SIMULATED else "Cask convolution execution"  # by a graph, no text but CUDA's
BF16 = (TensorSpec("x", "BF16", (1,)),)


def test_B17_ten_swaps_under_load_fail_no_request_and_every_answer_fits_its_revision(
    worker: WorkerProcess, engines: list[Any]
) -> None:
    v1, v2, _ = engines
    started(worker, v1)
    with Load(worker.port, FACTORS) as load:
        load.wait_for(50)
        for turn in range(10):
            new, old = (v2, v1) if turn % 2 == 0 else (v1, v2)
            assert worker.desire(new, standby=old).status == 200
            worker.wait_routed(new.manifest_digest)
            flip = worker.report().models["m"].flip_seconds
            assert flip is not None
            assert flip < 0.005
            load.wait_for(50)
    assert load.failures == []
    assert min(load.seen[REVISION_1], load.seen[REVISION_2]) > 200
    assert load.sent == sum(load.seen.values())


def test_engines_that_are_not_listed_are_released_after_their_last_request(
    start_worker: Callable[..., WorkerProcess], bucket: Bucket, operator: Operator, engines: list[Any]
) -> None:
    slow = operator.artifact(
        "5105105105", bucket.publish("5105105105", {"factor": 5.0, "slow": {"width": 4, "seconds": 0.6}})[0]
    )
    worker = started(start_worker(), slow)
    with Load(worker.port, {**FACTORS, "5105105105": 5.0}, clients=2) as load:
        load.wait_for(2)
        worker.desire(engines[1])
        worker.wait_routed(engines[1].manifest_digest)
        load.wait_for(20)
    assert load.failures == []
    eventually(lambda: len(worker.host_pids()) == 1, "one host is left")
    assert [e.revision for e in worker.report().models["m"].engines] == [REVISION_2]


def test_a_candidate_gets_its_exact_share_and_returning_is_a_flip(worker: WorkerProcess, engines: list[Any]) -> None:
    v1, v2, _ = engines
    started(worker, v1)
    worker.desire(v1, v2, weight=20)
    worker.wait_engine(v2.manifest_digest)
    eventually(lambda: worker.report().models["m"].routes.candidate == v2.manifest_digest, "the candidate is routed")
    revisions = [worker.infer_rows([[1] * 4]).revision for _ in range(100)]
    assert revisions.count(REVISION_2) == 20
    assert all(revisions[i : i + 5].count(REVISION_2) == 1 for i in range(0, 100, 5))
    told = worker.get("/v2/models/m").headers
    assert told["x-trtmodel-revision"] == REVISION_1
    assert told["x-trtmodel-candidate"] == f"{REVISION_2}; weight=20; shadow=0"
    worker.desire(v1, v2, weight=100)
    assert {worker.infer_rows([[1] * 4]).revision for _ in range(20)} == {REVISION_2}
    hosts = set(worker.host_pids())
    worker.desire(v1, standby=v2)
    assert worker.infer_rows([[1] * 4]).revision == REVISION_1
    assert "x-trtmodel-candidate" not in worker.get("/v2/models/m").headers
    assert set(worker.host_pids()) == hosts, "nothing was loaded or ended"
    counts = worker.report().models["m"].windows["w1"]
    assert (counts[v2.manifest_digest].ok, counts[v1.manifest_digest].ok) == (40, 81)


def test_a_named_standby_answers_although_it_is_not_routed(worker: WorkerProcess, engines: list[Any]) -> None:
    v1, v2, _ = engines
    started(worker, v1)
    worker.desire(v1, standby=v2)
    worker.wait_engine(v2.manifest_digest)
    answer = worker.infer_rows([[1] * 4], f"/v2/models/m/versions/{REVISION_2}/infer")
    assert (answer.revision, answer.json["outputs"][0]["data"]) == (REVISION_2, [2, 2, 2, 2])
    assert worker.infer_rows([[1] * 4]).revision == REVISION_1


def test_the_candidates_time_to_live_ends_and_is_renewed_by_the_same_request(
    worker: WorkerProcess, engines: list[Any]
) -> None:
    v1, v2, _ = engines
    started(worker, v1)
    worker.desire(v1, v2, weight=100, ttl=1)
    worker.wait_engine(v2.manifest_digest)
    assert worker.desire(v1, v2, weight=100, ttl=1, sequence=worker.sequence).status == 200
    assert worker.infer_rows([[1] * 4]).revision == REVISION_2
    eventually(lambda: worker.infer_rows([[1] * 4]).revision == REVISION_1, "stable alone answers", 3)
    assert worker.report().models["m"].routes.candidate == ""
    report = worker.engine(v2.manifest_digest)
    assert report is not None
    assert report.state is EngineState.READY
    worker.desire(v1, v2, weight=100, ttl=60, sequence=worker.sequence)
    assert worker.infer_rows([[1] * 4]).revision == REVISION_2


def refused(worker: WorkerProcess, artifact: Any, stable: Any) -> Any:
    """Ask for `artifact` as candidate; the report of its failure, with everything else as it was."""
    hosts = set(worker.host_pids())
    worker.desire(stable, artifact, weight=100)
    report = worker.wait_engine(artifact.manifest_digest, EngineState.FAILED)
    assert set(worker.host_pids()) == hosts
    assert worker.infer_rows([[1] * 4]).revision == stable.revision
    routes = worker.report().models["m"].routes
    assert (routes.stable, routes.candidate) == (stable.manifest_digest, "")
    return report


def test_changed_plan_bytes_are_refused(
    worker: WorkerProcess, bucket: Bucket, operator: Operator, engines: list[Any]
) -> None:
    started(worker, engines[0])
    digest, manifest = bucket.publish("dddddddddd", {"factor": 4.0})
    path = bucket.blob_path(manifest.plan.digest)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert refused(worker, operator.artifact("dddddddddd", digest), engines[0]).reason == "DigestMismatch"


def test_a_signature_for_another_model_or_by_another_key_is_refused_before_anything_is_fetched(
    worker: WorkerProcess, bucket: Bucket, operator: Operator, engines: list[Any]
) -> None:
    started(worker, engines[0])
    digest = bucket.publish("dddddddddd", {"factor": 4.0})[0]
    others = replace(MODEL, name="other"), replace(MODEL, uid="another")
    for artifact in (
        *(operator.artifact("dddddddddd", digest, other) for other in others),
        Operator().artifact("dddddddddd", digest),
        replace(operator.artifact("dddddddddd", digest), signature=engines[1].signature),
    ):
        report = refused(worker, artifact, engines[0])
        assert report.reason == "SignatureInvalid"
        assert 'trtmodel_untrusted_total{what="engine"} 0.0' not in worker.metrics()
        worker.desire(engines[0])
    cached = Path(worker.directory / "cache" / "sha256")
    assert digest not in [p.name for p in cached.iterdir()]


@pytest.mark.parametrize(
    ("publish", "reason", "text"),
    [
        ({"load_key": LoadKey("Test", "2", "cpu")}, "LoadKeyMismatch", "test-2-cpu"),
        ({"behaviour": {"refuse": "no room"}}, "CannotLoad", "no room"),
        ({"golden": lambda x: x + 1}, "SelfTestFailed", "'y'"),
        ({"behaviour": {"fault": {"when": 0.0, "do": "recoverable"}}}, "WarmUpFailed", FAULT),
        ({"profiles": ()}, "Unservable", "no profile"),
        ({"change": lambda m: replace(m, golden=())}, "SelfTestFailed", "no golden"),
        ({"change": lambda m: replace(m, revision="eeeeeeeeee")}, "RevisionMismatch", "eee"),
        ({"change": lambda m: replace(m, inputs=BF16, profiles=())}, "Unservable", "BF16"),
    ],
)  # fmt: skip
def test_an_engine_that_may_not_serve_here_is_refused_with_the_reason(
    worker: WorkerProcess, bucket: Bucket, operator: Operator, engines: list[Any], publish: Any, reason: str, text: str
) -> None:
    digest = bucket.publish("dddddddddd", **publish)[0]
    started(worker, engines[0])
    report = refused(worker, operator.artifact("dddddddddd", digest), engines[0])
    assert report.reason == reason
    assert text in report.message


def test_the_wanted_stable_takes_over_only_when_it_is_ready(
    worker: WorkerProcess, bucket: Bucket, operator: Operator, engines: list[Any]
) -> None:
    slow = operator.artifact("5105105105", bucket.publish("5105105105", {"factor": 5.0, "load": 1.0})[0])
    started(worker, engines[0])
    worker.desire(slow)
    assert worker.infer_rows([[1] * 4]).revision == REVISION_1
    report = worker.report()
    assert report.models["m"].routes.stable == engines[0].manifest_digest
    assert report.state is WorkerState.SERVING
    worker.wait_routed(slow.manifest_digest)
    loaded = worker.engine(slow.manifest_digest)
    assert loaded is not None
    assert loaded.load_seconds is not None
    assert 1.0 <= loaded.load_seconds < 10.0


def test_G07_while_another_engine_loads_however_long_the_worker_stays_live_and_ready_on_the_old_one(
    worker: WorkerProcess, bucket: Bucket, operator: Operator, engines: list[Any]
) -> None:
    endless = operator.artifact("5105105105", bucket.publish("5105105105", {"load": 600.0})[0])
    started(worker, engines[0])
    worker.desire(endless, standby=engines[0])
    eventually(lambda: len(worker.host_pids()) == 2, "it is being loaded")
    for _ in range(20):
        assert worker.get("/v2/health/live").status == 200
        assert worker.get("/v2/health/ready").status == 200
        assert worker.infer_rows([[1] * 4]).revision == REVISION_1


def test_a_preparation_that_nobody_wants_any_more_is_given_up_at_once(
    worker: WorkerProcess, bucket: Bucket, operator: Operator, engines: list[Any]
) -> None:
    endless = operator.artifact("5105105105", bucket.publish("5105105105", {"load": 600.0})[0])
    started(worker, engines[0])
    worker.desire(engines[0], endless, weight=100)
    eventually(lambda: len(worker.host_pids()) == 2, "it is being loaded")
    before = time.monotonic()
    worker.desire(engines[0], engines[1], weight=100)
    worker.wait_engine(engines[1].manifest_digest)
    assert time.monotonic() - before < 10.0
    assert len(worker.host_pids()) == 2
    assert worker.infer_rows([[1] * 4]).revision == REVISION_2


def test_a_new_input_signature_is_swapped_in_as_well(
    worker: WorkerProcess, bucket: Bucket, operator: Operator, engines: list[Any]
) -> None:
    specs = {"inputs": [TensorSpec("x", "FP32", (-1, 2))], "outputs": [TensorSpec("y", "FP32", (-1, 2))]}
    narrow = operator.artifact("dddddddddd", bucket.publish("dddddddddd", {"factor": 4.0}, **specs)[0])
    started(worker, engines[0])
    worker.desire(narrow, standby=engines[0])
    worker.wait_routed(narrow.manifest_digest)
    assert worker.infer_rows([[1, 2]]).json["outputs"][0]["data"] == [4, 8]
    assert worker.infer_rows([[1, 2, 3, 4]]).status == 400


def test_E15_the_first_requests_of_a_new_engine_are_no_slower_than_the_others(
    worker: WorkerProcess, bucket: Bucket, operator: Operator, engines: list[Any]
) -> None:
    """An engine that takes 0.3 s for the first run of each shape on each lane, as code and memory are set up."""
    lazy = operator.artifact("5105105105", bucket.publish("5105105105", {"factor": 5.0, "first": 0.3})[0])
    started(worker, engines[0])
    worker.desire(lazy)
    worker.wait_routed(lazy.manifest_digest)
    for rows in (1, 8, 1, 8):
        assert worker.infer_rows([[1] * 4] * rows).revision == "5105105105"
    counts = worker.report().models["m"].windows["w1"][lazy.manifest_digest]
    slowest = max(upper_bound(i) for histogram in counts.compute.values() for i in histogram)
    assert slowest < 0.2


@pytest.mark.long
@pytest.mark.timeout(400)  # a swap starts a process, which takes long on a busy machine
def test_a_hundred_swaps_leave_descriptors_and_memory_flat(worker: WorkerProcess, engines: list[Any]) -> None:
    v1, v2, _ = engines
    started(worker, v1)
    figures = []
    with Load(worker.port, FACTORS, clients=2) as load:
        for turn in range(100):
            new = (v2, v1)[turn % 2]
            worker.desire(new)
            worker.wait_routed(new.manifest_digest)
            if turn % 20 == 19:
                eventually(lambda: len(worker.host_pids()) == 1, "the old host is gone")
                load.wait_for(20)
                figures.append((descriptors(worker), resident_kib(worker)))
    assert load.failures == []
    assert max(f for f, _ in figures) - min(f for f, _ in figures) <= 4, figures
    assert figures[-1][1] < figures[1][1] * 1.05 + 2048, figures


def descriptors(worker: WorkerProcess) -> int:
    return len(list(Path(f"/proc/{worker.pid}/fd").iterdir()))


def resident_kib(worker: WorkerProcess) -> int:
    text = Path(f"/proc/{worker.pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0])
