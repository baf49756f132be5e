"""JSON, strictly and fast: documents in, tensors' values in and out.

orjson parses: UTF-8 only, no NaN, no infinity, numbers as JSON has them. It keeps the last of two equal keys, and says
nothing of it, so the keys are counted against the colons of the text; only where that does not come out even a slower
parser that looks at every key decides.

It holds the interpreter while it works: 6 ms for each MiB of numbers (TRTMODEL_MAX_JSON_BYTES bounds that). It would be
a hundred for each MiB of empty arrays or texts, so their number is bounded too.
"""

from __future__ import annotations

import json
import math
import reprlib
import struct
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import orjson

MAX_CONTAINERS = 1 << 16
"""Arrays and objects in one document. A tensor of 64 images that is nested to its last dimension has 43,000."""
MAX_TEXTS = 1 << 16
_CODES = {
    "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q",
    "FP32": "f", "FP64": "d",
}  # fmt: skip
_LENGTH = struct.Struct("<I")
_LOOKED_AT = 16


class BadJson(ValueError):
    """The text says what is wrong, for the client."""


def parse_object(text: bytes) -> dict[str, Any]:
    """A JSON object in which no key is given twice. Raises BadJson."""
    if len(text) > MAX_CONTAINERS:  # a shorter text cannot have so many
        _bound(text)
    try:
        document = orjson.loads(text)
    except ValueError as e:
        raise BadJson(f"is not JSON: {str(e)[:200]}") from e
    if type(document) is not dict:
        raise BadJson(f"must be a JSON object, not {short(document)}")
    escaped = b"\\" in text and b"\\u003" in text  # maybe a colon
    if escaped or text.count(b":") != _colons(document):
        _refuse_repeated_keys(text)
    return document


def _bound(text: bytes) -> None:
    if text.count(b"[") + text.count(b"{") > MAX_CONTAINERS:
        raise BadJson(f"has more than {MAX_CONTAINERS:,} arrays and objects: send the data flat, or as binary data")
    if text.count(b'"') > 2 * MAX_TEXTS:
        raise BadJson(f"has more than {MAX_TEXTS:,} keys and texts: send the data as binary data")


def may_hold_booleans(text: bytes) -> bool:
    """False if there is no `true` and no `false` in the text. Much faster than to look for the words: numbers have
    neither of the letters."""
    if b"l" in text:
        return True
    at = -1
    for _ in range(_LOOKED_AT):
        at = text.find(b"u", at + 1)
        if at < 0:
            return False
        if text[at - 2 : at + 2] == b"true":
            return True
    return True


def values_to_bytes(datatype: str, shape: Sequence[int], data: Any, booleans: bool = True) -> memoryview:
    """The bytes of a tensor whose values are a JSON array, flat or nested as the shape. Numbers are not converted from
    one kind to another, and must lie in the data type's range. `booleans`: there may be some in the data. Raises
    BadJson."""
    if type(data) is not list:
        raise BadJson(f"data must be an array, not {short(data)}")
    values = _flat(shape, data) if data and type(data[0]) is list else data
    count = math.prod(shape)
    if len(values) != count:
        raise BadJson(f"has shape {list(shape)}, which is {count} values, but its data has {len(values)}")
    if datatype == "BYTES":
        return memoryview(_strings(values))
    if datatype == "BOOL":
        if not set(map(type, values)) <= {bool}:
            raise BadJson("is BOOL: its data must be true and false only")
        return memoryview(bytes(values))
    what = "numbers" if datatype.startswith("FP") else "whole numbers"
    if booleans and bool in set(map(type, values)):
        raise BadJson(f"is {datatype}: its data must be {what} of its range only")
    try:
        found = array(_CODES[datatype], values)
    except TypeError as e:
        raise BadJson(f"is {datatype}: its data must be {what} of its range only") from e
    except OverflowError as e:
        raise BadJson(f"holds a value outside the range of {datatype}") from e
    if datatype == "FP32" and not np.isfinite(np.frombuffer(found, np.float32)).all():
        raise BadJson("holds a value outside the range of FP32")
    return memoryview(found).cast("B")


def numbers_to_json(values: np.ndarray[Any, Any]) -> bytes:
    """A flat array of a one-dimensional one, each number in the fewest digits that give it back exactly. Its values
    must be finite."""
    return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)


def strings_to_json(view: memoryview, count: int) -> bytes:
    """A JSON array of the `count` elements of a BYTES tensor. Raises BadJson if it is none, or holds other bytes than
    UTF-8, which JSON cannot carry."""
    check_elements(view, count)
    found, at = [], 0
    try:
        for _ in range(count):
            start = at + 4
            at = start + int.from_bytes(view[at:start], "little")
            found.append(str(view[start:at], "utf-8"))
    except UnicodeDecodeError as e:
        raise BadJson("holds bytes that are not UTF-8") from e
    return orjson.dumps(found)


def check_elements(view: memoryview, count: int) -> None:
    """BYTES in its binary form is, for each element, its length in four bytes, the lowest first, and its bytes. Raises
    BadJson unless the view is `count` such elements and nothing else."""
    at, size = 0, len(view)
    unpack = _LENGTH.unpack_from
    for i in range(count):
        if at + 4 > size:
            raise BadJson(f"ends within element {i} of {count}")
        at += 4 + unpack(view, at)[0]
        if at > size:
            raise BadJson(f"ends within element {i} of {count}")
    if at != size:
        raise BadJson(f"has {size - at} bytes more than its {count} elements")


def short(value: Any) -> str:
    """A value of a request, for a message. Takes no longer for a large one."""
    text = _SHORTENER.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _flat(shape: Sequence[int], data: list[Any]) -> list[Any]:
    level = data
    for depth, dim in enumerate(shape):
        if depth:
            if set(map(type, level)) != {list}:
                raise BadJson(f"has shape {list(shape)}, its data is not nested so")
            if any(len(item) != dim for item in level):
                raise BadJson(f"has shape {list(shape)}, its data is nested otherwise or ragged")
            level = list(chain.from_iterable(level))
        elif len(level) != dim:
            raise BadJson(f"has shape {list(shape)}, its data is nested otherwise or ragged")
    return level


def _strings(values: list[Any]) -> bytes:
    if not set(map(type, values)) <= {str}:
        raise BadJson("is BYTES: its data must be strings only")
    parts: list[bytes] = []
    for value in values:
        encoded = value.encode()
        parts += (_LENGTH.pack(len(encoded)), encoded)
    return b"".join(parts)


def _colons(value: Any) -> int:
    """How many colons the text of a value must have, if none is written as an escape. Lists of numbers are passed over:
    too low a number only means that the slower parser looks."""
    if isinstance(value, dict):
        found: int = len(value) + sum(key.count(":") + _colons(item) for key, item in value.items())
        return found
    if isinstance(value, str):
        return value.count(":")
    if isinstance(value, list) and value and isinstance(value[0], dict | list | str):
        return sum(map(_colons, value))
    return 0


def _refuse_repeated_keys(text: bytes) -> None:
    try:
        _STRICT.decode(text.decode())
    except RecursionError as e:
        raise BadJson("is nested too deeply") from e
    except ValueError as e:
        raise BadJson(f"is not JSON: {str(e)[:200]}") from e


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has the same key twice")
    return found


_STRICT = json.JSONDecoder(object_pairs_hook=_unique)
_SHORTENER = reprlib.Repr()
_SHORTENER.maxlist, _SHORTENER.maxdict, _SHORTENER.maxlevel, _SHORTENER.maxstring = 8, 4, 3, 60
