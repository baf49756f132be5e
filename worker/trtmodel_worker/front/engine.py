"""An engine that serves: its hosts are kept alive, its requests scheduled.

start -> READY <-> DOWN (a host died, another is being started) -> FAILED (too often; tried on slowly)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from trtmodel_contract.control import EngineState
from trtmodel_contract.manifest import Manifest

from trtmodel_worker.front.hostproc import EngineHost, HostFailed, Hosts, Payload
from trtmodel_worker.front.models import Admission
from trtmodel_worker.front.regions import Arenas
from trtmodel_worker.front.scheduler import Call, Scheduler
from trtmodel_worker.front.stats import RevisionStats
from trtmodel_worker.front.v2 import Codec
from trtmodel_worker.front.windows import Windows

log = logging.getLogger(__name__)
MAX_FAILURES = 5  # deaths and failed starts in a row before an engine is given up
HEALTHY_SECONDS = 60.0  # a host that lived so long ends the row
SLOWEST_RETRY_SECONDS = 30.0
HANG_FACTOR = 20.0  # a run that takes so many times the slowest run of the warm-up hangs
TICK_SECONDS = 0.05


@dataclass(frozen=True)
class EngineSettings:
    lanes: int
    prepare_seconds: float
    hang_seconds: float
    queue_limit: int


class Engine:
    """One manifest, loaded. `state` and `deaths` are for the report; `routed` says whether a death is a failed
    attempt."""

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
        self.deaths = 0
        self.on_change: Callable[[], None] = lambda: None
        self._payload = payload
        self._hosts = hosts
        self._windows = windows
        self._arenas = arenas
        self._settings = settings
        self.scheduler = Scheduler(
            self, self._arena, manifest.outputs, lambda: windows.counters(digest), stats,
            settings.queue_limit,
        )  # fmt: skip
        self._host: EngineHost | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()

    @property
    def alive(self) -> bool:
        return self.scheduler.lanes > 0

    def count_failed(self, kind: str) -> None:
        """An attempt that was this engine's to make, and was not made."""
        self._windows.counters(self.digest).count_failed(kind)

    def submit(self, call: Call) -> None:
        """Answer `call`, sooner or later, one way or the other."""
        self.scheduler.submit(call)

    async def start(self, payload: Payload) -> None:
        """Raises HostFailed; then nothing of it is left but the arena, which `close` gives back."""
        host = await self._start_host(payload)
        self._ticker = asyncio.create_task(self._tick(), name=f"tick {self.revision}")
        self._keeper = asyncio.create_task(self._keep(host), name=f"keep {self.revision}")

    async def close(self, drain_seconds: float) -> None:
        """Free everything, after the last request."""
        if drain_seconds and not self.scheduler.idle:
            self._idle.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._idle.wait(), drain_seconds)
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        host = self._host
        if host is not None:
            self.scheduler.suspend(host)
            await host.end()
            self.scheduler.remove(host, count_death=False)
        if self._ticker is not None:
            self._ticker.cancel()
        self.scheduler.fail_waiting("the engine was released")
        self._arenas.release(self._arena)

    async def _start_host(self, payload: Payload) -> EngineHost:
        try:
            host = await self._hosts.start(
                self.manifest, payload, self._arena.memory, self._settings.lanes, self._settings.prepare_seconds
            )
        finally:
            payload.close()
        self._host = host
        self.scheduler.hang_after = max(self._settings.hang_seconds, HANG_FACTOR * host.ready.slowest_seconds)
        host.on_dying = self.scheduler.suspend
        host.listen(self.scheduler.readable)
        if not host.exited.done():
            self.scheduler.add(host.lanes)
            self._set(EngineState.READY, "")
        return host

    async def _keep(self, host: EngineHost) -> None:
        """Replace the host whenever it dies, sooner at first, then more and more slowly."""
        failures, born = 0, time.monotonic()
        while True:
            await asyncio.shield(host.exited)
            self.deaths += 1
            self.stats.deaths += 1
            failures = 1 if time.monotonic() - born > HEALTHY_SECONDS else failures + 1
            text = f"host {host.pid} died: {host.epitaph()}"
            log.error("%s: %s", self.revision, text)
            self._host = None
            self.scheduler.remove(host, count_death=self.routed)
            replacement: EngineHost | None = None
            while replacement is None:
                self._judge(failures, text)
                await asyncio.sleep(_backoff(failures))
                try:
                    replacement = await self._start_host(await self._payload())
                except HostFailed as e:
                    failures += 1
                    text = f"its host could not be started again: {e.message}"
                    log.error("%s: %s", self.revision, text)
                except Exception as e:
                    failures += 1
                    text = f"its host could not be started again: {type(e).__name__}: {e}"
                    log.exception("%s: %s", self.revision, text)
            host, born = replacement, time.monotonic()

    def _judge(self, failures: int, text: str) -> None:
        if failures < MAX_FAILURES:
            self._set(EngineState.DOWN, text)
        else:
            self._set(EngineState.FAILED, f"{failures} failures in a row; {text}")
            self.scheduler.fail_waiting("the engine's hosts keep failing")

    def _set(self, state: EngineState, message: str) -> None:
        self.state, self.message = state, message
        self.on_change()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                self.scheduler.tick(time.monotonic())
                if self.scheduler.idle:
                    self._idle.set()
            except Exception:
                log.exception("a deadline could not be handled")


def _backoff(failures: int) -> float:
    """Nothing for a first death, then 0.5 s, 1 s, 2 s ..."""
    return 0.0 if failures <= 1 else min(SLOWEST_RETRY_SECONDS, 0.25 * 2.0 ** (failures - 1))
