"""Requests that are broken at random, byte by byte: each gets an answer, none an error of ours, none a wrong tensor.

TRTMODEL_MUTATIONS says how many (a few thousand by default), TRTMODEL_SEED which ones.
"""

from __future__ import annotations

import asyncio
import collections
import gzip
import json
import os
import random
import struct
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from trtmodel_contract.control import EngineState
from trtmodel_contract.identity import Profile, ShapeRange
from trtmodel_contract.manifest import TensorSpec
from trtmodel_worker.front.calls import Call
from trtmodel_worker.front.endpoints import Endpoints, Limits
from trtmodel_worker.front.jsoncodec import BadJson, check_elements
from trtmodel_worker.front.models import Admission
from trtmodel_worker.front.request import Request
from trtmodel_worker.front.router import Router, Table
from trtmodel_worker.front.stats import RevisionStats
from trtmodel_worker.front.v2 import Codec

INPUTS = {"x": ("FP32", (-1, 4)), "i": ("INT64", (-1,)), "b": ("BOOL", (-1, 1)), "s": ("BYTES", (-1,))}
TOKENS = [
    b"null", b"true", b"-1", b"1e400", b"[]", b"{}", b'""', b"NaN", b"\xff", b"\\u0000", b"\\ud800", b":", b",", b'"',
    b"[", b"]", b"9" * 25, b'"id":"q"', b"\\", b"1.5", b"0", b"\0",
]  # fmt: skip
PATHS = [b"/v2/models/m/versions/r/infer", b"/v2/systemsharedmemory/region/x/register", b"/v2/models/m/config"]
NO_JSON = "ask for it as binary data"  # an output of NaN, or of bytes that are no text


class EchoEngine:
    """Answers at once, and sees to it that what comes through fits together."""

    state, revision, header, alive, routed = EngineState.READY, "r", b"", True, True

    def __init__(self) -> None:
        specs = [TensorSpec(name, datatype, shape) for name, (datatype, shape) in INPUTS.items()]
        ranges = {s.name: ShapeRange(*((rows, *s.shape[1:]) for rows in (1, 1, 8))) for s in specs}
        outputs = (*specs, TensorSpec("h", "FP16", (-1,)))
        self.manifest: Any = SimpleNamespace(inputs=tuple(specs), outputs=outputs, profiles=(Profile(ranges),))
        self.scheduler = SimpleNamespace(comes=lambda: None)
        self.admission = Admission(self.manifest)
        self.codec = Codec("m", "r", self.admission)
        self.stats = RevisionStats()
        self.wrong: list[Any] = []

    def submit(self, call: Call) -> None:
        rows = call.shapes[0][0]
        sizes = [len(body) for body in call.bodies[:3]]
        if not 1 <= rows <= 8 or sizes != [16 * rows, 8 * rows, rows] or len(call.bodies) != 4:
            self.wrong.append((call.shapes, sizes))
        try:
            check_elements(call.bodies[3], rows)
        except BadJson as e:
            self.wrong.append(e)
        shapes = [*call.shapes, (rows,)]
        views = [*call.bodies, memoryview(bytes(2 * rows))]
        call.on_answer([(tuple(s), v) for s, v in zip(shapes, views, strict=True)], self)  # type: ignore[arg-type]


class Wire:
    """A connection that keeps the last answer."""

    def __init__(self) -> None:
        self.status, self.body = 0, b""

    def respond(self, request: Request, status: int, headers: bytes, body: bytes) -> None:
        self.status, self.body = status, body

    def hold(self, request: Request, size: int) -> bool:
        return True


