"""Protobuf's wire format, by skipping: what a large message holds is found without reading it into memory.

Libraries read whole messages, so a model of 2 GB would take 4 GB of memory to say which files it names. On a memory map
a walk touches a few pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_VARINT_BYTES = 10


class Damaged(ValueError):
    """The bytes are no protobuf message, or only a part of one. The text says where."""


class Field(NamedTuple):
    """One field of a message. `value` is that of a varint, otherwise 0."""

    number: int
    kind: int
    start: int  # of the tag
    payload: int
    end: int
    value: int = 0


class Data(Protocol):
    """Bytes, or a memory map."""

    def __getitem__(self, at: int, /) -> int: ...


def fields(data: Data, at: int, end: int) -> Iterator[Field]:
    """The fields of the message between two positions. Raises Damaged."""
    while at < end:
        start = at
        tag, at = _varint(data, at, end)
        number, kind, payload, value = tag >> 3, tag & 7, at, 0
        if kind == VARINT:
            value, at = _varint(data, at, end)
        elif kind == BYTES:
            length, payload = _varint(data, at, end)
            at = payload + length
        elif kind in (FIXED64, FIXED32):
            at += 8 if kind == FIXED64 else 4
        if not number or kind not in (VARINT, FIXED64, BYTES, FIXED32):
            raise Damaged(f"byte {start:,} is no field of a protobuf message")
        if at > end:
            raise Damaged(f"the field at byte {start:,} takes {at - start:,} bytes, and {end - start:,} are there")
        yield Field(number, kind, start, payload, at, value)


def _varint(data: Data, at: int, end: int) -> tuple[int, int]:
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
