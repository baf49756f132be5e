"""The load generator against a small server with every bad habit: what is counted, and what is not hidden."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import load
import numpy as np
import pytest
from loadstats import Record, Statistics, serve

ROWS = np.arange(3 * 8, dtype=np.int32).reshape(3, 8)
LABELS = [0, 1, 2]


@dataclass
class Server:
    """Answers as a worker does, row i with class i; `answer` may be replaced. Counts requests by connection."""

    answer: Callable[[Server, bytes, dict[str, str]], bytes | None] | None = None
    connections: list[int] = field(default_factory=list)
    binary: int = 0
    delay: float = 0
    close_idle_after: int = 0  # requests, then the connection is closed without a word after the answer
    url: str = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(0)
        me = len(self.connections) - 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:-2])
                body = await reader.readexactly(int(headers["content-length"]))
                self.connections[me] += 1
                self.binary += "inference-header-content-length" in headers
                await asyncio.sleep(self.delay)
                reply = self.answer(self, body, headers) if self.answer else self.good(body, headers)
                if reply is None:
                    break
                writer.write(reply)
                if self.close_idle_after and self.connections[me] >= self.close_idle_after:
                    break
                if b"X-Cut" in reply:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def good(self, body: bytes, headers: dict[str, str], *more: str, shift: int = 0) -> bytes:
        length = headers.get("inference-header-content-length")
        if length:
            row = np.frombuffer(body[int(length) :], "<i4")
        else:
            row = np.array(json.loads(body)["inputs"][0]["data"], np.int32)
        scores = np.zeros(3, np.float32)
        scores[(int(row[0]) // 8 + shift) % 3] = 1
        output: dict[str, Any] = {"name": "scores", "datatype": "FP32", "shape": [1, 3]}
        if length:
            text = json.dumps({"outputs": [{**output, "parameters": {"binary_data_size": 12}}]}).encode()
            return reply(text + scores.tobytes(), f"Inference-Header-Content-Length: {len(text)}", *more)
        return reply(json.dumps({"outputs": [{**output, "data": scores.tolist()}]}).encode(), *more)


def reply(body: bytes, *more: str, status: str = "200 OK", revision: str = "0123456789") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *more]
    if revision:
        lines.append(f"X-TRTModel-Revision: {revision}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def traffic(server: Server, *, rate: float = 200, seconds: float = 0.5, connections: int = 4) -> Statistics:
    async def run() -> Statistics:
        listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        generator = load.Load(server.url, load.questions(ROWS, LABELS, server.url, "m"), rate, connections)
        await generator.run(seconds)
        listening.close()
        return generator.statistics

    return asyncio.run(run())


def test_every_request_is_sent_in_time_checked_and_counted() -> None:
    server = Server()
    summary = traffic(server).summary()
    assert (summary["sent"], summary["ok"], summary["failed"], summary["pending"]) == (100, 100, 0, 0)
    assert summary["revisions"]["0123456789"]["ok"] == 100
    assert server.binary == 90
    assert 0 < summary["p50"] <= summary["p99"] <= summary["max"] < 5_000


def test_connections_are_given_up_after_fifty_requests() -> None:
    server = Server()
    assert traffic(server, rate=400, connections=2).summary()["failed"] == 0
    assert max(server.connections) == 50
    assert sum(server.connections) == 200
    assert len([n for n in server.connections if n < 50]) <= 2  # the last of each; who gets how many is a race


def test_requests_go_round_over_all_connections() -> None:
    server = Server()
    traffic(server, connections=4)
    assert len(server.connections) == 4
    assert min(server.connections) >= 20


@pytest.mark.parametrize("habit", ["asks to close", "closes while idle"])
def test_a_server_that_ends_a_connection_properly_fails_no_request(habit: str) -> None:
    server = Server(close_idle_after=3 if habit == "closes while idle" else 0)
    if habit == "asks to close":
        server.answer = lambda s, body, headers: s.good(body, headers, "Connection: close")
    assert traffic(server).summary()["failures"] == {}
    assert max(server.connections) == (1 if habit == "asks to close" else 3)


def _bad(make: Callable[[Server, bytes, dict[str, str]], bytes | None]) -> Callable[..., bytes | None]:
    """Every tenth answer is bad."""
    count = iter(range(10**6))
    return lambda s, body, headers: make(s, body, headers) if next(count) % 10 == 9 else s.good(body, headers)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (lambda s, b, h: reply(b'{"error":"busy"}', status="503 Service Unavailable"), "status 503"),
        (lambda s, b, h: s.good(b, h, shift=1), "wrong class"),
        (lambda s, b, h: s.good(b, h).replace(b"X-TRTModel-Revision", b"X-Other"), "no revision"),
        (lambda s, b, h: reply(b"{}"), "malformed"),
        (lambda s, b, h: reply(b'{"outputs":[{"shape":[1,3],"data":[1,0]}]}'), "malformed"),
        (lambda s, b, h: reply(b'{"outputs":[{"shape":[1,3],"data":[NaN,0,0]}]}'), "malformed"),
        (lambda s, b, h: b"nonsense\r\n\r\n", "malformed"),
        (lambda s, b, h: None, "reset"),
        (lambda s, b, h: s.good(b, h, "X-Cut: 1")[:-5], "reset"),
    ],
    ids=["busy", "another class", "no revision", "no output", "wrong shape", "NaN", "no http", "cut", "half an answer"],
)
def test_a_bad_answer_is_a_failed_request(answer: Callable[..., bytes | None], kind: str) -> None:
    server = Server(answer=_bad(answer))
    statistics = traffic(server)
    summary = statistics.summary()
    assert summary["failures"] == {kind: 10}, statistics.failures[:3]
    assert summary["ok"] == 90


def test_a_server_that_is_away_refuses_every_request() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        generator = load.Load(url, load.questions(ROWS, LABELS, url, "m"), 100, 2)
        asyncio.run(generator.run(0.1))
    assert generator.statistics.summary()["failures"] == {"refused": 10}


@pytest.mark.parametrize("url", ["https://example:1", "example:80", "http://name.invalid:80"])
def test_a_url_that_leads_nowhere_ends_the_program(url: str) -> None:
    with pytest.raises(SystemExit, match=r"must be http://HOST:PORT|name\.invalid has no address"):
        load.look_up(url)


def test_a_name_is_looked_up_once() -> None:
    assert load.look_up("http://127.0.0.1:8080/x") == ("127.0.0.1", 8080)
    assert load.look_up("http://127.0.0.1") == ("127.0.0.1", 80)


def test_a_silent_server_makes_requests_fail_after_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "TIMEOUT_SECONDS", 0.2)
    statistics = traffic(Server(delay=60), rate=40, seconds=0.25, connections=2)
    assert statistics.summary()["failures"] == {"timeout": 10}
    details = [failure.detail.split(" after")[0] for failure in statistics.failures]
    assert details.count("still waiting for the answer") >= 2
    assert set(details) <= {"still waiting for the answer", "still connecting", "still waiting for a free connection"}


def test_a_request_that_waits_for_a_connection_counts_its_waiting() -> None:
    """Open loop: a slow answer delays what is due behind it, and that shows."""
    summary = traffic(Server(delay=0.05), rate=40, seconds=0.5, connections=1).summary()
    assert summary["failed"] == 0
    assert summary["p50"] > 200  # 20 requests of 50 ms one after the other, due within half a second
    assert summary["max"] > 400


def test_a_summary_is_about_the_requests_that_were_due_in_its_time() -> None:
    statistics = Statistics()
    for due in (3.0, 1.0, 2.0, 4.0):
        statistics.sent(due)
        if due < 4:
            failure = "timeout" if due == 2 else ""
            statistics.done(Record(due, due / 10, f"r{int(due) % 2}", failure))
    assert statistics.summary(1, 3) == {
        "pending": 0,
        "sent": 2,
        "ok": 1,
        "failed": 1,
        "failures": {"timeout": 1},
        "p50": 100,
        "p99": 100,
        "max": 100,
        "revisions": {"r1": {"ok": 1, "first": 1.1, "p50": 100, "p99": 100, "max": 100}},
    }
    assert statistics.summary(3)["pending"] == 1
    assert statistics.summary(10)["p99"] is None


def _ask(statistics: Statistics, *targets: str) -> list[tuple[int, Any]]:
    async def run() -> list[tuple[int, Any]]:
        server = await serve(statistics, 0, "127.0.0.1")
        port = server.sockets[0].getsockname()[1]
        answers = []
        for target in targets:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            head, body = (await asyncio.wait_for(reader.read(), 5)).split(b"\r\n\r\n", 1)
            writer.close()
            answers.append((int(head.split(b" ")[1]), json.loads(body)))
        server.close()
        return answers

    return asyncio.run(run())


def test_summaries_are_served_over_http() -> None:
    statistics = Statistics()
    for due in range(10):
        statistics.done(Record(float(due), 0.001, "r", "" if due else "timeout", "no answer"))
    targets = ("/summary?from=2&to=5", "/summary", "/failures", "/healthz", "/other", "/summary?from=x")
    some, everything, failures, health, other, bad = _ask(statistics, *targets)
    assert some[1]["sent"] == 3
    assert everything[1]["failed"] == 1
    assert failures == (
        200,
        [{"due": 0.0, "latency": 0.001, "revision": "r", "failure": "timeout", "detail": "no answer"}],
    )
    assert (health[1]["sent"], health[1]["failed"]) == (10, 1)
    assert health[1]["now"] == pytest.approx(time.time(), abs=60)
    assert other[0] == 404
    assert bad[0] == 400
