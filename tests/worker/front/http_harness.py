"""A connection of the HTTP server without a network: what a client would send is put into its buffer, cut anywhere."""

from __future__ import annotations

from collections.abc import Iterable

from trtmodel_worker.front.connection import Connection
from trtmodel_worker.front.http import HttpServer
from trtmodel_worker.front.request import Refusal, Request

MIB = 1 << 20


class FakeTransport:
    def __init__(self) -> None:
        self.written = b""
        self.closed = False
        self.ended = False
        self.left = 0  # bytes that the client has not taken yet

    def get_write_buffer_size(self) -> int:
        return self.left

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, parts: Iterable[bytes]) -> None:
        self.written += b"".join(parts)

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class FakeLoop:
    now = 1000.0

    def time(self) -> float:
        return self.now


class Recorder:
    """An App that remembers what it got. It answers at once, or when `answer` is called."""

    def __init__(self, limit: int = 8 * MIB, *, at_once: bool = False) -> None:
        self.limit = limit
        self.at_once = at_once
        self.waiting: list[Request] = []
        self.got: list[tuple[bytes, bytes, bytes, tuple[tuple[bytes, bytes], ...], bytes]] = []
        self.admitted: list[tuple[bytes, int | None]] = []

    def admit(self, request: Request, length: int | None, /) -> int | Refusal:
        self.admitted.append((request.path, length))
        if request.path == b"/fault":
            raise RuntimeError("a fault of the application")
        if request.path == b"/nothing":
            return Refusal(404, "there is nothing here")
        return 100 if request.path == b"/small" else self.limit

    def handle(self, request: Request) -> None:
        self.got.append((request.method, request.path, request.query, tuple(request.headers.items()), request.body))
        self.waiting.append(request)
        if self.at_once:
            self.answer()

    def answer(self) -> None:
        """All that wait, and those that come to wait meanwhile."""
        while self.waiting:
            request = self.waiting.pop(0)
            request.respond(200, b"%d bytes" % len(request.body), b"")


class Client:
    """One connection to `server`."""

    def __init__(self, server: HttpServer, *, patient: bool = False) -> None:
        self.loop, self.transport = FakeLoop(), FakeTransport()
        self.connection = Connection(server, self.loop, patient)  # type: ignore[arg-type]
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]

    def send(self, data: bytes) -> None:
        """As one piece, or as several where the connection's buffer is smaller."""
        while data and not self.transport.closed:
            buffer = self.connection.get_buffer(65536)
            size = min(len(buffer), len(data))
            buffer[:size] = data[:size]
            self.connection.buffer_updated(size)
            data = data[size:]

    def leave(self) -> None:
        self.connection.connection_lost(None)
