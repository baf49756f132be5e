"""Port 8080: paths of the Open Inference Protocol v2, and what is refused before a body is read."""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import unquote_to_bytes

from trtmodel_contract.control import EngineState
from trtmodel_contract.manifest import TensorSpec

from trtmodel_worker.front.calls import Call, Failed, Outputs
from trtmodel_worker.front.engine import Engine
from trtmodel_worker.front.models import Invalid
from trtmodel_worker.front.request import JSON_HEAD, Refusal, Request
from trtmodel_worker.front.router import Router
from trtmodel_worker.front.v2 import HEADER_LENGTH, Plan, error_with_id

log = logging.getLogger(__name__)
_PROTOCOL = "this server speaks the Open Inference Protocol v2: POST /v2/models/<model>/infer"
_PLATFORMS = {"ONNXRuntime": "onnxruntime_onnx", "TensorRT": "tensorrt_plan"}
_RETRY_AFTER = b"retry-after: 1\r\n"
_ALLOW_GET = b"allow: GET, HEAD\r\n"
_ALLOW_POST = b"allow: POST\r\n"
# curl sends form data unless told otherwise: what it sends is JSON all the same.
_JSON_TYPES = (b"", b"application/json", b"application/x-www-form-urlencoded")
_BINARY_TYPES = (b"application/octet-stream", b"application/vnd.sagemaker-triton.binary+json")
_SMALL_BODY = 64 * 1024


@dataclass(frozen=True)
class Limits:
    body_bytes: int
    json_bytes: int
    request_seconds: float


class Path:
    """A path taken apart. `action`: what is asked of the model, of `revision` if that is not ''."""

    __slots__ = ("action", "model", "revision")

    def __init__(self, action: str, model: str = "", revision: str = "") -> None:
        self.action = action
        self.model = model
        self.revision = revision


