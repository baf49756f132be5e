"""HTTP/1.1 to the front, over its socket in the file system: kept connections, one request at a time on each.

The other side is known: it always says Content-Length, and never sends what was not asked for. So this is a tenth of
the time of a general client, on the path of every request.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

_MOST_IDLE = 512  # the front's queue is about as long: more requests than that are refused there
_MOST_HEAD_BYTES = 64 * 1024


class Unreachable(Exception):
    """The front did not answer: it cannot be connected to, or closed the connection half-way."""


class TooLate(Exception):
    """The front did not answer in time."""


@dataclass(frozen=True)
class Answer:
    """Header names are in lower case."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes


class FrontClient:
    """Connections are made as needed. What is cancelled closes its connection: so the front sees its client leave."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._idle: list[_Connection] = []

    async def ask(
        self, method: bytes, target: bytes, seconds: float, headers: bytes = b"", body: Sequence[bytes] = ()
    ) -> Answer:
        """`headers`: complete lines. Raises Unreachable, TooLate."""
        head = b"%b %b HTTP/1.1\r\nhost: front\r\n%bcontent-length: %d\r\n\r\n" % (
            method, target, headers, sum(map(len, body)),
        )  # fmt: skip
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                try:
                    return await self._exchange(connection, head, body, seconds)
                except Unreachable:
                    if connection.began_to_answer:
                        raise
                    break  # it was closed as idle while the request was on its way: once more, on a new one
        return await self._exchange(await self._connect(seconds), head, body, seconds)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()

    async def _connect(self, seconds: float) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await asyncio.wait_for(
                loop.create_unix_connection(lambda: _Connection(loop), self._path), seconds
            )
        except asyncio.TimeoutError as e:  # since Python 3.11 an OSError too
            raise TooLate(f"the worker's front did not take a connection within {seconds:g} s") from e
        except OSError as e:
            raise Unreachable(f"the worker's front cannot be reached: {e}") from e
        return connection

    async def _exchange(self, connection: _Connection, head: bytes, body: Sequence[bytes], seconds: float) -> Answer:
        try:
            answer = await connection.exchange(head, body, seconds)
        except BaseException:
            connection.abort()
            raise
        if connection.usable and len(self._idle) < _MOST_IDLE:
            self._idle.append(connection)
        else:
            connection.abort()
        return answer


class _Connection(asyncio.Protocol):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._answer: asyncio.Future[Answer] | None = None
        self._got: bytes | bytearray = b""
        self._head: _Head | None = None
        self.began_to_answer = False
        self.usable = True

    async def exchange(self, head: bytes, body: Sequence[bytes], seconds: float) -> Answer:
        self._got, self._head, self.began_to_answer = b"", None, False
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._answer = answer
        limit = self._loop.call_later(seconds, self._expire, seconds)
        try:
            self._transport.writelines([head, *body])
            return await answer
        finally:
            limit.cancel()
            self._answer = None

    def abort(self) -> None:
        self.usable = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        self._fail(Unreachable(f"the worker's front closed the connection{f': {exc}' if exc else ''}"))

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            self.abort()  # nothing was asked for
            return
        self.began_to_answer = True
        if self._head is None:
            self._got = bytes(self._got) + data if self._got else data
            end = self._got.find(b"\r\n\r\n")
            if end < 0:
                if len(self._got) > _MOST_HEAD_BYTES:
                    self._fail(Unreachable("the worker's front sent an endless head"))
                return
            try:
                self._head = _parse_head(self._got[:end])
            except ValueError as e:
                self._fail(Unreachable(f"the worker's front sent something else than HTTP: {e}"))
                return
            self._got = self._got[end + 4 :]
            if len(self._got) < self._head.length:
                self._got = bytearray(self._got)
        else:
            self._got += data
        head = self._head
        if len(self._got) >= head.length and not self._answer.done():
            self.usable = head.keep and len(self._got) == head.length
            self._answer.set_result(Answer(head.status, head.headers, bytes(self._got)))

    def _expire(self, seconds: float) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(TooLate(f"the worker's front did not answer within {seconds:g} s"))

    def _fail(self, why: Exception) -> None:
        self.usable = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(why)


@dataclass(frozen=True)
class _Head:
    status: int
    headers: Mapping[bytes, bytes]
    length: int
    keep: bool


@functools.lru_cache(maxsize=256)  # answers to like requests have like heads
def _parse_head(head: bytes) -> _Head:
    """Raises ValueError."""
    first, *lines = head.split(b"\r\n")
    version, status, *_ = first.split(b" ", 2)
    if version != b"HTTP/1.1":
        raise ValueError(f"{version[:40]!r} is not HTTP/1.1")
    headers = {}
    for line in lines:
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip()
    keep = headers.get(b"connection", b"").lower() != b"close"
    return _Head(int(status), headers, int(headers[b"content-length"]) if b"content-length" in headers else 0, keep)
