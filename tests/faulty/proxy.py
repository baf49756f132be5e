"""Between a client and a real API server: TLS on both sides, every request noted, and faults of the test's choice.

What a proxy, a load balancer or the server itself may do: refuse with 409, 429 or 500 (before the request was served or
after it, when only the answer is lost), end watches at once or with an ERROR event, answer slowly, take connections and
stay silent, or take none.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

CALL_SECONDS = 60.0
SEED = 7
HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
REASONS = {409: "Conflict", 410: "Expired", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}


@dataclasses.dataclass(frozen=True)
class Request:
    """What came: `verb` is WATCH for a watch, else the method; `at` is monotonic."""

    at: float
    verb: str
    path: str

    @property
    def is_watch(self) -> bool:
        return self.verb == "WATCH"


@dataclasses.dataclass(frozen=True)
class Fault:
    """For `share` of the requests of which `hits` is true. `status` 0: they are served, after `delay` seconds.
    `after`: the request was served, only its answer is lost. `retry_after`: seconds, as a header. For watches, `ends`
    ends them so many seconds after they were opened, with an ERROR event if `status` is set; `tears` ends them in the
    middle of their first event, as if that were all."""

    status: int = 0
    share: float = 1.0
    hits: Callable[[Request], bool] = lambda request: not request.is_watch
    after: bool = False
    retry_after: int = 0
    delay: float = 0.0
    ends: float | None = None
    tears: bool = False


def lease(request: Request) -> bool:
    return "/leases" in request.path


class FaultProxy:
    """Runs in a thread of its own while it is open as a context manager. `upstream` and `trust` (None: anybody) are
    the server's; `host` is where it listens and what its certificate, `ca`, is for."""

    def __init__(self, upstream: str, folder: Path, host: str = "127.0.0.1", trust: ssl.SSLContext | None = None):
        self.faults: tuple[Fault, ...] = ()
        self.seen: list[Request] = []
        self.hit = 0  # how many requests met a fault
        self.port = 0
        self._upstream, self._host, self._trust = upstream, host, trust
        self._random = random.Random(SEED)
        self._certificate, self._key = _certificate(folder, host)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault proxy", daemon=True)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"https://{self._host}:{self.port}"

    @property
    def ca(self) -> str:
        return self._certificate.read_text()

    def refuse(self) -> None:
        """Nobody listens any more, and what was open is cut."""
        self._run(self._refuse())

    def fall_silent(self) -> None:
        """Connections are taken and kept, and nothing is said on any of them."""
        self._run(self._set_silent(True))

    def recover(self) -> None:
        """After `refuse` or `fall_silent`; what was open then is lost. All other faults end, too."""
        self.faults = ()
        self._run(self._recover())

    def cut_watches(self) -> int:
        """Those that are open; how many."""
        return self._run(self._cut(self._watches))

    def hush_watches(self) -> int:
        """Those that are open stay open, and nothing comes any more; how many. As when something between forgot a
        connection: the client never hears of its end."""
        return self._run(self._hush())

    def watching(self) -> int:
        """How many watches are open."""
        return len(self._watches)

    def most_in(self, seconds: float, since: float, hits: Callable[[Request], bool] = lambda _: True) -> int:
        """The largest number of requests that came within so many seconds."""
        times = [r.at for r in list(self.seen) if r.at >= since and hits(r)]
        return max((sum(t <= other < t + seconds for other in times) for t in times), default=0)

    # ----------------------------------------------------------------------------------------------- in the thread

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _start(self) -> None:
        self._silent = asyncio.Event()
        self._watches: set[asyncio.Task[Any]] = set()
        self._open: set[asyncio.Task[Any]] = set()
        self._hushed: set[asyncio.Task[Any]] = set()
        ssl_of = self._trust if self._trust is not None else False
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=ssl_of, limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            auto_decompress=False,
            trust_env=False,
        )
        await self._listen()

    async def _listen(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{rest:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        serving.load_cert_chain(self._certificate, self._key)
        site = web.TCPSite(self._runner, self._host, self.port, ssl_context=serving, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        await self._refuse()
        await self._session.close()

    async def _refuse(self) -> None:
        await self._cut(self._open)
        await self._runner.cleanup()

    async def _set_silent(self, silent: bool) -> None:
        if silent:
            self._silent.set()
        else:
            self._silent.clear()

    async def _recover(self) -> None:
        if self._silent.is_set():
            self._silent.clear()
            await self._cut(self._open)
        if not self._runner.sites:
            await self._listen()

    async def _cut(self, tasks: set[asyncio.Task[Any]]) -> int:
        cut = list(tasks)
        for task in cut:
            task.cancel()
        await asyncio.gather(*cut, return_exceptions=True)
        return len(cut)

    async def _hush(self) -> int:
        self._hushed |= self._watches
        return len(self._hushed)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            return await self._serve(request)
        except (asyncio.CancelledError, aiohttp.ClientError, OSError) as e:
            if request.transport is not None:
                request.transport.abort()
            raise asyncio.CancelledError from e  # which the server of aiohttp takes for the end of a connection
        finally:
            self._open.discard(task)
            self._watches.discard(task)
            self._hushed.discard(task)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        is_watch = request.query.get("watch") in ("1", "true")
        noted = Request(time.monotonic(), "WATCH" if is_watch else request.method, request.path)
        self.seen.append(noted)
        body = await request.read()
        await self._while_silent()
        fault = self._fault_for(noted)
        if fault is not None:
            self.hit += 1
            await asyncio.sleep(fault.delay)
            if fault.status and not fault.after and fault.ends is None:
                return _refusal(fault)
        if is_watch:
            task = asyncio.current_task()
            assert task is not None
            self._watches.add(task)
            return await self._stream(request, fault)
        answer = await self._pass_on(request, body)
        await self._while_silent()
        return _refusal(fault) if fault is not None and fault.status else answer

    async def _while_silent(self) -> None:
        while self._silent.is_set():  # noqa: ASYNC110 - it ends with the connection
            await asyncio.sleep(0.05)

    def _fault_for(self, request: Request) -> Fault | None:
        return next((f for f in self.faults if f.hits(request) and self._random.random() < f.share), None)

    async def _pass_on(self, request: web.Request, body: bytes) -> web.Response:
        url, headers = f"{self._upstream}{request.raw_path}", _forwarded(request.headers)
        timeout = aiohttp.ClientTimeout(total=CALL_SECONDS, sock_connect=5)
        async with self._session.request(
            request.method, url, data=body or None, headers=headers, timeout=timeout
        ) as answer:
            return web.Response(status=answer.status, body=await answer.read(), headers=_forwarded(answer.headers))

    async def _stream(self, request: web.Request, fault: Fault | None) -> web.StreamResponse:
        async with self._session.get(
            f"{self._upstream}{request.raw_path}", headers=_forwarded(request.headers)
        ) as answer:
            out = web.StreamResponse(status=answer.status, headers=_forwarded(answer.headers))
            await out.prepare(request)
            ends = fault.ends if fault is not None else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ends):
                    async for chunk in answer.content.iter_any():
                        await self._while_silent()
                        if asyncio.current_task() in self._hushed:
                            continue
                        if fault is not None and fault.tears:
                            await out.write(chunk[: chunk.index(b"\n") // 2])
                            break
                        await out.write(chunk)
            if ends is not None and fault is not None and fault.status:
                await out.write(json.dumps({"type": "ERROR", "object": _status(fault.status)}).encode() + b"\n")
            await out.write_eof()
            return out


def _refusal(fault: Fault) -> web.Response:
    headers = {"Retry-After": str(fault.retry_after)} if fault.retry_after else {}
    return web.json_response(_status(fault.status), status=fault.status, headers=headers)


def _status(code: int) -> dict[str, Any]:
    reason = REASONS.get(code, "")
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": f"a fault made on purpose: {reason}",
        "reason": reason,
        "code": code,
    }


def _forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in HOP_BY_HOP}


def _certificate(folder: Path, host: str) -> tuple[Path, Path]:
    """Of this address alone, signed by itself."""
    folder.mkdir(parents=True, exist_ok=True)
    certificate, key = folder / "proxy.crt", folder / "proxy.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", "/CN=fault-proxy", "-addext", f"subjectAltName=IP:{host}",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return certificate, key