class Endpoints:
    """The App of the HTTP port. `is_ready` is the worker's word on readiness."""

    def __init__(self, model: str, runtime: str, router: Router, limits: Limits, is_ready: Callable[[], bool]) -> None:
        self._model = model
        self._runtime = runtime
        self._router = router
        self._limits = limits
        self._is_ready = is_ready
        self.unrouted: dict[int, int] = {}  # answers that no engine had a part in, by status
        self._hot = f"/v2/models/{model}/infer".encode()
        self._hot_path = Path("infer", model)

    def admit(self, request: Request, length: int | None, /) -> int | Refusal:
        verdict = self._admit(request, length)
        if isinstance(verdict, Refusal):
            self._count(verdict.status)
        return verdict

    def handle(self, request: Request) -> None:
        path = self._path(request.path)
        if path.action == "infer":
            self._infer(request, path)
        elif path.action == "live":
            self._say(request, 200, {"live": True})
        elif path.action == "ready":
            ready = self._is_ready()
            self._say(request, 200 if ready else 503, {"ready": ready})
        elif path.action == "server":
            document = {"name": "trtmodel", "version": _version(), "extensions": ["binary_tensor_data"]}
            self._say(request, 200, document)
        else:
            self._about_model(request, path)

    def _admit(self, request: Request, length: int | None) -> int | Refusal:
        path = self._path(request.path)
        if not path.action:
            return Refusal(404, f"there is nothing at this path: {_PROTOCOL}")
        if path.model and path.model != self._model:
            return Refusal(404, f"there is no such model here: this worker serves {self._model!r}")
        if path.action != "infer":
            if request.method not in (b"GET", b"HEAD"):
                return Refusal(405, f"this path is read with GET; {_PROTOCOL}", _ALLOW_GET)
            return _SMALL_BODY
        if request.method != b"POST":
            return Refusal(405, f"inference is asked for with POST; {_PROTOCOL}", _ALLOW_POST)
        headers = request.headers
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind not in _JSON_TYPES and kind not in _BINARY_TYPES:
            text = "the content type must be application/json, or application/octet-stream with the binary extension"
            return Refusal(415, f"{text}; {_PROTOCOL}")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            return Refusal(415, "compressed bodies are not accepted: send it as it is")
        if HEADER_LENGTH in headers:
            return self._limits.body_bytes
        if length is not None and self._limits.json_bytes < length <= self._limits.body_bytes:
            text = "send the tensors as binary data (Inference-Header-Content-Length), or raise TRTMODEL_MAX_JSON_BYTES"
            return Refusal(413, f"a request in JSON may have {self._limits.json_bytes:,} bytes: {text}")
        return min(self._limits.json_bytes, self._limits.body_bytes)

    def _path(self, path: bytes) -> Path:
        if path == self._hot:
            return self._hot_path
        return _parse_path(path)

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
            self._refuse(request, 503, "no engine is loaded yet: see the TRTModel's status", _RETRY_AFTER)

    def _revisions(self) -> list[str]:
        return sorted({e.revision for e in self._router.loaded.values()})

    def _infer(self, request: Request, path: Path) -> None:
        engine = self._engine(request, path.revision)
        if engine is None:
            return
        if engine.state is EngineState.FAILED:
            self._finish(request, engine, 503, error_with_id("the engine's hosts keep failing", None), _RETRY_AFTER)
            return
        try:
            plan, bodies = engine.codec.parse(request.headers, request.body)
        except Invalid as e:
            self._finish(request, engine, 400, error_with_id(str(e), e.request_id))
            return
        seconds = self._limits.request_seconds
        if plan.timeout is not None and plan.timeout < seconds:
            seconds = plan.timeout
        call = Call(
            plan.shapes,
            bodies,
            time.monotonic() + seconds,
            functools.partial(self._answer, request, plan),
            functools.partial(self._fail, request, engine, plan),
        )
        request.on_gone = call.cancel
        engine.submit(call)

    def _answer(self, request: Request, plan: Plan, outputs: Outputs, engine: Engine) -> None:
        try:
            headers, body = engine.codec.answer(plan, outputs)
        except Failed as e:
            self._fail(request, engine, plan, e)
            return
        engine.stats.count_response(200)
        request.respond(200, body, headers + engine.header)

    def _fail(self, request: Request, engine: Engine, plan: Plan, failure: Failed) -> None:
        extra = _RETRY_AFTER if failure.status == 503 else b""
        self._finish(request, engine, failure.status, error_with_id(failure.message, plan.id), extra)

    def _finish(self, request: Request, engine: Engine, status: int, body: bytes, extra: bytes = b"") -> None:
        engine.stats.count_response(status)
        request.respond(status, body, JSON_HEAD + extra + engine.header)

    def _about_model(self, request: Request, path: Path) -> None:
        table = self._router.table
        engine = self._router.named(path.revision) if path.revision else (table.stable if table else None)
        if path.action == "model-ready":
            ready = engine is not None and engine.alive and (bool(path.revision) or self._is_ready())
            self._say(request, 200 if ready else 503, {"name": self._model, "ready": ready})
        elif engine is None:
            self._refuse_without_engine(request, path.revision)
        else:
            document = {
                "name": self._model,
                "versions": self._revisions(),
                "platform": _PLATFORMS.get(self._runtime, self._runtime.lower()),
                "inputs": [_tensor(s) for s in engine.manifest.inputs],
                "outputs": [_tensor(s) for s in engine.manifest.outputs],
            }
            self._count(200)
            request.respond(200, json.dumps(document).encode(), JSON_HEAD + engine.header)

    def _say(self, request: Request, status: int, document: dict[str, Any]) -> None:
        self._count(status)
        request.respond(status, json.dumps(document).encode())

    def _refuse(self, request: Request, status: int, message: str, headers: bytes = b"") -> None:
        self._count(status)
        request.fail(status, message, headers)

    def _count(self, status: int) -> None:
        self.unrouted[status] = self.unrouted.get(status, 0) + 1


def _version() -> str:
    try:
        return version("trtmodel")
    except PackageNotFoundError:  # the image has the sources only
        return "unknown"


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}


def _parse_path(path: bytes) -> Path:
    try:
        parts = [unquote_to_bytes(part).decode() for part in path.strip(b"/").split(b"/")]
    except UnicodeDecodeError:
        return Path("")
    if parts[0] != "v2":
        return Path("")
    rest = parts[1:]
    if not rest:
        return Path("server")
    if rest[0] == "health" and len(rest) == 2 and rest[1] in ("live", "ready"):
        return Path(rest[1])
    if rest[0] != "models" or len(rest) < 2 or not rest[1]:
        return Path("")
    model, tail, revision = rest[1], rest[2:], ""
    if len(tail) >= 2 and tail[0] == "versions" and tail[1]:
        revision, tail = tail[1], tail[2:]
    if not tail:
        return Path("model", model, revision)
    if tail == ["ready"]:
        return Path("model-ready", model, revision)
    return Path("infer", model, revision) if tail == ["infer"] else Path("")
