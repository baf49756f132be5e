"""The HTTP server on real sockets, of each loop that it may run on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from free_ports import free_port
from http_harness import MIB, Recorder
from trtmodel_worker.front.http import HttpServer
from trtmodel_worker.front.request import Request

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


class Echo(Recorder):
    """Answers with the body that came, one turn of the loop later."""

    def handle(self, request: Request) -> None:
        asyncio.get_running_loop().call_soon(request.respond, 200, bytes(request.body), b"")


def test_bodies_of_all_sizes_come_and_go_whole_one_after_another(loop: asyncio.AbstractEventLoop) -> None:
    port = free_port()
    sizes = [0, 1, 8192, 262_143, 262_144, 3, 262_145, 3 * MIB, 70_000, 1_000_003, 5]
    bodies = [bytes([i]) * size for i, size in enumerate(sizes)]
    asked = b"".join(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body) for body in bodies)
    expected = b"".join(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body) for body in bodies)

    async def work() -> None:
        server = HttpServer(Echo(), 16 * MIB, 10)
        await server.listen("127.0.0.1", port)
        reader, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), SECONDS)
        writer.write(asked)
        assert await asyncio.wait_for(reader.readexactly(len(expected)), SECONDS) == expected
        writer.close()
        await server.close(SECONDS)

    loop.run_until_complete(work())
