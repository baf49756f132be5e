"""The collector is started: where, when, and with which rules."""

from __future__ import annotations

import asyncio
import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
from decide_scene import RAW, changed_raw
from trtmodel_contract.codec import loads
from trtmodel_contract.identity import Storage
from trtmodel_contract.jobs import CollectTask
from trtmodel_operator.collector import Collector, CollectPolicy
from trtmodel_operator.manifests import JobPolicy
from trtmodel_operator.ports import ClusterError, Json
from trtmodel_operator.settings import SettingsError, from_environment

HOUR = 3600
DAILY = CollectPolicy(24 * HOUR)


class Store:
    """The cluster: a Job whose name is there is not made again."""

    def __init__(self, *models: Json) -> None:
        self.listed, self.refuses = list(models), ""
        self.jobs: dict[str, Json] = {}
        self.lists = 0

    async def models(self, see: Callable[[Json], None]) -> None:
        self.lists += 1
        for one in self.listed:
            see(one)

    async def create_job(self, manifest: Json) -> None:
        if self.refuses and manifest["metadata"]["namespace"] == self.refuses:
            raise ClusterError("POST", "jobs", "exceeded quota", 403)
        self.jobs.setdefault(manifest["metadata"]["name"], manifest)

    def tasks(self) -> list[CollectTask]:
        containers = [j["spec"]["template"]["spec"]["containers"][0] for j in self.jobs.values()]
        return [
            loads(CollectTask, next(e["value"] for e in c["env"] if e["name"] == "TRTMODEL_TASK")) for c in containers
        ]


def model(name: str, namespace: str = "ml", **changes: Any) -> Json:
    return {"metadata": {"namespace": namespace, "name": name}, "spec": changed_raw(RAW, **changes)}


def look(store: Store, policy: CollectPolicy = DAILY, at: float = 1e9) -> None:
    """What an operator does that has just begun to lead."""
    asyncio.run(Collector(store, policy, JobPolicy(priority_class="low"), "worker:1", "inst", lambda: at).look())


def test_each_bucket_of_a_namespace_has_one_job_in_an_interval_whoever_leads() -> None:
    store = Store(model("a"), model("b"), model("c", storage__bucket="other"), model("a", "vision"))
    for moment in (1e9, 1e9 + 60):
        look(store, at=moment)
    assert [(t.namespace, t.storage.bucket) for t in store.tasks()] == [
        ("ml", "engines"),
        ("ml", "other"),
        ("vision", "engines"),
    ]
    look(store, at=1e9 + 24 * HOUR)
    assert len(store.jobs) == 6


def test_nothing_is_removed_unless_it_is_asked_for() -> None:
    store = Store(model("a"))
    look(store)
    assert store.tasks() == [CollectTask("ml", Storage("engines", "trtmodel"), "inst", grace_seconds=48 * HOUR)]
    assert not store.tasks()[0].delete
    removing = Store(model("a"))
    look(removing, CollectPolicy(HOUR, delete=True, grace=60))
    assert removing.tasks()[0].delete


def test_the_grace_is_longer_than_any_build_there_may_take() -> None:
    store = Store(model("a"), model("b", build__deadline="24h"))
    look(store, CollectPolicy(HOUR, delete=True, grace=0))
    assert store.tasks()[0].grace_seconds == 25 * HOUR


def test_a_model_that_cannot_be_read_or_is_being_deleted_names_no_bucket() -> None:
    odd, going = model("a"), model("b", storage__bucket="other")
    odd["spec"] = {"storage": 7}
    going["metadata"]["deletionTimestamp"] = "2026-11-30T00:00:00Z"
    store = Store(odd, going)
    look(store)
    assert store.jobs == {}


def test_a_namespace_that_refuses_the_job_holds_up_no_other_and_is_tried_again() -> None:
    store = Store(model("a"), model("a", "vision"))
    store.refuses = "ml"
    collector = Collector(store, DAILY, JobPolicy(), "worker:1", "inst", lambda: 1e9)
    asyncio.run(collector.look())
    assert [t.namespace for t in store.tasks()] == ["vision"]
    store.refuses = ""
    asyncio.run(collector.look())
    assert {t.namespace for t in store.tasks()} == {"ml", "vision"}


