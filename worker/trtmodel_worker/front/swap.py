"""Changing engines under traffic.

    desired state --> prepare what is missing, one at a time, beside what serves: stable, candidate, then standby
                  --> room in memory: beside what serves, or this worker leaves service for it (room.py)
                  --> flip: one assignment, as soon as what is to be routed is ready
                  --> release what is neither listed nor routed, after its last request

A preparation that fails leaves everything as it was. What is routed stays until its successor is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from trtmodel_contract.control import (
    DesiredEngine,
    DesiredModel,
    EngineReport,
    EngineState,
    Role,
    Routes,
    SignedArtifact,
)
from trtmodel_contract.manifest import Manifest

from trtmodel_worker.front.artifacts import Refused
from trtmodel_worker.front.engine import Engine
from trtmodel_worker.front.entry import Entry
from trtmodel_worker.front.hostproc import HostFailed
from trtmodel_worker.front.room import Asked, MemoryRules, Rests, Room
from trtmodel_worker.front.router import WHOLE, Router, Table
from trtmodel_worker.front.windows import Windows
from trtmodel_worker.host.arena import Unservable

log = logging.getLogger(__name__)
_URGENCY = {Role.STABLE: 0, Role.CANDIDATE: 1, Role.STANDBY: 3}
_RETREAT_URGENCY = 2
_HOST_TRIES = 3  # a host that crashes while it loads is tried so often


@dataclass(frozen=True)
class Flip:
    """The last change of routes: how long it took, and when it was (seconds since the epoch)."""

    seconds: float
    at: float


Progress = Callable[[EngineState], None]
MakeRoom = Callable[[Manifest], Awaitable[None]]
Load = Callable[[SignedArtifact, Progress, MakeRoom], Awaitable[Engine]]
"""Authorize, fetch, wait for room in memory, start. Raises Refused, Rests, Unservable or HostFailed; then nothing of it
is left."""


class Swapper:
    """Holds what is wanted and works towards it. `on_change` is called for everything that a report shows."""

    def __init__(
        self,
        router: Router,
        windows: Windows,
        load: Load,
        drain_seconds: float,
        on_change: Callable[[], None],
        tidy: Callable[[], Awaitable[None]],
        memory: MemoryRules,
    ) -> None:
        self.flipped: Flip | None = None
        self.room = Room(memory, router, lambda: list(self._entries.values()), self._unload, on_change)
        self._router = router
        self._windows = windows
        self._load = load
        self._drain_seconds = drain_seconds
        self._on_change = on_change
        self._tidy = tidy
        self._entries: dict[str, Entry] = {}
        self._wanted: DesiredModel | None = None
        self._candidate_until = float("inf")
        self._expiry: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()
        self._preparing: tuple[Entry, asyncio.Task[None]] | None = None
        self._releases: set[asyncio.Task[None]] = set()

    def want(self, model: DesiredModel, candidate_ttl: float | None) -> None:
        """Work towards `model`. Without renewal, its candidate is routed to for `candidate_ttl` seconds (None: for
        good)."""
        for engine in model.engines:
            self._list(engine)
        changed = self._wanted is None or _without_windows(model) != _without_windows(self._wanted)
        for entry in self._entries.values():
            entry.asked_anew(changed=changed)
        self._wanted = model
        if model.window != self._windows.current:
            self._windows.roll(model.window, model.baseline)
        self._on_change()
        self.renew(candidate_ttl)
        if self._preparing is not None and self._yields(self._preparing[0]):
            self._preparing[1].cancel()
        self._wake.set()

    def renew(self, candidate_ttl: float | None) -> None:
        """The candidate's time to live starts again. When it is over, stable alone is routed to."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        self._candidate_until = float("inf")
        if candidate_ttl is not None:
            self._candidate_until = time.monotonic() + candidate_ttl
            self._expiry = asyncio.get_running_loop().call_later(candidate_ttl + 0.001, self.settle)
        self.settle()

    @property
    def synthetic(self) -> int:
        """How many attempts each routed engine should have in the window; 0: those that come by themselves."""
        return self._wanted.synthetic if self._wanted is not None else 0

    def report(self) -> tuple[EngineReport, ...]:
        return tuple(entry.report() for entry in self._entries.values())

    @property
    def standing(self) -> Engine | None:
        """The engine that answers as stable now."""
        return self._router.table.stable if self._router.table else None

    @property
    def trouble(self) -> str:
        """Why the wanted stable does not serve, '' if it does or is on its way."""
        entry = self._entries.get(self._wanted.routes.stable) if self._wanted else None
        if entry is None:
            return ""
        report = entry.report()
        return f"{report.reason}: {report.message}" if report.state is EngineState.FAILED else ""

    def digests(self) -> set[str]:
        """Manifests of all engines that are held or wanted."""
        return set(self._entries)

    async def run(self) -> None:
        """Work until cancelled; then everything is released."""
        try:
            while True:
                self.settle()
                timeout = await self._step()
                await self._tidy()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), timeout)
                self._wake.clear()
        finally:
            if self._preparing is not None:
                self._preparing[1].cancel()
                await asyncio.wait({self._preparing[1]})
            entries, self._entries = list(self._entries.values()), {}
            for entry in entries:
                self._unload(entry)
            await asyncio.gather(*self._releases, return_exceptions=True)

    async def _step(self) -> float | None:
        """Prepare the next engine that is due. Returns the seconds until something is due."""
        while True:
            now = time.monotonic()
            waiting = [(e, self._due(e)) for e in self._entries.values() if self._may_start(e)]
            moments = [(due, e) for e, due in waiting if due is not None]
            entry = min((e for due, e in moments if due <= now), key=self._urgency, default=None)
            if entry is None:
                return max(0.0, min(due for due, _ in moments) - now) + 0.01 if moments else None
            task = asyncio.create_task(self._prepare(entry))
            self._preparing = (entry, task)
            await asyncio.wait({task})
            self._preparing = None
            if task.cancelled():
                continue
            task.result()
            self._wake.clear()
            self.settle()

    def _due(self, entry: Entry) -> float | None:
        """When to load it, None if it is there or is left alone. What rests comes when it is its turn to answer."""
        if entry.engine is not None:
            return None
        if entry.rests and (entry is self._foremost() or (entry is self.room.retreat and self.standing is None)):
            return 0.0
        return entry.due

    def _urgency(self, entry: Entry) -> int:
        return _RETREAT_URGENCY if entry is self.room.retreat else _URGENCY[entry.role]

    def _foremost(self) -> Entry | None:
        """The engine that is to answer if memory holds no other: the candidate, as long as there is hope for it."""
        candidate, stable = self._wanted_entries()
        in_time = time.monotonic() < self._candidate_until
        if candidate is not None and not candidate.hopeless and (candidate.engine is not None or in_time):
            return candidate
        if stable is not None and not stable.hopeless:
            return stable
        if self.standing is not None and self.standing.state is not EngineState.FAILED:
            return None
        return next((e for e in self._entries.values() if e.role is Role.STANDBY and not e.hopeless), None)

    def _wanted_entries(self) -> tuple[Entry | None, Entry | None]:
        """(candidate, stable) as they are asked for."""
        if self._wanted is None:
            return None, None
        listed = {e.role: e.artifact.manifest_digest for e in self._wanted.engines}
        digest = self._wanted.routes.candidate or listed.get(Role.CANDIDATE, "")
        return self._entries.get(digest), self._entries.get(self._wanted.routes.stable)

    def _asked(self, entry: Entry) -> Asked:
        wanted = self._wanted
        routes = wanted.routes if wanted is not None else Routes("")
        shares = entry.role is Role.CANDIDATE and (0 < routes.weight < WHOLE or routes.shadow > 0)
        return Asked(entry is self._foremost(), shares, wanted is not None and wanted.may_drain)

    def _may_start(self, entry: Entry) -> bool:
        """A standby takes no time from what serves, nor from what is to serve: it comes when a stable stands, or when
        the wanted one cannot; one that made room for another, when that one is not waited for any more."""
        if entry.role is not Role.STANDBY or self._wanted is None:
            return True
        if entry.rests and any(e.waits and e.role is not Role.STANDBY for e in self._entries.values()):
            return False
        if self.standing is not None:
            return True
        stable = self._entries.get(self._wanted.routes.stable)
        return stable is None or stable.tries >= _HOST_TRIES or stable.due is None

    def _yields(self, entry: Entry) -> bool:
        """What is being prepared is not wanted any more, or something more urgent is."""
        if self._entries.get(entry.digest) is not entry:
            return True
        return entry.role is Role.STANDBY and any(
            e.waits and e.role is not Role.STANDBY for e in self._entries.values()
        )

    async def _prepare(self, entry: Entry) -> None:
        first = entry.state is not EngineState.FAILED

        def progress(state: EngineState) -> None:
            if first:  # a failed one stays so in the report until it is ready: each try is no news
                entry.progress(state)
                self._on_change()

        started = time.monotonic()
        try:
            make_room = functools.partial(self.room.make, entry, asked=lambda: self._asked(entry))
            engine = await self._load(entry.artifact, progress, make_room)
        except Rests as e:
            entry.rest(str(e))
        except Refused as e:
            self._failed(entry, e.reason, e.message, again=e.transient)
        except Unservable as e:
            self._failed(entry, "Unservable", str(e), again=False)
        except HostFailed as e:
            self._failed(entry, e.reason, e.message, again=not e.refused)
        except Exception as e:
            log.exception("engine %s could not be prepared", entry.digest[:12])
            self._failed(entry, "InternalError", f"{type(e).__name__}: {e}", again=True)
        else:
            if self._entries.get(engine.digest) is not entry:
                await engine.close(0.0)  # nobody wants it any more
                return
            entry.loaded(engine, time.monotonic() - started)
            engine.on_change = self._engine_changed
            self._router.loaded[engine.digest] = engine
            log.info("revision %s is ready after %.3f s", engine.revision, entry.load_seconds)
        finally:
            self.room.leaving = False
        self._on_change()

    def _failed(self, entry: Entry, reason: str, message: str, *, again: bool) -> None:
        """After what answered was unloaded for it, it is not tried again by itself: that would be an outage each
        time."""
        retreat = self.room.retreat
        entry.outage = retreat is not None and retreat is not entry
        if retreat is not None and retreat is not entry:
            again, message = False, f"{message} (revision {retreat.artifact.revision} is loaded again)"
        entry.fail(reason, message, again=again)
        log.error("revision %s: %s: %s", entry.artifact.revision, reason, message)

    def _engine_changed(self) -> None:
        self.settle()
        self._wake.set()  # where one engine fails, it may be another one's turn
        self._on_change()

    def _list(self, wanted: DesiredEngine) -> None:
        digest = wanted.artifact.manifest_digest
        entry = self._entries.get(digest)
        if entry is None:
            self._entries[digest] = Entry(wanted.artifact, wanted.role)
        else:
            entry.role, entry.artifact = wanted.role, wanted.artifact

    def settle(self) -> None:
        """Route by what is ready and wanted now, and let go of the rest. Does nothing if nothing changed."""
        wanted = self._wanted
        if wanted is None:
            return
        started = time.perf_counter()
        table = self._target(wanted.routes)
        self._router.standby = self._standby()
        if table is not None and table != self._router.table:
            before = self._router.table
            self._router.flip(table)
            self.flipped = Flip(time.perf_counter() - started, time.time())
            for engine in before.engines() if before else ():
                engine.routed = False
            for engine in table.engines():
                engine.routed = engine is table.stable or table.weight > 0
                engine.hedges_elsewhere = engine is table.stable
            self.room.stands()
            log.info("routes: stable %s, candidate %s at %d %%", table.stable.revision,
                     table.candidate.revision if table.candidate else "none", table.weight)  # fmt: skip
            self._on_change()
        listed = {e.artifact.manifest_digest for e in wanted.engines}
        kept = {e.digest for e in self._router.table.engines()} if self._router.table else set()
        if self.room.retreat is not None:
            kept.add(self.room.retreat.digest)
        for digest in [d for d in self._entries if d not in listed and d not in kept]:
            self._unload(self._entries.pop(digest))

    def _released(self, task: asyncio.Task[None]) -> None:
        self._releases.discard(task)
        self._wake.set()  # its files may go

    def _target(self, routes: Routes) -> Table | None:
        """The table that should be in force, None if there can be none."""
        retreat = self.room.retreat
        stable = self._serving(routes.stable) or self.standing or (self._serving(retreat.digest) if retreat else None)
        if stable is None or stable.state is EngineState.FAILED:
            stable = self._standby() or stable
        if stable is None and retreat is not None:  # unloaded for a candidate, which answers alone then
            stable = self._candidate()
        if stable is None:
            return None
        entry = self._entries.get(stable.digest)
        if stable.digest != routes.stable and entry is not None and entry.role is Role.CANDIDATE:
            return Table(stable, stable, WHOLE)
        candidate = self._serving(routes.candidate) if time.monotonic() < self._candidate_until else None
        if candidate is None or candidate is stable or not (routes.weight or routes.shadow):
            return Table(stable)
        return Table(stable, candidate, routes.weight, routes.shadow)

    def _candidate(self) -> Engine | None:
        candidate, _ = self._wanted_entries()
        return candidate.engine if candidate is not None and candidate.engine and candidate.engine.alive else None

    def _serving(self, digest: str) -> Engine | None:
        """The engine, if it is ready, or routed to already and being repaired."""
        entry = self._entries.get(digest)
        engine = entry.engine if entry else None
        if engine is None or engine.state is EngineState.FAILED:
            return None
        return engine if engine.alive or engine.routed else None

    def _standby(self) -> Engine | None:
        """Better an old engine than none."""
        return next(
            (e.engine for e in self._entries.values() if e.role is Role.STANDBY and e.engine and e.engine.alive), None
        )

    def _unload(self, entry: Entry) -> asyncio.Task[None]:
        """From now on the engine is nobody's to route to. The task ends when nothing of it is left."""
        engine, entry.engine = entry.engine, None
        if engine is not None:
            self._router.loaded.pop(engine.digest, None)
            if self._router.standby is engine:
                self._router.standby = None
            engine.on_change = lambda: None
        task = asyncio.create_task(self._close(engine))
        self._releases.add(task)
        task.add_done_callback(self._released)
        self._on_change()
        return task

    async def _close(self, engine: Engine | None) -> None:
        if engine is not None:
            await engine.close(self._drain_seconds)
            log.info("revision %s was released", engine.revision)


def _without_windows(model: DesiredModel) -> DesiredModel:
    """What is asked of the engines: under which window attempts are counted is not."""
    return replace(model, window="", baseline="", synthetic=0)
