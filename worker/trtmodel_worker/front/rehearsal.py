"""A few requests before anybody asks, on their whole way but for the connection.

What is made once is made then: the plan of a request, the places that a host has prepared for its inputs and outputs,
the code that an interpreter has specialised. A warm engine alone does not do: the first request of a null model took
1.3 ms where the others took 0.26.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trtmodel_contract.manifest import Manifest

from trtmodel_worker.engines.base import DTYPES
from trtmodel_worker.front.calls import OwnCall
from trtmodel_worker.front.models import BYTES, Invalid
from trtmodel_worker.front.sharedmemory import Regions
from trtmodel_worker.front.v2 import HEADER_LENGTH
from trtmodel_worker.front.windows import Counters
from trtmodel_worker.host.warming import steps

if TYPE_CHECKING:
    from trtmodel_worker.front.engine import Engine

log = logging.getLogger(__name__)
ROUNDS = 3  # the interpreter specialises what it has run twice
_LARGEST_BYTES = 1 << 20  # of a request: larger ones take so long that the rest does not matter


async def rehearse(engine: Engine, lanes: int, seconds: float) -> None:
    """One request to each lane, some times over, for `seconds` at most. They are counted nowhere, and how they end is
    nobody's concern."""
    until = time.monotonic() + seconds
    for turn, request in enumerate(_requests(engine.manifest)):
        try:
            engine.codec.plan(*_elsewhere(engine.manifest, turn))
            calls = [_call(engine, *request, until) for _ in range(lanes)]
        except Invalid as e:
            log.warning("%s: no request of zeros can be made: %s", engine.revision, e)
            return
        for call in calls:
            engine.submit(call)
        _, late = await asyncio.wait([call.ended for call in calls], timeout=max(0.0, until - time.monotonic()))
        if late:
            log.warning("%s: a rehearsal took longer than %.1f s", engine.revision, seconds)
            return


def _requests(manifest: Manifest) -> Iterator[tuple[dict[bytes, bytes], memoryview]]:
    """Headers and body of binary requests of zeros, in the smallest shapes: each is over when the next one is asked
    for, since they lie in the same memory. Its JSON part is read each time, since it is another text each time. No
    request for a model that takes texts, which is not batched and has nothing prepared, and for large requests."""
    shapes = steps(manifest, ())[0].shapes
    inputs: list[dict[str, object]] = []
    size = 0
    for spec in manifest.inputs:
        if spec.datatype == BYTES:
            return
        count = DTYPES[spec.datatype].itemsize * math.prod(shapes[spec.name])
        tensor = {"name": spec.name, "datatype": spec.datatype, "shape": list(shapes[spec.name])}
        inputs.append({**tensor, "parameters": {"binary_data_size": count}})
        size += count
    if size > _LARGEST_BYTES:
        return
    heads = [_head(inputs, turn) for turn in range(ROUNDS)]
    room = max(len(head) for head in heads)
    body = memoryview(bytearray(room + size))
    for head in heads:
        at = room - len(head)
        body[at:room] = head
        yield {HEADER_LENGTH: b"%d" % len(head)}, body[at:]


def _elsewhere(manifest: Manifest, turn: int) -> tuple[dict[bytes, bytes], bytes]:
    """Headers and body of one whose inputs are said to lie in shared memory, which is not there: it is only read."""
    inputs: list[dict[str, object]] = []
    for name, shape in steps(manifest, ())[0].shapes.items():
        datatype = next(spec.datatype for spec in manifest.inputs if spec.name == name)
        size = DTYPES[datatype].itemsize * math.prod(shape)
        place = {"shared_memory_region": "rehearsal", "shared_memory_byte_size": size}
        inputs.append({"name": name, "datatype": datatype, "shape": list(shape), "parameters": place})
    head = _head(inputs, turn)
    return {HEADER_LENGTH: b"%d" % len(head)}, head


def _head(inputs: list[dict[str, object]], turn: int) -> bytes:
    document = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    return json.dumps(document, separators=(",", ":")).encode() + b" " * turn


def _call(engine: Engine, headers: dict[bytes, bytes], body: memoryview, deadline: float) -> OwnCall:
    """Raises Invalid."""
    regions = Regions("")
    plan, _, tail = engine.codec.plan(headers, body)
    bodies = plan.bodies(tail, regions)
    call = OwnCall(plan.shapes, bodies, deadline, lambda outputs: engine.codec.answer(plan, None, outputs, regions))
    call.mirror, call.rehearsed = Counters(), True
    return call
