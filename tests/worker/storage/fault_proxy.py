"""A proxy before a real S3 server that does to it what networks, clocks and operators of stores do.

It takes one request a connection, so that every answer passes whole through its hands. The client signs for the
proxy's address and the Host header is passed on as it is, so signatures stay valid.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

HEAD_END = b"\r\n\r\n"
TRICKLE_BYTES, TRICKLE_SECONDS = 512, 0.05


@dataclass(frozen=True)
class Request:
    method: str
    target: str
    headers: dict[str, str]  # names in lower case
    head: bytes = field(repr=False)
    body: bytes = field(repr=False)


@dataclass
class Fault:
    """What happens to the next `times` requests for which `when` is true. With `before` the server never sees them and
    `before` is the answer, b"" for a connection that just ends; `after` makes another answer of the server's. A `slow`
    one comes a few bytes at a time, for as long as the client cares to wait."""

    when: Callable[[Request], bool]
    times: int
    before: bytes | None = None
    after: Callable[[bytes], bytes] = bytes
    slow: bool = False


class FaultProxy:
    """`faults` is a test's to fill, `seen` are the requests that came."""

    def __init__(self, port: int) -> None:
        self.upstream = port
        self.faults: list[Fault] = []
        self.seen: list[Request] = []
        self.endpoint = ""

    def count(self, when: Callable[[Request], bool]) -> int:
        return sum(map(when, self.seen))

    @contextlib.contextmanager
    def running(self) -> Iterator[FaultProxy]:
        loop = asyncio.new_event_loop()
        server = loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 26))
        self.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(server.close)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            request = await self._read(reader, writer)
            self.seen.append(request)
            fault = next((f for f in self.faults if f.times > 0 and f.when(request)), None)
            if fault is not None:
                fault.times -= 1
            if fault is not None and fault.before is not None:
                answer = fault.before
            else:
                answer = await self._ask(request)
                answer = fault.after(answer) if fault is not None else answer
            if fault is not None and fault.slow:
                await _trickle(writer, answer)
            else:
                writer.write(answer)
                await writer.drain()
        writer.close()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request:
        head = await reader.readuntil(HEAD_END)
        first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("expect") == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        kept = [line for line in lines if not line.lower().startswith(("connection:", "expect:"))]
        new = "\r\n".join([first, *kept, "Connection: close"]).encode("latin-1") + HEAD_END
        return Request(method, target, headers, new, body)

    async def _ask(self, request: Request) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.upstream)
        writer.write(request.head + request.body)
        await writer.drain()
        answer = await reader.read()
        writer.close()
        return answer


async def _trickle(writer: asyncio.StreamWriter, answer: bytes) -> None:
    for at in range(0, len(answer), TRICKLE_BYTES):
        writer.write(answer[at : at + TRICKLE_BYTES])
        await writer.drain()
        await asyncio.sleep(TRICKLE_SECONDS)


def refused(status: str, code: str) -> bytes:
    """An answer of S3 that is not the server's."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>said the proxy</Message></Error>".encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def cut(answer: bytes) -> bytes:
    """Half of the body that the head promises."""
    head, end, body = answer.partition(HEAD_END)
    return head + end + body[: len(body) // 2]


def damaged(answer: bytes) -> bytes:
    """One byte in the middle of the body is another one."""
    head, end, body = answer.partition(HEAD_END)
    middle = len(body) // 2
    return head + end + body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]


def lost(_answer: bytes) -> bytes:
    """The server did what it was asked, and nobody hears of it."""
    return b""
