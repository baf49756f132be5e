"""Workers by the thousand in one process: each has a loopback address and answers on its control port.

Models: reports, long polls, the fence (the worker's own rules), boot from a pointer, loading that takes a moment,
routes, and traffic enough for every analysis to pass. Does not model: signatures (one check costs more than the rest),
hosts, memory, bad engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from urllib.parse import parse_qs, urlsplit

from trtmodel_contract.codec import dumps, loads
from trtmodel_contract.control import (
    CONTROL_PORT,
    DESIRED_PATH,
    REPORT_PATH,
    AttemptCounts,
    BootPointer,
    ControlError,
    DesiredEngine,
    DesiredModel,
    DesiredRequest,
    EngineReport,
    EngineState,
    Fence,
    ModelReport,
    Report,
    Role,
    Routes,
    WorkerState,
)
from trtmodel_contract.histogram import bucket_index
from trtmodel_contract.identity import LoadKey
from trtmodel_worker.front.fence import Conflict, Held, Ruling, judge_request, pointer_counts

LOAD_KEY = LoadKey("ONNXRuntime", "1.20", "hollow")
REQUESTS = 5000  # that an engine has answered in a window, as soon as it is routed to
WINDOWS_KEPT = 4
BACKLOG = 16


class HollowWorker:
    """One pod. Engines are ready `load_seconds` after they were asked for."""

    def __init__(self, pod: str, uid: str, model: str, model_uid: str, load_seconds: float) -> None:
        self.pod, self.uid, self.model, self.model_uid = pod, uid, model, model_uid
        self._load_seconds = load_seconds
        self.key_ids: tuple[str, ...] = ()
        self.held: Held | None = None
        self.refused = 0
        self.routes = Routes("")
        self.version = 1
        self._pointer_sequence = 0
        self._engines: dict[str, tuple[str, Role, bool]] = {}  # digest -> revision, role, ready
        self._wanted: DesiredModel | None = None
        self._windows: dict[str, dict[str, AttemptCounts]] = {}
        self._waiting: set[asyncio.Future[None]] = set()

    def boot(self, pointer: BootPointer) -> None:
        self._pointer_sequence = pointer.sequence
        stable = pointer.stable.artifacts.get(str(LOAD_KEY))
        if stable is None or not pointer_counts(self.held, pointer.sequence):
            self._changed()
            return
        self.held = Held(Fence(self.model_uid, pointer.sequence))
        engines = [DesiredEngine(Role.STABLE, stable)]
        if pointer.standby is not None and str(LOAD_KEY) in pointer.standby.artifacts:
            engines.append(DesiredEngine(Role.STANDBY, pointer.standby.artifacts[str(LOAD_KEY)]))
        window = self._wanted.window if self._wanted else ""
        self._want(DesiredModel(tuple(engines), Routes(stable.manifest_digest), window))

    def told(self, request: DesiredRequest) -> None:
        """Raises Conflict, which is counted."""
        try:
            ruling = judge_request(self.held, self.model_uid, request.desired)
        except Conflict:
            self.refused += 1
            raise
        if ruling is Ruling.APPLY:
            self.held = Held(request.desired.fence, request.desired.content_hash())
            self._want(request.desired.models[self.model])

    async def news(self, after: int, wait: float) -> None:
        """Returns when the version is another one than `after`, at the latest after `wait` seconds."""
        if self.version != after:
            return
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(changed)
        try:
            await asyncio.wait([changed], timeout=wait)
        finally:
            self._waiting.discard(changed)

    def report(self) -> Report:
        engines = tuple(
            EngineReport(revision, digest, role, EngineState.READY if ready else EngineState.LOADING)
            for digest, (revision, role, ready) in self._engines.items()
        )
        return Report(
            version=self.version,
            pod=self.pod,
            pod_uid=self.uid,
            load_key=LOAD_KEY,
            driver="",
            state=WorkerState.SERVING if self.routes.stable else WorkerState.NO_ENGINE,
            message="",
            fence=self.held.fence if self.held else Fence(self.model_uid, 0),
            pointer_sequence=self._pointer_sequence,
            key_ids=self.key_ids,
            models={self.model: ModelReport(engines, self.routes, self._windows)},
        )

    def _want(self, desired: DesiredModel) -> None:
        self._wanted = desired
        listed = {e.artifact.manifest_digest: e for e in desired.engines}
        routed = {self.routes.stable, self.routes.candidate} - {""}
        self._engines = {d: v for d, v in self._engines.items() if d in listed or d in routed}
        missing = [d for d in listed if not self._engines.get(d, ("", Role.STABLE, False))[2]]
        for digest, engine in listed.items():
            ready = digest not in missing
            self._engines[digest] = (engine.artifact.revision, engine.role, ready)
        if missing:
            asyncio.get_running_loop().call_later(self._load_seconds, self._loaded, desired)
        self._settle()

    def _loaded(self, desired: DesiredModel) -> None:
        if desired is self._wanted:
            self._engines = {d: (revision, role, True) for d, (revision, role, _) in self._engines.items()}
            self._settle()

    def _settle(self) -> None:
        """Routes what is ready and wanted, and has it answer requests."""
        assert self._wanted is not None
        wanted, ready = self._wanted.routes, {d for d, (_, _, is_ready) in self._engines.items() if is_ready}
        stable = wanted.stable if wanted.stable in ready else self.routes.stable
        candidate = wanted.candidate if wanted.candidate in ready else ""
        self.routes = Routes(stable, candidate, wanted.weight if candidate else 0)
        counts = AttemptCounts(ok=REQUESTS, compute={"1": {bucket_index(0.005): REQUESTS}})
        answering = {d: counts for d in (stable, candidate) if d}
        kept = [w for w in self._windows if w == self._wanted.baseline] + list(self._windows)[-WINDOWS_KEPT:]
        windows = {w: self._windows[w] for w in kept}
        self._windows = windows | {self._wanted.window: windows.get(self._wanted.window, {}) | answering}
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)


class Fleet:
    """The control ports. `workers` by address."""

    def __init__(self) -> None:
        self.workers: dict[str, HollowWorker] = {}
        self._servers: dict[str, asyncio.Server] = {}
        self.requests = 0

    async def add(self, ip: str, worker: HollowWorker) -> None:
        self.workers[ip] = worker
        loop = asyncio.get_running_loop()
        self._servers[ip] = await loop.create_server(lambda: _Connection(self), ip, CONTROL_PORT, backlog=BACKLOG)

    async def close(self) -> None:
        for server in self._servers.values():
            server.close()

    async def answer(self, ip: str, method: str, target: str, body: bytes) -> tuple[int, bytes]:
        self.requests += 1
        worker, url = self.workers[ip], urlsplit(target)
        if (method, url.path) == ("GET", REPORT_PATH):
            query = parse_qs(url.query)
            if "after" in query:
                await worker.news(int(query["after"][0]), float(query["wait"][0]))
        elif (method, url.path) == ("PUT", DESIRED_PATH):
            try:
                worker.told(loads(DesiredRequest, body))
            except Conflict as e:
                return 409, dumps(ControlError("Fenced", str(e), worker.held.fence if worker.held else None))
        else:
            return 404, b"{}"
        return 200, dumps(worker.report())


class _Connection(asyncio.Protocol):
    """As much of HTTP/1.1 as the operator's client speaks: one request after the other, bodies with a length. A library
    would take most of the processor that the operator is measured on."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._buffer = fleet, b""
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ip = str(transport.get_extra_info("sockname")[0])

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        headers: Mapping[str, str] = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", 0))
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        method, target, _ = first.split(" ")
        self._task = asyncio.create_task(self._answer(method, target, rest[:length], headers.get("connection", "")))

    async def _answer(self, method: str, target: str, body: bytes, connection: str) -> None:
        status, text = await self._fleet.answer(self._ip, method, target, body)
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n"
        closing = connection.lower() == "close"
        self._transport.write((head + ("Connection: close\r\n" if closing else "") + "\r\n").encode() + text)
        if closing:
            self._transport.close()
