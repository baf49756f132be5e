"""What this worker is, holds and says: pointer and requests come in here, the report goes out."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import time
from dataclasses import replace

from trtmodel_contract.codec import DocumentError
from trtmodel_contract.control import (
    BootPointer,
    DesiredRequest,
    EngineState,
    Fence,
    ModelReport,
    Report,
    SignedArtifact,
    WorkerState,
)
from trtmodel_contract.identity import LoadKey, ModelRef

from trtmodel_worker.cpus import usable_cpus
from trtmodel_worker.devicememory import device_memory
from trtmodel_worker.front import ladder
from trtmodel_worker.front import pointer as pointers
from trtmodel_worker.front.artifacts import Refused, authorize
from trtmodel_worker.front.disposal import dispose
from trtmodel_worker.front.engine import Engine, EngineSettings
from trtmodel_worker.front.fence import Held, Ruling, check, judge_request, pointer_counts
from trtmodel_worker.front.golden import GoldenTraffic
from trtmodel_worker.front.hostproc import HostFailed, Hosts, Machine
from trtmodel_worker.front.memory import Free, HostMemory
from trtmodel_worker.front.pulse import Crowd, crowd
from trtmodel_worker.front.regions import Arenas
from trtmodel_worker.front.room import MemoryRules
from trtmodel_worker.front.router import Router
from trtmodel_worker.front.scheduler import Rules
from trtmodel_worker.front.sharing import Sharing
from trtmodel_worker.front.spinning import spin_rule
from trtmodel_worker.front.stats import RevisionStats
from trtmodel_worker.front.supply import Supply
from trtmodel_worker.front.swap import MakeRoom, Progress, Swapper
from trtmodel_worker.front.windows import Windows
from trtmodel_worker.settings import Settings
from trtmodel_worker.trust import Keyring, Untrusted

log = logging.getLogger(__name__)
DEBOUNCE_SECONDS = 10.0  # a host that is being replaced makes nobody leave the Service so soon
KEPT_STATS = 16
MOST_LANES = 8  # that contexts: Auto chooses
SIGNED = ("request", "pointer", "engine")  # what this worker follows only if the operator signed it
_DESCRIBE_RETRY_SECONDS = 5.0
_TRAFFIC_SECONDS = 1.0
_DEVICE_SECONDS = 1.0


class NotYet(Exception):
    """A request came before the worker knows where its artifacts are."""


class DeviceGone(Exception):
    """Nothing answers here any more, and nothing will in this container."""


class Worker:
    """One model's worker. Everything runs on one loop; blocking work is in threads and hosts."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.model = ModelRef(settings.namespace, settings.model, settings.model_uid)
        self.router = Router(settings.fallback)
        self.windows = Windows()
        self.keyring = Keyring({})
        self.stats: dict[str, RevisionStats] = {}
        self.untrusted = dict.fromkeys(SIGNED, 0)
        self.arenas = Arenas((settings.lanes or MOST_LANES) * settings.hosts, settings.output_bytes)
        self.sharing = Sharing()
        self.hosts = Hosts(settings.runtime, self._crowd, self.sharing)
        self.machine: Machine | None = None
        self._described = asyncio.Event()
        self._cpus = usable_cpus()
        self.draining = False
        self.version = 1
        self._rules = Rules(
            settings.queue_limit,
            settings.batch_delay_seconds,
            settings.retry_attempts,
            ladder.RetryBudget(settings.retry_budget_percent),
            ladder.Refused(),
        )
        self._news = asyncio.Event()
        self._message = ""
        self._held: Held | None = None
        self._pointer: BootPointer | None = None
        self._supply = Supply(settings)
        self._memory = HostMemory()
        self._batches_before = (0, 0)  # one to two times _TRAFFIC_SECONDS ago, and since then
        self._down_since: float | None = None
        self._watch = pointers.MountWatch(settings.pointer_dir, settings.keys_dir, self._mounted_changed)
        self.swapper = Swapper(
            self.router, self.windows, self._load, settings.request_seconds + 5.0, self.changed, self._tidy,
            MemoryRules(settings.memory_policy, settings.allow_downtime, settings.hosts, settings.lanes,
                        settings.drain_seconds, self._free_memory, self._batches),
        )  # fmt: skip

        self.golden = GoldenTraffic(
            self.router, self.windows, lambda: self.swapper.synthetic, self._supply.goldens, settings.request_seconds
        )

    # -- life

    async def begin(self) -> None:
        """Before the first request: know whom to trust."""
        await self._watch.look()

    async def run(self) -> None:
        """Learn what can be loaded here, and follow the mounted files. Until cancelled. Raises DeviceGone."""
        tasks = [
            asyncio.create_task(self._watch.run(), name="mounts"),
            asyncio.create_task(self.swapper.run(), name="swap"),
            asyncio.create_task(self._describe(), name="describe"),
            asyncio.create_task(self._reach_storage(), name="storage"),
            asyncio.create_task(self.golden.run(), name="golden samples"),
            asyncio.create_task(self._watch_traffic(), name="traffic"),
            asyncio.create_task(self._watch_device(), name="device"),
        ]
        try:
            # Not gather: its children would be cancelled twice, and the second time ends the release of the engines.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.hosts.close()
            self._supply.close()

    async def _watch_traffic(self) -> None:
        while True:
            self._batches_before = (self._batches_before[1], self._batches())
            await asyncio.sleep(_TRAFFIC_SECONDS)

    async def _watch_device(self) -> None:
        """A container that lost its device (its device rules are dropped when a daemon of the node reloads) never gets
        it back: another one does."""
        while True:
            engine = self.swapper.standing
            if engine is not None and engine.device_lost and engine.state is EngineState.FAILED and not engine.answers:
                raise DeviceGone(f"{engine.message}: this worker ends, so that its container is made anew")
            await asyncio.sleep(_DEVICE_SECONDS)

    def _batches(self) -> int:
        return sum(stats.batches for stats in self.stats.values())

    async def _describe(self) -> None:
        while self.machine is None:
            try:
                self.machine = await self.hosts.describe()
            except HostFailed as e:
                log.error("%s: %s", e.reason, e.message)
                self._say(f"{e.reason}: {e.message}")
                await asyncio.sleep(_DESCRIBE_RETRY_SECONDS)
        self._described.set()
        if self._pointer is not None:
            self._follow(self._pointer)
        self.changed()

    async def _reach_storage(self) -> None:
        """While the machine is looked at: both are needed before the first engine can be loaded."""
        if self._pointer is not None:
            await self._supply.reach(self._pointer.storage)
            gc.freeze()  # boto3's modules as well, see main

    # -- what comes in

    def _mounted_changed(self, mounted: pointers.Mounted) -> None:
        if mounted.keys is not None:
            try:
                self.keyring = Keyring.read(mounted.keys)
            except DocumentError as e:
                self._say(f"the mounted keys cannot be read, the former ones stay: {e}")
                return
        try:
            pointer = pointers.verified(mounted, self.keyring, self.model)
        except (Untrusted, DocumentError) as e:
            self.untrusted["pointer"] += 1
            self._say(f"the mounted pointer is not followed: {e}")
            return
        self._pointer = pointer
        self._say("")
        self._follow(pointer)
        self.changed()

    def _follow(self, pointer: BootPointer) -> None:
        if self.machine is None or not pointer_counts(self._held, pointer.sequence):
            return
        model = pointers.desired(pointer, self.machine.load_key, self.windows.current)
        if model is None:
            self._say(f"the pointer of sequence {pointer.sequence} names no engine for {self.machine.load_key}")
            return
        log.info("following the pointer of sequence %d", pointer.sequence)
        self._held = Held(Fence(self.model.uid, pointer.sequence))
        self.swapper.want(model, None)

    def take(self, request: DesiredRequest) -> None:
        """A request whose signature was checked. Raises Conflict, NotYet, DocumentError; then nothing has changed."""
        ruling = judge_request(self._held, self.model.uid, request.desired)
        model = request.desired.models.get(self.model.name)
        if model is None or len(request.desired.models) != 1:
            raise DocumentError(f"desired.models must hold {self.model.name!r} and nothing else")
        check(request, model)
        if self._pointer is None:
            raise NotYet("no pointer was mounted yet, so this worker does not know where its artifacts are")
        if ruling is Ruling.RENEW:
            self.swapper.renew(float(request.candidate_ttl_seconds))
            return
        self._held = Held(request.desired.fence, request.desired.content_hash())
        self.swapper.want(model, float(request.candidate_ttl_seconds))

    @property
    def held(self) -> Fence:
        return self._held.fence if self._held else Fence(self.model.uid, 0)

    # -- loading

    async def _load(
        self,
        artifact: SignedArtifact,
        progress: Progress,
        make_room: MakeRoom,
    ) -> Engine:
        try:
            authorize(artifact, self.model, self.keyring)
        except Refused:
            self.untrusted["engine"] += 1
            raise
        if self._pointer is None:
            raise Refused("NotStarted", "no pointer was mounted yet", transient=True)
        progress(EngineState.FETCHING)
        await self._described.wait()  # the operator may be faster than the look at this machine
        assert self.machine is not None
        began = time.monotonic()
        artifacts, manifest = await self._supply.fetched(self._pointer.storage, artifact, self.machine.load_key)
        self._stats_of(manifest.revision).fetch_seconds = time.monotonic() - began
        await make_room(manifest)  # now that all files are here: nothing is unloaded for what cannot be fetched
        payload = await self._supply.payload(artifacts, manifest)
        progress(EngineState.LOADING)
        try:
            engine = Engine(
                self.model.name,
                artifact.manifest_digest,
                manifest,
                lambda: self._supply.payload(artifacts, manifest, again=True),
                self.hosts,
                self.arenas,
                self.windows,
                self._stats_of(manifest.revision),
                self._engine_settings(),
            )
            engine.fallback = functools.partial(self.router.fallback_of, engine)
        except BaseException:
            dispose(payload.close)
            raise
        try:
            await engine.start(payload)
        except BaseException:
            await asyncio.shield(engine.close(0.0))
            raise
        return engine

    def _engine_settings(self) -> EngineSettings:
        settings = self.settings
        standing = self.swapper.standing
        return EngineSettings(
            lanes=settings.lanes or (standing.lanes if standing is not None else MOST_LANES),
            hosts=settings.hosts,
            buckets=settings.buckets,
            prepare_seconds=settings.prepare_seconds,
            hang_seconds=settings.hang_seconds,
            health_seconds=settings.health_seconds,
            hedge_seconds=settings.hedge_seconds,
            rules=replace(self._rules, spin=spin_rule(settings.spin_seconds, self._cpus, device=self._has_device())),
            auto=not settings.lanes and standing is None,
            paced=standing is not None and self._batches() != self._batches_before[0],
        )

    def _has_device(self) -> bool:
        return self.machine is not None and bool(self.machine.driver)

    def _crowd(self) -> Crowd:
        """What a slice of a preparation would take from requests: from those that run, or from the next one."""
        standing = self.swapper.standing
        if standing is None or not standing.alive:
            return Crowd.NONE
        serving = [engine.scheduler for engine in self.router.loaded.values()]
        running, waiting = sum(s.running for s in serving), sum(s.waiting for s in serving)
        return crowd(running, waiting, standing.scheduler.lanes, self._cpus)

    async def _free_memory(self) -> Free:
        device = await asyncio.to_thread(device_memory)
        return Free(await asyncio.to_thread(self._memory.free_bytes), device.free if device is not None else None)

    async def _tidy(self) -> None:
        """Drop cached files that neither serve nor are wanted. Called when nothing is being fetched."""
        keep = self.swapper.digests()
        for engine in self.router.loaded.values():
            manifest = engine.manifest
            keep |= {manifest.plan.digest, *(golden.blob.digest for golden in manifest.golden)}
        if self.router.loaded:
            await self._supply.keep(keep)

    def _stats_of(self, revision: str) -> RevisionStats:
        stats = self.stats.pop(revision, None) or RevisionStats()
        self.stats[revision] = stats
        for old in list(self.stats)[:-KEPT_STATS]:
            del self.stats[old]
        return stats

    # -- what goes out

    def changed(self) -> None:
        """Something that the operator may care about."""
        self.version += 1
        self._news.set()
        self._news = asyncio.Event()

    def _say(self, message: str) -> None:
        if message != self._message:
            self._message = message
            if message:
                log.warning("%s", message)
            self.changed()

    async def news(self, after: int, seconds: float) -> None:
        """Returns when the version is higher than `after`, or after `seconds`."""
        deadline = time.monotonic() + seconds
        while self.version <= after and time.monotonic() < deadline and not self.draining:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), deadline - time.monotonic())

    def begin_drain(self) -> None:
        self.draining = True
        self.changed()

    def is_ready(self) -> bool:
        """May the Service send requests here? Not while nothing can answer; a host that is being replaced has a
        while."""
        engine = self.swapper.standing
        if engine is None or self.draining or self.swapper.room.leaving or engine.state is EngineState.FAILED:
            return False
        if engine.answers:
            self._down_since = None
            return True
        now = time.monotonic()
        self._down_since = self._down_since or now
        return now - self._down_since < DEBOUNCE_SECONDS

    @property
    def state(self) -> WorkerState:
        if self.draining:
            return WorkerState.DRAINING
        engine = self.swapper.standing
        if engine is not None:
            return WorkerState.SERVING if self.is_ready() else WorkerState.NOT_SERVING
        if self.machine is None or self._pointer is None:
            return WorkerState.STARTING
        if self._held is None:
            return WorkerState.NO_ENGINE
        return WorkerState.NOT_SERVING if self.swapper.trouble else WorkerState.STARTING

    def report(self) -> Report:
        machine = self.machine or Machine(LoadKey(self.settings.runtime, "", ""), "")
        flipped = self.swapper.flipped
        return Report(
            version=self.version,
            pod=self.settings.pod,
            pod_uid=self.settings.pod_uid,
            load_key=machine.load_key,
            driver=machine.driver,
            state=self.state,
            message=self._message or self.swapper.trouble,
            fence=self.held,
            pointer_sequence=self._pointer.sequence if self._pointer else 0,
            key_ids=self.keyring.ids,
            models={
                self.model.name: ModelReport(
                    engines=self.swapper.report(),
                    routes=self.router.routes(),
                    windows=self.windows.snapshot(),
                    flip_seconds=flipped.seconds if flipped else None,
                    routed_at=flipped.at if flipped else None,
                    memory=self.swapper.room.report,
                )
            },
        )
