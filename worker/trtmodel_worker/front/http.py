"""HTTP/1.1 on the loop's buffered protocol: keep-alive, pipelining, chunked bodies, Expect, limits. Knows no model.

A request is refused by its head where that is possible, before its body is read. A connection whose body was not read
to its end lingers: it is read and thrown away for a while, since closing it at once would reset it, and the client
would never see the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from http import HTTPStatus
from typing import cast

import httptools

from trtmodel_worker.front.request import App, Refusal, Request

log = logging.getLogger(__name__)

BUFFER_BYTES = 256 * 1024
HEAD_BYTES = 64 * 1024
PIPELINED = 64  # requests that one connection may have sent ahead
PROGRESS_SECONDS = 30.0  # a request that comes in, or an answer that goes out, moves at least so often
IDLE_SECONDS = 300.0
LINGER_SECONDS = 5.0
DISCARDED_BYTES = 1 << 20  # of a refused body: so much is read away to keep the connection
_STATUS = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSE = b"connection: close\r\n"


class HttpServer:
    """One listening port. `staging_bytes` bounds the bodies that are held at once."""

    def __init__(self, app: App, staging_bytes: int) -> None:
        self.app = app
        self.staged = 0
        self.staging_bytes = staging_bytes
        self.closing = False
        self.memory = bytearray(BUFFER_BYTES)  # one for all connections: it is consumed before the next read
        self.view = memoryview(self.memory)
        self.connections: set[Connection] = set()
        self._vacant = asyncio.Event()
        self._server: asyncio.AbstractServer | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def listen(self, host: str | None, port: int) -> None:
        """Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self, loop), host, port, backlog=1024)
        self._sweeper = asyncio.create_task(self._sweep(), name=f"sweep {port}")

    def announce_end(self) -> None:
        """Every answer from now on tells its client to connect anew (elsewhere)."""
        self.closing = True

    async def close(self, seconds: float) -> None:
        """Accept nothing more, answer what runs for at most `seconds`, close."""
        self.closing = True
        if self._server is not None:
            self._server.close()
        deadline = asyncio.get_running_loop().time() + seconds
        for connection in list(self.connections):
            connection.close_if_idle()
        while self.connections and asyncio.get_running_loop().time() < deadline:
            self._vacant.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._vacant.wait(), deadline - asyncio.get_running_loop().time())
        for connection in list(self.connections):
            connection.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()

    def forget(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._vacant.set()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            now = asyncio.get_running_loop().time()
            for connection in list(self.connections):
                connection.check(now)


class Connection(asyncio.BufferedProtocol):
    """One client. Requests are answered in the order in which they came, one at a time."""

    def __init__(self, server: HttpServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._parser = httptools.HttpRequestParser(self)
        self._pending: deque[Request] = deque()
        self._busy: Request | None = None
        self._incoming: Request | None = None
        self._begun = False
        self._head_bytes = 0
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._size = 0
        self._unparsed = 0
        self._limit = 0
        self._last = loop.time()
        self._linger_until = 0.0
        self._stalled = False
        self._paused = False
        self._answering = False

    # -- the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._server.connections.add(self)

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._server.view

    def buffer_updated(self, nbytes: int) -> None:
        self._last = self._loop.time()
        if not self._linger_until:
            self._feed(self._server.view[:nbytes])

    def eof_received(self) -> bool:
        return False  # a client that stops sending has given up: the transport closes

    def connection_lost(self, _exc: Exception | None) -> None:
        self._server.forget(self)
        requests = [self._busy, self._incoming, *self._pending]
        self._busy = self._incoming = None
        self._pending.clear()
        for request in requests:
            if request is not None and not request.gone:
                self._finished(request)
                if request.on_gone is not None:
                    request.on_gone()

    def pause_writing(self) -> None:
        self._stalled = True
        self._flow()

    def resume_writing(self) -> None:
        self._stalled = False
        self._last = self._loop.time()
        self._flow()

    # -- the parser's side. No exception may leave these.

    def on_message_begin(self) -> None:
        self._begun = True
        self._target = b""
        self._headers = {}
        self._body = []
        self._size = 0

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        headers = self._headers
        request = self._incoming = Request(self, self._parser.get_method(), self._target, headers)
        length = None if b"transfer-encoding" in headers else int(headers.get(b"content-length", 0))
        verdict = self._server.app.admit(request, length)
        if isinstance(verdict, int):
            self._limit = verdict
            refusal = self._room(request, length or 0)
        else:
            refusal = verdict
        if refusal is not None:
            request.refusal = refusal
            if b"expect" in headers or (length or 0) > DISCARDED_BYTES or refusal.status in (413, 503):
                self._refuse(request, refusal)
        elif headers.get(b"expect", b"").lower() == b"100-continue":
            self._transport.write(_CONTINUE)
        if self._parser.should_upgrade():
            self._unparsed = length or 0

    def on_body(self, body: bytes) -> None:
        request = self._incoming
        if request is None:
            return
        self._size += len(body)
        if request.refusal is not None:
            if self._size > DISCARDED_BYTES:
                self._refuse(request, request.refusal)
            return
        if self._size > request.staged:  # chunked: its length was not announced
            refusal = self._room(request, self._size)
            if refusal is not None:
                self._refuse(request, refusal)
                return
        self._body.append(body)

    def on_message_complete(self) -> None:
        request = self._incoming
        if request is not None and not self._parser.should_keep_alive():
            request.ending = _CLOSE
        elif request is not None and self._parser.get_http_version() == "1.0":
            request.ending = b"connection: keep-alive\r\n"
        if not self._unparsed:
            self._complete()

    def _complete(self) -> None:
        self._begun = False
        request, self._incoming = self._incoming, None
        if request is None:
            return
        request.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        self._pending.append(request)
        self._flow()
        self._next()

    # -- answers

    def respond(self, request: Request, status: int, headers: bytes, body: bytes) -> None:
        if request is not self._busy:
            log.error("an answer to a request that is not being answered")
            return
        self._busy = None
        self._finished(request)
        if self._server.closing and not self._pending:
            request.ending = _CLOSE
        head = b"%b%bcontent-length: %d\r\n%b\r\n" % (_STATUS[status], headers, len(body), request.ending)
        if request.method == b"HEAD":
            body = b""
        if len(body) < BUFFER_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        if request.ending == _CLOSE:
            if not self._linger_until:
                self._transport.close()
            elif self._transport.can_write_eof():
                self._transport.write_eof()
        else:
            self._last = self._loop.time()
            if self._pending:
                self._flow()
                self._next()

    def close_if_idle(self) -> None:
        if self._busy is None and not self._pending and not self._begun:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def check(self, now: float) -> None:
        """Time limits, looked at every second."""
        quiet = now - self._last
        if self._linger_until:
            if now > self._linger_until and self._busy is None and not self._pending:
                self._transport.abort()
        elif self._stalled:
            if quiet > PROGRESS_SECONDS:
                self._transport.abort()
        elif self._begun:
            if quiet > PROGRESS_SECONDS and not self._paused:
                self._break_off(Refusal(408, f"no byte of the request came for {PROGRESS_SECONDS:g} s"))
        elif self._busy is None and quiet > IDLE_SECONDS:
            self._transport.close()

    def _feed(self, data: memoryview) -> None:
        if self._unparsed:
            size = min(self._unparsed, len(data))
            self.on_body(bytes(data[:size]))
            self._unparsed -= size
            data = data[size:]
            if not self._unparsed:
                self._complete()
        if self._incoming is None:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as e:
            # Another protocol is offered, not demanded (Java's client offers HTTP/2 so with its first request): the
            # request is taken as it is. The parser stops at its body, so that is counted out by hand.
            self._parser = httptools.HttpRequestParser(self)
            if not self._linger_until:
                self._feed(data[e.args[0] :])
        except httptools.HttpParserError as e:
            if not self._linger_until:
                self._break_off(Refusal(400, f"this is not HTTP/1.1 as this server understands it: {str(e)[:200]}"))
        else:
            if self._head_bytes > HEAD_BYTES and not self._linger_until:
                self._break_off(Refusal(431, f"the request's head is longer than {HEAD_BYTES:,} bytes"))

    def _room(self, request: Request, size: int) -> Refusal | None:
        """Take room for a body of `size` bytes so far, or say why there is none."""
        if size > self._limit:
            text = f"the request's body is larger than {self._limit:,} bytes"
            return Refusal(413, text)
        more = size - request.staged
        if self._server.staged + more > self._server.staging_bytes:
            return Refusal(503, "too many bytes of requests are held already: try again later", b"retry-after: 1\r\n")
        request.staged = size
        self._server.staged += more
        return None

    def _refuse(self, request: Request, refusal: Refusal) -> None:
        """Answer now, before the body has come, and end the connection."""
        request.refusal = refusal
        self._incoming = None
        self._finish_with(request)

    def _break_off(self, refusal: Refusal) -> None:
        """What comes on this connection makes no sense, or nothing comes."""
        request = self._incoming or Request(self, b"", b"", {})
        request.refusal = refusal
        self._incoming = None
        self._finish_with(request)

    def _finish_with(self, request: Request) -> None:
        request.ending = _CLOSE
        self._body = []
        self._linger_until = self._loop.time() + LINGER_SECONDS
        self._pending.append(request)
        self._next()

    def _next(self) -> None:
        if self._answering:  # an answer was given at once, within the loop below
            return
        self._answering = True
        while self._pending and self._busy is None and not self._transport.is_closing():
            request = self._busy = self._pending.popleft()
            try:
                if request.refusal is not None:
                    request.fail(request.refusal.status, request.refusal.message, request.refusal.headers)
                else:
                    self._server.app.handle(request)
            except Exception:
                log.exception("a request could not be handled")
                request.fail(500, "an error of this server, see its log")
        self._answering = False

    def _finished(self, request: Request) -> None:
        request.gone = True
        self._server.staged -= request.staged

    def _flow(self) -> None:
        """Read on only while answers leave and not too many requests wait."""
        paused = self._stalled or len(self._pending) >= PIPELINED
        if paused != self._paused and not self._transport.is_closing():
            self._paused = paused
            if paused:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()
