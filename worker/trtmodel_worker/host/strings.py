"""Tensors of strings (BYTES) between the arena and the engine: each element is its length in four bytes, little-endian,
and then its bytes, in row-major order, as in the binary form of the Open Inference Protocol."""

from __future__ import annotations

import math

import numpy as np

from trtmodel_worker.engines.base import DTYPES, Array, InvalidInput

_LENGTH = 4


def decode(view: memoryview, shape: tuple[int, ...]) -> Array:
    """An array of `str`. Raises InvalidInput if the elements do not end within `view` or are no UTF-8."""
    count, at = math.prod(shape), 0
    if count * _LENGTH > len(view):
        raise InvalidInput(f"a tensor of {count} strings is longer than {len(view)} bytes")
    array = np.empty(count, DTYPES["BYTES"])
    for i in range(count):
        start = at + _LENGTH
        at = start + int.from_bytes(view[at:start], "little")
        if at > len(view):
            raise InvalidInput(f"string {i} of {count} ends beyond the tensor's bytes")
        try:
            array[i] = str(view[start:at], "utf-8")
        except UnicodeDecodeError as e:
            raise InvalidInput(f"string {i} of {count} is no UTF-8: {e}") from e
    return array.reshape(shape)


def encode(array: Array) -> bytes:
    parts: list[bytes] = []
    for element in array.ravel():
        data = element if isinstance(element, bytes) else str(element).encode()
        parts += (len(data).to_bytes(_LENGTH, "little"), data)
    return b"".join(parts)
