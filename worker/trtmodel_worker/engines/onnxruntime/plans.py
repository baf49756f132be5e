"""A plan whose large weights are used where they lie.

    magic | length of the index | length of the graph | index (JSON) | graph (ONNX) | weights, each where 64 divides

A graph is one protobuf message, which ends at 2 GiB, and is copied when it is read. Weights behind it are mapped: ONNX
Runtime takes them as they are, so that an engine of 3 GB loads at once and takes no memory but the file's pages.
A plan without this head is a plain ONNX file: small models need none of it.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass

import numpy as np

from trtmodel_worker.engines.base import Array

PLACE = "weights"  # the file that the graph names for them
MAGIC = b"TRTMODEL ORT 1\r\n"  # no ONNX file begins with a T: it would be a group, which protobuf has no more
HEAD = struct.Struct("<16sQQ")
_PAGE = 4096


@dataclass(frozen=True)
class Contents:
    """What a plan holds. `weights` are views of it, by name."""

    graph: memoryview
    weights: dict[str, Array]


def read(plan: memoryview) -> Contents | None:
    """None for a plain ONNX file. Raises ValueError for a plan that was cut off."""
    if bytes(plan[: len(MAGIC)]) != MAGIC:
        return None
    try:
        _, index_length, graph_length = HEAD.unpack_from(plan)
        graph = HEAD.size + index_length
        index = json.loads(bytes(plan[HEAD.size : graph]))
        base = start(index_length, graph_length)
        found = {
            name: np.frombuffer(plan, dtype, int(np.prod(dims, dtype=np.int64)), base + at).reshape(dims)
            for name, dtype, dims, at in index
        }
    except (struct.error, ValueError, TypeError) as e:
        raise ValueError(f"the plan is damaged: {e}") from e
    return Contents(plan[graph : graph + graph_length], found)


def start(index_length: int, graph_length: int) -> int:
    """Of the weights: where a page begins, so that they lie as well in memory as in the file."""
    return -(-(HEAD.size + index_length + graph_length) // _PAGE) * _PAGE
