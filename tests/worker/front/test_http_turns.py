"""Requests of the gRPC gateway come many at a time: what others ask does not wait for all of them."""

from __future__ import annotations

import asyncio

import pytest
from http_harness import MIB, Client, Recorder
from trtmodel_worker.front.http import AT_A_TIME, HttpServer

MANY = 3 * AT_A_TIME + 1


def ask(path: bytes) -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: m\r\nContent-Length: 3\r\n\r\nabc" % path


def paths(app: Recorder) -> list[bytes]:
    return [path for _, path, _, _, _ in app.got]


def test_what_others_ask_comes_before_all_but_a_few_of_the_gateways_requests() -> None:
    async def story() -> None:
        app = Recorder(at_once=True)
        server = HttpServer(app, MIB, 100)
        gateway, other = [Client(server, patient=True) for _ in range(MANY)], Client(server)
        for client in gateway:
            client.send(ask(b"/gateway"))
        assert paths(app) == []
        other.send(ask(b"/other"))
        assert paths(app) == [b"/other"]
        await asyncio.sleep(0)
        other.send(ask(b"/other"))
        assert paths(app) == [b"/other", *[b"/gateway"] * AT_A_TIME, b"/other"]
        for _ in range(MANY):
            await asyncio.sleep(0)
        assert all(client.transport.written.count(b"3 bytes") == 1 for client in gateway)
        gateway[0].send(ask(b"/gateway"))
        await asyncio.sleep(0)
        assert len(app.got) == MANY + 3

    asyncio.run(story())


def test_a_gateway_whose_call_was_given_up_meanwhile_asks_nothing_more() -> None:
    async def story() -> None:
        app = Recorder(at_once=True)
        server = HttpServer(app, MIB, 100)
        gone, here = Client(server, patient=True), Client(server, patient=True)
        gone.send(ask(b"/gone"))
        here.send(ask(b"/here"))
        gone.leave()
        for _ in range(3):
            await asyncio.sleep(0)
        assert paths(app) == [b"/here"]
        assert server.staged == 0

    asyncio.run(story())


def test_a_connection_that_breaks_down_in_its_turn_takes_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        app = Recorder(at_once=True)
        server = HttpServer(app, MIB, 100)
        broken, others = Client(server, patient=True), [Client(server, patient=True) for _ in range(MANY)]
        monkeypatch.setattr(broken.connection, "handle_next", lambda: 1 / 0)
        for client in (broken, *others):
            client.send(ask(b"/it"))
        for _ in range(MANY):
            await asyncio.sleep(0)
        assert [client.transport.written.count(b"3 bytes") for client in others] == [1] * MANY
        assert broken.transport.closed

    asyncio.run(story())


def test_requests_sent_ahead_on_one_connection_are_answered_in_their_order() -> None:
    async def story() -> None:
        app = Recorder(at_once=True)
        client = Client(HttpServer(app, MIB, 100), patient=True)
        client.send(b"".join(ask(b"/%d" % n) for n in range(5)))
        for _ in range(6):
            await asyncio.sleep(0)
        assert paths(app) == [b"/%d" % n for n in range(5)]
        assert client.transport.written.count(b"3 bytes") == 5

    asyncio.run(story())
