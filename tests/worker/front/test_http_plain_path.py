"""Messages that pass the parser by: nobody can tell, however they come, and whatever comes before and after them."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
from http_harness import MIB, Client, Recorder
from hypothesis import given, settings
from hypothesis import strategies as st
from trtmodel_worker.front.connection import JOINED_BYTES
from trtmodel_worker.front.heads import HEADS, Head, Heads, plain
from trtmodel_worker.front.http import HttpServer

POST = b"POST /v2/models/m/infer?a=b HTTP/1.1\r\nHost: m\r\n"


class ParserOnly(Heads):
    """No head is ordinary: the parser gets everything."""

    def find(self, head: bytes) -> Head | None:
        return None


def message(
    start: bytes = b"POST /v2/models/m/infer HTTP/1.1", headers: bytes = b"Host: m\r\n", body: bytes | None = b"abc"
) -> bytes:
    if body is not None:
        headers += b"Content-Length: %d\r\n" % len(body)
    return start + b"\r\n" + headers + b"\r\n" + (body or b"")


CHUNKED = message(headers=b"Transfer-Encoding: chunked\r\n", body=None)
HEAD_ONLY = message(body=b"1234567890")[:-10]
PIECES = [
    message(),
    message(body=b"x" * 700),
    message(body=b"x" * 3000),
    message(body=b""),
    message(body=b"\r\n\r\n"),
    message(body=b"\r\n\r\nGET / HTTP/1.1\r\n\r\n"),
    message(start=b"GET /v2/health/live HTTP/1.1", headers=b"", body=None),
    message(start=b"HEAD /v2/models/m?q HTTP/1.1", body=None),
    message(start=b"POST /small HTTP/1.1", body=b"y" * 101),
    message(start=b"POST /small HTTP/1.1", body=b"y" * 99),
    message(start=b"POST /nothing HTTP/1.1", body=b"z" * 500),
    message(start=b"POST /fault HTTP/1.1", body=b"z" * 5),
    message(start=b"POST / HTTP/1.0"),
    message(start=b"POST / HTTP/1.0", headers=b"Connection: keep-alive\r\n"),
    message(start=b"CONNECT a:1 HTTP/1.1"),
    message(headers=b"Connection: close\r\n"),
    message(headers=b"Connection: Upgrade\r\nUpgrade: h2c\r\n"),
    message(headers=b"Upgrade: h2c\r\n"),
    message(headers=b"Expect: 100-continue\r\n"),
    message(headers=b"A: 1\r\nA: 2\r\na:3\r\n"),
    message(headers=b"Long: " + b"l" * 2100 + b"\r\n"),
    message(headers=b"Content-Length: 4\r\n", body=b"abcd"),  # twice
    message(headers=b"Content-Length: 99999999999999999999\r\n", body=None),
    message(headers=b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", body=None) + b"0\r\n\r\n",
    message(headers=b"Folded: a\r\n b\r\n"),
    message().replace(b"\r\n", b"\n"),
    CHUNKED + b"3\r\nabc\r\n0\r\n\r\n",
    CHUNKED + b"3;e=1\r\nabc\r\n20\r\n" + b"c" * 32 + b"\r\n0\r\nTrailer: t\r\n\r\n",
    CHUNKED + b"fff\r\n" + b"c" * 4095 + b"\r\n0\r\n\r\n",
    HEAD_ONLY,
    b"\r\n",
    b"\r\n\r\n",
    b"\r",
    b"\n",
    b"GET / HTTP/1.1\r\n",
    b"\x00\xff not HTTP",
]
PUT_IN = [b"", b"\r", b"\n", b" ", b":", b"0", b"\xff"]
STREAMS = st.lists(st.one_of(st.sampled_from(PIECES[:7]), st.sampled_from(PIECES), st.binary(max_size=8)), max_size=8)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Messages after one another, perhaps with a byte changed, put in, or left out."""
    stream = b"".join(draw(STREAMS))
    for _ in range(draw(st.integers(0, 2))):
        at, put = draw(st.integers(0, len(stream))), draw(st.sampled_from(PUT_IN))
        stream = stream[:at] + put + stream[at + draw(st.integers(0, 1)) :]
    return stream


