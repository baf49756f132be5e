"""The graph of an ONNX file without its weights.

Protobuf libraries read whole messages: a file of 2 GB would be in memory once as bytes and once as a message, and a
second time in whatever reads it next. So the few fields around large weights are walked here, on a memory map, and only
what is left goes to protobuf. What is left has the same graph, and takes as much memory as a graph takes.

    ModelProto --graph(7)--> GraphProto --initializer(5)--> TensorProto --raw_data(9)--> stays in the file
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from google.protobuf.message import DecodeError
from onnx import GraphProto, ModelProto

from trtmodel_worker.protobuf import BYTES, Damaged, Field, fields

INLINE_BYTES = 1 << 16  # smaller weights stay in the graph: shapes, axes and scales, which decide how it runs
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9


class Stored(NamedTuple):
    """Where raw data that was left out lies in the model's file."""

    offset: int
    length: int


@dataclass(frozen=True)
class Outline:
    """A model whose large weights have no data. `stored`: by the weight's number in graph.initializer."""

    model: ModelProto
    stored: Mapping[int, Stored]


def read(path: Path) -> Outline:
    """Raises Damaged, OSError."""
    model, stored = ModelProto(), dict[int, Stored]()
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            for kept, field in _split(data, 0, len(data), _is_graph):
                model.MergeFromString(kept)
                if field is not None:
                    _read_graph(data, field, model.graph, stored)
        except DecodeError as e:
            text = f"{e}; or If and Loop are nested deeper than protobuf reads, which is about 30 times"
            raise Damaged(text) from e
    return Outline(model, stored)


def _is_graph(field: Field) -> bool:
    return field.number == _GRAPH and field.kind == BYTES


def _is_large_weight(field: Field) -> bool:
    return field.number == _INITIALIZER and field.kind == BYTES and field.end - field.payload >= INLINE_BYTES


def _is_large_data(field: Field) -> bool:
    return field.number == _RAW_DATA and field.kind == BYTES and field.end - field.payload >= INLINE_BYTES


def _read_graph(data: mmap.mmap, outer: Field, graph: GraphProto, stored: dict[int, Stored]) -> None:
    for kept, field in _split(data, outer.payload, outer.end, _is_large_weight):
        graph.MergeFromString(kept)
        if field is None:
            continue
        tensor, raw = graph.initializer.add(), None
        for rest, found in _split(data, field.payload, field.end, _is_large_data):
            tensor.MergeFromString(rest)
            raw = found or raw
        if raw is not None:
            stored[len(graph.initializer) - 1] = Stored(raw.payload, raw.end - raw.payload)


def _split(
    data: mmap.mmap, start: int, end: int, taken: Callable[[Field], bool]
) -> Iterator[tuple[bytes, Field | None]]:
    """Fields for which `taken` holds, each with the bytes between it and the former one; None after the last."""
    kept = start
    for field in fields(data, start, end):
        if taken(field):
            yield data[kept : field.start], field
            kept = field.end
    yield data[kept:end], None