class Mutator:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def request(self, wire: Wire) -> Request:
        chance = self.random.random
        head, tail = self.document()
        head, tail = self.mutate(head), self.mutate(tail) if chance() < 0.2 else tail
        headers = {}
        if tail or chance() < 0.3:
            length = len(head) if chance() < 0.9 else self.random.randint(-1, len(head) + 5)
            headers[b"inference-header-content-length"] = str(length).encode()
        body = head + tail
        if chance() < 0.1:
            body = gzip.compress(body, 1, mtime=0)
            body = self.mutate(body) if chance() < 0.5 else body
            headers[b"content-encoding"] = b"gzip"
        if chance() < 0.1:
            headers[b"accept-encoding"] = self.mutate(b"gzip;q=0.5, deflate")
        if chance() < 0.1:
            headers[b"traceparent"] = self.mutate(b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
        path = b"/v2/models/m/infer" if chance() < 0.9 else self.mutate(self.random.choice(PATHS))
        request = Request(wire, b"POST" if chance() < 0.98 else b"GET", path, headers)
        request.body = body
        return request

    def document(self) -> tuple[bytes, bytes]:
        """A good request."""
        choice, chance = self.random.choice, self.random.random
        rows = choice([1, 1, 2, 8])
        values: dict[str, list[Any]] = {
            "x": [0.5 * i for i in range(4 * rows)],
            "i": list(range(rows)),
            "b": [True] * rows,
            "s": ["é:\\"] * rows,
        }
        codes = {"x": f"<{4 * rows}f", "i": f"<{rows}q", "b": f"<{rows}?"}
        inputs, tail = [], b""
        for name in self.random.sample(list(INPUTS), 4):
            datatype, shape = INPUTS[name]
            tensor: dict[str, Any] = {"name": name, "datatype": datatype, "shape": [rows, *shape[1:]]}
            if chance() < 0.5:
                blob = struct.pack(codes[name], *values[name]) if name in codes else b"\1\0\0\0a" * rows
                tensor["parameters"] = {"binary_data_size": len(blob)}
                tail += blob
            else:
                tensor["data"] = values[name]
            inputs.append(tensor)
        document: dict[str, Any] = {"inputs": inputs}
        if chance() < 0.5:
            document["id"] = choice(["a", "b", "\\", '"', "é"])
        if chance() < 0.3:
            document["parameters"] = choice([{"timeout": 100}, {"binary_data_output": True}, {"x": 1}])
        if chance() < 0.3:
            wanted = self.random.sample([*INPUTS, "h"], 3)
            document["outputs"] = [{"name": n, **choice([{}, {"parameters": {"binary_data": True}}])} for n in wanted]
        return json.dumps(document, ensure_ascii=chance() < 0.5).encode(), tail

    def mutate(self, data: bytes) -> bytes:
        found = bytearray(data)
        for _ in range(self.random.choice([0, 1, 1, 1, 2, 3, 8])):
            if not found:
                break
            kind, at = self.random.random(), self.random.randrange(len(found))
            if kind < 0.3:
                found[at] = self.random.randrange(256)
            elif kind < 0.5:
                del found[at : at + self.random.randint(1, 8)]
            elif kind < 0.8:
                found[at:at] = self.random.choice(TOKENS)
            else:
                start = self.random.randrange(len(found))
                found[at:at] = found[start : start + self.random.randint(1, 40)]
        return bytes(found)


def strange(wire: Wire) -> bool:
    """Is this no answer that a client may get for a request of its own making?"""
    if wire.status == 200:
        return False
    error = json.loads(wire.body)["error"]
    return not error or (wire.status not in (400, 404, 413) and NO_JSON not in error)


def test_broken_requests_get_an_answer_and_never_reach_the_engine_as_something_else() -> None:
    count = int(os.environ.get("TRTMODEL_MUTATIONS", "4000"))
    mutator = Mutator(int(os.environ.get("TRTMODEL_SEED", "1")))
    engine, router = EchoEngine(), Router()
    router.table = Table(engine)  # type: ignore[arg-type]
    router.loaded = {"d": engine}  # type: ignore[dict-item]
    shadow: Any = SimpleNamespace(offer=lambda *_: None, will_take=lambda _: False)
    endpoints = Endpoints("m", "Test", router, Limits(1 << 20, 1 << 18, 5.0), lambda: True, shadow, "prefix-")
    statuses: collections.Counter[int] = collections.Counter()

    async def send() -> Sequence[Any]:
        wrong = []
        for _ in range(count):
            wire = Wire()
            request = mutator.request(wire)
            verdict = endpoints.admit(request, len(request.body))
            if not isinstance(verdict, int):
                statuses[verdict.status] += 1
                continue
            endpoints.handle(request)
            statuses[wire.status] += 1
            if strange(wire):
                wrong.append((wire.status, wire.body, request.body))
        return wrong

    wrong = asyncio.run(send())
    assert not wrong, f"{len(wrong)}, of statuses {collections.Counter(status for status, *_ in wrong)}"
    assert not engine.wrong
    assert statuses[200] > count // 20
    assert statuses[400] > count // 20
    assert set(statuses) <= {200, 400, 404, 405, 413, 500}, statuses
