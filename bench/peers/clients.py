"""Clients that note every request: in a closed loop for faults, in an open loop for overload."""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import cast

from measure import Client, ServerError

RETRY_SECONDS = 0.01  # a client that failed waits so long: else a dead server would count thousands


@dataclass(frozen=True)
class Outcome:
    """One request. `version`: who answered right, 0 for a failure, which `why` names. Times: `time.monotonic`."""

    begun: float
    ended: float
    version: int
    why: str = ""


class Clients:
    """Threads that ask without pause, each over a connection of its own, and compare every answer."""

    def __init__(self, make: Callable[[], Client], count: int) -> None:
        self.outcomes: list[Outcome] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._loop, args=(make(),)) for _ in range(count)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait(self, what: Callable[[Outcome], bool], seconds: float) -> Outcome | None:
        """The first outcome that is so, or None after `seconds`."""
        deadline, at = time.monotonic() + seconds, 0
        while time.monotonic() < deadline:
            while at < len(self.outcomes):
                if what(self.outcomes[at]):
                    return self.outcomes[at]
                at += 1
            time.sleep(0.005)
        return None

    def _loop(self, client: Client) -> None:
        while not self._stop.is_set():
            begun = time.monotonic()
            try:
                version, why = client.ask(), ""
            except (OSError, http.client.HTTPException, ServerError) as e:
                version, why = 0, f"{type(e).__name__}: {e}"
            self.outcomes.append(Outcome(begun, time.monotonic(), version, why))
            if not version:
                self._stop.wait(RETRY_SECONDS)
        client.close()


Reader = Callable[[Mapping[str, str], bytes], bool]


class _Line(asyncio.Protocol):
    """One connection, one request at a time. `due` is None while none is under way."""

    def __init__(self, ended: Callable[[_Line, str, Mapping[str, str], bytes], None]) -> None:
        self._ended = ended
        self._got = bytearray()
        self._body_at = self._length = 0
        self._headers: dict[str, str] = {}
        self.due: float | None = None
        self.connected = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.connected = True
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, _: Exception | None) -> None:
        self.connected = False
        self._end("broken")

    def ask(self, request: bytes) -> None:
        self._got.clear()
        self._body_at = 0
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._got += data
        if not self._body_at:
            end = self._got.find(b"\r\n\r\n")
            if end < 0:
                return
            self._body_at = end + 4
            lines = self._got[:end].decode("latin-1").split("\r\n")[1:]
            self._headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
            if "content-length" not in self._headers:  # in chunks, as KServe's 500: no right answer of any server is
                self.give_up("refused")
                return
            self._length = int(self._headers["content-length"])
        if len(self._got) >= self._body_at + self._length:
            status, body = int(self._got[9:12]), bytes(self._got[self._body_at :])
            self._end("good" if status == HTTPStatus.OK else "refused", body)

    def give_up(self, kind: str) -> None:
        if self.connected:
            self._transport.abort()
        self._end(kind)

    def _end(self, kind: str, body: bytes = b"") -> None:
        if self.due is not None:
            self._ended(self, kind, self._headers, body)


class _Offer:
    def __init__(self, port: int, request: bytes, deadline: float, right: Reader) -> None:
        self._port, self._request, self._deadline, self._right = port, request, deadline, right
        self.found: dict[str, list[float]] = {kind: [] for kind in ("good", "refused", "late", "broken", "wrong")}
        self._loop = asyncio.get_running_loop()
        self._idle: list[_Line] = []
        self._asked: deque[tuple[float, _Line]] = deque()  # in the order in which they were due
        self._connecting: set[asyncio.Task[None]] = set()

    def one(self, due: float) -> None:
        while self._idle:
            line = self._idle.pop()
            if line.connected:
                break
        else:
            line = _Line(self._ended)
        line.due = due
        self._asked.append((due, line))
        if line.connected:
            line.ask(self._request)
            return
        task = asyncio.create_task(self._connect(line))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def expire(self) -> None:
        """Nobody waits any longer."""
        limit = self._loop.time() - self._deadline
        while self._asked and self._asked[0][0] <= limit:
            due, line = self._asked.popleft()
            if line.due == due:
                line.give_up("late")

    async def finish(self) -> None:
        while self._asked:
            self.expire()
            await asyncio.sleep(0.005)
        for line in self._idle:
            line.give_up("")

    async def _connect(self, line: _Line) -> None:
        try:
            await self._loop.create_connection(lambda: line, "127.0.0.1", self._port)
        except OSError:
            line.give_up("broken")
            return
        if line.due is not None:
            line.ask(self._request)
        else:
            line.give_up("")

    def _ended(self, line: _Line, kind: str, headers: Mapping[str, str], body: bytes) -> None:
        assert line.due is not None
        took, line.due = self._loop.time() - line.due, None
        if kind == "good" and took > self._deadline:
            kind = "late"
        elif kind == "good" and not self._right(headers, body):
            kind = "wrong"
        self.found[kind].append(took)
        if headers.get("connection", "").lower() == "close":
            line.give_up("")
        elif line.connected and kind not in ("late", "broken"):
            self._idle.append(line)


async def offer(
    port: int, request: bytes, rate: float, seconds: float, deadline: float, right: Reader
) -> dict[str, list[float]]:
    """Open loop: `rate` requests a second are due whether answers come or not, and nobody waits longer than `deadline`.

    Kind -> latencies in seconds from when each was due. Kinds: good, refused (a status that is not 200), late (none
    within the deadline), broken (the connection), wrong. It is cheap, since it may share its processors with the
    server.
    """
    loop, offered = asyncio.get_running_loop(), _Offer(port, request, deadline, right)
    begun = loop.time()
    for number in range(int(rate * seconds)):
        due = begun + number / rate
        await asyncio.sleep(max(0.0, due - loop.time()))
        offered.one(due)
        offered.expire()
    await offered.finish()
    return offered.found
