"""Changing engines under traffic.

    desired state --> prepare what is missing, one at a time, beside what serves: stable, candidate, then standby
                  --> flip: one assignment, as soon as what is to be routed is ready
                  --> release what is neither listed nor routed, after its last request

A preparation that fails leaves everything as it was. What is routed stays until its successor is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from trtmodel_contract.control import (
    DesiredEngine,
    DesiredModel,
    EngineReport,
    EngineState,
    Role,
    Routes,
    SignedArtifact,
)

from trtmodel_worker.front.artifacts import Refused
from trtmodel_worker.front.engine import Engine
from trtmodel_worker.front.hostproc import HostFailed
from trtmodel_worker.front.router import Router, Table
from trtmodel_worker.front.windows import Windows
from trtmodel_worker.host.arena import Unservable

log = logging.getLogger(__name__)
_ORDER = (Role.STABLE, Role.CANDIDATE, Role.STANDBY)
_FIRST_RETRY_SECONDS = 2.0
_SLOWEST_RETRY_SECONDS = 60.0
_HOST_TRIES = 3  # a host that crashes while it loads is tried so often


class Entry:
    """One engine that is wanted, or was."""

    def __init__(self, artifact: SignedArtifact, role: Role) -> None:
        self.artifact = artifact
        self.role = role
        self.state = EngineState.FETCHING
        self.reason = ""
        self.message = ""
        self.load_seconds: float | None = None
        self.engine: Engine | None = None
        self.tries = 0
        self.due: float | None = 0.0  # when to try (monotonic); None: never again

    def fail(self, reason: str, message: str, *, again: bool) -> None:
        self.state, self.reason, self.message = EngineState.FAILED, reason, message
        self.tries += 1
        delay = min(_SLOWEST_RETRY_SECONDS, _FIRST_RETRY_SECONDS * 2.0 ** (self.tries - 1))
        self.due = time.monotonic() + delay if again else None

    def report(self) -> EngineReport:
        engine = self.engine
        loaded = engine is not None and self.state is EngineState.READY
        return EngineReport(
            revision=self.artifact.revision,
            manifest_digest=self.artifact.manifest_digest,
            role=self.role,
            state=engine.state if engine is not None and loaded else self.state,
            reason="HostDeath" if engine is not None and loaded and engine.message else self.reason,
            message=engine.message if engine is not None and loaded else self.message,
            load_seconds=self.load_seconds,
            deaths=engine.deaths if engine is not None else 0,
        )


@dataclass(frozen=True)
class Flip:
    """The last change of routes: how long it took, and when it was (seconds since the epoch)."""

    seconds: float
    at: float


Load = Callable[[SignedArtifact, Callable[[EngineState], None]], Awaitable[Engine]]
"""Authorize, fetch, start. Raises Refused, Unservable or HostFailed; then nothing of it is left."""


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
    ) -> None:
        self.flipped: Flip | None = None
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
        listed = {e.artifact.manifest_digest: e for e in model.engines}
        for digest, engine in listed.items():
            self._list(digest, engine)
        self._wanted = model
        if model.window != self._windows.current:
            self._windows.roll(model.window)
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
            await asyncio.gather(*(self._release(e) for e in entries), *self._releases, return_exceptions=True)

    async def _step(self) -> float | None:
        """Prepare the next engine that is due. Returns the seconds until something is due."""
        while True:
            now = time.monotonic()
            due = [e for e in self._entries.values() if e.engine is None and e.due is not None]
            entry = min(
                (e for e in due if e.due is not None and e.due <= now and self._may_start(e)),
                key=lambda e: _ORDER.index(e.role),
                default=None,
            )
            if entry is None:
                moments = [e.due for e in due if e.due is not None and self._may_start(e)]
                return max(0.0, min(moments) - now) + 0.01 if moments else None
            task = asyncio.create_task(self._prepare(entry))
            self._preparing = (entry, task)
            await asyncio.wait({task})
            self._preparing = None
            if task.cancelled():
                continue
            task.result()
            self._wake.clear()
            self.settle()

    def _may_start(self, entry: Entry) -> bool:
        """A standby takes no time from what serves, nor from what is to serve: it comes when a stable stands, or when
        the wanted one cannot."""
        if entry.role is not Role.STANDBY or self.standing is not None or self._wanted is None:
            return True
        stable = self._entries.get(self._wanted.routes.stable)
        return stable is None or stable.tries >= _HOST_TRIES or stable.due is None

    def _yields(self, entry: Entry) -> bool:
        """What is being prepared is not wanted any more, or something more urgent is."""
        if self._entries.get(entry.artifact.manifest_digest) is not entry:
            return True
        waiting = (e for e in self._entries.values() if e.engine is None and e.due is not None)
        return entry.role is Role.STANDBY and any(e.role is not Role.STANDBY for e in waiting)

    async def _prepare(self, entry: Entry) -> None:
        first = entry.state is not EngineState.FAILED

        def progress(state: EngineState) -> None:
            if first:  # a failed one stays so in the report until it is ready: each try is no news
                entry.state = state
                self._on_change()

        started = time.monotonic()
        try:
            engine = await self._load(entry.artifact, progress)
        except Refused as e:
            entry.fail(e.reason, e.message, again=e.transient)
        except Unservable as e:
            entry.fail("Unservable", str(e), again=False)
        except HostFailed as e:
            entry.fail(e.reason, e.message, again=not e.refused)
        except Exception as e:
            log.exception("engine %s could not be prepared", entry.artifact.manifest_digest[:12])
            entry.fail("InternalError", f"{type(e).__name__}: {e}", again=True)
        else:
            if self._entries.get(engine.digest) is not entry:
                await engine.close(0.0)  # nobody wants it any more
                return
            entry.engine, entry.state, entry.reason, entry.message = engine, EngineState.READY, "", ""
            entry.load_seconds = time.monotonic() - started
            entry.due = None
            engine.on_change = self._engine_changed
            self._router.loaded[engine.digest] = engine
            log.info("revision %s is ready after %.3f s", engine.revision, entry.load_seconds)
        if entry.state is EngineState.FAILED:
            log.error("revision %s: %s: %s", entry.artifact.revision, entry.reason, entry.message)
        self._on_change()

    def _engine_changed(self) -> None:
        self.settle()
        self._on_change()

    def _list(self, digest: str, wanted: DesiredEngine) -> None:
        entry = self._entries.get(digest)
        if entry is None:
            self._entries[digest] = Entry(wanted.artifact, wanted.role)
            return
        entry.role, entry.artifact = wanted.role, wanted.artifact
        if entry.engine is None and entry.state is EngineState.FAILED:
            entry.tries, entry.due = 0, 0.0  # it is asked for anew

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
                engine.routed = True
                engine.hedges_elsewhere = engine is table.stable
            log.info("routes: stable %s, candidate %s at %d %%", table.stable.revision,
                     table.candidate.revision if table.candidate else "none", table.weight)  # fmt: skip
            self._on_change()
        listed = {e.artifact.manifest_digest for e in wanted.engines}
        routed = {e.digest for e in self._router.table.engines()} if self._router.table else set()
        for digest in [d for d in self._entries if d not in listed and d not in routed]:
            task = asyncio.create_task(self._release(self._entries.pop(digest)))
            self._releases.add(task)
            task.add_done_callback(self._released)
            self._on_change()

    def _released(self, task: asyncio.Task[None]) -> None:
        self._releases.discard(task)
        self._wake.set()  # its files may go

    def _target(self, routes: Routes) -> Table | None:
        """The table that should be in force, None if there can be none."""
        current = self.standing
        stable = self._serving(routes.stable) or current
        if stable is None or stable.state is EngineState.FAILED:
            stable = self._standby() or stable
        if stable is None:
            return None
        candidate = self._serving(routes.candidate) if time.monotonic() < self._candidate_until else None
        if candidate is None or candidate is stable or routes.weight <= 0:
            return Table(stable)
        return Table(stable, candidate, routes.weight)

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

    async def _release(self, entry: Entry) -> None:
        engine = entry.engine
        if engine is not None:
            self._router.loaded.pop(engine.digest, None)
            engine.on_change = lambda: None
            await engine.close(self._drain_seconds)
            log.info("revision %s was released", engine.revision)
