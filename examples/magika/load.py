"""Steady, checked traffic on a model: requests leave on time, whatever the answers do, and every answer is checked.

    python load.py --url http://magika:8080 --model magika --requests requests.npz --seconds 600

Open loop: request n is due at n / rate seconds. It takes the connection that has rested longest; if none is free it
waits, and its latency counts from when it was due. A connection is given up after 50 requests, or when the server asks
for it (`Connection: close`), or closed it while it rested: the next one may lead to another pod, since a Service
balances connections. Its name is looked up once: a Service keeps its address, and this is no test of the DNS. Requests
are Open Inference Protocol v2, binary, and one in ten JSON. Nothing is retried.

A request has failed if it was not answered in 5 s (--timeout), not with 200, not by a named revision, or with another
class than the expected one; if no connection could be made; and if a connection broke while it waited. One JSON line a
second tells how it goes. GET /summary?from=T&to=T (seconds since the epoch) sums up the requests due in that time,
GET /failures lists the first 200 that failed.

Standard library and numpy only: it and loadstats.py run as a pod in any image that has them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from loadstats import Record, Statistics, serve
from numpy.typing import NDArray

TIMEOUT_SECONDS = 5.0
REQUESTS_PER_CONNECTION = 50
JSON_EVERY = 10
LARGEST_ANSWER = 1 << 20
LOOK_UPS = 5  # of a name, each with the resolver's own patience


class Failure(Exception):
    """A request that a client would complain about: the first argument is its kind, the second what happened."""


@dataclass(frozen=True)
class Question:
    """A request, ready to be sent, and the class that is the right answer."""

    binary: bytes
    text: bytes
    label: int


def questions(rows: NDArray[np.int32], labels: Sequence[int], url: str, model: str) -> list[Question]:
    """Every row in both forms of the protocol. The input is called `bytes`, the output of scores is the first."""
    host = urlsplit(url).netloc
    return [_question(row, int(label), host, model) for row, label in zip(rows, labels, strict=True)]


def _question(row: NDArray[np.int32], label: int, host: str, model: str) -> Question:
    data = np.ascontiguousarray(row, "<i4").tobytes()
    tensor: dict[str, Any] = {"name": "bytes", "datatype": "INT32", "shape": [1, len(row)]}
    head = json.dumps(
        {
            "inputs": [{**tensor, "parameters": {"binary_data_size": len(data)}}],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    text = json.dumps({"inputs": [{**tensor, "data": row.tolist()}]}).encode()

    def post(content: bytes, *more: str) -> bytes:
        lines = [f"POST /v2/models/{model}/infer HTTP/1.1", f"Host: {host}", f"Content-Length: {len(content)}", *more]
        return ("\r\n".join(lines) + "\r\n\r\n").encode() + content

    return Question(
        binary=post(
            head + data, "Content-Type: application/octet-stream", f"Inference-Header-Content-Length: {len(head)}"
        ),
        text=post(text, "Content-Type: application/json"),
        label=label,
    )


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def check(self, label: int) -> str:
        """The revision that gave the right answer. Raises Failure."""
        if self.status != HTTPStatus.OK:
            raise Failure(f"status {self.status}", self.body[:300].decode(errors="replace"))
        revision = self.headers.get("x-trtmodel-revision", "")
        if not revision:
            raise Failure("no revision", "the answer has no header x-trtmodel-revision")
        try:
            shape, scores = self._scores()
        except (ValueError, KeyError, IndexError, TypeError) as e:
            raise Failure("malformed", f"{type(e).__name__}: {e}") from e
        if len(shape) != 2 or shape[0] != 1 or shape[1] != len(scores) or not np.isfinite(scores).all():
            raise Failure("malformed", f"{len(scores)} scores of shape {shape}")
        if int(scores.argmax()) != label:
            raise Failure("wrong class", f"revision {revision} says {int(scores.argmax())}, right is {label}")
        return revision

    def _scores(self) -> tuple[list[int], NDArray[np.float32]]:
        length = self.headers.get("inference-header-content-length")
        head = json.loads(self.body if length is None else self.body[: int(length)])
        output = head["outputs"][0]
        if length is None:
            return output["shape"], np.array(output["data"], np.float32)
        size = output["parameters"]["binary_data_size"]
        return output["shape"], np.frombuffer(self.body[int(length) :][:size], "<f4")


class Connection:
    """One kept-alive connection. Used by one request at a time; `doing` says how far that is."""

    def __init__(self, host: str, port: int) -> None:
        self.doing = ""
        self._host, self._port = host, port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._left = 0

    async def ask(self, request: bytes) -> Answer:
        """Raises Failure, OSError, or asyncio.IncompleteReadError when the connection broke."""
        self.doing = "connecting"
        reader, writer = await self._ready()
        self._left -= 1
        self.doing = "waiting for the answer"
        keep = False
        try:
            writer.write(request)
            await writer.drain()
            answer = await _read_answer(reader)
            keep = answer.headers.get("connection", "").lower() != "close"
            return answer
        finally:
            if not keep or self._left <= 0:
                self.close()

    async def _ready(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None or self._reader.at_eof() or self._writer.is_closing():
            self.close()
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=LARGEST_ANSWER)
            self._left = REQUESTS_PER_CONNECTION
        return self._reader, self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


async def _read_answer(reader: asyncio.StreamReader) -> Answer:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    try:
        status = int(head[0].split(" ")[1])
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        length = int(headers["content-length"])
        if length > LARGEST_ANSWER:
            raise ValueError(f"an answer of {length} bytes")
    except (ValueError, KeyError, IndexError) as e:
        raise Failure("malformed", f"{type(e).__name__} {e} in {head[0]!r}") from e
    return Answer(status, headers, await reader.readexactly(length))


def look_up(url: str) -> tuple[str, int]:
    """Address and port of a URL. Raises SystemExit."""
    parts = urlsplit(url)
    if not parts.hostname or parts.scheme != "http":
        raise SystemExit(f"--url must be http://HOST:PORT, not {url}")
    for left in reversed(range(LOOK_UPS)):
        try:
            found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
            return str(found[0][4][0]), int(found[0][4][1])
        except socket.gaierror as e:
            if not left:
                raise SystemExit(f"{parts.hostname} has no address: {e}") from e
    raise AssertionError("the last look-up returns or raises")


class Load:
    """The traffic. `run` sends it, `statistics` tells of it."""

    def __init__(
        self,
        url: str,
        asked: Sequence[Question],
        rate: float,
        connections: int,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        host, port = look_up(url)
        self._timeout = timeout
        self.statistics = Statistics()
        self._asked = asked
        self._rate = rate
        self._random = np.random.default_rng(0)
        self._free: asyncio.Queue[Connection] = asyncio.Queue()
        for _ in range(connections):
            self._free.put_nowait(Connection(host, port))

    async def run(self, seconds: float) -> None:
        """Send for so long, then wait for the last answers."""
        loop, waiting = asyncio.get_running_loop(), set()
        begin, epoch = loop.time(), time.time()
        for n in itertools.count():
            offset = n / self._rate
            if offset >= seconds:
                break
            await asyncio.sleep(begin + offset - loop.time())
            question = self._asked[int(self._random.integers(len(self._asked)))]
            request = question.text if n % JSON_EVERY == JSON_EVERY - 1 else question.binary
            task = asyncio.create_task(self._one(request, question.label, begin + offset, epoch + offset))
            waiting.add(task)
            task.add_done_callback(waiting.discard)
        await asyncio.gather(*waiting)
        while not self._free.empty():
            self._free.get_nowait().close()

    async def _one(self, request: bytes, label: int, due: float, due_epoch: float) -> None:
        used: list[Connection] = []
        loop, revision, failure, detail = asyncio.get_running_loop(), "", "", ""
        self.statistics.sent(due_epoch)
        try:
            revision = await asyncio.wait_for(self._attempt(request, label, used), due + self._timeout - loop.time())
        except Failure as e:
            failure, detail = e.args
        except asyncio.IncompleteReadError as e:
            failure, detail = "reset", f"the connection ended after {len(e.partial)} bytes of the answer"
        except (TimeoutError, asyncio.TimeoutError):
            doing = used[0].doing if used else "waiting for a free connection"
            failure, detail = "timeout", f"still {doing} after {self._timeout:g} s"
        except ConnectionRefusedError as e:
            failure, detail = "refused", str(e)
        except (OSError, asyncio.LimitOverrunError) as e:
            failure, detail = "reset", f"{type(e).__name__}: {e}"
        self.statistics.done(Record(due_epoch, loop.time() - due, revision, failure, detail))

    async def _attempt(self, request: bytes, label: int, used: list[Connection]) -> str:
        connection = await self._free.get()
        used.append(connection)
        try:
            return (await connection.ask(request)).check(label)
        finally:
            self._free.put_nowait(connection)


async def tell(statistics: Statistics) -> None:
    """One line a second about the second before the last: its requests have mostly ended."""
    while True:
        await asyncio.sleep(1)
        now = time.time()
        line = {"time": round(now, 3), **statistics.summary(now - 2, now - 1), "total": statistics.totals()}
        print(json.dumps(line, separators=(",", ":")), flush=True)


async def main(arguments: argparse.Namespace) -> None:
    with np.load(arguments.requests) as archive:
        asked = questions(archive["bytes"], archive["labels"].tolist(), arguments.url, arguments.model)
    load = Load(arguments.url, asked, arguments.rate, arguments.connections, arguments.timeout)
    server = await serve(load.statistics, arguments.port)
    teller = asyncio.create_task(tell(load.statistics))
    await load.run(arguments.seconds)
    teller.cancel()
    print(json.dumps({"total": load.statistics.totals(), **load.statistics.summary()}), flush=True)
    # Whoever asks for the summary may come late.
    await asyncio.sleep(arguments.linger)
    server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="of the Service: http://HOST:PORT")
    parser.add_argument("--model", required=True, help="name of the TRTModel")
    parser.add_argument("--requests", required=True, help="npz with the arrays bytes and labels")
    parser.add_argument("--rate", type=float, default=40, help="requests a second")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=600, help="how long")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_SECONDS, help="seconds until a request has failed")
    parser.add_argument("--port", type=int, default=9090, help="where summaries are served")
    parser.add_argument("--linger", type=float, default=0, help="seconds to serve summaries after the last request")
    asyncio.run(main(parser.parse_args()))
