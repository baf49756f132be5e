"""Bad requests by the hundred thousand, as bytes on real sockets, and good ones between them.

Two kinds of bad ones. Those that are *framed* keep where a request begins and ends: on one connection many of them are
sent in one piece, or cut anywhere, with a good request at the end that must be answered right. Those that are *broken*
may leave the server waiting for more; each has a connection of its own that is closed after a while. A second, kept
connection sends a good request after each round.
"""

from __future__ import annotations

import collections
import contextlib
import gzip
import json
import random
import selectors
import socket
import struct
import time
from dataclasses import dataclass, field

MODEL_PATH = b"/v2/models/m/infer"
PATHS = [
    MODEL_PATH, b"/v2/models/m", b"/v2/models/m/config", b"/v2/models/m/stats", b"/v2/models/m/ready", b"/v2",
    b"/v2/models/m/versions/aaaaaaaaaa/infer", b"/v2/health/ready", b"/v2/repository/index", b"/openapi.json",
    b"/v2/systemsharedmemory/region/x/register", b"/v2/systemsharedmemory/status", b"/v1/models/m:predict",
]  # fmt: skip
METHODS = [*[b"POST"] * 40, b"GET", b"GET", b"PUT", b"DELETE", b"HEAD", b"OPTIONS"]
TOKENS = [
    b"null", b"true", b"-1", b"1e400", b"3e38", b"[]", b"{}", b'""', b"NaN", b"\xff\xfe", b"\\u0000", b"\\ud800", b":",
    b",", b'"', b"[", b"]", b"{", b"}", b"9" * 25, b'"id":"q",', b"\\", b"1.5", b"0", b"\0", b"[" * 400, b"\xc0\x80",
    b'"shape":"-1"', b'"data":[{"b64":"AA=="}]', b'"parameters":{"binary_data_size":-1}', b'"datatype":"BYTES"',
]  # fmt: skip
HEADS = [
    b"\r\n", b"\n", b"\r", b" ", b":", b"\0", b"\xff", b"HTTP/1.1", b"HTTP/9.9", b"Content-Length: 5\r\n",
    b"Content-Length: -1\r\n", b"Content-Length: 99999999999999999999\r\n", b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n", b"Connection: upgrade\r\nUpgrade: h2c\r\n", b"Expect: 100-continue\r\n",
    b"Host: \r\n", b"X: " + b"y" * 3000 + b"\r\n", b"\r\n\r\n", b"0\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\t", b"Inference-Header-Content-Length: 7\r\n", b"Content-Encoding: br\r\n", b"GET / HTTP/1.0\r\n\r\n",
]  # fmt: skip
SIZES = [b"0", b"1", b"-1", b"zz", b"", b"ffffffffffffffff", b"7fffffffffffffff", b"5;a=b", b" 5", b"+5", b"0x5"]
DOCUMENTED_500 = b"which JSON cannot carry"
PATIENCE_SECONDS = 30.0
BATCH, BROKEN = 40, 24  # of one round
_LINGER_SECONDS = 0.004


class Violation(AssertionError):
    """The server did what it must never do."""


@dataclass
class Tally:
    """What was sent, and what came back for it."""

    bad: int = 0
    good: int = 0
    silent: int = 0
    statuses: collections.Counter[int] = field(default_factory=collections.Counter)
    seconds: float = 0.0

    def __str__(self) -> str:
        found = ", ".join(f"{status}: {count:,}" for status, count in sorted(self.statuses.items()))
        return (
            f"{self.bad:,} bad and {self.good:,} good requests in {self.seconds:.1f} s; answers {found}; "
            f"cut off while the server waited for more: {self.silent:,}"
        )

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.bad + other.bad,
            self.good + other.good,
            self.silent + other.silent,
            self.statuses + other.statuses,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True)
class Answer:
    status: int
    head: bytes
    body: bytes

    @property
    def closes(self) -> bool:
        return b"connection: close" in self.head.lower()


