"""Engines changed where memory holds one of them only: a real worker, in a real control group where there is one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trtmodel_contract.control import NOT_RESIDENT, EngineState, MemoryPolicy, Routes, WorkerState
from trtmodel_contract.manifest import Manifest, MemoryNeed
from worker_harness import (
    FACTORS,
    REVISION_1,
    REVISION_2,
    REVISION_3,
    Bucket,
    Load,
    Operator,
    WorkerProcess,
    eventually,
    started,
)

MIB = 1 << 20
HUGE = 1 << 50
GROUPS = Path("/sys/fs/cgroup/memory")


def needing(host_bytes: int) -> Callable[[Manifest], Manifest]:
    return lambda manifest: replace(manifest, memory=MemoryNeed(0, host_bytes))


def memory(worker: WorkerProcess) -> Any:
    return worker.report().models["m"].memory


def test_an_engine_that_does_not_fit_is_refused_with_the_figures_and_nothing_else_changes(
    worker: WorkerProcess, bucket: Bucket, operator: Operator, engines: list[Any]
) -> None:
    fat = operator.artifact("fafafafafa", bucket.publish("fafafafafa", change=needing(HUGE))[0])
    started(worker, engines[0])
    hosts = set(worker.host_pids())
    worker.desire(engines[0], fat, weight=100)
    found = worker.wait_engine(fat.manifest_digest, EngineState.FAILED)
    assert found.reason == "NoMemory"
    assert "needs 1,073,741,824.0 MiB of memory" in found.message
    assert set(worker.host_pids()) == hosts
    assert worker.infer_rows([[1] * 4]).revision == REVISION_1
    assert worker.report().state is WorkerState.SERVING
    assert memory(worker).need_host_bytes > HUGE
    text = worker.metrics()
    assert "trtmodel_memory_needed_bytes 1.12" in text
    assert "trtmodel_memory_free_bytes " in text
    assert f'trtmodel_load_seconds{{revision="{REVISION_1}"}}' in text


def test_policy_resource_refuses_while_no_other_worker_serves(
    start_worker: Callable[..., WorkerProcess], engines: list[Any]
) -> None:
    worker = started(start_worker(TRTMODEL_MEMORY_POLICY="Resource"), engines[0])
    worker.desire(engines[1])
    found = worker.wait_engine(engines[1].manifest_digest, EngineState.FAILED)
    assert found.reason == "NoMemory"
    assert "no other worker serves" in found.message
    assert worker.infer_rows([[1] * 4]).revision == REVISION_1
    assert memory(worker).policy is MemoryPolicy.RESOURCE


def test_policy_resource_leaves_service_answers_until_the_endpoints_know_and_comes_back_with_the_new_engine(
    start_worker: Callable[..., WorkerProcess], engines: list[Any]
) -> None:
    worker = started(start_worker(TRTMODEL_MEMORY_POLICY="Resource", TRTMODEL_DRAIN_SECONDS="3"), engines[0])
    worker.desire(engines[1], standby=engines[0], may_drain=True)
    eventually(lambda: worker.get("/v2/health/ready").status == 503, "it is not ready")
    assert worker.infer_rows([[1] * 4]).revision == REVISION_1, "it still answers"
    worker.wait_routed(engines[1].manifest_digest)
    worker.wait_ready()
    assert worker.infer_rows([[1] * 4]).revision == REVISION_2
    eventually(lambda: len(worker.host_pids()) == 1, "one engine is in memory")
    eventually(lambda: _is_not_resident(worker, engines[0]), "the old one waits to be wanted")
    assert memory(worker).policy is MemoryPolicy.RESOURCE


def test_a_worker_that_leaves_service_answers_as_long_as_anybody_comes_and_sends_each_client_elsewhere(
    start_worker: Callable[..., WorkerProcess], engines: list[Any]
) -> None:
    worker = started(start_worker(TRTMODEL_MEMORY_POLICY="Resource", TRTMODEL_DRAIN_SECONDS="0"), engines[0])
    stays = worker.infer_rows([[1] * 4])
    assert "connection" not in stays.headers
    worker.desire(engines[1], standby=engines[0], may_drain=True)
    eventually(lambda: worker.get("/v2/health/ready").status == 503, "it is not ready")
    over = time.monotonic() + 3.0
    while time.monotonic() < over:  # longer than the drain delay, and than a pause that would count as quiet
        answer = worker.infer_rows([[1] * 4])
        assert (answer.status, answer.revision) == (200, REVISION_1)
        assert answer.headers["connection"] == "close"
    worker.wait_routed(engines[1].manifest_digest)
    worker.wait_ready()
    assert worker.infer_rows([[1] * 4]).revision == REVISION_2


def _is_not_resident(worker: WorkerProcess, engine: Any) -> bool:
    found = worker.engine(engine.manifest_digest)
    return found is not None and (found.state, found.reason) == (EngineState.FETCHING, NOT_RESIDENT)


def test_what_answered_comes_back_when_the_new_engine_cannot_be_loaded_after_all(
    start_worker: Callable[..., WorkerProcess], bucket: Bucket, operator: Operator, engines: list[Any]
) -> None:
    bad = operator.artifact("dddddddddd", bucket.publish("dddddddddd", {"refuse": "no room after all"})[0])
    worker = started(start_worker(TRTMODEL_MEMORY_POLICY="Resource", TRTMODEL_ALLOW_DOWNTIME="true"), engines[0])
    first = worker.host_pids()
    worker.desire(bad)
    found = worker.wait_engine(bad.manifest_digest, EngineState.FAILED)
    assert found.reason == "CannotLoad"
    assert REVISION_1 in found.message
    worker.wait_routed(engines[0].manifest_digest)
    worker.wait_ready()
    assert worker.infer_rows([[1] * 4]).revision == REVISION_1
    second = worker.host_pids()
    assert first != second, "it had been unloaded"
    worker.desire(bad, window="w2")
    over = time.monotonic() + 1.0
    while time.monotonic() < over:
        assert worker.get("/v2/health/ready").status == 200, "the same again is not worth another outage"
    assert worker.host_pids() == second
    worker.desire(engines[2])
    worker.wait_routed(engines[2].manifest_digest)
    assert worker.infer_rows([[1] * 4]).revision == REVISION_3


def test_a_candidate_answers_alone_where_memory_holds_one_engine_and_stable_returns_the_same_way(
    start_worker: Callable[..., WorkerProcess], engines: list[Any]
) -> None:
    v1, v2, _ = engines
    worker = started(start_worker(TRTMODEL_MEMORY_POLICY="Resource"), v1)
    worker.desire(v1, v2, may_drain=True)
    worker.wait_engine(v2.manifest_digest)
    routes = eventually(lambda: worker.report().models["m"].routes, "routes")
    assert (routes.stable, routes.candidate, routes.weight) == ("", v2.manifest_digest, 100)
    assert worker.infer_rows([[1] * 4]).revision == REVISION_2
    stable = worker.engine(v1.manifest_digest)
    assert stable is not None
    assert stable.reason == NOT_RESIDENT
    worker.desire(v1, v2, weight=100, may_drain=True)
    assert worker.infer_rows([[1] * 4]).revision == REVISION_2
    worker.desire(v1, may_drain=True)
    worker.wait_routed(v1.manifest_digest)
    worker.wait_ready()
    assert worker.infer_rows([[1] * 4]).revision == REVISION_1
    eventually(lambda: len(worker.host_pids()) == 1, "the candidate is gone")
    worker.desire(v1, v2, may_drain=True)
    worker.wait_engine(v2.manifest_digest)
    worker.desire(v2, standby=v1)
    routes = worker.report().models["m"].routes
    assert (routes.stable, routes.candidate) == (v2.manifest_digest, "")


def test_a_candidate_that_answers_alone_goes_on_when_its_time_is_over_for_there_is_no_stable_to_go_back_to(
    start_worker: Callable[..., WorkerProcess], engines: list[Any]
) -> None:
    v1, v2, _ = engines
    worker = started(start_worker(TRTMODEL_MEMORY_POLICY="Resource"), v1)
    worker.desire(v1, v2, may_drain=True)
    worker.wait_engine(v2.manifest_digest)
    worker.desire(v1, v2, may_drain=True, ttl=1, sequence=worker.sequence)
    over = time.monotonic() + 2.0
    while time.monotonic() < over:
        assert worker.infer_rows([[1] * 4]).revision == REVISION_2
    assert worker.get("/v2/health/ready").status == 200


@pytest.mark.parametrize("routes", [{"weight": 20}, {"shadow": 5}])
def test_a_share_or_a_shadow_is_refused_where_memory_is_to_hold_one_engine(
    start_worker: Callable[..., WorkerProcess], engines: list[Any], routes: dict[str, int]
) -> None:
    v1, v2, _ = engines
    worker = started(start_worker(TRTMODEL_MEMORY_POLICY="Resource"), v1)
    worker.desire(v1, v2, may_drain=True, routes=Routes(v1.manifest_digest, v2.manifest_digest, **routes))
    found = worker.wait_engine(v2.manifest_digest, EngineState.FAILED)
    assert found.reason == "NoMemory"
    assert "takes two" in found.message
    assert worker.infer_rows([[1] * 4]).revision == REVISION_1


def test_a_worker_that_is_asked_for_something_else_while_it_leaves_serves_on(
    start_worker: Callable[..., WorkerProcess], engines: list[Any]
) -> None:
    worker = started(start_worker(TRTMODEL_MEMORY_POLICY="Resource", TRTMODEL_DRAIN_SECONDS="60"), engines[0])
    hosts = worker.host_pids()
    worker.desire(engines[1], may_drain=True)
    eventually(lambda: worker.get("/v2/health/ready").status == 503, "it is not ready")
    worker.desire(engines[0], may_drain=True)
    worker.wait_ready()
    assert worker.host_pids() == hosts
    assert worker.infer_rows([[1] * 4]).revision == REVISION_1
    assert worker.process is not None
    worker.process.kill()  # it would drain for a minute
    worker.process.wait(10)


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of the kernel's own, for as long as the test runs."""
    path = GROUPS / f"trtmodel-{os.getpid()}"
    try:
        path.mkdir()
    except OSError:
        pytest.skip("no control group of version 1 can be made here")
    yield path
    eventually(lambda: not (path / "cgroup.procs").read_text(), "everything in the group has ended")
    path.rmdir()


