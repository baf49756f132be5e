"""Builds take turns, and orphans go."""

from __future__ import annotations

import asyncio
import copy
import datetime
from typing import Any

from trtmodel_operator.buildqueue import ORPHAN_AGE, BuildQueue, orphans, turns
from trtmodel_operator.metrics import OperatorMetrics
from trtmodel_operator.ports import Conflict, Json

MADE = datetime.datetime(2026, 11, 30, tzinfo=datetime.timezone.utc)
NOW = MADE.timestamp() + 3600


def job(name: str, namespace: str = "ml", *, made: int = 0, suspend: bool = True, **more: Any) -> Json:
    created = (MADE + datetime.timedelta(seconds=made)).isoformat()
    return {
        "metadata": {
            "namespace": namespace,
            "name": name,
            "resourceVersion": "1",
            "creationTimestamp": created,
            "labels": {"trtmodel.io/kind": "build", "trtmodel.io/role": "job"},
            "ownerReferences": [{"kind": "TRTModel", "name": "m", "uid": "u"}],
        },
        "spec": {"suspend": suspend},
        "status": {},
    } | more


def ended(name: str, kind: str = "Complete", **more: Any) -> Json:
    return job(name, suspend=False, status={"conditions": [{"type": kind, "status": "True"}]}, **more)


def names(jobs: list[Json]) -> list[str]:
    return [j["metadata"]["name"] for j in jobs]


def test_as_many_begin_as_places_are_free_the_oldest_first() -> None:
    jobs = [job("c", made=3), job("b", made=2), job("a", made=1), job("runs", suspend=False), ended("over")]
    assert names(turns(jobs, 3)) == ["a", "b"]
    assert turns(jobs, 1) == []


def test_a_namespace_that_asks_for_many_does_not_hold_up_one_that_asks_for_one() -> None:
    jobs = [job(f"many-{n}", "greedy", made=n) for n in range(9)] + [job("single", "modest", made=99)]
    assert names(turns(jobs, 2)) == ["many-0", "single"]
    running = [job(f"r{n}", "greedy", suspend=False) for n in range(2)]
    assert names(turns([*jobs, *running], 3)) == ["single"]


def test_without_a_limit_all_begin_also_those_of_a_former_limit() -> None:
    assert names(turns([job("a"), job("b", made=1), job("r", suspend=False)], 0)) == ["a", "b"]


def test_a_resolve_job_takes_no_place() -> None:
    resolve = job("resolve", suspend=False)
    resolve["metadata"]["labels"]["trtmodel.io/kind"] = "resolve"
    assert names(turns([resolve, job("a")], 1)) == ["a"]


def test_a_job_that_is_being_deleted_or_has_ended_takes_no_place() -> None:
    going = job("going", suspend=False)
    going["metadata"]["deletionTimestamp"] = "2026-11-30T00:00:00Z"
    assert names(turns([going, ended("failed", "Failed"), job("a")], 1)) == ["a"]


def test_a_job_of_nobody_is_an_orphan_once_it_is_old_enough() -> None:
    lost = job("lost", suspend=False)
    lost["metadata"]["ownerReferences"] = []
    other = job("other", suspend=False)
    other["metadata"]["ownerReferences"] = [{"kind": "Workflow", "name": "x", "uid": "y"}]
    over = ended("over")
    over["metadata"]["ownerReferences"] = []
    assert names(orphans([lost, other, over, job("owned")], NOW)) == ["lost", "other"]
    assert orphans([lost], MADE.timestamp() + ORPHAN_AGE - 1) == []


class Store:
    """What lies in the cluster. `busy`: somebody else changes a Job first, once."""

    def __init__(self, *jobs: Json) -> None:
        self.jobs = {j["metadata"]["name"]: j for j in jobs}
        self.busy: set[str] = set()
        self.looks = 0
        self.begun = asyncio.Event()

    async def unfinished_jobs(self) -> list[Json]:
        self.looks += 1
        return copy.deepcopy(list(self.jobs.values()))

    async def resume_job(self, job: Json) -> None:
        self._change(job)
        self.jobs[job["metadata"]["name"]]["spec"]["suspend"] = False
        self.begun.set()

    async def remove_job(self, job: Json) -> None:
        self._change(job)
        del self.jobs[job["metadata"]["name"]]

    def _change(self, job: Json) -> None:
        if job["metadata"]["name"] in self.busy:
            self.busy.discard(job["metadata"]["name"])
            raise Conflict("modified")

    @property
    def running(self) -> int:
        return sum(not j["spec"]["suspend"] for j in self.jobs.values())


def test_never_more_run_than_are_let_run_and_in_the_end_all_did() -> None:
    store = Store(*(job(f"j{n}", f"ns{n % 3}", made=n) for n in range(10)))

    async def go() -> None:
        queue = BuildQueue(store, 3, lambda: NOW)
        for _ in range(10):
            await queue.look()
            assert store.running <= 3
            for name in [n for n, j in store.jobs.items() if not j["spec"]["suspend"]][:1]:
                del store.jobs[name]

    asyncio.run(go())
    assert store.jobs == {}


def test_a_job_that_another_one_changed_is_looked_at_again_at_once() -> None:
    store = Store(job("a"))
    store.busy = {"a"}

    async def go() -> None:
        queue = BuildQueue(store, 1, lambda: NOW)
        running = asyncio.create_task(queue.run())
        async with asyncio.timeout(20):
            await store.begun.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(go())
    assert store.looks == 2


def test_it_is_counted_how_many_run_and_wait() -> None:
    store = Store(job("a"), job("b"), job("c", suspend=False), ended("over"))
    metrics = OperatorMetrics()
    asyncio.run(BuildQueue(store, 1, lambda: NOW, metrics.count_builds).look())
    name = "trtmodel_operator_active_builds"
    found = {state: metrics.registry.get_sample_value(name, {"state": state}) for state in ("running", "waiting")}
    assert found == {"running": 1, "waiting": 2}


def test_an_orphan_is_removed() -> None:
    lost = job("lost", suspend=False)
    lost["metadata"]["ownerReferences"] = []
    store = Store(lost, job("kept", suspend=False))
    asyncio.run(BuildQueue(store, 0, lambda: NOW).look())
    assert list(store.jobs) == ["kept"]
