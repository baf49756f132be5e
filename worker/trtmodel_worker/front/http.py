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
SLOWEST_BYTES = 64 * 1024  # per second, on average after PROGRESS_SECONDS: a body's room is taken when it is announced
IDLE_SECONDS = 300.0
LINGER_SECONDS = 5.0
DISCARDED_BYTES = 1 << 20  # of a refused body: so much is read away to keep the connection
_STATUS = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSE = b"connection: close\r\n"


class HttpServer:
    """One listening port. `staging_bytes` bounds the bodies that are held at once, `most` the connections: when there
    are more, the one that was idle for the longest is closed."""

    def __init__(self, app: App, staging_bytes: int, most: int) -> None:
        self.app = app
        self.most = most
        self.staged = 0
        self.staging_bytes = staging_bytes
        self.closing = False
        self.memory = bytearray(BUFFER_BYTES)  # one for all connections: it is consumed before the next read
        self.view = memoryview(self.memory)
        self.connections: set[Connection] = set()
        self._vacant = asyncio.Event()
        self._server: asyncio.AbstractServer | None = None
        self._local: asyncio.AbstractServer | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def listen(self, host: str | None, port: int) -> None:
        """Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self, loop), host, port, backlog=1024)
        self._sweeper = asyncio.create_task(self._sweep(), name=f"sweep {port}")

    async def listen_unix(self, path: str) -> None:
        """Also on a socket in the file system, for the gRPC gateway. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._local = await loop.create_unix_server(lambda: Connection(self, loop), path, backlog=1024)

    def announce_end(self) -> None:
        """Every answer from now on tells its client to connect anew (elsewhere)."""
        self.closing = True

    async def close(self, seconds: float) -> None:
        """Accept nothing more, answer what runs for at most `seconds`, close."""
        self.closing = True
        for listening in (self._server, self._local):
            if listening is not None:
                listening.close()
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

    def connected(self, connection: Connection) -> None:
        self.connections.add(connection)
        if len(self.connections) > self.most:
            idle = [c for c in self.connections if c.idle and c is not connection]
            (min(idle, key=lambda c: c.last) if idle else connection).abort()

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
        self._begun_at = 0.0
        self._in_head = False
        self._taking_over = False
        self._overhead = 0  # bytes in a row that are no body: a head, trailers, chunk extensions
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: bytes | bytearray = b""
        self._size = 0
        self._limit = 0
        self.last = loop.time()
        self._linger_until = 0.0
        self._stalled = False
        self._paused = False
        self._answering = False

    # -- the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._server.connected(self)

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._server.view

    def buffer_updated(self, nbytes: int) -> None:
        self.last = self._loop.time()
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
        self.last = self._loop.time()
        self._flow()
        self._next()

    # -- the parser's side. No exception may leave these. What follows a refusal that ends the connection is no request.

    def on_message_begin(self) -> None:
        if self._linger_until or self._taking_over:
            return
        self._begun = self._in_head = True
        self._begun_at = self._loop.time()
        self._target = b""
        self._headers = {}
        self._body = b""
        self._size = 0

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers come too late: the request was admitted by its head
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._linger_until or self._taking_over:
            return
        self._in_head = False
        self._overhead = 0
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

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
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
        if self._size == len(body):
            self._body = body
        else:  # one growing piece: a body in chunks of two bytes would cost thirty times its size as a list
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += body

    def on_message_complete(self) -> None:
        self._overhead = 0
        if self._parser.should_upgrade():  # its body is still to come: see _take_over
            return
        request = self._incoming
        if request is not None and not self._parser.should_keep_alive():
            request.ending = _CLOSE
        elif request is not None and self._parser.get_http_version() == "1.0":
            request.ending = b"connection: keep-alive\r\n"
        self._begun = False
        self._incoming = None
        if request is None:
            return
        request.body = bytes(self._body)
        self._body = b""
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
            self.last = self._loop.time()
            if self._pending:
                self._flow()
                self._next()

    def hold(self, request: Request, size: int) -> bool:
        if self._server.staged + size > self._server.staging_bytes:
            return False
        request.staged += size
        self._server.staged += size
        return True

    @property
    def idle(self) -> bool:
        """No request is here, and none has begun to come."""
        return self._busy is None and not self._pending and not self._begun

    def close_if_idle(self) -> None:
        if self.idle:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def check(self, now: float) -> None:
        """Time limits, looked at every second."""
        quiet = now - self.last
        if self._stalled or self._transport.is_closing():
            if quiet > PROGRESS_SECONDS:
                self._transport.abort()
        elif self._linger_until:
            if now > self._linger_until and self._busy is None and not self._pending:
                self._transport.abort()
        elif self._begun:
            slow = now - self._begun_at > PROGRESS_SECONDS + self._size / SLOWEST_BYTES
            if (slow or quiet > PROGRESS_SECONDS) and not self._paused:
                text = f"no byte came for {PROGRESS_SECONDS:g} s, or on average less than {SLOWEST_BYTES:,} per second"
                self._break_off(Refusal(408, f"the request comes too slowly: {text}"))
        elif self._busy is None and quiet > IDLE_SECONDS:
            self._transport.close()

    def _feed(self, data: memoryview) -> None:
        self._overhead += len(data)
        try:
            while True:
                try:
                    self._parser.feed_data(data)
                    break
                except httptools.HttpParserUpgrade as e:
                    data = data[e.args[0] :]
                    self._take_over()
        except httptools.HttpParserError as e:
            if not self._linger_until:
                self._break_off(Refusal(400, f"this is not HTTP/1.1 as this server understands it: {str(e)[:200]}"))
        else:
            if self._overhead > HEAD_BYTES and not self._linger_until:
                self._break_off(Refusal(431, f"the request's head is longer than {HEAD_BYTES:,} bytes"))

    def _take_over(self) -> None:
        """Another protocol is offered, not demanded (Java's client offers HTTP/2 so with its first request): the
        request is taken as it is. The parser stops at its body, so another one goes on there, under a head that says
        how the body comes and offers nothing."""
        former, self._parser = self._parser, httptools.HttpRequestParser(self)
        lines = [b"POST / HTTP/%b" % former.get_http_version().encode()]
        lines += [
            b"%b: %b" % (n, self._headers[n]) for n in (b"content-length", b"transfer-encoding") if n in self._headers
        ]
        lines.append(b"connection: keep-alive" if former.should_keep_alive() else b"connection: close")
        self._taking_over = True
        self._parser.feed_data(b"\r\n".join((*lines, b"", b"")))
        self._taking_over = False

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
        self._body = b""
        self._linger_until = self._loop.time() + LINGER_SECONDS
        self._pending.append(request)
        self._next()

    def _next(self) -> None:
        if self._answering:  # an answer was given at once, within the loop below
            return
        self._answering = True
        while self._pending and self._busy is None and not self._stalled and not self._transport.is_closing():
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
                self._begun_at = self._loop.time()
                self._transport.resume_reading()
