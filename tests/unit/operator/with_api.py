"""One connection to a fake API server, for as long as a test needs it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fakes.api_server import FakeApiServer
from kubernetes.aio.client import Configuration
from trtmodel_operator.adapters.api import Api


def with_api(server: FakeApiServer, scene: Callable[[Api], Awaitable[None]]) -> None:
    """Plays the scene, which has 30 s."""

    async def go() -> None:
        api = Api(Configuration(host=server.url))
        try:
            async with asyncio.timeout(30):
                await scene(api)
        finally:
            await api.close()

    asyncio.run(go())
