"""Leader election by a Lease, with client-go's timing and rules.

The Lease keeps two operators from doing the same work; it does not make effects safe. That is what the sequence in
.status.rollout is for: a leader that was paused and wakes up too late is stopped by preconditions and fences. Before
that it is stopped here: who could not renew lately sends nothing more (`expired`), not even what it was about to send.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import time
from collections.abc import Callable
from typing import Protocol

from trtmodel_operator.ports import NO_RIGHT, ClusterError, Conflict, Json

DURATION = 15.0  # seconds: a holder that has not renewed for so long may be replaced
RENEW_DEADLINE = 10.0  # a leader that could not renew for so long ends itself, before another may begin
RETRY_PERIOD = 2.0
IDLE = 60.0  # seconds without any try to become the leader, after which one that stands by is of no use

log = logging.getLogger(__name__)


class LeaseStore(Protocol):
    """Raises Conflict when the Lease was written since it was read (or created by another), ClusterError otherwise."""

    async def get_lease(self, namespace: str, name: str) -> Json | None: ...

    async def create_lease(self, lease: Json) -> Json: ...

    async def replace_lease(self, lease: Json) -> Json: ...


class Lease:
    """`identity` must differ for every process, also for two lives of one pod. Times in seconds, of a monotonic clock:
    the clocks of two machines are never compared, a holder is judged by whether its record *changes*."""

    def __init__(
        self,
        store: LeaseStore,
        namespace: str,
        name: str,
        identity: str,
        *,
        duration: float = DURATION,
        renew_deadline: float = RENEW_DEADLINE,
        retry_period: float = RETRY_PERIOD,
        now: Callable[[], float] = time.monotonic,
        lost: Callable[[], None] = lambda: os._exit(1),
    ) -> None:
        self._store, self._namespace, self._name, self.identity = store, namespace, name, identity
        self._duration, self._renew_deadline, self._retry_period = duration, renew_deadline, retry_period
        self._now, self._lost = now, lost
        self._record: Json | None = None  # the spec as last seen, and since when it is like that
        self._seen_at = 0.0
        self._held: Json | None = None  # the whole Lease after our last write of it
        self._renewed: float | None = None  # None: never
        self._tried: float | None = None  # to become the leader; None: not begun
        self._refused = ""
        self._released = False
        self.holder = ""

    async def acquire(self) -> None:
        """Returns when this process is the leader. It looks twice as often as a leader renews, so that a Lease that was
        let go is found within a second."""
        while True:
            self._tried = self._now()
            try:
                leads = await self._try()
                self._refused = ""
                if leads:
                    return
            except (ClusterError, Conflict, TimeoutError) as e:
                self._note(e)
                log.warning("lease not acquired yet: %s", str(e) or "no answer in time")
            await asyncio.sleep(self._retry_period / 2)

    async def hold(self) -> None:
        """Renews for ever. When that failed until the deadline, `lost` is called: it ends the process at once, since
        a graceful stop would go on acting beside the next leader."""
        while True:
            await asyncio.sleep(self._retry_period)
            try:
                async with asyncio.timeout(max(0.0, self._renew_deadline - self._silence())):
                    await self._renew()
                self._refused = ""
            except (ClusterError, Conflict, TimeoutError) as e:
                self._note(e)
                log.warning("lease not renewed: %s", str(e) or "no answer in time")
            if self.expired() or self.holder not in ("", self.identity):
                log.error("not renewed for %.1f s, held by %r: this process ends now", self._silence(), self.holder)
                self._lost()
                return

    def expired(self) -> bool:
        """Whether another may lead by now, or soon: from then on nothing must be sent any more. The clock goes on while
        the process stands still."""
        return self._released or self._silence() >= self._renew_deadline

    def trouble(self) -> str:
        """Why this leader is none any more, or would never become one, although its process lives; '' if it leads or
        stands by. An API server that does not answer is no trouble of one that stands by: it asks again."""
        if self._renewed is None and self._tried is not None and (idle := self._now() - self._tried) > IDLE:
            return f"the lease was not asked for for {idle:.0f} s"
        return f"the lease was not renewed for {self._silence():.0f} s" if self.expired() else ""

    def refused(self) -> dict[str, str]:
        """What the API server says to who may not read or write the Lease, by its kind; empty if it may."""
        return {"Lease": self._refused} if self._refused else {}

    def _note(self, error: Exception) -> None:
        self._refused = str(error) if isinstance(error, ClusterError) and error.status in NO_RIGHT else ""

    def _silence(self) -> float:
        return 0.0 if self._renewed is None else self._now() - self._renewed

    async def release(self) -> None:
        """Lets the next one begin at once. Only a holder releases; a failure costs the others `duration` seconds. From
        here on nothing may be sent, whatever is left of this process."""
        self._released = True
        try:
            async with asyncio.timeout(self._retry_period * 2):
                lease = await self._store.get_lease(self._namespace, self._name)
                if lease is not None and lease["spec"].get("holderIdentity") == self.identity:
                    lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _timestamp()}
                    await self._store.replace_lease(lease)
        except (ClusterError, Conflict, TimeoutError) as e:
            log.warning("lease not released: %s", str(e) or "no answer in time")

    async def _renew(self) -> None:
        """With one call, on what was written last; only if somebody else wrote in between, it is read."""
        if self._held is not None:
            try:
                await self._write({**self._held, "spec": self._mine(self._held["spec"])})
                return
            except Conflict:
                self._held = None
            except ClusterError:
                self._held = None  # it may be gone: the next time it is read first
                raise
        await self._try()

    async def _try(self) -> bool:
        lease = await self._store.get_lease(self._namespace, self._name)
        if lease is None:
            metadata = {"namespace": self._namespace, "name": self._name}
            created = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
            started = self._now()
            self._took(await self._store.create_lease(created | {"spec": self._mine(None)}), started)
            return True
        spec = lease.get("spec") or {}
        self._remember(spec)
        if self.holder not in ("", self.identity) and self._now() < self._seen_at + self._duration:
            return False
        await self._write({**lease, "spec": self._mine(spec)})
        return True

    async def _write(self, lease: Json) -> None:
        started = self._now()
        self._took(await self._store.replace_lease(lease), started)

    def _took(self, lease: Json, started: float) -> None:
        """It is ours since the write was sent, not since its answer came."""
        self._held, self._renewed = lease, started
        self._remember(lease["spec"])

    def _remember(self, spec: Json) -> None:
        if spec != self._record:
            self._record, self._seen_at = spec, self._now()
        self.holder = spec.get("holderIdentity") or ""

    def _mine(self, previous: Json | None) -> Json:
        spec = dict(previous or {})
        if spec.get("holderIdentity") != self.identity:
            spec["acquireTime"] = _timestamp()
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + (1 if previous else 0)
        return spec | {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": max(1, round(self._duration)),
            "renewTime": _timestamp(),
        }


def _timestamp() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
