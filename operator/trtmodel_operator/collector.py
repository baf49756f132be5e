"""Starts the collector: a Job for each bucket that TRTModels of a namespace name, once in an interval. Off by default.

A Job is named after its interval of time, counted from the epoch, so that no restart and no second operator makes one
more. What it removes, and what it never does, is written in the worker's `builder/collect.py`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from trtmodel_contract.codec import canonical, encode
from trtmodel_contract.identity import short_hash
from trtmodel_contract.jobs import CollectTask

from trtmodel_operator import manifests
from trtmodel_operator import spec as specs
from trtmodel_operator.fields import SpecError
from trtmodel_operator.model import CreateJob, JobKind, Spec
from trtmodel_operator.ports import ClusterError, Conflict, Json

LOOK = 300.0  # seconds between two looks: how late a Job is at most
BUILT_BY = 3600  # seconds that a build may take to publish after its deadline has ended it

log = logging.getLogger(__name__)


class ModelStore(Protocol):
    async def models(self, see: Callable[[Json], None]) -> None:
        """Shows every TRTModel in the namespaces that are watched, some of them twice: thousands are never held."""
        ...

    async def create_job(self, manifest: Json) -> None: ...


@dataclass(frozen=True)
class CollectPolicy:
    """`every` seconds a Job, 0 for none at all. Without `delete` it only says what would go. `grace` in seconds: what
    is younger stays."""

    every: int = 0
    delete: bool = False
    grace: int = 172800


@dataclass(frozen=True)
class _Place:
    """A bucket as a namespace names it. `name` and `spec` are the first TRTModel's by name, `longest` is what any build
    there may take."""

    namespace: str
    name: str
    spec: Spec
    longest: int


class Collector:
    """`image` is that of Jobs of models that name none, `installation` what this operator's pins are written under."""

    def __init__(
        self,
        store: ModelStore,
        policy: CollectPolicy,
        job_policy: manifests.JobPolicy,
        image: str,
        installation: str,
        now: Callable[[], float],
    ) -> None:
        self._store, self._policy, self._job_policy = store, policy, job_policy
        self._image, self._installation, self._now = image, installation, now
        self._made: set[str] = set()
        self._done = -1  # the interval that has all its Jobs: nothing is listed before the next one

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            if self._policy.every:
                try:
                    await self.look()
                except (ClusterError, Conflict) as e:
                    log.warning("collector: %s", e)
            await asyncio.sleep(min(LOOK, self._policy.every or LOOK))

    async def look(self) -> None:
        """Makes the Jobs of this interval. One that the API server refuses is tried again with the next look. Raises
        ClusterError if the TRTModels cannot be listed."""
        turn = int(self._now() // self._policy.every)
        if turn == self._done:
            return
        places: dict[str, _Place] = {}
        await self._store.models(lambda raw: _enter(places, raw))
        in_order = sorted(places.items(), key=lambda place: (place[1].namespace, place[1].name))
        wanted = {f"{place}-{turn}": self._job(place, turn, there) for place, there in in_order}
        self._made &= wanted.keys()
        for name, manifest in wanted.items():
            if name in self._made:
                continue
            try:
                await self._store.create_job(manifest)
            except (ClusterError, Conflict) as e:
                log.warning("collector for namespace %s: %s", manifest["metadata"]["namespace"], e)
                continue
            self._made.add(name)
            log.info("collector: Job %s/%s", manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        if wanted.keys() <= self._made:
            self._done = turn

    def _job(self, place: str, turn: int, there: _Place) -> Json:
        spec = there.spec
        task = CollectTask(
            there.namespace,
            spec.storage,
            self._installation,
            delete=self._policy.delete,
            grace_seconds=max(self._policy.grace, there.longest + BUILT_BY),
        )
        name = f"collect-{place}-{turn}"
        create = CreateJob(name, JobKind.COLLECT, spec.targets[0], task, spec.serving.image or self._image)
        policy = dataclasses.replace(self._job_policy, keep=max(manifests.JOB_TTL, self._policy.every))
        return manifests.collector_job(there.namespace, spec, create, policy)


def _enter(places: dict[str, _Place], raw: Json) -> None:
    """In any order, and again: the outcome is the same."""
    namespace, name = raw["metadata"]["namespace"], raw["metadata"]["name"]
    if "deletionTimestamp" in raw["metadata"]:
        return
    try:
        spec = specs.parse(raw.get("spec"))
    except SpecError:
        return  # its own status says so; what it has pinned stays all the same
    place = short_hash(namespace, canonical(encode(spec.storage)).decode())
    held = places.setdefault(place, _Place(namespace, name, spec, spec.build.deadline))
    first = held if held.name <= name else _Place(namespace, name, spec, 0)
    places[place] = dataclasses.replace(first, longest=max(held.longest, spec.build.deadline))
