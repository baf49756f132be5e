"""An HTTP server: its listening sockets, its connections, and what they may hold together."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from trtmodel_worker.front.connection import BUFFER_BYTES, Connection
from trtmodel_worker.front.heads import Heads
from trtmodel_worker.front.request import App


class HttpServer:
    """One listening port. `staging_bytes` bounds the bodies that are held at once, `most` the connections: when there
    are more, the one that was idle for the longest is closed."""

    def __init__(self, app: App, staging_bytes: int, most: int) -> None:
        self.app = app
        self.most = most
        self.staged = 0
        self.staging_bytes = staging_bytes
        self.closing = False
        self.memory = bytearray(BUFFER_BYTES)  # one for all connections: it is consumed before the next read
        self.view = memoryview(self.memory)
        self.heads = Heads()
        self.connections: set[Connection] = set()
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
        self._local = await loop.create_unix_server(lambda: Connection(self, loop), path, backlog=1024)
        self._path = path

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
        if len(self.connections) > self.most:
            idle = [c for c in self.connections if c.idle and c is not connection]
            (min(idle, key=lambda c: c.last) if idle else connection).abort()

    def forget(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._vacant.set()

    def _remove_path(self) -> None:
        if self._path:  # not every loop removes it
            Path(self._path).unlink(missing_ok=True)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            now = asyncio.get_running_loop().time()
            for connection in list(self.connections):
                connection.check(now)