def outcome(server: HttpServer, app: Recorder, stream: bytes, cuts: list[int]) -> tuple[object, ...]:
    """Everything that a client, the application and the server's accounts can tell of this stream."""
    client = Client(server)
    ends = sorted({min(cut, len(stream)) for cut in cuts} | {len(stream)})
    for start, end in zip([0, *ends], ends, strict=False):
        client.send(stream[start:end])
    held = server.staged
    app.answer()
    idle = client.connection.idle
    left = server.staged
    client.leave()
    assert server.staged == 0
    got, admitted = list(app.got), list(app.admitted)
    app.got.clear()
    app.admitted.clear()
    app.waiting.clear()
    return got, admitted, client.transport.written, client.transport.closed, client.transport.ended, idle, held, left


CUTS = st.lists(st.integers(0, 6000), max_size=12)


@given(stream=streams(), cuts=CUTS, at_once=st.booleans())
@settings(max_examples=400, deadline=None)
def test_the_way_past_the_parser_changes_nothing(stream: bytes, cuts: list[int], at_once: bool) -> None:
    app = Recorder(at_once=at_once)
    server, reference = HttpServer(app, 9000, 10), HttpServer(app, 9000, 10)
    reference.heads = ParserOnly()
    expected = outcome(reference, app, stream, cuts)
    assert outcome(server, app, stream, cuts) == expected
    assert outcome(server, app, stream, cuts) == expected  # by heads that are known now
    assert outcome(server, app, stream, cuts[:1]) == outcome(reference, app, stream, cuts[:1])


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("piece", PIECES)
def test_each_kind_of_message_is_taken_alike_wherever_it_is_cut(piece: bytes, at_once: bool) -> None:
    app = Recorder(at_once=at_once)
    server, reference = HttpServer(app, 9000, 10), HttpServer(app, 9000, 10)
    reference.heads = ParserOnly()
    stream = piece + message() + piece
    for cut in [*range(300), *range(300, len(stream), 97)]:
        assert outcome(server, app, stream, [cut]) == outcome(reference, app, stream, [cut])


@pytest.mark.parametrize(
    "head",
    [
        message(headers=b"Transfer-Encoding: chunked\r\n", body=None),
        message(headers=b"Expect: 100-continue\r\nContent-Length: 3\r\n", body=None),
        message(headers=b"Connection: close\r\n", body=None),
        message(headers=b"Connection: Upgrade\r\nUpgrade: h2c\r\n", body=None),
        message(start=b"GET / HTTP/1.0", headers=b"Connection: keep-alive\r\n", body=None),
        message(start=b"CONNECT a:1 HTTP/1.1", body=None),
        message(body=b"abc"),  # a byte of the body is no head any more
        message(body=b"abcdef")[:-2],
        message(body=None) + message(body=None),
        message(body=None)[:-2],
        b"\r\n\r\n",
        b"nothing\r\n\r\n",
    ],
)
def test_only_ordinary_heads_pass_the_parser_by(head: bytes) -> None:
    assert plain(head) is None


def test_an_ordinary_head_says_what_the_parser_says() -> None:
    head = plain(POST + b"X-Ab: Cd\r\nContent-Length: 12\r\n\r\n")
    headers = {b"host": b"m", b"x-ab": b"Cd", b"content-length": b"12"}
    assert head == Head(b"POST", b"/v2/models/m/infer?a=b", headers, 12)


def test_heads_that_never_come_again_take_bounded_memory() -> None:
    server = HttpServer(Recorder(at_once=True), MIB, 10)
    client = Client(server)
    for i in range(5 * HEADS):
        client.send(message(headers=b"Traceparent: %d\r\n" % i))
    assert client.transport.written.count(b"HTTP/1.1 200 OK") == 5 * HEADS
    assert len(server.heads) <= HEADS


def test_a_large_body_is_read_into_its_place_and_is_whole() -> None:
    app = Recorder()
    client = Client(HttpServer(app, 8 * MIB, 10))
    body = bytes(range(256)) * 16384
    client.send(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body[:100])
    rest = memoryview(body)[100:]
    while rest:
        client.send(bytes(rest[:300_001]))
        rest = rest[300_001:]
    assert [got[-1] for got in app.got] == [body]


