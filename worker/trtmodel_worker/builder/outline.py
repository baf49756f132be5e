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

INLINE_BYTES = 1 << 16  # smaller weights stay in the graph: shapes, axes and scales, which decide how it runs
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_VARINT_BYTES = 10


class Damaged(ValueError):
    """The bytes are no protobuf message, or only a part of one. The text says where."""


class Stored(NamedTuple):
    """Where raw data that was left out lies in the model's file."""

    offset: int
    length: int


@dataclass(frozen=True)
class Outline:
    """A model whose large weights have no data. `stored`: by the weight's number in graph.initializer."""

    model: ModelProto
    stored: Mapping[int, Stored]


class _Field(NamedTuple):
    number: int
    kind: int
    start: int  # of the tag
    payload: int
    end: int


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


def _is_graph(field: _Field) -> bool:
    return field.number == _GRAPH and field.kind == _BYTES


def _is_large_weight(field: _Field) -> bool:
    return field.number == _INITIALIZER and field.kind == _BYTES and field.end - field.payload >= INLINE_BYTES


def _is_large_data(field: _Field) -> bool:
    return field.number == _RAW_DATA and field.kind == _BYTES and field.end - field.payload >= INLINE_BYTES


def _read_graph(data: mmap.mmap, outer: _Field, graph: GraphProto, stored: dict[int, Stored]) -> None:
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
    data: mmap.mmap, start: int, end: int, taken: Callable[[_Field], bool]
) -> Iterator[tuple[bytes, _Field | None]]:
    """Fields for which `taken` holds, each with the bytes between it and the former one; None after the last."""
    kept = start
    for field in _fields(data, start, end):
        if taken(field):
            yield data[kept : field.start], field
            kept = field.end
    yield data[kept:end], None


def _fields(data: mmap.mmap, at: int, end: int) -> Iterator[_Field]:
    while at < end:
        start = at
        tag, at = _varint(data, at, end)
        number, kind, payload = tag >> 3, tag & 7, at
        if kind == _VARINT:
            _, at = _varint(data, at, end)
        elif kind == _BYTES:
            length, payload = _varint(data, at, end)
            at = payload + length
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        if not number or kind not in (_VARINT, _FIXED64, _BYTES, _FIXED32):
            raise Damaged(f"byte {start:,} is no field of a protobuf message")
        if at > end:
            raise Damaged(f"the field at byte {start:,} takes {at - start:,} bytes, and {end - start:,} are there")
        yield _Field(number, kind, start, payload, at)


def _varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    """(value, position behind it)."""
    value = 0
    for i in range(_VARINT_BYTES):
        if at + i >= end:
            raise Damaged(f"it ends in the middle of a number at byte {at:,}")
        byte = data[at + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, at + i + 1
    raise Damaged(f"byte {at:,} begins a number that does not end")
