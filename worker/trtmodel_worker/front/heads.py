"""Heads of requests. Clients send the same few again and again, byte for byte: those are parsed once.

What is remembered is a pure function of the bytes, so it does not matter who sent them first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import httptools

HEAD_BYTES = 2048  # a longer head is not looked at here: it comes from a browser, or means harm
HEADS = 512  # that are remembered, of one server
END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Head:
    """`length`: bytes of the body that follows. Header names are in lower case. Nobody may change `headers`: requests
    share them."""

    method: bytes
    target: bytes
    headers: dict[bytes, bytes]
    length: int


class Heads:
    """What `plain` said of the heads that came last."""

    def __init__(self) -> None:
        self._found: dict[bytes, Head | None] = {}

    def __len__(self) -> int:
        return len(self._found)

    def find(self, head: bytes) -> Head | None:
        try:
            return self._found[head]
        except KeyError:
            pass
        if len(self._found) >= HEADS:
            self._found.clear()
        found = self._found[head] = plain(head)
        return found


def plain(head: bytes) -> Head | None:
    """What these bytes say if they are one whole head of the ordinary kind: HTTP/1.1, a body of announced length or
    none, the connection stays. None for anything else, also for bytes that are no head: the parser's business, which
    gets the whole message."""
    seen = _Seen()
    parser = seen.parser = httptools.HttpRequestParser(seen)
    try:
        parser.feed_data(head)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None
    finally:
        del seen.parser  # else each would wait for the garbage collector
    headers = seen.headers
    if not seen.ordinary or b"transfer-encoding" in headers or b"expect" in headers:
        return None
    length = int(headers.get(b"content-length", 0))
    if seen.begun != 1 or seen.body or seen.complete != (length == 0):  # more than a head, or less
        return None
    return Head(parser.get_method(), seen.target, headers, length)


def stand_in(version: str, keep_alive: bool, headers: Mapping[bytes, bytes]) -> bytes:
    """A head that says how the body comes, and nothing else, for a parser that is to go on at a body."""
    lines = [b"POST / HTTP/%b" % version.encode()]
    lines += [b"%b: %b" % (n, headers[n]) for n in (b"content-length", b"transfer-encoding") if n in headers]
    lines.append(b"connection: keep-alive" if keep_alive else b"connection: close")
    return b"\r\n".join((*lines, b"", b""))


class _Seen:
    """The parser's callbacks."""

    parser: httptools.HttpRequestParser

    def __init__(self) -> None:
        self.begun = 0
        self.ordinary = self.body = self.complete = False
        self.target = b""
        self.headers: dict[bytes, bytes] = {}

    def on_message_begin(self) -> None:
        self.begun += 1

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.ordinary = self.parser.get_http_version() == "1.1" and self.parser.should_keep_alive()

    def on_body(self, _body: bytes) -> None:
        self.body = True

    def on_message_complete(self) -> None:
        self.complete = True
