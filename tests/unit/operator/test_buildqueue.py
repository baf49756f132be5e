"""Builds take turns, and orphans go."""

from __future__ import annotations

import asyncio
import copy
import datetime
from typing import Any

import pytest
from trtmodel_operator.buildqueue import ORPHAN_AGE, REFUSED_LAST, REFUSED_MOST, BuildQueue, orphans, turns
from trtmodel_operator.metrics import OperatorMetrics
from trtmodel_operator.ports import ClusterError, Conflict, Json

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
    """What lies in the cluster. `busy`: somebody else changes a Job first, once. `refused`: the status with which the
    API server refuses to change a Job."""

    def __init__(self, *jobs: Json) -> None:
        self.jobs = {j["metadata"]["name"]: j for j in jobs}
        self.busy: set[str] = set()
        self.refused: dict[str, int] = {}
        self.asked: list[str] = []
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
        self.asked.append(job["metadata"]["name"])
        if (status := self.refused.get(job["metadata"]["name"])) is not None:
            raise ClusterError("PATCH", "jobs", "admission webhook denied the request", status)
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


def looked(store: Store, most: int, times: int = 1, now: Any = lambda: NOW) -> None:
    async def go() -> None:
        queue = BuildQueue(store, most, now)
        for _ in range(times):
            await queue.look()

    asyncio.run(go())


def running(store: Store) -> list[str]:
    return sorted(name for name, j in store.jobs.items() if not j["spec"]["suspend"])


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_build_that_the_api_server_refuses_gives_its_turn_to_the_next_one(most: int) -> None:
    store = Store(job("a", made=1), job("b", made=2), job("c", made=3))
    store.refused = {"a": 403}
    looked(store, most)
    assert running(store) == (["b"] if most == 1 else ["b", "c"])


def test_a_build_that_was_refused_goes_after_the_others_and_begins_once_it_may() -> None:
    store = Store(job("a", "first", made=1), *(job(n, "second", made=2) for n in "bcd"))
    store.refused = {"a": 500}

    async def go() -> None:
        queue = BuildQueue(store, 1, lambda: NOW)
        for expected in "bcda":
            if expected == "a":
                store.refused.clear()
            await queue.look()
            assert running(store) == [expected]
            del store.jobs[expected]

    asyncio.run(go())
    assert store.asked == ["a", "b", "c", "d", "a"]


def test_a_build_that_was_refused_long_ago_goes_by_its_age_again() -> None:
    store = Store(job("a", made=1), job("b", made=2), job("c", made=3))
    store.refused = {"a": 500}
    now = [NOW]

    async def go() -> None:
        queue = BuildQueue(store, 1, lambda: now[0])
        await queue.look()
        del store.jobs["b"]
        store.refused.clear()
        now[0] += REFUSED_LAST + 1
        await queue.look()

    asyncio.run(go())
    assert running(store) == ["a"]


def test_a_look_ends_after_some_refusals_and_the_next_one_begins_with_others() -> None:
    store = Store(*(job(f"bad-{n:02}", made=n) for n in range(REFUSED_MOST + 2)), job("good", made=99))
    store.refused = {f"bad-{n:02}": 500 for n in range(REFUSED_MOST + 2)}
    looked(store, 1)
    assert (len(store.asked), running(store)) == (REFUSED_MOST, [])
    store.asked.clear()
    looked(store, 1, times=2)
    assert running(store) == ["good"]


def test_a_build_of_which_nobody_knows_whether_it_began_keeps_the_place() -> None:
    store = Store(job("a", made=1), job("b", made=2))
    store.refused = {"a": 0}  # no answer
    with pytest.raises(ClusterError):
        looked(store, 1)
    assert store.asked == ["a"]


def test_an_orphan_that_cannot_be_removed_holds_up_nobody_else_and_does_not_begin() -> None:
    lost, runs = job("lost"), job("runs", suspend=False)
    lost["metadata"]["ownerReferences"] = runs["metadata"]["ownerReferences"] = []
    store = Store(lost, runs, job("a", made=1), job("b", made=2))
    store.refused = {"lost": 403, "runs": 403}
    looked(store, 2)
    assert running(store) == ["a", "runs"]
    assert store.asked == ["lost", "runs", "a"]


def test_an_orphan_that_waits_is_removed_and_not_begun() -> None:
    lost = job("lost")
    lost["metadata"]["ownerReferences"] = []
    store = Store(lost, job("a", made=1))
    looked(store, 1)
    assert store.asked == ["lost", "a"]
