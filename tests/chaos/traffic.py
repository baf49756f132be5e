"""Steady, checked requests to the Services of all models, from outside the cluster's pods: it goes on whatever is gone.

Open loop. A request has LIFETIME seconds in all; a try has TRY_SECONDS. What a client may try again is tried again, on
a new connection, which may lead to another worker: a connection that could not be made or broke, no answer in time, and
503. Every second request uses a new connection from the begin, so that new workers get their share.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import aiohttp

from chaos import sources
from chaos.ledger import Ledger

RATE = 10.0  # requests a second and model; builds, workers and this share two cores
LIFETIME = 12.0
TRY_SECONDS = 3.0
# While the API server is away, half of a Service's addresses may be dead for 40 s: 15 tries find a live one.
CONNECT_SECONDS = 0.6
PAUSE_FIRST, PAUSE_MOST = 0.05, 0.2
REST_SECONDS = 4.0  # a connection that rested longer is not used again: servers close theirs, too
GOES_ON = "there are requests all the time"
REVISION = "x-trtmodel-revision"


class Again(Exception):
    """What a client tries again."""


class Wrong(Exception):
    """What no client can put right: a status, or an answer of no model."""


@dataclass(frozen=True)
class First:
    """The first answer of a revision to a model's clients."""

    gain: int
    at: float


class Traffic:
    """`urls` by model. `trusted` says whether a model's answer may come from the model with this gain. Stop it."""

    def __init__(self, urls: Mapping[str, str], ledger: Ledger, trusted: Callable[[str, int], bool]) -> None:
        self._urls, self._ledger, self._trusted = dict(urls), ledger, trusted
        self._rows = sources.rows()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.requests = self.failed = 0
        self.late = 0.0  # seconds that this side was late at most: then the machine has no time for clients
        self.tries_failed: Counter[str] = Counter()  # by kind; all of them in declared times, or they are violations
        self._first: dict[tuple[str, str], First] = {}  # model, revision
        self._recent: dict[str, list[tuple[float, str, int]]] = {model: [] for model in urls}
        self._thread = threading.Thread(target=self._work, name="traffic", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when every request has ended."""
        self._over.set()
        self._thread.join(LIFETIME + 30)
        if self._thread.is_alive():
            self._ledger.violation(GOES_ON, "requests do not end")

    def firsts(self) -> dict[tuple[str, str], First]:
        with self._lock:
            return dict(self._first)

    def since(self, model: str, begin: float) -> list[tuple[str, int]]:
        """(revision, gain) of the answers to requests that were made after `begin`, at most the last thousand."""
        with self._lock:
            return [(revision, gain) for at, revision, gain in self._recent[model] if at >= begin]

    def _work(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception:
            self._ledger.violation(GOES_ON, traceback.format_exc())

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=TRY_SECONDS, sock_connect=CONNECT_SECONDS)
        resting = aiohttp.TCPConnector(limit=0, keepalive_timeout=REST_SECONDS)
        single = aiohttp.TCPConnector(limit=0, force_close=True)
        async with (
            aiohttp.ClientSession(connector=resting, timeout=timeout, trust_env=False) as kept,
            aiohttp.ClientSession(connector=single, timeout=timeout, trust_env=False) as fresh,
        ):
            running: set[asyncio.Task[None]] = set()
            begin, n = time.monotonic(), 0
            while not self._over.is_set():
                left = begin + n / RATE - time.monotonic()
                self.late = max(self.late, -left)
                await asyncio.sleep(max(0.0, left))
                for model in self._urls:
                    task = asyncio.create_task(self._ask(model, n, fresh, kept if n % 2 else fresh))
                    running.add(task)
                    task.add_done_callback(running.discard)
                n += 1
            await asyncio.gather(*running, return_exceptions=True)

    async def _ask(self, model: str, n: int, fresh: aiohttp.ClientSession, first: aiohttp.ClientSession) -> None:
        begin, pause, troubles = time.time(), PAUSE_FIRST, list[str]()
        session = first
        row, expected = self._rows[n % len(self._rows)]
        try:
            while True:
                try:
                    revision, gain = await self._try(session, model, row, expected)
                    self._answered(model, begin, revision, gain)
                    break
                except Again as e:
                    troubles.append(str(e))
                    if not self._ledger.excused(model, time.time()) and not self._ledger.excused(model, begin):
                        self._ledger.violation("a try failed outside declared times", f"{model}: {e}")
                    if time.time() + pause > begin + LIFETIME:
                        raise Wrong(f"no answer in {LIFETIME:g} s: {', '.join(troubles)}") from e
                    await asyncio.sleep(pause)
                    pause, session = min(PAUSE_MOST, pause * 2), fresh
        except Exception as e:  # also what this side did not foresee of an answer
            with self._lock:
                self.failed += 1
            self._ledger.violation("a request failed", f"{model}: {e if isinstance(e, Wrong) else repr(e)}")
        with self._lock:
            self.requests += 1
            self.tries_failed.update(t.split(":")[0] for t in troubles)

    async def _try(
        self, session: aiohttp.ClientSession, model: str, row: list[float], expected: sources.Row
    ) -> tuple[str, int]:
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, len(row)], "data": row}]}
        try:
            async with session.post(f"{self._urls[model]}/v2/models/{model}/infer", json=body) as answer:
                data = await answer.read()
                if answer.status == 503:
                    raise Again(f"503: {data[:200].decode(errors='replace')}")
                if answer.status != 200:
                    raise Wrong(f"{answer.status}: {data[:300].decode(errors='replace')}")
                found = json.loads(data)
        except ValueError as e:
            raise Wrong(f"malformed answer: {e}: {data[:300].decode(errors='replace')}") from e
        except aiohttp.ConnectionTimeoutError:
            raise Again(f"no connection in {CONNECT_SECONDS:g} s") from None
        except TimeoutError:
            raise Again(f"timeout: no answer in {TRY_SECONDS:g} s") from None
        except (aiohttp.ClientError, OSError) as e:
            raise Again(f"{type(e).__name__}: {e}") from e
        revision = answer.headers.get(REVISION, "")
        try:
            gain = sources.gain_of(found["outputs"][0]["data"], expected)
        except (LookupError, TypeError, ValueError) as e:
            raise Wrong(f"malformed answer of revision {revision}: {e}") from e
        if not revision or not gain:
            raise Wrong(f"revision {revision!r} answers {str(found)[:200]}")
        return revision, gain

    def _answered(self, model: str, begin: float, revision: str, gain: int) -> None:
        with self._lock:
            first = self._first.setdefault((model, revision), First(gain, time.time()))
            recent = self._recent[model]
            recent.append((begin, revision, gain))
            del recent[:-1000]
        if first.gain != gain:
            text = f"{model}: {revision} answered as gain {first.gain} and as gain {gain}"
            self._ledger.violation("a revision is one engine", text)
        if not self._trusted(model, gain):
            self._ledger.violation("an unverified engine answered", f"{model}: {revision} with gain {gain}")
