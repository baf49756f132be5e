"""Room in memory for the engine that is being prepared: asked for, made, or refused (the rules are in memory.py).

short of memory --> the standby goes
                --> or this worker leaves service: not ready, still answering until the endpoints know
                    --> everything is unloaded --> the new engine is loaded, and routed to
                                               `-> it fails: the retreat, what answered before, is loaded again
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from trtmodel_contract.control import MemoryReport, Role
from trtmodel_contract.manifest import Manifest, MemoryNeed

from trtmodel_worker.front.artifacts import Refused
from trtmodel_worker.front.entry import Entry
from trtmodel_worker.front.memory import Action, Free, Situation, decide_memory, need_of
from trtmodel_worker.front.router import Router

log = logging.getLogger(__name__)
_RETURN_SECONDS = 5.0  # what was unloaded gives its memory back within so long: a driver takes a moment
_POLL_SECONDS = 0.1
_QUIET_SECONDS = 1.0  # without a request: whoever is routed by endpoints has taken note
_MOST_WAIT_SECONDS = 15.0  # for that: clients that know the worker's own address never will


class Rests(Exception):
    """The engine is left unloaded, and that is no failure. The text says why."""


@dataclass(frozen=True)
class MemoryRules:
    """`policy`, `allow_downtime`, `hosts` and `lanes` are the settings' (0 lanes: `contexts: Auto` finds out how many
    there is room for). `leave_seconds`: how long at least a worker that leaves service still answers, since endpoints
    lag behind. `free`: what is free now. `batches`: how many were run so far."""

    policy: str
    allow_downtime: bool
    hosts: int
    lanes: int
    leave_seconds: float
    free: Callable[[], Awaitable[Free]]
    batches: Callable[[], int]


@dataclass(frozen=True)
class Asked:
    """What is asked of memory for one engine. `wanted`: it is to answer alone. `shares`: it is to run beside another
    one, for a share of the requests or as a shadow. `may_drain`: the operator says that others serve."""

    wanted: bool
    shares: bool
    may_drain: bool


class Room:
    """`leaving`: the worker should get no more requests, for it is about to unload what answers them. `retreat`: what
    answered until then, to be loaded again if nothing else comes to stand. `report`: the last decision."""

    def __init__(
        self,
        rules: MemoryRules,
        router: Router,
        entries: Callable[[], list[Entry]],
        unload: Callable[[Entry], asyncio.Task[None]],
        on_change: Callable[[], None],
    ) -> None:
        self.leaving = False
        self.retreat: Entry | None = None
        self.report: MemoryReport | None = None
        self._rules = rules
        self._router = router
        self._entries = entries
        self._unload = unload
        self._on_change = on_change

    async def make(self, entry: Entry, manifest: Manifest, asked: Callable[[], Asked]) -> None:
        """Returns when `entry` may be loaded. Raises Refused (NoMemory), or Rests."""
        spare = 1 if self._rules.lanes else 0  # which TensorRT has below version 9; what is unloaded may have had none
        need = need_of(manifest, self._rules.hosts, self._rules.lanes + spare)
        patience, made = 0.0, False
        while True:
            free = await self._rules.free()
            verdict = decide_memory(self._rules.policy, need, free, self._situation(entry, asked()))
            if not made or verdict.action is Action.REFUSE:
                self._say(MemoryReport(verdict.policy, verdict.reason, need.host_bytes, need.device_bytes,
                                       free.host_bytes, free.device_bytes))  # fmt: skip
            if verdict.action is Action.LOAD:
                return
            if made and time.monotonic() < patience:
                await asyncio.sleep(_POLL_SECONDS)
                continue
            if verdict.action is Action.REFUSE:
                raise Refused("NoMemory", verdict.reason, transient=True)
            if verdict.action is Action.REST:
                raise Rests(verdict.reason)
            log.info("room for revision %s: %s", entry.artifact.revision, verdict.reason)
            if verdict.action is Action.RELEASE_STANDBY:
                await self._give_up(self._standbys(), f"it made room for revision {entry.artifact.revision}")
            else:
                await self._leave_service(entry)
            patience, made = time.monotonic() + _RETURN_SECONDS, True

    def stands(self) -> None:
        """Something is routed to: there is nothing to go back to."""
        self.retreat = None

    async def _leave_service(self, entry: Entry) -> None:
        self.leaving = True
        self._on_change()
        await self._until_nobody_comes()
        table = self._router.table
        if table is not None:
            answering = table.candidate if table.candidate is not None and table.weight >= 100 else table.stable
            self.retreat = next((e for e in self._entries() if e.engine is answering), None)
        self._router.unroute()
        loaded = [e for e in self._entries() if e.engine is not None and e is not entry]
        await self._give_up(loaded, f"memory holds one engine, and revision {entry.artifact.revision} is loaded")

    async def _until_nobody_comes(self) -> None:
        """A probe has to fail twice, and then endpoints and proxies follow: on a busy node that took longer than any
        time that is right for a quiet one, and requests met a worker without an engine."""
        await asyncio.sleep(self._rules.leave_seconds)
        over = time.monotonic() + _MOST_WAIT_SECONDS
        seen, quiet_from = self._rules.batches(), time.monotonic()
        while quiet_from + _QUIET_SECONDS > time.monotonic() < over:
            await asyncio.sleep(_POLL_SECONDS)
            if (now := self._rules.batches()) != seen:
                seen, quiet_from = now, time.monotonic()

    async def _give_up(self, entries: list[Entry], why: str) -> None:
        for entry in entries:
            entry.rest(why, again=entry.role is Role.STANDBY)
        if entries:
            await asyncio.wait([self._unload(e) for e in entries])  # which goes on if nobody waits for it any more

    def _situation(self, entry: Entry, asked: Asked) -> Situation:
        standbys = self._standbys()
        serving = [e for e in self._entries() if e.engine is not None and not e.hopeless and e not in standbys]
        return Situation(
            serving=self._sum(serving),
            standby=self._sum([e for e in standbys if e is not entry]),
            role=entry.role,
            wanted=asked.wanted,
            shares=asked.shares,
            may_leave=asked.may_drain or self._rules.allow_downtime,
        )

    def _standbys(self) -> list[Entry]:
        """Those that do not answer now."""
        table = self._router.table
        routed = table.engines() if table is not None else ()
        return [e for e in self._entries() if e.role is Role.STANDBY and e.engine and e.engine not in routed]

    def _say(self, report: MemoryReport) -> None:
        if report != self.report:
            self.report = report
            self._on_change()

    def _sum(self, entries: list[Entry]) -> MemoryNeed | None:
        rules = self._rules
        needs = [need_of(e.engine.manifest, rules.hosts, rules.lanes) for e in entries if e.engine is not None]
        if not needs:
            return None
        return MemoryNeed(sum(n.device_bytes for n in needs), sum(n.host_bytes for n in needs))
