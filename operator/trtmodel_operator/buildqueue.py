"""Builds take turns: of the Jobs that were made suspended, as many begin as the operator lets run at a time.

Whose turn it is stands in the cluster alone (`spec.suspend`), so that another leader goes on where this one ended. A
Job that waits for a node holds its place: it was let run. With no limit every suspended build begins, also those that
were made under a former limit.

The same look finds orphans: Jobs whose owners were taken away from them by hand, which no garbage collector removes.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from trtmodel_operator.adapters.informer import has_ended
from trtmodel_operator.manifests import KIND, LABEL_KIND
from trtmodel_operator.model import JobKind
from trtmodel_operator.ports import ClusterError, Conflict, Json, Key

EVERY = 30.0  # seconds between two looks that nothing called for
RARELY = 300.0  # the same where no limit is set: only orphans are looked for, and builds of a former limit
LEAST = 1.0  # seconds between two looks
REFUSED_MOST = 10  # in one look: a webhook that is down may take its time for each
REFUSED_LAST = 300.0  # seconds for which all others go before a build that was refused
NO_ANSWER = (0, 504)  # of a ClusterError: what was asked for may have been done all the same
ORPHAN_AGE = 600.0  # seconds: a Job is given its owners when it is made, so a young one has them

log = logging.getLogger(__name__)


class JobStore(Protocol):
    async def unfinished_jobs(self) -> list[Json]: ...

    async def resume_job(self, job: Json) -> None:
        """Raises Conflict if it changed since it was read."""
        ...

    async def remove_job(self, job: Json) -> None:
        """Raises Conflict if it changed since it was read."""
        ...


def turns(jobs: Sequence[Json], most: int, late: Collection[Key] = ()) -> list[Json]:
    """The suspended builds that may begin now; `most` run at a time, 0 for no limit. A place goes to the namespace that
    has the fewest, there to the oldest: a team that asks for fifty builds holds up nobody who asks for one. Those that
    are `late` go last, in that order."""
    order = {key: n for n, key in enumerate(late, 1)}
    builds = [j for j in jobs if _is_active_build(j)]
    waiting = sorted((j for j in builds if _suspended(j)), key=lambda j: (j["metadata"]["creationTimestamp"], _key(j)))
    running = Counter(j["metadata"]["namespace"] for j in builds if not _suspended(j))
    free = len(waiting) if most == 0 else max(0, most - running.total())
    chosen: list[Json] = []
    while waiting and len(chosen) < free:
        # Of equal ones the oldest.
        first = min(waiting, key=lambda j: (order.get(_key(j), 0), running[j["metadata"]["namespace"]]))
        waiting.remove(first)
        running[first["metadata"]["namespace"]] += 1
        chosen.append(first)
    return chosen


def orphans(jobs: Sequence[Json], now: float) -> list[Json]:
    """Jobs that run for nobody."""
    found = []
    for job in jobs:
        owners = job["metadata"].get("ownerReferences") or ()
        made = datetime.datetime.fromisoformat(job["metadata"]["creationTimestamp"]).timestamp()
        if _label(job, LABEL_KIND) == JobKind.COLLECT.value:
            continue  # it never has an owner, and ends by its deadline
        if not any(o.get("kind") == KIND for o in owners) and not _ended(job) and now - made > ORPHAN_AGE:
            found.append(job)
    return found


class BuildQueue:
    """Looks every half minute, and at once when it is told that something about a build changed; rarely without a
    limit. `counted` is told how many builds run and wait."""

    def __init__(
        self,
        store: JobStore,
        most: int,
        now: Callable[[], float],
        counted: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        self._store, self._most, self._now, self._counted = store, most, now, counted
        self._called = asyncio.Event()
        self._refused: dict[Key, float] = {}  # builds that the API server did not let begin, and when; oldest first

    def call(self) -> None:
        """Something about a Job changed. Without a limit that calls for nothing."""
        if self._most:
            self._called.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            self._called.clear()
            try:
                await self.look()
            except ClusterError as e:
                log.warning("builds that wait for their turn: %s", e)
            await asyncio.sleep(LEAST)
            try:
                async with asyncio.timeout(EVERY if self._most else RARELY):
                    await self._called.wait()
            except TimeoutError:
                pass

    async def look(self) -> None:
        """One Job that cannot be changed holds up no other. Raises ClusterError if they cannot be listed, or if nobody
        knows whether one began."""
        jobs = await self._store.unfinished_jobs()
        active = [job for job in jobs if _is_active_build(job)]
        waiting = sum(map(_suspended, active))
        self._counted(len(active) - waiting, waiting)
        for job in orphans(jobs, self._now()):
            log.warning("Job %s runs for no TRTModel any more: it is removed", "/".join(_key(job)))
            if await self._removed(job) or _suspended(job):
                jobs.remove(job)  # one that runs and cannot be removed keeps its place
        await self._begin(jobs)

    async def _begin(self, jobs: list[Json]) -> None:
        """Those whose turn it is; in place of one that the API server refuses the next one."""
        waiting = {_key(job) for job in jobs if _suspended(job)}
        self._refused = {key: at for key, at in self._refused.items() if key in waiting}
        if self._refused and self._now() - next(iter(self._refused.values())) > REFUSED_LAST:
            del self._refused[next(iter(self._refused))]  # one in a look, so that many refused ones hold up nobody
        refused = 0
        while chosen := turns(jobs, self._most, self._refused):
            tried = {_key(job) for job in chosen}
            jobs = [job for job in jobs if _key(job) not in tried]
            for job in chosen:
                log.info("it is the turn of build %s", "/".join(_key(job)))
                try:
                    await self._store.resume_job(job)
                except Conflict:
                    self._called.set()  # somebody else was faster: look again
                except ClusterError as e:
                    self._refused.pop(_key(job), None)
                    self._refused[_key(job)] = self._now()
                    if e.status in NO_ANSWER:
                        raise
                    log.warning("build %s cannot begin, and others go before it: %s", "/".join(_key(job)), e)
                    refused += 1
                    if refused == REFUSED_MOST:
                        return
                    continue
                jobs.append({**job, "spec": {**job["spec"], "suspend": False}})

    async def _removed(self, job: Json) -> bool:
        try:
            await self._store.remove_job(job)
        except Conflict:
            self._called.set()  # somebody else was faster: look again
            return False
        except ClusterError as e:
            log.warning("Job %s, which runs for nobody, cannot be removed: %s", "/".join(_key(job)), e)
            return False
        return True


def _key(job: Json) -> Key:
    return job["metadata"]["namespace"], job["metadata"]["name"]


def _label(job: Json, name: str) -> str:
    return str((job["metadata"].get("labels") or {}).get(name, ""))


def _is_active_build(job: Json) -> bool:
    return _label(job, LABEL_KIND) == JobKind.BUILD.value and not _ended(job)


def _suspended(job: Json) -> bool:
    return bool((job.get("spec") or {}).get("suspend"))


def _ended(job: Json) -> bool:
    return has_ended(job) or "deletionTimestamp" in job["metadata"]
