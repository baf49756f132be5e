"""An engine that serves: its hosts are kept alive, its requests scheduled.

start -> READY <-> DOWN (no host lives, one is being started) -> FAILED (too often; tried on slowly)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from trtmodel_contract.control import DEVICE_LOST, EngineState
from trtmodel_contract.manifest import Manifest

from trtmodel_worker.front.batching import Buckets
from trtmodel_worker.front.calls import Call
from trtmodel_worker.front.disposal import dispose
from trtmodel_worker.front.hostproc import EngineHost, HostFailed, Hosts, Payload
from trtmodel_worker.front.ladder import Overdue
from trtmodel_worker.front.models import Admission
from trtmodel_worker.front.regions import Arenas
from trtmodel_worker.front.rehearsal import rehearse
from trtmodel_worker.front.scheduler import Rules, Scheduler
from trtmodel_worker.front.stats import RevisionStats
from trtmodel_worker.front.v2 import Codec
from trtmodel_worker.front.windows import Windows

log = logging.getLogger(__name__)
MAX_FAILURES = 5  # deaths and failed starts in a row before an engine is given up
HEALTHY_SECONDS = 60.0  # a host that lived so long ends the row
SLOWEST_RETRY_SECONDS = 30.0
SETTLED_SECONDS = 0.2  # the same for one that somebody killed from outside: nothing is wrong with the engine
HANG_FACTOR = 20.0  # a run that takes so many times the slowest run of the warm-up hangs
TICK_SECONDS = 0.05
PACED_DUTY = 0.2  # share of the time in which a warm-up beside traffic may compute


@dataclass(frozen=True)
class EngineSettings:
    """`lanes` of each of `hosts`, or fewer if `auto` finds that they are enough. `hedge_seconds` is 0 for Auto.
    `paced`: requests are being answered meanwhile, so the warm-up takes its time."""

    lanes: int
    hosts: int
    buckets: tuple[int, ...]
    prepare_seconds: float
    hang_seconds: float
    health_seconds: float
    hedge_seconds: float
    rules: Rules
    auto: bool = False
    paced: bool = False


class Engine:
    """One manifest, loaded. `state` and `deaths` are for the report; `routed` says whether a death is a failed
    attempt. `device_lost`: the last host that was started found no device that it could use. `fallback`: the engine
    that answers when no host of this one can, None if there is none; `hedges_elsewhere`: it also takes what is overdue
    here."""

    def __init__(
        self,
        model: str,
        digest: str,
        manifest: Manifest,
        payload: Callable[[], Awaitable[Payload]],
        hosts: Hosts,
        arenas: Arenas,
        windows: Windows,
        stats: RevisionStats,
        settings: EngineSettings,
    ) -> None:
        """Raises Unservable."""
        self._arena = arenas.acquire(manifest)  # first: it refuses what cannot be served
        self.digest = digest
        self.revision = manifest.revision
        self.manifest = manifest
        self.admission = Admission(manifest)
        self.codec = Codec(model, manifest.revision, self.admission)
        self.header = f"x-trtmodel-revision: {manifest.revision}\r\n".encode()
        self.stats = stats
        self.state = EngineState.LOADING
        self.message = ""
        self.routed = False
        self.hedges_elsewhere = False
        self.lanes = settings.lanes
        self.deaths = 0
        self.device_lost = False
        self.on_change: Callable[[], None] = lambda: None
        self.fallback: Callable[[], Engine | None] = lambda: None
        self._payload = payload
        self._hosts = hosts
        self._windows = windows
        self._arenas = arenas
        self._settings = settings
        self.scheduler = Scheduler(
            self, self._arena, manifest.outputs, Buckets(settings.buckets, self.admission.most_rows or 1),
            Overdue(settings.hedge_seconds), lambda: windows.counters(digest), stats, settings.rules,
        )  # fmt: skip
        self.scheduler.hosts_wanted = settings.hosts
        self.scheduler.elsewhere = self._elsewhere
        self.scheduler.on_load = hosts.look
        self._living: list[EngineHost] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._ticker: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()

    @property
    def alive(self) -> bool:
        return self.scheduler.lanes > 0

    @property
    def answers(self) -> bool:
        """A host of its own answers, or the engine that helps out."""
        return self.alive or self._elsewhere() is not None

    def count_failed(self, kind: str) -> None:
        """An attempt that was this engine's to make, and was not made."""
        self._windows.counters(self.digest).count_failed(kind)

    def submit(self, call: Call) -> None:
        """Answer `call`, sooner or later, one way or the other."""
        self.scheduler.submit(call)

    async def start(self, payload: Payload) -> None:
        """All hosts side by side. Raises HostFailed; then nothing of it is left but the arena, which `close` gives
        back."""
        duty = PACED_DUTY if self._settings.paced else 1.0
        auto, hosts = self._settings.auto, self._settings.hosts
        done: list[EngineHost | BaseException] = []
        try:
            # What the first one finds to be enough, the others have: they would disturb its measurement.
            for number in (1, hosts - 1) if auto else (hosts,):
                starts = [asyncio.ensure_future(self._start_host(payload, duty, auto=auto)) for _ in range(number)]
                try:
                    await asyncio.gather(*starts, return_exceptions=True)
                finally:
                    for task in starts:
                        task.cancel()
                    done += await asyncio.gather(*starts, return_exceptions=True)
                auto = False
        finally:
            dispose(payload.close)
        started = [host for host in done if isinstance(host, EngineHost)]
        try:
            failed = [e for e in done if isinstance(e, BaseException)]
            if failed:
                raise failed[0]
            self._ticker = asyncio.create_task(self._tick(), name=f"tick {self.revision}")
            self._keepers = [asyncio.create_task(self._keep(host), name=f"keep {self.revision}") for host in started]
            # Beside traffic it makes way while it rehearses, too; for so long that no lane seems to hang.
            await rehearse(self, self.lanes * self._settings.hosts, self._settings.hang_seconds / 2)
        finally:
            for host in started:
                self._hosts.run_freely(host)

    async def close(self, drain_seconds: float) -> None:
        """Free everything, after the last request."""
        if drain_seconds and not self.scheduler.idle:
            self._idle.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._idle.wait(), drain_seconds)
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self.scheduler.elsewhere = lambda: None
        for host in self._living:
            self.scheduler.suspend(host)
            self._hosts.run_freely(host)
        await asyncio.gather(*(host.end() for host in self._living))
        for host in self._living:
            self.scheduler.remove(host, count_death=False, guilty=False)
        if self._ticker is not None:
            self._ticker.cancel()
        self.scheduler.fail_waiting("the engine was released")
        self._arenas.release(self._arena)

    async def _start_host(self, payload: Payload, duty: float, *, auto: bool = False) -> EngineHost:
        settings, scheduler = self._settings, self.scheduler
        buckets = tuple(scheduler.buckets.sizes) if self.admission.batched else ()
        host = await self._hosts.start(
            self.manifest, payload, self._arena.memory, self.lanes, settings.prepare_seconds, buckets, duty, auto,
            settings.rules.spin.seconds,
        )  # fmt: skip
        self.lanes = len(host.lanes)
        self._living.append(host)
        ready = host.ready
        scheduler.batchable = ready.batchable and self.admission.batched
        scheduler.pins = ready.pins
        scheduler.expect(ready.bucket_seconds, ready.slowest_seconds)
        scheduler.hang_after = max(settings.hang_seconds, HANG_FACTOR * ready.slowest_seconds)
        host.on_dying = scheduler.suspend
        if not host.exited.done():
            host.listen(scheduler.readable)
            scheduler.add(host.lanes)
            self._set(EngineState.READY, "")
        return host

    async def _keep(self, host: EngineHost) -> None:
        """Replace a host whenever it dies, sooner at first, then more and more slowly."""
        failures, born = 0, time.monotonic()
        while True:
            await asyncio.shield(host.exited)
            self.deaths += 1
            self.stats.deaths += 1
            healthy = SETTLED_SECONDS if host.killed_from_outside else HEALTHY_SECONDS
            failures = 1 if time.monotonic() - born > healthy else failures + 1
            text = f"host {host.pid} died: {host.epitaph()}"
            log.error("%s: %s", self.revision, text)
            self._living.remove(host)
            self.scheduler.remove(host, count_death=self.routed, guilty=host.guilty)
            replacement: EngineHost | None = None
            while replacement is None:
                self._judge(failures, text)
                await asyncio.sleep(_backoff(failures))
                try:
                    replacement = await self._restart()
                except HostFailed as e:
                    failures += 1
                    self.device_lost = e.reason == DEVICE_LOST
                    text = f"its host could not be started again: {e.message}"
                    log.error("%s: %s", self.revision, text)
                except Exception as e:
                    failures += 1
                    text = f"its host could not be started again: {type(e).__name__}: {e}"
                    log.exception("%s: %s", self.revision, text)
            host, born, self.device_lost = replacement, time.monotonic(), False

    async def _restart(self) -> EngineHost:
        payload = await self._payload()
        other = self._elsewhere()
        # Suspects run only where another host lives on: at a slow pace they would wait past their time limit.
        awaited = self.scheduler.suspects_wait or (other is not None and other.suspects_wait)
        paced = (self.alive or other is not None) and not awaited
        try:
            host = await self._start_host(payload, PACED_DUTY if paced else 1.0)
        finally:
            dispose(payload.close)
        self._hosts.run_freely(host)
        return host

    def _elsewhere(self) -> Scheduler | None:
        """The scheduler that may run this engine's batches: its rows must lie in the same arena."""
        other = self.fallback()
        if other is None or other is self or not other.alive or other._arena is not self._arena:
            return None
        return other.scheduler

    def _judge(self, failures: int, text: str) -> None:
        if self.alive:
            self._set(EngineState.READY, f"{len(self._living)} of {self._settings.hosts} hosts are up; {text}")
        elif failures < MAX_FAILURES:
            self._set(EngineState.DOWN, text)
        else:
            self._set(EngineState.FAILED, f"{failures} failures in a row; {text}")
            self.scheduler.fail_waiting("the engine's hosts keep failing")

    def _set(self, state: EngineState, message: str) -> None:
        self.state, self.message = state, message
        self.on_change()

    async def _tick(self) -> None:
        probed = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            try:
                self.scheduler.tick(now)
                if now - probed > self._settings.health_seconds:
                    probed = now
                    self.scheduler.probe()
                if self.scheduler.idle:
                    self._idle.set()
            except Exception:
                log.exception("a deadline could not be handled")


def _backoff(failures: int) -> float:
    """Nothing for a first death, then 0.5 s, 1 s, 2 s ..."""
    return 0.0 if failures <= 1 else min(SLOWEST_RETRY_SECONDS, 0.25 * 2.0 ** (failures - 1))
