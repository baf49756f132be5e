"""The HTTP client of the gateway alone: limits that no call would wait for."""

from __future__ import annotations

import asyncio

import pytest
from gateway_harness import Asked, ScriptedFront, http_answer
from trtmodel_worker.gateway.client import FrontClient, TooLate, Unreachable


def test_a_front_that_does_not_answer_is_given_up_on(front: ScriptedFront) -> None:
    front.answer = lambda _: b""

    async def ask() -> None:
        with pytest.raises(TooLate, match=r"within 0\.2 s"):
            await FrontClient(front.path).ask(b"GET", b"/", 0.2)

    asyncio.run(ask())


def test_an_answer_that_was_begun_is_not_asked_for_again(front: ScriptedFront) -> None:
    """The request may have been worked on: only one that met a closed connection is sent once more."""

    def answer(asked: Asked) -> bytes:
        if asked.target == "/half":
            return b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\nconnection: close\r\n\r\nhalf"
        return http_answer(200, {})

    front.answer = answer

    async def ask() -> None:
        client = FrontClient(front.path)
        assert (await client.ask(b"GET", b"/whole", 20.0)).status == 200
        with pytest.raises(Unreachable):
            await client.ask(b"GET", b"/half", 20.0)
        assert (await client.ask(b"GET", b"/whole", 20.0)).status == 200
        client.close()

    asyncio.run(ask())
    assert [asked.target for asked in front.asked] == ["/whole", "/half", "/whole"]
    assert front.connections == 2


def test_a_connection_that_the_front_is_about_to_close_is_not_used_again(front: ScriptedFront) -> None:
    front.answer = lambda _: http_answer(200, {}, Connection="Close")  # so written, this front keeps it open

    async def ask() -> None:
        client = FrontClient(front.path)
        for _ in range(3):
            assert (await client.ask(b"GET", b"/", 20.0)).status == 200

    asyncio.run(ask())
    assert front.connections == 3
