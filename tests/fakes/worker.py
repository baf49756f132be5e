"""Worker pods as the operator sees them: the control port over real HTTP, one address of 127.0.0.0/8 for each.

Models: signatures checked as a worker checks them, long polls, versions, fences (a lower sequence is refused). Does
not model: engines. A test says what the report is.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from aiohttp import web
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from trtmodel_contract.codec import dumps, loads
from trtmodel_contract.control import (
    DESIRED_PATH,
    REPORT_PATH,
    ControlError,
    DesiredRequest,
    Fence,
    Report,
    WorkerState,
)
from trtmodel_contract.identity import LoadKey
from trtmodel_contract.signing import HEADER_EXPIRES, HEADER_KEY_ID, HEADER_SIGNATURE, request_payload


class FakeWorker:
    def __init__(self, ip: str, uid: str, keys: Mapping[str, str]) -> None:
        self.ip, self.uid, self.port = ip, uid, 0
        self.keys = dict(keys)
        self.told: list[DesiredRequest] = []
        self.asked = 0
        self.hangs = False
        self.report = Report(
            version=1,
            pod=f"pod-{uid}",
            pod_uid=uid,
            load_key=LoadKey("ONNXRuntime", "1.20", "cpu"),
            driver="",
            state=WorkerState.NO_ENGINE,
            message="",
            fence=Fence("", 0),
            pointer_sequence=0,
            key_ids=tuple(keys),
            models={},
        )
        self._changed = asyncio.Condition()

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.add_routes([web.get(REPORT_PATH, self._report), web.put(DESIRED_PATH, self._desired)])
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.ip, port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def becomes(self, **changes: Any) -> None:
        self.report = dataclasses.replace(self.report, version=self.report.version + 1, **changes)
        async with self._changed:
            self._changed.notify_all()

    async def _report(self, request: web.Request) -> web.Response:
        self.asked += 1
        if refused := await self._refuse(request):
            return refused
        if self.hangs:
            await asyncio.sleep(60)
        after, wait = int(request.query.get("after", -1)), float(request.query.get("wait", 0))
        try:
            async with asyncio.timeout(wait), self._changed:
                while self.report.version == after:
                    await self._changed.wait()
        except TimeoutError:
            pass
        return web.Response(body=dumps(self.report))

    async def _desired(self, request: web.Request) -> web.Response:
        if refused := await self._refuse(request):
            return refused
        asked = loads(DesiredRequest, await request.read())
        if asked.desired.fence.sequence < self.report.fence.sequence:
            return _error(409, "Fenced", "a lower sequence than the held one", self.report.fence)
        self.told.append(asked)
        await self.becomes(fence=asked.desired.fence)
        return web.Response(body=dumps(self.report))

    async def _refuse(self, request: web.Request) -> web.Response | None:
        expires = int(request.headers.get(HEADER_EXPIRES, 0))
        body = await request.read()
        payload = request_payload(request.method, request.path_qs, self.uid, body, expires)
        try:
            key = Ed25519PublicKey.from_public_bytes(base64.b64decode(self.keys[request.headers[HEADER_KEY_ID]]))
            key.verify(base64.b64decode(request.headers[HEADER_SIGNATURE]), payload)
        except (KeyError, InvalidSignature):
            return _error(401, "BadSignature", "not signed by a key that this worker trusts")
        return _error(401, "Expired", "too late") if expires < time.time() else None


def _error(status: int, reason: str, message: str, held: Fence | None = None) -> web.Response:
    return web.Response(status=status, body=dumps(ControlError(reason, message, held)))
