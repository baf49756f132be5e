"""How kopf's requests behave towards an API server in trouble: what kopf itself leaves open.

kopf opens a watch that ended again at once, and lists again a tenth of a second after a 410: through a proxy that ends
watches early that is hundreds of requests a second. An event that is cut in its middle, and an error that the server
reports inside a watch, end kopf and with it the process. Both are seen in the field: see `tests/scale`.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import aiohttp

from trtmodel_operator.ports import NO_RIGHT

FIRST, MOST = 0.2, 15.0  # seconds between two requests of a kind; less than `informing.REQUEST_SECONDS`
CALM = 60.0  # seconds from one list to the next, after which it is not held back
# Seconds after which a watch was no short one. (Many proxies end a quiet connection after 30 or 60: if that counted,
# what people change would wait for up to MOST, again and again.)
LASTED = 5.0
GONE = 410  # a version that is too old: kopf lists again
_HEAD = 40  # bytes of an event, of which the type is the first field

Send = Callable[[aiohttp.ClientRequest], Awaitable[aiohttp.ClientResponse]]


class Pace:
    """A middleware of aiohttp: of lists of one path, and of its watches, each is held back for longer than the one
    before, unless the last is long ago (CALM, LASTED). Watches give whole events, and none of a server that failed.
    `answered` is told of each: whether it is a watch, its path, the status."""

    def __init__(
        self,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
        answered: Callable[[bool, str, int], None] = lambda *_: None,
    ) -> None:
        self._now, self._sleep, self._jitter, self._answered = now, sleep, jitter, answered
        self._refused: dict[tuple[str, bool], str] = {}
        self._last: dict[tuple[str, bool], tuple[float, float]] = {}  # when it was sent, and what it was held back

    async def __call__(self, request: aiohttp.ClientRequest, send: Send) -> aiohttp.ClientResponse:
        is_watch = request.url.query.get("watch") == "true"
        if "continue" not in request.url.query:
            await self.turn(request.url.path, is_watch)
        answer = await send(request)
        self._answered(is_watch, request.url.path, answer.status)
        if answer.status in NO_RIGHT:
            self._refused[request.url.path, is_watch] = f"{answer.status} {answer.reason}"
        else:
            self._refused.pop((request.url.path, is_watch), None)
        if is_watch:
            answer.content = _WholeEvents(answer.content)  # type: ignore[assignment]  # as much of it as kopf uses
        return answer

    def refused(self) -> dict[str, str]:
        """Kinds that kopf may not list or watch, and how the API server says so; empty if it may."""
        return {
            path.rpartition("/")[2]: f"cannot {'WATCH' if is_watch else 'GET'} {path}: {said}"
            for (path, is_watch), said in self._refused.items()
        }

    async def turn(self, path: str, is_watch: bool) -> None:
        key = path, is_watch
        sent, held = self._last.get(key, (-CALM, 0.0))
        long_ago = self._now() - sent >= (LASTED if is_watch else CALM)
        held = 0.0 if long_ago else min(MOST, max(FIRST, held * 2))
        if held:
            await self._sleep(held * (0.75 + 0.25 * self._jitter()))
        self._last[key] = self._now(), held


class _WholeEvents:
    """The body of a watch. Raises aiohttp.ClientPayloadError, which has kopf open the watch again, where the server
    reports an error in place of an event; but for 410, which kopf understands."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        rest = b""
        async for chunk in self._content.iter_chunked(size):
            whole, found, rest = (rest + chunk).rpartition(b"\n")
            if found:
                for line in whole.split(b"\n"):
                    _check(line)
                yield whole + b"\n"


def _check(line: bytes) -> None:
    if b'"ERROR"' not in line[:_HEAD]:
        return
    event = json.loads(line)
    said = event.get("object") or {}
    if event.get("type") == "ERROR" and said.get("code") != GONE:
        raise aiohttp.ClientPayloadError(f"the API server ended a watch: {said.get('message')}")


class ForEver:
    """kopf's back-offs: it asks on, each time about a second later, and `Pace` holds back what comes too often. Where
    they end, kopf ends the process, which helps nobody while the API server is in trouble."""

    def __iter__(self) -> Iterator[float]:
        while True:
            yield random.uniform(0.75, 1.25)  # noqa: S311 - spreads load
