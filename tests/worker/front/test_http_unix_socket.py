"""The HTTP server on a socket in the file system."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from http_harness import MIB, Recorder
from trtmodel_worker.front.http import HttpServer

REQUEST = b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"
SECONDS = 20


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    made: asyncio.AbstractEventLoop = request.param()
    yield made
    made.close()


async def ask(path: Path) -> bytes:
    reader, writer = await asyncio.wait_for(asyncio.open_unix_connection(str(path)), SECONDS)
    writer.write(REQUEST)
    said = await asyncio.wait_for(reader.readuntil(b"3 bytes"), SECONDS)
    writer.close()
    return said


def test_requests_are_answered_on_it_and_the_file_is_gone_afterwards(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    path = tmp_path / "front.sock"

    async def work() -> None:
        server = HttpServer(Recorder(at_once=True), MIB, 10)
        await server.listen_unix(str(path))
        assert (await ask(path)).startswith(b"HTTP/1.1 200 OK\r\n")
        await server.close(SECONDS)
        assert not path.exists()
        with pytest.raises(OSError):
            await asyncio.open_unix_connection(str(path))

    loop.run_until_complete(work())


def test_the_file_of_a_server_that_died_is_replaced(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    path = tmp_path / "front.sock"

    async def work() -> None:
        dead = HttpServer(Recorder(at_once=True), MIB, 10)
        await dead.listen_unix(str(path))  # and it ends without close
        server = HttpServer(Recorder(at_once=True), MIB, 10)
        await server.listen_unix(str(path))
        assert (await ask(path)).startswith(b"HTTP/1.1 200 OK\r\n")
        await server.close(SECONDS)
        await dead.close(0.0)
        assert not path.exists()

    loop.run_until_complete(work())
