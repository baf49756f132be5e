"""The memory file that the front shares with its engine hosts.

    | input 0 | input 1 | ... | output 0 | output 1 | ...      `slots` regions of each kind
      `- tensors of one batch at fixed offsets    `- written by one attempt, wherever the host allocates in it

The front alone hands out regions. A region that an attempt may still write is not free: it becomes free when the host
acknowledged the attempt or was reaped. The file can neither shrink nor grow, so no process can take memory away from
under another. Pages that nobody touched cost nothing.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from trtmodel_contract.identity import Profile
from trtmodel_contract.manifest import TensorSpec

from trtmodel_worker import kernel
from trtmodel_worker.engines.base import DTYPES

ALIGNMENT = 64  # a cache line, and what CUDA copies and vector loads like
MAX_BYTES_TENSOR = 1 << 20
"""Room for an input of strings (BYTES): its size does not follow from its shape. The front refuses longer ones."""
_PAGE = mmap.PAGESIZE


class Unservable(ValueError):
    """This engine's inputs or outputs cannot be laid out in shared memory. The text names the tensor and the cause."""


def align(size: int, to: int = ALIGNMENT) -> int:
    return (size + to - 1) // to * to


@dataclass(frozen=True)
class Layout:
    """Where things are. Offsets of inputs are within an input region; all sizes are in bytes."""

    input_offsets: tuple[int, ...]
    input_bytes: int
    output_bytes: int
    slots: int

    @property
    def size(self) -> int:
        return self.slots * (self.input_bytes + self.output_bytes)

    def input_region(self, slot: int) -> int:
        return slot * self.input_bytes

    def output_region(self, slot: int) -> int:
        return self.slots * self.input_bytes + slot * self.output_bytes


def plan_layout(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    profiles: Sequence[Profile],
    slots: int,
    max_output_bytes: int,
) -> Layout:
    """Sizes from the maxima of the profiles. An output with a dynamic dimension other than the leading one, or of
    strings, may need up to `max_output_bytes`. Raises Unservable."""
    offsets, cursor = [], 0
    for spec in inputs:
        offsets.append(cursor)
        largest = _bytes(spec, _largest_input(spec, profiles))
        cursor += align(MAX_BYTES_TENSOR if spec.datatype == "BYTES" else largest)
    rows = max((s.max[0] for p in profiles for s in p.inputs.values() if s.max), default=1)
    needed = 0
    for spec in outputs:
        known = spec.shape[:1] == (-1,) and -1 not in spec.shape[1:]
        if spec.datatype == "BYTES" or (-1 in spec.shape and not known):
            _bytes(spec, ())
            needed += align(max_output_bytes)
        else:
            needed += align(_bytes(spec, (rows, *spec.shape[1:]) if known else spec.shape))
    return Layout(tuple(offsets), align(max(cursor, 1), _PAGE), align(max(needed, 1), _PAGE), slots)


def _largest_input(spec: TensorSpec, profiles: Sequence[Profile]) -> tuple[int, ...]:
    if -1 not in spec.shape:
        return spec.shape
    maxima = [p.inputs[spec.name].max for p in profiles if spec.name in p.inputs]
    if any(len(m) != len(spec.shape) for m in maxima):
        raise Unservable(f"input {spec.name!r} has {len(spec.shape)} dimensions, a profile gives it another number")
    if not maxima:
        raise Unservable(f"input {spec.name!r} of shape {list(spec.shape)} is dynamic, but no profile bounds it")
    return tuple(max(dims) for dims in zip(*maxima, strict=True))


def _bytes(spec: TensorSpec, shape: tuple[int, ...]) -> int:
    dtype = DTYPES.get(spec.datatype)
    if dtype is None:
        raise Unservable(f"tensor {spec.name!r} has data type {spec.datatype}, which this worker does not serve")
    return dtype.itemsize * math.prod(shape)


class Arena:
    """A mapping of the memory file. Closing it while views exist is refused by Python, so views must go first."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self.map = mmap.mmap(fd, size)
        self.view = memoryview(self.map)

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    @classmethod
    def create(cls, name: str, size: int) -> Arena:
        """Raises OSError where there is not the memory for it."""
        fd = kernel.memory_file(name)
        try:
            os.ftruncate(fd, size)
            kernel.seal(fd, kernel.SEAL_SHRINK | kernel.SEAL_GROW | kernel.SEAL_SEAL)
            return cls(fd, size)
        except BaseException:
            os.close(fd)
            raise

    def array(self, offset: int, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> NDArray[np.generic]:
        """Raises ValueError or TypeError where that is not within the arena."""
        if offset < 0:  # NumPy would take it
            raise ValueError(f"offset {offset} is before the arena")
        return np.ndarray(shape, dtype, buffer=self.map, offset=offset)

    def close(self) -> None:
        self.view.release()
        self.map.close()
        os.close(self.fd)


def sealed_copy(name: str, source: int, size: int) -> int:
    """A memory file with the first `size` bytes of the open file `source` that nobody can change any more; its
    descriptor. Raises OSError, EOFError if the source is shorter."""

    def copy(fd: int) -> None:
        done = 0
        while done < size:
            sent = os.sendfile(fd, source, done, min(size - done, 16 << 20))
            if not sent:
                raise EOFError(f"{name} has {done} bytes where {size} were expected")
            done += sent

    return _sealed(name, copy)


def sealed_bytes(name: str, data: bytes) -> int:
    """A memory file with `data` that nobody can change any more; its descriptor."""

    def write(fd: int) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]

    return _sealed(name, write)


def _sealed(name: str, fill: Callable[[int], None]) -> int:
    fd = kernel.memory_file(name)
    try:
        fill(fd)
        kernel.seal(fd, kernel.SEAL_SHRINK | kernel.SEAL_GROW | kernel.SEAL_WRITE | kernel.SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd
