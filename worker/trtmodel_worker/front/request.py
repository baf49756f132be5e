"""A request as the ports' applications see it, whatever carried it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import orjson

from trtmodel_worker.front.tracing import Span

JSON_HEAD = b"content-type: application/json\r\n"
RETRY_AFTER = b"retry-after: 1\r\n"
OUR_FAULT = "an error of this server, see its log"
NO_ROOM = "too many bytes of requests are held already: try again later"


@dataclass(frozen=True)
class Refusal:
    """An answer that can be given without the body."""

    status: int
    message: str
    headers: bytes = b""


class Answerer(Protocol):
    """The connection that a request came on."""

    def respond(self, request: Request, status: int, headers: bytes, body: bytes) -> None: ...

    def hold(self, request: Request, size: int) -> bool:
        """Take room for `size` bytes more until the request is answered. False if there is none."""
        ...


class App(Protocol):
    def admit(self, request: Request, length: int | None, /) -> int | Refusal:
        """By the head: how many bytes its body may have, or why not. `length`: as announced, None if chunked."""
        ...

    def handle(self, request: Request) -> None:
        """The request is complete. `request.respond` must be called once, now or later, from the loop."""
        ...


class Request:
    """`path` and `query` as sent, still percent-encoded. Header names are in lower case."""

    __slots__ = (
        "body", "connection", "ending", "gone", "headers", "method", "on_gone", "path", "query", "refusal", "span",
        "staged",
    )  # fmt: skip

    def __init__(self, connection: Answerer, method: bytes, target: bytes, headers: dict[bytes, bytes]) -> None:
        self.connection = connection
        self.method = method
        self.path, _, self.query = target.partition(b"?")
        self.headers = headers
        self.body: bytes | memoryview = b""  # a view if it is large: a copy would cost more than all else
        self.ending = b""  # the answer's Connection header
        self.staged = 0
        self.gone = False
        self.refusal: Refusal | None = None
        self.on_gone: Callable[[], object] | None = None
        self.span: Span | None = None  # of a request that is traced

    def respond(self, status: int, body: bytes, headers: bytes = JSON_HEAD) -> None:
        """`headers`: complete lines, content type included. Does nothing if the client is gone."""
        if not self.gone:
            self.connection.respond(self, status, headers, body)

    def hold(self, size: int) -> bool:
        """Count `size` bytes that the request needs beside its body, as it came, among the bodies that are held at
        once. False if there is no room for them, or the client is gone."""
        return not self.gone and self.connection.hold(self, size)

    def fail(self, status: int, message: str, headers: bytes = b"") -> None:
        """The error object of the Open Inference Protocol."""
        self.respond(status, error_body(message), JSON_HEAD + headers)


def error_body(message: str, request_id: str | None = None) -> bytes:
    """The protocol's error object, and the request's id beside it where it is known."""
    return orjson.dumps({"error": message} if request_id is None else {"error": message, "id": request_id})
