"""What load.py counts, and the small HTTP server that tells it: /summary?from=T&to=T, /failures, /healthz."""

from __future__ import annotations

import asyncio
import bisect
import collections
import dataclasses
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

MOST_FAILURES_LISTED = 200
QUESTION_SECONDS = 5


@dataclass(frozen=True)
class Record:
    """One finished request. `due` is in seconds since the epoch, `latency` in seconds from then; `failure` is ''
    for a good answer."""

    due: float
    latency: float
    revision: str
    failure: str
    detail: str = ""


class Statistics:
    """What happened, by time. Requests end in another order than they were due."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.failures: list[Record] = []
        self.failed = 0
        self.pending: collections.Counter[float] = collections.Counter()

    def sent(self, due: float) -> None:
        self.pending[due] += 1

    def done(self, record: Record) -> None:
        self.pending.pop(record.due, None)
        bisect.insort(self.records, record, key=lambda r: r.due)
        if record.failure:
            self.failed += 1
            if len(self.failures) < MOST_FAILURES_LISTED:
                self.failures.append(record)

    def totals(self) -> dict[str, int]:
        return {"sent": len(self.records), "failed": self.failed}

    def summary(self, begin: float = -math.inf, end: float = math.inf) -> dict[str, Any]:
        """Counters and latencies (milliseconds) of the requests due from `begin` until before `end`."""
        first = bisect.bisect_left(self.records, begin, key=lambda r: r.due)
        last = bisect.bisect_left(self.records, end, key=lambda r: r.due)
        pending = sum(n for due, n in self.pending.items() if begin <= due < end)
        return {"pending": pending, **describe(self.records[first:last])}


def describe(records: Sequence[Record]) -> dict[str, Any]:
    good = sorted(r.latency for r in records if not r.failure)
    by_revision: dict[str, list[Record]] = collections.defaultdict(list)
    for record in records:
        if not record.failure:
            by_revision[record.revision].append(record)
    return {
        "sent": len(records),
        "ok": len(good),
        "failed": sum(1 for r in records if r.failure),
        "failures": dict(collections.Counter(r.failure for r in records if r.failure)),
        **_latencies(good),
        "revisions": {name: _of_revision(some) for name, some in by_revision.items()},
    }


def _of_revision(records: list[Record]) -> dict[str, Any]:
    """`first`: when its first answer came, in seconds since the epoch."""
    first = min(r.due + r.latency for r in records)
    return {"ok": len(records), "first": first, **_latencies(sorted(r.latency for r in records))}


def _latencies(ordered: list[float]) -> dict[str, float | None]:
    def rank(q: float) -> float | None:
        return round(ordered[max(0, math.ceil(q * len(ordered)) - 1)] * 1e3, 2) if ordered else None

    return {"p50": rank(0.5), "p99": rank(0.99), "max": rank(1)}


async def serve(statistics: Statistics, port: int, host: str | None = None) -> asyncio.Server:
    """Answer GET requests on `port` of `host` (None: of all addresses) until the server is closed."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), QUESTION_SECONDS)
            status, body = _page(statistics, head.split(b" ")[1].decode())
            text = json.dumps(body).encode()
            lines = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n"
            writer.write(f"{lines}Connection: close\r\n\r\n".encode() + text)
            await asyncio.wait_for(writer.drain(), QUESTION_SECONDS)
        except (OSError, ValueError, IndexError, asyncio.IncompleteReadError, asyncio.TimeoutError):
            pass  # whoever asks badly gets nothing: the traffic goes on
        finally:
            writer.close()

    return await asyncio.start_server(answer, host, port)


def _page(statistics: Statistics, target: str) -> tuple[str, Any]:
    url = urlsplit(target)
    query = {name: values[-1] for name, values in parse_qs(url.query).items()}
    if url.path == "/summary":
        try:
            begin, end = float(query.get("from", "-inf")), float(query.get("to", "inf"))
        except ValueError:
            return "400 Bad Request", {"error": "from and to are seconds since the epoch"}
        return "200 OK", statistics.summary(begin, end)
    if url.path == "/failures":
        return "200 OK", [dataclasses.asdict(record) for record in statistics.failures]
    if url.path == "/healthz":
        return "200 OK", {**statistics.totals(), "now": time.time()}
    return "404 Not Found", {"error": "there are /summary, /failures and /healthz"}
