"""An HTTP server: its listening sockets, its connections, and what they may hold together.

Requests of the gRPC gateway come many at a time, since it makes them as its own loop turns. So they take turns: a few
in each turn of this loop, which looks in between for what has come from others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path

from trtmodel_worker.front.connection import BUFFER_BYTES, Connection
from trtmodel_worker.front.heads import Heads
from trtmodel_worker.front.request import App

log = logging.getLogger(__name__)
AT_A_TIME = 2  # of the gateway's requests


class HttpServer:
    """One listening port. `staging_bytes` bounds the bodies that are held at once, `most` the connections: when there
    are more, the one that was idle for the longest is closed. While `leaving` says so, every answer tells its client to
    connect anew, as after `announce_end`: a connection that is kept open would lead here for ever. `on_connect` is told
    of each new one."""

    def __init__(
        self,
        app: App,
        staging_bytes: int,
        most: int,
        leaving: Callable[[], bool] = lambda: False,
        on_connect: Callable[[], None] = lambda: None,
    ) -> None:
        self.app = app
        self._on_connect = on_connect
        self.most = most
        self.staged = 0
        self.staging_bytes = staging_bytes
        self.closing = False
        self.leaving = leaving
        self.memory = bytearray(BUFFER_BYTES)  # one for all connections: it is consumed before the next read
        self.view = memoryview(self.memory)
        self.heads = Heads()
        self.connections: set[Connection] = set()
        self._turns: deque[Connection] = deque()
        self._vacant = asyncio.Event()
        self._server: asyncio.AbstractServer | None = None
        self._local: asyncio.AbstractServer | None = None
        self._path = ""
        self._sweeper: asyncio.Task[None] | None = None

    async def listen(self, host: str | None, port: int) -> None:
        """Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self, loop), host, port, backlog=1024)
        self._sweeper = asyncio.create_task(self._sweep(), name=f"sweep {port}")

    async def listen_unix(self, path: str) -> None:
        """Also on a socket in the file system, for the gRPC gateway. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._local = await loop.create_unix_server(lambda: Connection(self, loop, patient=True), path, backlog=1024)
        self._path = path

    def take_turn(self, connection: Connection) -> None:
        """Handle what has come on it, behind the others that take turns."""
        self._turns.append(connection)
        if len(self._turns) == 1:
            asyncio.get_running_loop().call_soon(self._turn)

    def announce_end(self) -> None:
        """Every answer from now on tells its client to connect anew (elsewhere)."""
        self.closing = True

    async def close(self, seconds: float) -> None:
        """Accept nothing more, answer what runs for at most `seconds`, close."""
        self.closing = True
        for listening in (self._server, self._local):
            if listening is not None:
                listening.close()
        self._remove_path()
        deadline = asyncio.get_running_loop().time() + seconds
        for connection in list(self.connections):
            connection.close_if_idle()
        while self.connections and asyncio.get_running_loop().time() < deadline:
            self._vacant.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._vacant.wait(), deadline - asyncio.get_running_loop().time())
        for connection in list(self.connections):
            connection.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()

    def connected(self, connection: Connection) -> None:
        self.connections.add(connection)
        self._on_connect()
        if len(self.connections) > self.most:
            idle = [c for c in self.connections if c.idle and c is not connection]
            (min(idle, key=lambda c: c.last) if idle else connection).abort()

    def forget(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._vacant.set()

    def _turn(self) -> None:
        turns = [self._turns.popleft() for _ in range(min(AT_A_TIME, len(self._turns)))]
        if self._turns:
            asyncio.get_running_loop().call_soon(self._turn)
        for connection in turns:
            try:
                connection.handle_next()
            except Exception:
                log.exception("a connection broke down")  # the others have their turn all the same
                connection.abort()

    def _remove_path(self) -> None:
        if self._path:  # not every loop removes it
            Path(self._path).unlink(missing_ok=True)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            now = asyncio.get_running_loop().time()
            for connection in list(self.connections):
                connection.check(now)
