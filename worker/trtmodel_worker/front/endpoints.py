"""Port 8080: paths of the Open Inference Protocol v2, and what is refused before a body is read."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

import orjson
from trtmodel_contract.control import EngineState
from trtmodel_contract.version import product_version

from trtmodel_worker.front import describe
from trtmodel_worker.front.calls import Body, Call, Failed, Outputs, Unreadable
from trtmodel_worker.front.compression import CODINGS, Compression
from trtmodel_worker.front.engine import Engine
from trtmodel_worker.front.jsoncodec import BadJson, parse_object
from trtmodel_worker.front.models import Invalid
from trtmodel_worker.front.openapi import openapi
from trtmodel_worker.front.paths import POSTED, Path, parse_path
from trtmodel_worker.front.request import JSON_HEAD, NO_ROOM, RETRY_AFTER, Refusal, Request, error_body
from trtmodel_worker.front.router import Router
from trtmodel_worker.front.shadow import Shadow
from trtmodel_worker.front.sharedmemory import Regions
from trtmodel_worker.front.sharing import Sharing
from trtmodel_worker.front.statistics import statistics
from trtmodel_worker.front.tracing import CLIENT_GONE, Tracing
from trtmodel_worker.front.v2 import HEADER_LENGTH, Plan

log = logging.getLogger(__name__)
_PROTOCOL = "this server speaks the Open Inference Protocol v2: POST /v2/models/<model>/infer"
_ALLOW_GET = b"allow: GET, HEAD\r\n"
_ALLOW_POST = b"allow: POST\r\n"
_ACCEPT_ENCODING = b"accept-encoding: gzip, deflate\r\n"
# curl sends form data unless told otherwise: what it sends is JSON all the same.
_JSON_TYPES = (b"", b"application/json", b"application/x-www-form-urlencoded")
_BINARY_TYPES = (b"application/octet-stream", b"application/vnd.sagemaker-triton.binary+json")
_SMALL_BODY = 64 * 1024
_PLAIN = (b"", b"identity")
_SHORT_PATH = 256
_MOST_WAIT_SECONDS = 10.0
_READY_POLL_SECONDS = 0.02
_known_path = functools.lru_cache(maxsize=128)(parse_path)


@dataclass(frozen=True)
class Limits:
    body_bytes: int
    json_bytes: int
    request_seconds: float


class Endpoints:
    """The App of the HTTP port. `is_ready` is the worker's word on readiness."""

    def __init__(
        self,
        model: str,
        runtime: str,
        router: Router,
        limits: Limits,
        is_ready: Callable[[], bool],
        shadow: Shadow,
        shared_memory_prefix: str = "",
        tracing: Tracing | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        self._model = model
        self._runtime = runtime
        self._router = router
        self._limits = limits
        self._is_ready = is_ready
        self._shadow = shadow
        self._regions = Regions(shared_memory_prefix, sharing)
        self._compression = Compression(self._refuse)
        self._tracing = tracing or Tracing()
        self._waiting: set[asyncio.Task[None]] = set()
        self.unrouted: dict[int, int] = {}  # answers that no engine had a part in, by status
        self._hot = f"/v2/models/{model}/infer".encode()
        self._hot_path = Path("infer", model)

    # -- before there is a request

    @property
    def _standing(self) -> Engine | None:
        """Which engine the next request most likely goes to."""
        table = self._router.table
        return table.stable if table is not None else None

    def connected(self) -> None:
        """A client has connected."""
        engine = self._standing
        if engine is not None:
            engine.scheduler.may_come()

    # -- by the head

    def admit(self, request: Request, length: int | None, /) -> int | Refusal:
        verdict = self._admit(request, length)
        if isinstance(verdict, Refusal):
            self._count(verdict.status)
        return verdict

    def _admit(self, request: Request, length: int | None) -> int | Refusal:
        path = self._path(request.path)
        if not path.action:
            return Refusal(404, f"there is nothing at this path: {_PROTOCOL}")
        if path.model and path.model != self._model:
            return Refusal(404, f"there is no such model here: this worker serves {self._model!r}")
        if path.action.startswith("memory") and not self._regions.enabled:
            text = "system shared memory is not enabled for this worker (TRTMODEL_SHARED_MEMORY_PREFIX)"
            return Refusal(404, text)
        if path.action not in POSTED:
            if request.method not in (b"GET", b"HEAD"):
                return Refusal(405, f"this path is read with GET; {_PROTOCOL}", _ALLOW_GET)
            return _SMALL_BODY
        if request.method != b"POST":
            return Refusal(405, f"this path is asked with POST; {_PROTOCOL}", _ALLOW_POST)
        return self._admit_body(request, length) if path.action == "infer" else _SMALL_BODY

    def _admit_body(self, request: Request, length: int | None) -> int | Refusal:
        headers = request.headers
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind not in _JSON_TYPES and kind not in _BINARY_TYPES:
            text = "the content type must be application/json, or application/octet-stream with the binary extension"
            return Refusal(415, f"{text}; {_PROTOCOL}")
        if b"content-encoding" in headers:
            coding = _coding(request)
            if coding not in _PLAIN and coding not in CODINGS:
                return Refusal(415, "a body may be compressed with gzip or deflate, and once", _ACCEPT_ENCODING)
        engine = self._standing
        if engine is not None:
            engine.scheduler.comes()
        limit = self._limit(request)
        if length is not None and limit < length <= self._limits.body_bytes:
            text = "send the tensors as binary data (Inference-Header-Content-Length), or raise TRTMODEL_MAX_JSON_BYTES"
            return Refusal(413, f"a request in JSON may have {limit:,} bytes: {text}")
        return limit

    def _limit(self, request: Request) -> int:
        """Bytes that an inference request may have, compressed or not."""
        limits = self._limits
        return limits.body_bytes if HEADER_LENGTH in request.headers else min(limits.json_bytes, limits.body_bytes)

    def _path(self, path: bytes) -> Path:
        if path == self._hot:
            return self._hot_path
        return _known_path(path, self._model) if len(path) <= _SHORT_PATH else parse_path(path, self._model)

    # -- inference

    def handle(self, request: Request) -> None:
        path = self._path(request.path)
        if path.action != "infer":
            self._answer_about(request, path)
            return
        if b"content-encoding" in request.headers:
            coding = _coding(request)
            if coding not in _PLAIN:
                infer = functools.partial(self._infer, path=path)
                self._compression.inflate(request, coding, self._limit(request), infer)
                return
        self._infer(request, path)

    def _engine(self, request: Request, revision: str) -> Engine | None:
        """The engine that answers; None after the request was refused."""
        engine = self._router.named(revision) if revision else self._router.choose()
        if engine is None:
            self._refuse_without_engine(request, revision)
        return engine

    def _refuse_without_engine(self, request: Request, revision: str) -> None:
        if revision:
            loaded = ", ".join(self._revisions()) or "none"
            self._refuse(request, 404, f"this revision is not loaded here: loaded are {loaded}")
        else:
            self._refuse(request, 503, "no engine is loaded yet: see the TRTModel's status", RETRY_AFTER)

    def _infer(self, request: Request, path: Path) -> None:
        engine = self._engine(request, path.revision)
        if engine is None:
            return
        if b"traceparent" in request.headers:
            request.span = self._tracing.begin(request.headers)
        if engine.state is EngineState.FAILED:
            self._finish(request, engine, 503, error_body("the engine's hosts keep failing"), RETRY_AFTER)
            return
        request_id = None
        try:
            plan, request_id, tail = engine.codec.plan(request.headers, request.body)
            if plan.simple is None and not request.hold(plan.memory_bytes()):
                self._finish(request, engine, 503, error_body(NO_ROOM, request_id), RETRY_AFTER)
                return
            bodies = plan.bodies(tail, self._regions)
        except Invalid as e:
            known = e.request_id if request_id is None else request_id
            self._finish(request, engine, 400, error_body(str(e), known))
            return
        seconds = self._limits.request_seconds
        if plan.timeout is not None and plan.timeout < seconds:
            seconds = plan.timeout
        call = Call(
            plan.shapes,
            bodies,
            time.monotonic() + seconds,
            functools.partial(self._answer, request, request_id, plan, bodies),
            functools.partial(self._fail, request, request_id, engine),
        )
        request.on_gone = call.cancel if request.span is None else functools.partial(self._gone, request, engine, call)
        engine.submit(call)

    def _gone(self, request: Request, engine: Engine, call: Call) -> None:
        self._traced(request, engine, CLIENT_GONE)
        call.cancel()

    def _answer(
        self,
        request: Request,
        request_id: str | None,
        plan: Plan,
        bodies: Sequence[Body],
        outputs: Outputs,
        engine: Engine,
    ) -> None:
        try:
            headers, body = engine.codec.answer(plan, request_id, outputs, self._regions)
        except Failed as e:
            self._fail(request, request_id, engine, e)
            return
        if plan.simple is None and self._shadow.will_take(engine):
            bodies = _kept(bodies)
        engine.stats.count_response(200)
        extra = engine.header if request.span is None else self._traced(request, engine, 200)
        if b"accept-encoding" in request.headers:
            self._compression.respond(request, 200, headers, body, extra)
        else:
            request.respond(200, body, headers + extra)
        self._shadow.offer(plan.shapes, bodies, outputs, engine)

    def _fail(self, request: Request, request_id: str | None, engine: Engine, failure: Failed) -> None:
        extra = RETRY_AFTER if failure.status == 503 else b""
        self._finish(request, engine, failure.status, error_body(failure.message, request_id), extra)

    def _finish(self, request: Request, engine: Engine, status: int, body: bytes, extra: bytes = b"") -> None:
        engine.stats.count_response(status)
        request.respond(status, body, JSON_HEAD + extra + self._traced(request, engine, status))

    @staticmethod
    def _traced(request: Request, engine: Engine, status: int) -> bytes:
        """The header lines of an answer that `engine` gave, to a request that is traced."""
        span = request.span
        if span is None:
            return engine.header
        span.end(status, engine.revision)
        return engine.header + span.header

    # -- everything else

    def _answer_about(self, request: Request, path: Path) -> None:
        match path.action:
            case "live":
                self._say(request, 200, {"live": True})
            case "ready":
                self._answer_ready(request)
            case "server":
                self._say(
                    request, 200, {"name": "trtmodel", "version": product_version(), "extensions": self._extensions()}
                )
            case "openapi":
                document = openapi(product_version(), self._model, self._revisions(), self._regions.enabled)
                self._say(request, 200, document)
            case "repository-index":
                self._say(request, 200, describe.index(self._model, list(self._router.loaded.values())))
            case "repository-change":
                text = "models are loaded and unloaded as the TRTModel says, not by requests: change its spec"
                self._refuse(request, 400, text)
            case "memory-status" | "memory-register" | "memory-unregister":
                self._answer_about_memory(request, path)
            case _:
                self._answer_about_model(request, path)

    def _answer_ready(self, request: Request) -> None:
        """`?wait=4` holds a "no" back for so many seconds, in case it becomes a "yes": the kubelet asks each second at
        most, which would keep a new worker idle for half of one on average."""
        try:
            wait = min(_MOST_WAIT_SECONDS, float(parse_qs(request.query.decode()).get("wait", ["0"])[0]))
        except ValueError:
            self._refuse(request, 400, "wait must be a number of seconds")
            return
        if self._is_ready() or not wait > 0:
            self._say_ready(request)
            return
        task = asyncio.create_task(self._say_ready_later(request, wait))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)
        request.on_gone = task.cancel

    async def _say_ready_later(self, request: Request, wait: float) -> None:
        for _ in range(math.ceil(wait / _READY_POLL_SECONDS)):
            if self._is_ready():
                break
            await asyncio.sleep(_READY_POLL_SECONDS)
        self._say_ready(request)

    def _say_ready(self, request: Request) -> None:
        self._say_whether(request, {}, self._is_ready())

    def _say_whether(self, request: Request, document: dict[str, Any], ready: bool) -> None:
        self._say(request, 200 if ready else 503, {**document, "ready": ready}, b"" if ready else RETRY_AFTER)

    def _answer_about_model(self, request: Request, path: Path) -> None:
        table = self._router.table
        engine = self._router.named(path.revision) if path.revision else (table.stable if table else None)
        if engine is None and path.revision:
            self._refuse_without_engine(request, path.revision)
        elif path.action == "model-ready":
            ready = engine is not None and engine.alive and (bool(path.revision) or self._is_ready())
            self._say_whether(request, {"name": self._model}, ready)
        elif path.action == "stats":
            engines = [engine] if path.revision and engine else list(self._router.loaded.values())
            self._say(request, 200, statistics(self._model, engines))
        elif engine is None:
            self._refuse_without_engine(request, "")
        elif path.action == "config":
            self._say(request, 200, describe.config(self._model, self._runtime, engine), engine.header)
        else:
            document = describe.metadata(self._model, self._runtime, engine, self._revisions())
            trial = b"" if path.revision else describe.trial(table)
            self._say(request, 200, document, engine.header + trial)

    def _answer_about_memory(self, request: Request, path: Path) -> None:
        try:
            if path.action == "memory-status":
                self._say(request, 200, self._regions.status(path.name or None))
                return
            if path.action == "memory-register":
                self._regions.register(path.name, parse_object(bytes(request.body)))
            else:
                self._regions.unregister(path.name or None)
            self._say(request, 200, {})
        except BadJson as e:
            self._refuse(request, 400, f"the body {e}")
        except Invalid as e:
            self._refuse(request, 400, str(e))

    def _extensions(self) -> list[str]:
        # Statistics are served, too; but perf_analyzer, told so, reads versions as numbers, and dies of a revision
        extensions = ["binary_tensor_data", "model_configuration"]
        return [*extensions, "system_shared_memory"] if self._regions.enabled else extensions

    def _revisions(self) -> list[str]:
        return sorted({e.revision for e in self._router.loaded.values()})

    def _say(self, request: Request, status: int, document: Any, headers: bytes = b"") -> None:
        self._count(status)
        request.respond(status, orjson.dumps(document), JSON_HEAD + headers)

    def _refuse(self, request: Request, status: int, message: str, headers: bytes = b"") -> None:
        self._count(status)
        request.fail(status, message, headers)

    def _count(self, status: int) -> None:
        self.unrouted[status] = self.unrouted.get(status, 0) + 1


def _kept(bodies: Sequence[Body]) -> list[Body]:
    """As they are now. What cannot be read is left: that shows when it is to run."""
    found: list[Body] = []
    for body in bodies:
        try:
            found.append(body if isinstance(body, memoryview) else body.copy())
        except Unreadable:
            found.append(body)
    return found


def _coding(request: Request) -> bytes:
    return request.headers.get(b"content-encoding", b"").strip().lower()
