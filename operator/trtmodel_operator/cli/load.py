"""Requests to a worker, several at a time for some seconds, and how long each took. Standard library only.

A thread for each client, with a connection that stays open. What a Python client costs itself (about 0.2 ms a request)
is part of what it measures: for figures below a millisecond use a client that is faster, such as those in bench/.
"""

from __future__ import annotations

import collections
import contextlib
import http.client
import math
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import SplitResult

PERCENTILES = (50, 90, 99)
FAILURES_KEPT = 20  # kinds of them
AGAIN_SECONDS = 0.1  # after a connection was refused


@dataclass(frozen=True)
class Request:
    """What every client sends, to `url`'s host."""

    url: SplitResult
    body: bytes
    headers: dict[str, str]
    timeout: float


@dataclass
class Result:
    """`seconds` until the last answer; `latencies` in seconds, of answers that were no failure; `revisions` counts who
    made them."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    revisions: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: collections.Counter[str] = field(default_factory=collections.Counter)

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    def add(self, other: Result) -> None:
        self.latencies += other.latencies
        self.revisions += other.revisions
        self.failures += other.failures


def run(request: Request, concurrency: int, seconds: float) -> Result:
    """Sends until the time is over, and waits for the answers under way. On KeyboardInterrupt what there is counts."""
    over = threading.Event()
    parts = [Result() for _ in range(concurrency)]
    begin = time.monotonic()
    threads = [threading.Thread(target=_client, args=(request, part, over, begin), daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    with contextlib.suppress(KeyboardInterrupt):
        over.wait(seconds)
    over.set()
    sent = time.monotonic() - begin
    for thread in threads:
        thread.join(request.timeout + 1)
    # Slow answers come when nothing is sent any more: they count, so their time does.
    whole = Result(max(sent, *(part.seconds for part in parts)))
    for part in parts:
        whole.add(part)
    return whole


def percentile(values: Sequence[float], percent: int) -> float:
    """By nearest rank. Raises ValueError if there are none."""
    if not values:
        raise ValueError("no value")
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def _client(request: Request, result: Result, over: threading.Event, began: float) -> None:
    connection = connect(request.url, request.timeout)
    while not over.is_set():
        begin = time.monotonic()
        try:
            connection.request("POST", request.url.path, request.body, request.headers)
            answer = connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException) as e:
            connection.close()
            _failed(result, _short(e))
            over.wait(AGAIN_SECONDS)
            continue
        if answer.status == http.client.OK:
            now = time.monotonic()
            result.latencies.append(now - begin)
            result.seconds = now - began
            result.revisions[answer.headers.get("x-trtmodel-revision") or "unknown"] += 1
        else:
            _failed(result, f"{answer.status} {answer.reason}")
    connection.close()


def connect(url: SplitResult, timeout: float) -> http.client.HTTPConnection:
    """Connects at the first request."""
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    return kind(url.hostname or "", url.port, timeout=timeout)


def _failed(result: Result, why: str) -> None:
    known = why in result.failures or len(result.failures) < FAILURES_KEPT
    result.failures[why if known else "others"] += 1


def _short(error: Exception) -> str:
    if isinstance(error, (TimeoutError, socket.timeout)):
        return "no answer in time"
    return getattr(error, "strerror", None) or type(error).__name__
