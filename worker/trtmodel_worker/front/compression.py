"""Compressed bodies, both ways: gzip and deflate (RFC 9110, 8.4). Large ones are worked on in threads of their own.

An answer is compressed if its client asks for it: Accept-Encoding names one coding and no other. Libraries that name
all they know in each request, unasked, get large answers in JSON compressed and nothing else: numbers in binary form
hardly shrink, and a cluster's network is faster than zlib.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from trtmodel_worker.front.request import JSON_HEAD, NO_ROOM, OUR_FAULT, RETRY_AFTER, Request
from trtmodel_worker.placement import step_aside

log = logging.getLogger(__name__)
CODINGS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}
"""Name of a coding -> zlib's `wbits`."""
ASKED_BYTES = 1024  # less is sent as it is
ACCEPTED_BYTES = 64 * 1024
LOOP_BYTES = 64 * 1024  # so much is inflated (0.2 ms) or deflated (1 ms) at once on the loop
_LEVEL = 1
_THREADS = 2


class BadCompression(ValueError):
    """The body is not what its Content-Encoding says."""


class TooLarge(ValueError):
    """There is more in the body than it may have."""


class Inflation:
    """One compressed body. It is taken out in steps, so that a few bytes never become more than was asked for."""

    def __init__(self, coding: bytes, body: bytes | memoryview, limit: int) -> None:
        self._stream = zlib.decompressobj(CODINGS[coding])
        self._limit = limit
        self._rest: bytes | memoryview = body
        self._found = b""

    def run(self, most: int) -> bytes | None:
        """All of it; None if it is more than `most` bytes: then go on with another call. Raises TooLarge if it is more
        than its limit, BadCompression."""
        most = min(most, self._limit)
        try:
            more = self._stream.decompress(self._rest, most + 1 - len(self._found))
        except zlib.error as e:
            raise BadCompression(f"the body is not compressed as Content-Encoding says: {e}") from e
        self._found = self._found + more if self._found else more
        self._rest = self._stream.unconsumed_tail
        if len(self._found) > self._limit:
            raise TooLarge
        if len(self._found) > most:
            return None
        if not self._stream.eof or self._stream.unused_data:
            raise BadCompression("the compressed body ends too early, or something follows it")
        return self._found


Refuse = Callable[[Request, int, str, bytes], None]
"""Answers a request with an error: status, message, header lines."""


class Compression:
    def __init__(self, refuse: Refuse) -> None:
        self._refuse = refuse
        self._threads = ThreadPoolExecutor(_THREADS, "compression", step_aside)

    def inflate(self, request: Request, coding: bytes, limit: int, then: Callable[[Request], None]) -> None:
        """Go on with `then` when the request's body is what was compressed, or refuse the request."""
        inflation = Inflation(coding, request.body, limit)
        try:
            found = inflation.run(LOOP_BYTES)
        except ValueError as e:
            self._refuse_as(request, e, limit)
            return
        if found is not None:
            self._go_on(request, found, then)
            return
        future = asyncio.get_running_loop().run_in_executor(self._threads, inflation.run, limit)

        def done(future: asyncio.Future[bytes | None]) -> None:
            try:
                body = future.result()
            except ValueError as e:
                self._refuse_as(request, e, limit)
                return
            except Exception:  # such as no memory for it
                log.exception("a request could not be inflated")
                self._refuse(request, 500, OUR_FAULT, b"")
                return
            try:
                self._go_on(request, body or b"", then)
            except Exception:
                log.exception("a request could not be handled")
                self._refuse(request, 500, OUR_FAULT, b"")

        future.add_done_callback(done)

    def respond(self, request: Request, status: int, headers: bytes, body: bytes, extra: bytes) -> None:
        """Answer a request that has an Accept-Encoding header, compressed or not. `headers`: the content type's;
        `extra`: the others."""
        coding = chosen(request.headers[b"accept-encoding"], len(body), headers == JSON_HEAD)
        if coding is None:
            request.respond(status, body, headers + extra)
            return
        headers += extra + b"content-encoding: %b\r\nvary: accept-encoding\r\n" % coding
        if len(body) <= LOOP_BYTES:
            request.respond(status, _deflate(coding, body), headers)
            return
        future = asyncio.get_running_loop().run_in_executor(self._threads, _deflate, coding, body)

        def done(future: asyncio.Future[bytes]) -> None:
            try:
                request.respond(status, future.result(), headers)
            except Exception:
                log.exception("an answer could not be compressed")
                self._refuse(request, 500, OUR_FAULT, b"")

        future.add_done_callback(done)

    def _go_on(self, request: Request, body: bytes, then: Callable[[Request], None]) -> None:
        if not request.hold(len(body)):
            self._refuse(request, 503, NO_ROOM, RETRY_AFTER)
            return
        request.body = body
        then(request)

    def _refuse_as(self, request: Request, error: ValueError, limit: int) -> None:
        if isinstance(error, TooLarge):
            text = f"the request's body is larger than {limit:,} bytes when it is not compressed"
            self._refuse(request, 413, text, b"")
        else:
            self._refuse(request, 400, str(error), b"")


def chosen(accepted: bytes, size: int, is_json: bool) -> bytes | None:
    """The coding for an answer of `size` bytes; None to send it as it is."""
    names = []
    for part in accepted.lower().split(b","):
        name, _, parameters = part.partition(b";")
        name, quality = name.strip(), parameters.replace(b" ", b"")
        if name and name != b"identity" and not (quality.startswith(b"q=0") and not quality.strip(b"q=0.")):
            names.append(name)
    if size < ASKED_BYTES or (len(names) > 1 and (size < ACCEPTED_BYTES or not is_json)):
        return None
    return next((name for name in (b"gzip", b"deflate") if name in names), None)


def _deflate(coding: bytes, body: bytes) -> bytes:
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, CODINGS[coding])
    return stream.compress(body) + stream.flush()
