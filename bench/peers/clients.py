"""Clients that note every request: in a closed loop for faults, in an open loop for overload."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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


async def offer(
    port: int, request: bytes, rate: float, seconds: float, deadline: float, right: Reader
) -> dict[str, list[float]]:
    """Open loop: `rate` requests a second are due whether answers come or not, and nobody waits longer than `deadline`.

    Kind -> latencies in seconds from when each was due. Kinds: good, refused (a status that is not 200), late (none
    within the deadline), broken (the connection), wrong.
    """
    found: dict[str, list[float]] = {kind: [] for kind in ("good", "refused", "late", "broken", "wrong")}
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    loop = asyncio.get_running_loop()

    async def one(due: float) -> None:
        connection, me = None, asyncio.current_task()
        assert me is not None
        patience = loop.call_at(due + deadline, me.cancel)
        try:
            connection = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port)
            reader, writer = connection
            writer.write(request)
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
            body = await reader.readexactly(int(headers["content-length"]))
        except asyncio.CancelledError:
            kind = "late"
        except (OSError, EOFError, KeyError):
            kind = "broken"
        else:
            status = int(head[0].split()[1])
            kind = "refused" if status != 200 else "good" if right(headers, body) else "wrong"
            if headers.get("connection", "").lower() != "close":
                idle.append(connection)
                connection = None
        patience.cancel()
        if connection is not None:
            connection[1].close()
        found[kind].append(loop.time() - due)

    tasks: set[asyncio.Task[None]] = set()
    begun = loop.time()
    for number in range(int(rate * seconds)):
        due = begun + number / rate
        await asyncio.sleep(max(0.0, due - loop.time()))
        task = asyncio.create_task(one(due))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    for _, writer in idle:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return found
