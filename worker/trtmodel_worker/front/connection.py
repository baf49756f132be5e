"""HTTP/1.1 on the loop's buffered protocol: keep-alive, pipelining, chunked bodies, Expect, limits. Knows no model.

A request is refused by its head where that is possible, before its body is read. A connection whose body was not read
to its end lingers: it is read and thrown away for a while, since closing it at once would reset it, and the client
would never see the answer.

A message with an ordinary head (see `heads`) never meets the parser: its body is taken as it comes, a large one read
straight into its place. Anything else goes through the parser, to the end of its message.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from http import HTTPStatus
from typing import TYPE_CHECKING, cast

import httptools
import numpy as np

from trtmodel_worker.front.heads import END, HEAD_BYTES, stand_in
from trtmodel_worker.front.request import NO_ROOM, OUR_FAULT, RETRY_AFTER, Refusal, Request

if TYPE_CHECKING:
    from trtmodel_worker.front.http import HttpServer

log = logging.getLogger(__name__)

BUFFER_BYTES = 256 * 1024
OVERHEAD_BYTES = 64 * 1024  # of a request's head, or of what else is no body
JOINED_BYTES = 32 * 1024  # of an answer: a smaller one is sent sooner when it is copied behind its head (measured)
PIPELINED = 64  # requests that one connection may have sent ahead
PROGRESS_SECONDS = 30.0  # a request that comes in, or an answer that goes out, moves at least so often
SLOWEST_BYTES = 64 * 1024  # per second: of a body on average after PROGRESS_SECONDS, of an answer in one of these
IDLE_SECONDS = 300.0
LINGER_SECONDS = 5.0
DISCARDED_BYTES = 1 << 20  # of a refused body: so much is read away to keep the connection
_STATUS = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}
_ANSWER = b"%b%bcontent-length: %d\r\n%b\r\n%b"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSE = b"connection: close\r\n"


class Connection(asyncio.BufferedProtocol):
    """One client. Requests are answered in the order in which they came, one at a time. `patient`: it takes turns with
    others that are."""

    def __init__(self, server: HttpServer, loop: asyncio.AbstractEventLoop, patient: bool = False) -> None:
        self._server = server
        self._loop = loop
        self._patient = patient
        self._parser = httptools.HttpRequestParser(self)
        self._pending: deque[Request] = deque()
        self._busy: Request | None = None
        self._incoming: Request | None = None
        self._begun = False
        self._begun_at = 0.0
        self._in_head = False
        self._last_came = False  # a message after which nothing may come
        self._taking_over = False
        self._overhead = 0  # bytes in a row that are no body: a head, trailers, chunk extensions
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: bytes | bytearray = b""
        self._plain = 0  # bytes of the body that comes past the parser, 0 if none does
        self._place: memoryview | None = None  # where it is read to, once some of it has come
        self._size = 0
        self._limit = 0
        self.last = loop.time()
        self._linger_until = 0.0
        self._stalled = False
        self._left = 0  # bytes of answers that were still here when it was looked at last
        self._paused = False
        self._answering = False

    # -- the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._server.connected(self)

    def get_buffer(self, _sizehint: int) -> memoryview:
        if self._place is None:
            return self._server.view
        return self._place[self._size : self._size + BUFFER_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        self.last = self._loop.time()
        if self._linger_until:
            return
        if self._place is not None:
            self._size += nbytes
            if self._size == self._plain:
                self._complete(self._place)
            return
        self._overhead += nbytes
        at = self._take_plain(nbytes)
        if at < nbytes and not self._linger_until:
            self._feed(self._server.view[at:nbytes])

    def eof_received(self) -> bool:
        return False  # a client that stops sending has given up: the transport closes

    def connection_lost(self, _exc: Exception | None) -> None:
        self._server.forget(self)
        requests = [self._busy, self._incoming, *self._pending]
        self._busy = self._incoming = None
        self._pending.clear()
        del self._parser  # it refers to this connection: else both would wait for the garbage collector
        for request in requests:
            if request is not None and not request.gone:
                on_gone = request.on_gone
                self._finished(request)
                if on_gone is not None:
                    on_gone()

    def pause_writing(self) -> None:
        self._stalled = True
        self._flow()

    def resume_writing(self) -> None:
        self._stalled = False
        self.last = self._loop.time()
        self._flow()
        self.handle_next()

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
        request = Request(self, self._parser.get_method(), self._target, headers)
        self._admit(request, None if b"transfer-encoding" in headers else int(headers.get(b"content-length", 0)))
        if request.refusal is None and headers.get(b"expect", b"").lower() == b"100-continue":
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
        self._last_came = not self._parser.should_keep_alive()
        if self._incoming is not None and self._last_came:
            self._incoming.ending = _CLOSE
        elif self._incoming is not None and self._parser.get_http_version() == "1.0":
            self._incoming.ending = b"connection: keep-alive\r\n"
        self._complete(bytes(self._body))

    # -- answers

    def respond(self, request: Request, status: int, headers: bytes, body: bytes) -> None:
        if request is not self._busy:
            log.error("an answer to a request that is not being answered")
            return
        self._busy = None
        self._finished(request)
        if (self._server.closing or self._server.leaving()) and not self._pending:
            request.ending = _CLOSE
        size = len(body)
        if request.method == b"HEAD":
            body = b""
        if size < JOINED_BYTES:
            self._transport.write(_ANSWER % (_STATUS[status], headers, size, request.ending, body))
        else:
            self._transport.writelines((_ANSWER % (_STATUS[status], headers, size, request.ending, b""), body))
        if request.ending == _CLOSE:
            if not self._linger_until:
                self._transport.close()
            elif self._transport.can_write_eof():
                self._transport.write_eof()
        else:
            self.last = self._loop.time()
            if self._pending:
                self._flow()
                self.handle_next()

    def hold(self, request: Request, size: int) -> bool:
        if self._server.staged + size > self._server.staging_bytes:
            return False
        request.staged += size
        self._server.staged += size
        return True

    @property
    def idle(self) -> bool:
        """No request is here, and none has begun to come."""
        return self._busy is None and not (self._pending or self._begun or self._linger_until)

    def close_if_idle(self) -> None:
        if self.idle:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def check(self, now: float) -> None:
        """Time limits, looked at every second."""
        quiet = now - self.last
        if self._stalled or self._transport.is_closing():
            left = self._transport.get_write_buffer_size()
            if self._left - left >= SLOWEST_BYTES:  # since a second ago: a slow client takes a large answer bit by bit
                self.last = now
            elif quiet > PROGRESS_SECONDS:
                self._transport.abort()
            self._left = left
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

    def _take_plain(self, nbytes: int) -> int:
        """Take the messages with ordinary heads that are next in the buffer. Returns where other bytes begin."""
        server = self._server
        at = self._take_body(0, nbytes) if self._plain else 0
        while at < nbytes and not (self._begun or self._linger_until or self._last_came):
            end = server.memory.find(END, at, min(at + HEAD_BYTES, nbytes))
            if end < 0:
                break
            end += len(END)
            head = server.heads.find(bytes(server.view[at:end]))
            if head is None:
                break
            self._begun = True
            self._begun_at = self.last
            self._plain = head.length
            self._size = 0
            self._admit(Request(self, head.method, head.target, head.headers), head.length)
            at = self._take_body(end, nbytes)
        return at

    def _take_body(self, at: int, nbytes: int) -> int:
        """What the buffer has of the body that comes past the parser, from `at` on. Returns where it ends."""
        self._overhead = 0
        request = self._incoming
        kept = request is not None and request.refusal is None
        end = at + self._plain - self._size
        if end <= nbytes:
            self._complete(bytes(self._server.view[at:end]) if kept else b"")
            return end
        # Its pages take no memory before bytes come. Many clients send head and body apart: a small one comes whole.
        if kept and (at < nbytes or self._plain > BUFFER_BYTES):
            self._place = np.empty(self._plain, np.uint8).data
            self._place[: nbytes - at] = self._server.view[at:nbytes]
        self._size += nbytes - at
        return nbytes

    def _admit(self, request: Request, length: int | None) -> None:
        """Refuse `request`, or take room for its body. `length`: as announced, None if chunked."""
        self._incoming = request
        try:
            verdict: int | Refusal | None = self._server.app.admit(request, length)
        except Exception:
            log.exception("a request could not be admitted")
            verdict = Refusal(500, OUR_FAULT)
        if isinstance(verdict, int):
            self._limit = verdict
            verdict = self._room(request, length or 0)
        if verdict is not None:
            request.refusal = verdict
            if b"expect" in request.headers or (length or 0) > DISCARDED_BYTES or verdict.status in (413, 503):
                self._refuse(request, verdict)

    def _complete(self, body: bytes | memoryview) -> None:
        """The message that came in has ended."""
        request = self._incoming
        self._begun = False
        self._incoming = self._place = None
        self._plain = 0
        self._body = b""
        if request is None:
            return
        request.body = body
        self._pending.append(request)
        if len(self._pending) >= PIPELINED:
            self._flow()
        if self._busy is None:
            if self._patient:
                self._server.take_turn(self)
            else:
                self.handle_next()

    def _feed(self, data: memoryview) -> None:
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
            if self._overhead > OVERHEAD_BYTES and not self._linger_until:
                self._break_off(Refusal(431, f"the request's head is longer than {OVERHEAD_BYTES:,} bytes"))

    def _take_over(self) -> None:
        """Another protocol is offered, not demanded (Java's client offers HTTP/2 so with its first request): the
        request is taken as it is. The parser stops at its body, so another one goes on there, under a head that says
        how the body comes and offers nothing."""
        former, self._parser = self._parser, httptools.HttpRequestParser(self)
        self._taking_over = True
        self._parser.feed_data(stand_in(former.get_http_version(), former.should_keep_alive(), self._headers))
        self._taking_over = False

    def _room(self, request: Request, size: int) -> Refusal | None:
        """Take room for a body of `size` bytes so far, or say why there is none."""
        if size > self._limit:
            return Refusal(413, f"the request's body is larger than {self._limit:,} bytes")
        if not self.hold(request, size - request.staged):
            return Refusal(503, NO_ROOM, RETRY_AFTER)
        return None

    def _break_off(self, refusal: Refusal) -> None:
        """What comes on this connection makes no sense, or nothing comes. After its last request nothing has to make
        sense: the connection ends with that one's answer."""
        if self._last_came:
            return
        self._refuse(self._incoming or Request(self, b"", b"", {}), refusal)

    def _refuse(self, request: Request, refusal: Refusal) -> None:
        """Answer now, before the body has come, and end the connection."""
        request.refusal = refusal
        request.ending = _CLOSE
        self._incoming = self._place = None
        self._body = b""
        self._linger_until = self._loop.time() + LINGER_SECONDS
        self._pending.append(request)
        self.handle_next()

    def handle_next(self) -> None:
        """Handle the request that has waited for the longest, if none is being handled."""
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
                request.fail(500, OUR_FAULT)
        self._answering = False

    def _finished(self, request: Request) -> None:
        request.gone = True
        request.on_gone = None  # it knows the request: without it nothing waits for the garbage collector
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
