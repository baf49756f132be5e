"""How often an API server in trouble is asked, and what of its watches reaches kopf."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from fakes.api_server import FakeApiServer, Seen, refusal
from test_main import Start, start
from trtmodel_operator.adapters import pacing
from trtmodel_operator.adapters.pacing import CALM, LASTED, MOST, Pace
from trtmodel_operator.health import Health
from trtmodel_operator.main import patiently
from trtmodel_operator.ports import ClusterError
from yarl import URL

__all__ = ["start"]  # a fixture

LIST = "https://server/apis/trtmodel.io/v1alpha1/trtmodels"
WATCH = f"{LIST}?watch=true&resourceVersion=7"


class Scene:
    """Requests through a Pace, on a clock that only its waits move. `lasts`: how long each request takes."""

    def __init__(self, lasts: float = 0.0, body: tuple[bytes, ...] = ()) -> None:
        self.time, self.sent, self._lasts, self._body = 0.0, list[float](), lasts, body
        self.pace = Pace(now=lambda: self.time, sleep=self._sleep, jitter=lambda: 1.0)

    async def _sleep(self, seconds: float) -> None:
        self.time += seconds

    async def _send(self, _: Any) -> Any:
        self.sent.append(self.time)
        self.time += self._lasts
        return SimpleNamespace(content=Body(*self._body), status=200)

    def asks(self, url: str, times: int = 1) -> list[float]:
        """How long each of these requests was held back."""
        before = len(self.sent)

        async def run() -> list[float]:
            held = []
            for _ in range(times):
                due = self.time
                await self.pace(SimpleNamespace(url=URL(url)), self._send)  # type: ignore[arg-type]
                held.append(self.sent[-1] - due)
            return held

        held = asyncio.run(run())
        assert len(self.sent) == before + times
        return held

    def body_of(self, url: str) -> list[Any]:
        """The events that are read of the answer."""

        async def run() -> list[Any]:
            answer = await self.pace(SimpleNamespace(url=URL(url)), self._send)  # type: ignore[arg-type]
            return [json.loads(e) async for chunk in answer.content.iter_chunked(9) for e in chunk.splitlines() if e]

        return asyncio.run(run())


class Body:
    def __init__(self, *chunks: bytes) -> None:
        self._chunks = chunks

    async def iter_chunked(self, _: int) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk


def test_a_watch_that_ends_at_once_is_opened_ever_more_seldom() -> None:
    held = Scene().asks(WATCH, times=10)
    assert held[:4] == pytest.approx([0.0, 0.2, 0.4, 0.8])
    assert held == pytest.approx(sorted(held))
    assert held[-1] == pytest.approx(MOST)


def test_a_watch_that_lasted_is_opened_again_at_once() -> None:
    scene = Scene(lasts=LASTED)  # a proxy ends each after some seconds: that is no trouble of the server
    assert scene.asks(WATCH, times=9) == [0.0] * 9


def test_lists_are_held_back_also_where_each_and_the_watch_behind_it_take_a_while() -> None:
    scene = Scene(lasts=CALM / 4)
    assert scene.asks(LIST, times=3) == pytest.approx([0.0, 0.2, 0.4])


def test_lists_are_held_back_apart_from_watches_and_the_pages_of_one_list_not_at_all() -> None:
    scene = Scene()
    assert scene.asks(LIST, times=2) == pytest.approx([0.0, 0.2])
    assert scene.asks(WATCH) == [0.0]
    assert scene.asks(f"{LIST}?limit=100&continue=abc", times=20) == [0.0] * 20


def test_of_a_watch_that_is_torn_in_an_event_the_whole_ones_are_read() -> None:
    first, second = b'{"type":"ADDED","object":{"n":1}}\n', b'{"type":"ADDED","object":{"n":2}}\n'
    scene = Scene(body=(first[:9], first[9:] + second[:12]))
    assert scene.body_of(WATCH) == [json.loads(first)]


def test_an_error_that_the_server_reports_in_a_watch_is_a_broken_connection_and_410_is_left_to_kopf() -> None:
    def error(code: int) -> bytes:
        return json.dumps({"type": "ERROR", "object": {"code": code, "message": "why"}}).encode() + b"\n"

    assert Scene(body=(error(410),)).body_of(WATCH)[0]["object"]["code"] == 410
    with pytest.raises(aiohttp.ClientPayloadError, match="why"):
        Scene(body=(error(500),)).body_of(WATCH)


def test_back_offs_never_end() -> None:
    delays = [delay for delay, _ in zip(pacing.ForEver(), range(1000), strict=False)]
    assert len(delays) == 1000
    assert min(delays) > 0.7


def test_an_answer_is_waited_for_while_the_server_fails_or_is_busy_and_a_refusal_is_told() -> None:
    answers: list[Any] = [0, 500, 429, "there", 403]

    async def ask() -> str:
        answer = answers.pop(0)
        if isinstance(answer, int):
            raise ClusterError("GET", "/apis", "why", answer)
        return str(answer)

    health = Health()
    assert asyncio.run(patiently(ask, health, pause=0.001)) == "there"
    assert "why" in health.waiting_for
    with pytest.raises(ClusterError):
        asyncio.run(patiently(ask, health, pause=0.001))


def test_one_that_begins_while_the_api_server_fails_waits_for_it_and_says_so(
    api_server: FakeApiServer, start: Start
) -> None:
    async def fails(_: Seen) -> web.Response:
        return refusal(503, "it is starting")

    api_server.fault = fails
    operator = start()
    operator.until(lambda: "the API server" in operator.get("/readyz")[1])
    assert operator.get("/readyz")[0] == 503
    assert operator.get("/livez")[0] == 200
    api_server.fault = None
    operator.until(operator.leads)
    assert operator.get("/readyz")[0] == 200
