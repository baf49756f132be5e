"""The workers' control ports: ask for a report, send desired state, and wait for news.

Every request is signed over method, path, worker uid, body and expiry. A worker that cannot be reached is unknown,
which is a WorkerError with its cause and never a guess.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
from trtmodel_contract.codec import DocumentError, dumps, loads
from trtmodel_contract.control import CONTROL_PORT, DESIRED_PATH, REPORT_PATH, ControlError, DesiredRequest, Report
from trtmodel_contract.signing import (
    HEADER_EXPIRES,
    HEADER_KEY_ID,
    HEADER_SIGNATURE,
    REQUEST_LIFETIME_SECONDS,
    request_payload,
)

from trtmodel_operator.adapters import bounded
from trtmodel_operator.adapters.plausible import implausible
from trtmodel_operator.ports import Clock, Key, Signer, WorkerError

REPORT_TIMEOUT = 2.0  # seconds
SEND_TIMEOUT = 5.0
AT_ONCE = 64  # reports and requests under way, over all models
WAIT = 30  # seconds that a worker may keep a long poll open; must be less than a request's lifetime
FOLLOWED_MOST = 2048  # workers with a long poll; the others are seen when the reconciler looks again
# The same while nothing of their model is under way. A long poll costs a request every WAIT seconds: for all workers of
# thousands of models that would be half a core for nothing. Of the others, the pod's readiness tells the worst at once,
# and the resync the rest.
QUIET_MOST = 256
REPORT_BYTES = 4 << 20  # a longer answer is refused
RETRY_MOST = 30.0
_RESULTS = {401: "unauthorized", 409: "conflict"}

log = logging.getLogger(__name__)

OnCall = Callable[[str, str], None]  # verb; ok, conflict, refused, unauthorized or unreachable


class HttpWorkers:
    """Implements `ports.Workers`. `changed` is called with the key of a model when one of its workers has news.
    Open it in the event loop that uses it; close it."""

    def __init__(
        self,
        signer: Signer,
        clock: Clock,
        changed: Callable[[Key], None],
        *,
        port: int = CONTROL_PORT,
        on_call: OnCall = lambda *_: None,
    ) -> None:
        self._signer, self._clock, self._changed, self._port = signer, clock, changed, port
        self._on_call = on_call
        # Workers close their connections in their own time: without keep-alive no request meets a closed one.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, trust_env=False, auto_decompress=False)
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._followed: dict[Key, dict[str, tuple[str, asyncio.Task[None]]]] = {}

    async def close(self) -> None:
        tasks = [task for workers in self._followed.values() for _, task in workers.values()]
        self._followed.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()

    async def report(self, ip: str, uid: str) -> Report:
        async with self._gate:
            return await self._report(ip, uid, REPORT_PATH, REPORT_TIMEOUT)

    async def send(self, ip: str, uid: str, request: DesiredRequest) -> None:
        async with self._gate:
            status, body = await self._call("PUT", ip, uid, DESIRED_PATH, dumps(request), SEND_TIMEOUT)
        if status == 409:
            log.info("worker %s at %s refused sequence %d: %s", uid, ip, request.desired.fence.sequence, _refusal(body))
        elif not 200 <= status < 300:
            raise WorkerError(f"the worker refused what it was asked ({status}): {_refusal(body)}")

    def follow(self, key: Key, workers: Mapping[str, tuple[str, int]], *, closely: bool = True) -> None:
        held = self._followed.setdefault(key, {})
        room = (FOLLOWED_MOST if closely else QUIET_MOST) - self.following
        for uid in [u for u, (ip, _) in held.items() if room < 0 or u not in workers or workers[u][0] != ip]:
            held.pop(uid)[1].cancel()
        for uid, (ip, version) in workers.items():
            if uid not in held and room > 0:
                room -= 1
                task = asyncio.create_task(self._follow(key, ip, uid, version), name=f"follow {key[0]}/{key[1]} {ip}")
                held[uid] = (ip, task)
        if not held:
            del self._followed[key]

    @property
    def following(self) -> int:
        """How many workers have a long poll open."""
        return sum(map(len, self._followed.values()))

    async def _follow(self, key: Key, ip: str, uid: str, version: int) -> None:
        """Ends only by being cancelled. An unreachable worker is told once, when it stops answering; that its pod is
        gone is the pod watch's to say."""
        failures = 0
        while True:
            try:
                news = await self._report(ip, uid, f"{REPORT_PATH}?after={version}&wait={WAIT}", WAIT + REPORT_TIMEOUT)
            except WorkerError as e:
                log.debug("following worker %s at %s: %s", uid, ip, e)
                failures += 1
                version = 0  # it may have restarted, and counts anew
                if failures == 1:
                    self._changed(key)
                await asyncio.sleep(min(RETRY_MOST, 0.5 * 2.0 ** min(failures, 10)) * random.uniform(0.75, 1.0))  # noqa: S311
                continue
            failures = 0
            if news.version != version:
                version = news.version
                self._changed(key)

    async def _report(self, ip: str, uid: str, path: str, timeout: float) -> Report:
        status, body = await self._call("GET", ip, uid, path, b"", timeout)
        if status != 200:
            raise WorkerError(f"the worker refused to report ({status}): {_refusal(body)}")
        try:
            report = loads(Report, body)
        except DocumentError as e:
            raise WorkerError(f"the worker's report cannot be read: {e}") from e
        if report.pod_uid != uid:
            raise WorkerError(f"another worker ({report.pod}) answers at {ip}")
        if impossible := implausible(report):
            raise WorkerError(f"the worker's report cannot be true: {impossible}")
        return report

    async def _call(self, method: str, ip: str, uid: str, path: str, body: bytes, timeout: float) -> tuple[int, bytes]:
        expires = int(self._clock.now()) + REQUEST_LIFETIME_SECONDS
        signature = self._signer.sign(request_payload(method, path, uid, body, expires))
        headers = {
            HEADER_KEY_ID: signature.key_id,
            HEADER_SIGNATURE: signature.value,
            HEADER_EXPIRES: str(expires),
            "content-type": "application/json",
        }
        host = f"[{ip}]" if ":" in ip else ip
        url = f"http://{host}:{self._port}{path}"
        limits = aiohttp.ClientTimeout(total=timeout, connect=min(timeout, REPORT_TIMEOUT))
        options: dict[str, Any] = {"headers": headers, "timeout": limits, "allow_redirects": False}
        result = "unreachable"
        try:
            async with self._session.request(method, url, data=body or None, **options) as answer:
                found = answer.status, await bounded.read(answer, REPORT_BYTES)
                result = _RESULTS.get(answer.status, "ok" if 200 <= answer.status < 300 else "refused")
                return found
        except bounded.TooLong as e:
            raise WorkerError(f"the worker's answer is longer than {REPORT_BYTES >> 20} MiB") from e
        except TimeoutError as e:
            raise WorkerError(f"no answer from {ip}:{self._port} within {timeout:g} s") from e
        except (aiohttp.ClientError, OSError) as e:
            raise WorkerError(f"{ip}:{self._port} cannot be reached: {e}") from e
        except asyncio.CancelledError:
            result = ""  # nobody waits for this answer any more: a worker that went, or the end of the process
            raise
        finally:
            if result:
                self._on_call(method, result)


def _refusal(body: bytes) -> str:
    try:
        error = loads(ControlError, body)
    except DocumentError:
        return body[:300].decode(errors="replace")
    held = f" (it holds sequence {error.held.sequence})" if error.held else ""
    return f"{error.reason}: {error.message}{held}"
