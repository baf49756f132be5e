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
    async def models(self) -> list[Json]:
        """Every TRTModel in the namespaces that are watched."""
        ...

    async def create_job(self, manifest: Json) -> None: ...


@dataclass(frozen=True)
class CollectPolicy:
    """`every` seconds a Job, 0 for none at all. Without `delete` it only says what would go. `grace` in seconds: what
    is younger stays."""

    every: int = 0
    delete: bool = False
    grace: int = 172800


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
        wanted = dict(self._jobs(await self._store.models(), turn))
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

    def _jobs(self, models: list[Json], turn: int) -> list[tuple[str, Json]]:
        places: dict[str, tuple[str, list[Spec]]] = {}
        for raw in sorted(models, key=lambda m: (m["metadata"]["namespace"], m["metadata"]["name"])):
            namespace = raw["metadata"]["namespace"]
            try:
                spec = specs.parse(raw.get("spec"))
            except SpecError:
                continue  # its own status says so; what it has pinned stays all the same
            if "deletionTimestamp" not in raw["metadata"]:
                place = short_hash(namespace, canonical(encode(spec.storage)).decode())
                places.setdefault(place, (namespace, []))[1].append(spec)
        return [(f"{place}-{turn}", self._job(place, turn, *those)) for place, those in places.items()]

    def _job(self, place: str, turn: int, namespace: str, specs_there: list[Spec]) -> Json:
        spec = specs_there[0]
        longest = max(s.build.deadline for s in specs_there)
        task = CollectTask(
            namespace,
            spec.storage,
            self._installation,
            delete=self._policy.delete,
            grace_seconds=max(self._policy.grace, longest + BUILT_BY),
        )
        name = f"collect-{place}-{turn}"
        create = CreateJob(name, JobKind.COLLECT, spec.targets[0], task, spec.serving.image or self._image)
        policy = dataclasses.replace(self._job_policy, keep=max(manifests.JOB_TTL, self._policy.every))
        return manifests.collector_job(namespace, spec, create, policy)
