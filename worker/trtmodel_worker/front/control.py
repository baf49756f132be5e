"""Port 8081: the operator asks and tells. Every request carries the operator's signature over all of it."""

from __future__ import annotations

import asyncio
import logging
import time
from urllib.parse import parse_qs

from trtmodel_contract.codec import DocumentError, dumps, loads
from trtmodel_contract.control import DESIRED_PATH, REPORT_PATH, ControlError, DesiredRequest, Fence
from trtmodel_contract.signing import (
    HEADER_EXPIRES,
    HEADER_KEY_ID,
    HEADER_SIGNATURE,
    REQUEST_LIFETIME_SECONDS,
    Signature,
    request_payload,
)

from trtmodel_worker.front.fence import Conflict
from trtmodel_worker.front.request import Refusal, Request
from trtmodel_worker.front.worker import NotYet, Worker
from trtmodel_worker.trust import Untrusted

log = logging.getLogger(__name__)
MAX_BODY_BYTES = 1 << 20
MAX_WAIT_SECONDS = 60.0
CLOCK_SKEW_SECONDS = 30
_METHODS = {DESIRED_PATH.encode(): b"PUT", REPORT_PATH.encode(): b"GET"}


class ControlEndpoints:
    """The App of the control port."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._waiting: set[asyncio.Task[None]] = set()

    def admit(self, request: Request, _length: int | None) -> int | Refusal:
        method = _METHODS.get(request.path)
        if method is None:
            return Refusal(404, f"this port has {DESIRED_PATH} (PUT) and {REPORT_PATH} (GET)")
        if method != request.method:
            return Refusal(405, f"this path takes {method.decode()}", b"allow: " + method + b"\r\n")
        return MAX_BODY_BYTES

    def handle(self, request: Request) -> None:
        try:
            self._authenticate(request)
        except Untrusted as e:
            self._worker.untrusted["request"] += 1
            _refuse(request, 401, "Unauthorized", str(e))
            return
        if request.path == DESIRED_PATH.encode():
            self._take(request)
        else:
            self._tell(request)

    def _authenticate(self, request: Request) -> None:
        """Raises Untrusted."""
        text = request.headers.get(HEADER_EXPIRES.encode(), b"")
        expires = int(text) if text.isdigit() and len(text) < 16 else 0
        now = time.time()
        if expires <= now:
            raise Untrusted(f"the request has expired (or this node's clock is wrong: it says {now:.0f})")
        if expires > now + REQUEST_LIFETIME_SECONDS + CLOCK_SKEW_SECONDS:
            raise Untrusted(f"the request lives longer than {REQUEST_LIFETIME_SECONDS} s (this clock says {now:.0f})")
        path = request.path + (b"?" + request.query if request.query else b"")
        signature = Signature(
            request.headers.get(HEADER_KEY_ID.encode(), b"").decode(errors="replace"),
            request.headers.get(HEADER_SIGNATURE.encode(), b"").decode(errors="replace"),
        )
        payload = request_payload(
            request.method.decode(),
            path.decode(errors="replace"),
            self._worker.settings.pod_uid,
            bytes(request.body),
            expires,
        )
        self._worker.keyring.verify(signature, payload)

    def _take(self, request: Request) -> None:
        try:
            self._worker.take(loads(DesiredRequest, bytes(request.body)))
        except Conflict as e:
            _refuse(request, 409, "Conflict", str(e), self._worker.held)
        except NotYet as e:
            _refuse(request, 503, "NotYet", str(e))
        except DocumentError as e:
            _refuse(request, 400, "Invalid", str(e))
        else:
            request.respond(200, dumps(self._worker.report()))

    def _tell(self, request: Request) -> None:
        query = parse_qs(request.query.decode(errors="replace"))
        try:
            after = int(query["after"][0]) if "after" in query else None
            wait = min(MAX_WAIT_SECONDS, float(query.get("wait", ["0"])[0].removesuffix("s")))
        except ValueError:
            _refuse(request, 400, "Invalid", "after must be a version, wait a number of seconds")
            return
        if after is None or not wait > 0 or after > self._worker.version:  # that was said by a former process
            request.respond(200, dumps(self._worker.report()))
            return
        task = asyncio.create_task(self._tell_later(request, after, wait))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)
        request.on_gone = task.cancel

    async def _tell_later(self, request: Request, after: int, wait: float) -> None:
        await self._worker.news(after, wait)
        request.respond(200, dumps(self._worker.report()))


def _refuse(request: Request, status: int, reason: str, message: str, held: Fence | None = None) -> None:
    level = logging.DEBUG if status == 401 else logging.WARNING  # anybody in the cluster can cause a 401
    log.log(level, "refused %s %s: %s", request.method.decode(), request.path.decode(errors="replace"), message)
    request.respond(status, dumps(ControlError(reason, message, held)))
