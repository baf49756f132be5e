"""A server outside the cluster, for tests of what the operator looks up: it answers as it is told, and notes what it
was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web
from trtmodel_operator.adapters.addresses import Addresses
from trtmodel_operator.adapters.calls import Calls

T = TypeVar("T")
Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Asked:
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Outside:
    """`reply` may be changed while it runs."""

    reply: Reply
    port: int = 0
    host: str = "127.0.0.1"
    asked: list[Asked] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0

    @property
    def address(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append(Asked(request.path_qs, headers, await request.read()))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            return await self.reply(request)
        finally:
            self.under_way -= 1


def beside(reply: Reply, scene: Callable[[Outside, Calls], Awaitable[T]], host: str = "127.0.0.1") -> T:
    """What `scene` comes to while such a server runs, and its address is the only one that is allowed. `host` is
    another name of this machine."""

    async def go() -> T:
        outside = Outside(reply, host=host)
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", outside.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        outside.port = runner.addresses[0][1]
        calls = Calls(Addresses([outside.address]))
        try:
            return await scene(outside, calls)
        finally:
            await calls.close()
            await runner.cleanup()

    return asyncio.run(go())


def saying(body: bytes = b"", status: int = 200, **headers: str) -> Reply:
    async def reply(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, status=status, headers=headers)

    return reply


async def hanging(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(3600)
    return web.Response()


async def until(holds: Callable[[], Any]) -> None:
    """Fails after 20 s."""
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - of what is watched nothing tells
            await asyncio.sleep(0.005)