def test_models_are_listed_once_in_an_interval_and_again_only_while_a_job_of_it_is_missing() -> None:
    store = Store(model("a"), model("a", "vision"))
    store.refuses = "ml"
    now = [1e9]
    collector = Collector(store, DAILY, JobPolicy(), "worker:1", "inst", lambda: now[0])

    async def looks(times: int) -> int:
        before = store.lists
        for _ in range(times):
            await collector.look()
            now[0] += 300
        return store.lists - before

    assert asyncio.run(looks(3)) == 3
    store.refuses = ""
    assert asyncio.run(looks(9)) == 1
    assert len(store.jobs) == 2
    now[0] += 24 * HOUR
    assert asyncio.run(looks(9)) == 1
    assert len(store.jobs) == 4


def test_a_model_that_is_shown_twice_or_in_another_order_makes_the_same_job() -> None:
    """A list whose continuation expired is read again from its start."""
    models = [model("b", build__deadline="24h", serving__image="b:1"), model("a", serving__image="a:1")]
    once, twice = Store(*reversed(models)), Store(*models, *models)
    for store in (once, twice):
        look(store, CollectPolicy(24 * HOUR, grace=0))
    assert once.jobs == twice.jobs
    (job,) = once.jobs.values()
    assert job["spec"]["template"]["spec"]["containers"][0]["image"] == "a:1"
    assert once.tasks()[0].grace_seconds == 25 * HOUR


def test_thousands_of_models_are_never_held_at_once() -> None:
    class Held(dict[str, Any]):
        """A document that can be counted."""

    class Large(Store):
        most = 0

        async def models(self, see: Callable[[Json], None]) -> None:
            for n in range(500):
                see(Held(copy.deepcopy(model(f"m{n}"))))
                if n % 100 == 99:
                    self.most = max(self.most, sum(isinstance(o, Held) for o in gc.get_objects()))

    store = Large()
    look(store)
    assert store.most <= 1
    assert len(store.jobs) == 1


def test_the_job_has_the_models_access_to_the_bucket_no_owner_and_stays_until_the_next_one() -> None:
    store = Store(model("a", storage__credentialsSecret="s3", serving__pod={"serviceAccountName": "reader"}))
    look(store, CollectPolicy(7 * 24 * HOUR))
    (job,) = store.jobs.values()
    pod = job["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "reader"
    assert [v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v] == ["s3"]
    assert pod["priorityClassName"] == "low"
    assert "ownerReferences" not in job["metadata"]
    assert job["spec"]["ttlSecondsAfterFinished"] == 7 * 24 * HOUR
    assert "trtmodel.io/model" not in job["metadata"]["labels"], "it is of no TRTModel: no pass is called for"


# ---------------------------------------------------------------------------------------------------------------
# Settings
# ---------------------------------------------------------------------------------------------------------------

NEEDED = {"TRTMODEL_WORKER_IMAGE": "worker:1", "TRTMODEL_NAMESPACE": "ops"}


def test_the_collector_is_off_by_default_and_when_on_removes_nothing() -> None:
    found = from_environment(NEEDED)
    assert (found.collect_every_hours, found.collect_delete, found.collect_grace_hours) == (0, False, 48)
    found = from_environment({**NEEDED, "TRTMODEL_COLLECT_EVERY_HOURS": "24", "TRTMODEL_COLLECT_DELETE": "True"})
    assert (found.collect_every_hours, found.collect_delete) == (24, True)


def test_a_setting_of_the_collector_that_is_not_understood_is_named() -> None:
    wrong = {"COLLECT_EVERY_HOURS": "-1", "COLLECT_DELETE": "maybe", "COLLECT_GRACE_HOURS": "1d"}
    with pytest.raises(SettingsError) as e:
        from_environment(NEEDED | {f"TRTMODEL_{name}": value for name, value in wrong.items()})
    assert not [name for name in wrong if name not in str(e.value)]