def test_what_follows_a_large_body_is_the_next_request() -> None:
    app = Recorder(at_once=True)
    client = Client(HttpServer(app, 8 * MIB, 10))
    large = message(body=b"l" * 400_000)
    stream = (large + message()) * 3
    for at in range(0, len(stream), 70_000):
        client.send(stream[at : at + 70_000])
    assert [len(got[-1]) for got in app.got] == [400_000, 3] * 3


def test_an_announced_body_takes_no_memory_before_it_comes() -> None:
    server = HttpServer(Recorder(512 * MIB), 1024 * MIB, 10)
    before = resident()
    clients = [Client(server) for _ in range(4)]
    for client in clients:
        client.send(POST + b"Content-Length: %d\r\n\r\nx" % (128 * MIB))
    assert server.staged == 512 * MIB
    assert resident() - before < 64 * MIB
    for client in clients:
        client.leave()
    assert server.staged == 0


def resident() -> int:
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) * 1024


def test_a_large_body_that_stops_coming_is_refused_and_leaves_its_room() -> None:
    server = HttpServer(Recorder(), 8 * MIB, 10)
    client = Client(server)
    client.send(POST + b"Content-Length: %d\r\n\r\nxyz" % MIB)
    client.loop.now += 31.0
    client.connection.check(client.loop.now)
    assert client.transport.written.startswith(b"HTTP/1.1 408 ")
    assert server.staged == 0
    assert client.connection.get_buffer(0) is server.view  # what comes now is kept nowhere
    client.send(b"z" * MIB)
    assert client.transport.written.count(b"HTTP/1.1") == 1


def test_a_body_that_is_refused_is_read_away_without_being_held() -> None:
    app = Recorder()
    server = HttpServer(app, 8 * MIB, 200)
    refused = message(start=b"POST /nothing HTTP/1.1", body=b"n" * 900_000)
    clients = [Client(server) for _ in range(100)]
    before = resident()
    for client in clients:
        client.send(refused[:-1])
    assert resident() - before < 32 * MIB
    for client in clients:
        client.send(b"n" + message())
        assert client.transport.written.startswith(b"HTTP/1.1 404 ")
    assert [got[1] for got in app.got] == [b"/v2/models/m/infer"] * 100


def test_empty_lines_count_as_a_head_from_the_last_request_on() -> None:
    client = Client(HttpServer(Recorder(at_once=True), 8 * MIB, 10))
    for _ in range(4):
        client.send(b"\r\n" * 15_000)
        client.send(message())
    assert client.transport.written.count(b"HTTP/1.1 200 OK") == 4
    for _ in range(3):
        client.send(b"\r\n" * 15_000)
    assert b"HTTP/1.1 431 " in client.transport.written


def test_a_fault_at_admission_is_answered_and_the_connection_goes_on() -> None:
    app = Recorder(at_once=True)
    client = Client(HttpServer(app, 8 * MIB, 10))
    client.send(message(start=b"POST /fault HTTP/1.1") + message())
    assert client.transport.written.startswith(b"HTTP/1.1 500 ")
    assert client.transport.written.endswith(b"3 bytes")


@pytest.mark.parametrize("size", [0, 1, JOINED_BYTES - 1, JOINED_BYTES, 3 * MIB])
@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
def test_an_answer_of_any_size_is_whole(method: bytes, size: int) -> None:
    app = Recorder()
    client = Client(HttpServer(app, 8 * MIB, 10))
    client.send(method + b" / HTTP/1.1\r\n\r\n")
    body = bytes(range(256)) * (size // 256 + 1)
    app.waiting[0].respond(200, body[:size], b"x: y\r\n")
    head = b"HTTP/1.1 200 OK\r\nx: y\r\ncontent-length: %d\r\n\r\n" % size
    assert client.transport.written == head + (body[:size] if method == b"GET" else b"")


class Canary:
    """What a request refers to."""


def test_an_answered_request_waits_for_no_garbage_collector() -> None:
    app = Recorder()
    client = Client(HttpServer(app, 8 * MIB, 10))
    client.send(message())
    (request,) = app.waiting
    canary = Canary()
    request.on_gone = lambda request=request, canary=canary: None  # type: ignore[misc]
    dead = weakref.ref(canary)
    del request, canary
    gc.disable()
    try:
        app.answer()
        assert dead() is None
    finally:
        gc.enable()