class Connection:
    """Answers of one socket, one after the other."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS)
        self._got = b""

    def close(self) -> None:
        self.socket.close()

    def answer(self, *, of_head: bool = False) -> Answer | None:
        """The next one, None at the end of the connection."""
        while True:
            while (end := self._got.find(b"\r\n\r\n")) < 0:
                if not self._more():
                    return None
            head = self._got[: end + 2]
            status = int(head[9:12])
            length = _length(head)
            while not of_head and len(self._got) < end + 4 + length:
                if not self._more():
                    raise Violation(f"an answer was cut off: {self._got!r}")
            size = end + 4 + (0 if of_head else length)
            body, self._got = self._got[end + 4 : size], self._got[size:]
            if status != 100:
                return Answer(status, head, body)

    def _more(self) -> bool:
        try:
            data = self.socket.recv(1 << 18)
        except ConnectionError:
            return False
        except TimeoutError as e:
            raise Violation(f"no answer within {PATIENCE_SECONDS:g} s; so far {self._got[:200]!r}") from e
        self._got += data
        return bool(data)


class Fuzzer:
    """Sends to a model m of one FP32 input x[1..8, 4] that gives y = 2 x. The same seed sends the same bytes."""

    def __init__(self, port: int, seed: int) -> None:
        self.tally = Tally()
        self._port, self._random = port, random.Random(seed)
        self._kept = Connection(port)
        self._value = 0

    def run(self, requests: int, seconds: float = float("inf")) -> Tally:
        """Until so many bad requests were sent, or the time is over. Raises Violation."""
        started = time.monotonic()
        while self.tally.bad < requests and time.monotonic() - started < seconds:
            self._pipelined()
            self._broken()
            self._kept = self._good(self._kept)
        self.tally.seconds = time.monotonic() - started
        self._kept.close()
        return self.tally

    # -- rounds

    def _pipelined(self) -> None:
        """Framed requests on one connection, then a good one."""
        made = [self._framed() for _ in range(BATCH)]
        value, good = self._good_request()
        asked = [*made, (good, False)]
        sent = 0
        while sent < len(asked):
            connection = Connection(self._port)
            try:
                self._send(connection, b"".join(data for data, _ in asked[sent:]))
                while sent < len(asked):
                    data, of_head = asked[sent]
                    answer = connection.answer(of_head=of_head)
                    if answer is None:
                        raise Violation(f"the connection was ended without a word before {data[:300]!r} was answered")
                    sent += 1
                    if sent == len(asked):
                        self._check_good(answer, value)
                        break
                    self._judge(answer, data)
                    if answer.closes:
                        break
            finally:
                connection.close()

    def _broken(self) -> None:
        """Each on a connection of its own; whatever comes within a moment is judged."""
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
            sent: dict[int, tuple[bytes, list[bytes]]] = {}
            for _ in range(BROKEN):
                data = self._mutated(self._wire(), HEADS)
                s = stack.enter_context(socket.create_connection(("127.0.0.1", self._port), PATIENCE_SECONDS))
                sent[s.fileno()] = (data, [])
                with contextlib.suppress(ConnectionError):
                    s.sendall(data)
                    selector.register(s, selectors.EVENT_READ)
            until = time.monotonic() + _LINGER_SECONDS
            while selector.get_map() and (left := until - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    got = b""
                    with contextlib.suppress(ConnectionError):
                        got = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                    sent[key.fd][1].append(got)
                    if not got:
                        selector.unregister(key.fileobj)
            for data, got in sent.values():
                self._judge_bytes(b"".join(got), data)

    def _good(self, connection: Connection) -> Connection:
        value, data = self._good_request()
        connection.socket.sendall(data)
        answer = connection.answer()
        if answer is None:
            raise Violation("a kept connection was ended between two good requests")
        self._check_good(answer, value)
        return connection

    # -- judging

    def _judge(self, answer: Answer, data: bytes) -> None:
        self.tally.bad += answer.status != 200  # some changes harm nothing
        self.tally.statuses[answer.status] += 1
        if answer.status >= 500 and answer.status != 503 and DOCUMENTED_500 not in answer.body:
            raise Violation(f"{answer.status} {answer.body[:300]!r} for {data[:3000]!r}")
        if answer.status >= 400 and answer.body:
            error = json.loads(answer.body)
            if not error.get("error") and not {"ready", "live"} & error.keys():
                raise Violation(f"{answer.status} without a reason: {answer.body[:300]!r} for {data[:3000]!r}")

    def _judge_bytes(self, got: bytes, data: bytes) -> None:
        self.tally.bad += not got.startswith(b"HTTP/1.1 200")
        if not got:
            self.tally.silent += 1
            return
        if not got.startswith(b"HTTP/1.1 "):
            raise Violation(f"no answer of HTTP: {got[:300]!r} for {data[:3000]!r}")
        status = int(got[9:12])
        self.tally.statuses[status] += 1
        if b"HTTP/1.1 500" in got and DOCUMENTED_500 not in got:
            raise Violation(f"{got[:600]!r} for {data[:3000]!r}")

    def _check_good(self, answer: Answer, value: float) -> None:
        self.tally.good += 1
        found = json.loads(answer.body) if answer.status == 200 else {}
        if answer.status != 200 or found["outputs"][0]["data"] != [2.0 * value] * 4:
            raise Violation(f"a good request with {value} got {answer.status} {answer.body[:300]!r}")

    # -- making

    def _send(self, connection: Connection, data: bytes) -> None:
        """In one piece, or cut where it hurts. A server that has ended the connection has answered before."""
        cuts = sorted(self._random.randrange(len(data)) for _ in range(self._random.choice([0, 0, 0, 1, 2, 5])))
        with contextlib.suppress(ConnectionError):
            for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
                connection.socket.sendall(data[start:end])

    def _good_request(self) -> tuple[float, bytes]:
        self._value = self._value % 100_000 + 3
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [self._value] * 4}
        return float(self._value), _request(b"POST", MODEL_PATH, json.dumps({"inputs": [tensor]}).encode())

    def _content(self) -> tuple[bytes, bytes]:
        """A good document, and the binary data after it."""
        choice, chance = self._random.choice, self._random.random
        rows = choice([1, 1, 2, 8])
        tensor: dict[str, object] = {"name": "x", "datatype": "FP32", "shape": [rows, 4]}
        tail = b""
        if chance() < 0.5:
            tail = struct.pack(f"<{4 * rows}f", *(float(i) for i in range(4 * rows)))
            tensor["parameters"] = {"binary_data_size": len(tail)}
        else:
            tensor["data"] = [0.5 * i for i in range(4 * rows)]
        document: dict[str, object] = {"inputs": [tensor]}
        if chance() < 0.3:
            document["id"] = choice(["a", "é", '"', "\\"])
        if chance() < 0.3:
            document["parameters"] = choice([{"binary_data_output": True}, {"timeout": 5_000_000}, {"priority": 1}])
        if chance() < 0.3:
            document["outputs"] = [{"name": "y", "parameters": {"binary_data": chance() < 0.5}}]
        return json.dumps(document).encode(), tail

    def _framed(self) -> tuple[bytes, bool]:
        """A request with a bad content in a good frame; and whether only a head comes back."""
        choice, chance = self._random.choice, self._random.random
        head, tail = self._content()
        head = self._mutated(head, TOKENS)
        tail = self._mutated(tail, TOKENS) if tail and chance() < 0.3 else tail
        fields = []
        if tail or chance() < 0.2:
            length = len(head) if chance() < 0.8 else self._random.randint(-2, len(head) + len(tail) + 5)
            fields.append(b"Inference-Header-Content-Length: %d" % length)
        body = head + tail
        if chance() < 0.05:
            body = gzip.compress(body, 1)
            body = self._mutated(body, TOKENS) if chance() < 0.7 else body
            fields.append(b"Content-Encoding: " + choice([b"gzip", b"deflate", b"br", b"gzip, gzip"]))
        if chance() < 0.1:
            fields.append(b"Accept-Encoding: " + self._visible(b"gzip;q=0.5, deflate"))
        if chance() < 0.1:
            fields.append(b"traceparent: " + self._visible(b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"))
        if chance() < 0.1:
            fields.append(b"Content-Type: " + self._visible(b"application/json"))
        method = choice(METHODS)
        path = MODEL_PATH if chance() < 0.7 else choice(PATHS)
        path = b"/" + self._visible(path[1:]).replace(b" ", b"") if chance() < 0.1 else path
        return _request(method, path, body, fields, self._cut(body) if chance() < 0.3 else None), method == b"HEAD"

    def _wire(self) -> bytes:
        """One to three good requests, some in chunks whose sizes may be wrong."""
        found = b""
        for _ in range(self._random.choice([1, 1, 1, 2, 3])):
            head, tail = self._content()
            fields = [b"Inference-Header-Content-Length: %d" % len(head)] if tail else []
            chunks = self._cut(head + tail) if self._random.random() < 0.4 else None
            sizes = self._random.choice(SIZES) if chunks and self._random.random() < 0.5 else b""
            found += _request(b"POST", MODEL_PATH, head + tail, fields, chunks, sizes)
        return found

    def _cut(self, body: bytes) -> list[bytes]:
        step = self._random.randint(1, len(body) + 1) if len(body) > 1 else 1
        step = max(step, len(body) // 20 + 1)
        return [body[i : i + step] for i in range(0, len(body), step)]

    def _visible(self, text: bytes) -> bytes:
        """Mutated, and still something that a header or a target may hold."""
        return bytes(b for b in self._mutated(text, TOKENS) if 0x20 < b < 0x7F)

    def _mutated(self, data: bytes, tokens: list[bytes]) -> bytes:
        found = bytearray(data)
        for _ in range(self._random.choice([1, 1, 1, 2, 3, 8])):
            if not found:
                break
            kind, at = self._random.random(), self._random.randrange(len(found))
            if kind < 0.3:
                found[at] = self._random.randrange(256)
            elif kind < 0.5:
                del found[at : at + self._random.choice([1, 2, 8, 8, 64])]
            elif kind < 0.8:
                found[at:at] = self._random.choice(tokens)
            elif kind < 0.9:
                start = self._random.randrange(len(found))
                found[at:at] = found[start : start + self._random.randint(1, 60)]
            else:
                del found[at:]
        return bytes(found)


def _request(
    method: bytes,
    path: bytes,
    body: bytes,
    fields: list[bytes] | None = None,
    chunks: list[bytes] | None = None,
    size: bytes = b"",
) -> bytes:
    """`chunks`: the body in pieces; `size` replaces that of the last one."""
    if chunks is None:
        framing, content = b"Content-Length: %d" % len(body), body
    else:
        parts = [b"%x\r\n%b\r\n" % (len(c), c) for c in chunks]
        if size and parts:
            parts[-1] = size + b"\r\n" + chunks[-1] + b"\r\n"
        framing, content = b"Transfer-Encoding: chunked", b"".join(parts) + b"0\r\n\r\n"
    lines = [method + b" " + path + b" HTTP/1.1", b"Host: m", *(fields or []), framing]
    return b"\r\n".join(lines) + b"\r\n\r\n" + content


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line[15:])
    return 0