def leave_free(group: Path, size: int) -> None:
    """A limit that is so far above what is used now."""
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    used = int((group / "memory.usage_in_bytes").read_text()) - int(stat["total_inactive_file"])
    (group / "memory.limit_in_bytes").write_text(str(used + size))


def test_E06_two_engines_that_do_not_fit_are_changed_one_for_the_other_and_never_is_none_there_while_ready(
    worker: WorkerProcess, bucket: Bucket, operator: Operator, group: Path
) -> None:
    """The current one takes 300 MiB, the next one 200, and 120 are left."""
    current = operator.artifact(
        REVISION_1,
        bucket.publish(REVISION_1, {"factor": 1.0, "ballast": 300 * MIB}, change=needing(340 * MIB))[0],
    )
    following = operator.artifact(
        REVISION_2,
        bucket.publish(REVISION_2, {"factor": 2.0, "ballast": 160 * MIB}, change=needing(200 * MIB))[0],
    )
    worker.point(current)
    worker.start(group=group)
    try:
        worker.wait_ready()
        leave_free(group, 120 * MIB)
        worker.desire(following)
        found = worker.wait_engine(following.manifest_digest, EngineState.FAILED)
        assert found.reason == "NoMemory"
        assert "needs 200" in found.message
        assert "no other worker serves" in found.message
        assert worker.infer_rows([[1] * 4]).revision == REVISION_1
        told = memory(worker)
        assert told.policy is MemoryPolicy.RESOURCE
        assert 100 * MIB < told.free_host_bytes < 140 * MIB
        worker.desire(following, may_drain=True)
        gaps = []

        def changed() -> bool:
            ready = worker.get("/v2/health/ready").status == 200
            answer = worker.infer_rows([[1] * 4])
            if ready and answer.status != 200 and worker.get("/v2/health/ready").status == 200:
                gaps.append(answer)
            return answer.revision == REVISION_2

        eventually(changed, "the next engine answers")
        assert gaps == []
        worker.wait_ready()
        assert (group / "memory.failcnt").read_text().strip() == "0", "the limit was never met"
    finally:
        worker.stop()


def test_a_standby_makes_room_for_a_candidate_and_returns_when_there_is_room(
    worker: WorkerProcess, bucket: Bucket, operator: Operator, group: Path
) -> None:
    made = [
        operator.artifact(
            revision,
            bucket.publish(revision, {"factor": factor, "ballast": 160 * MIB}, change=needing(200 * MIB))[0],
        )
        for revision, factor in FACTORS.items()
    ]
    worker.point(made[0], made[1])
    worker.start(group=group)
    try:
        worker.wait_engine(made[1].manifest_digest)
        leave_free(group, 120 * MIB)
        with Load(worker.port, FACTORS, clients=2) as load:
            worker.desire(made[0], made[2], made[1])
            worker.wait_engine(made[2].manifest_digest)
            standby = worker.wait_engine(made[1].manifest_digest, EngineState.FAILED)
            load.wait_for(20)
        assert load.failures == []
        assert standby.reason == "NoMemory"
        assert len(worker.host_pids()) == 2
        worker.desire(made[0], standby=made[1])
        worker.wait_engine(made[1].manifest_digest)
    finally:
        worker.stop()
