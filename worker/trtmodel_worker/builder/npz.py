"""One npz archive whose arrays are streamed row by row: it need not fit into memory, and nothing in it is trusted."""

from __future__ import annotations

import contextlib
import math
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from trtmodel_worker.engines.base import Array

# What zipfile, zlib and numpy raise for damaged bytes: bad offsets, methods and flags (RuntimeError: "encrypted", and
# NotImplementedError), broken streams, headers that are no Python.
UNREADABLE = (
    OSError, ValueError, EOFError, RuntimeError, TypeError, zipfile.BadZipFile, zlib.error, tokenize.TokenError,
)  # fmt: skip

Rows = Callable[[int], Array]


@dataclass(frozen=True)
class Header:
    """What an array's header states. `member` is its name in the archive."""

    member: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool

    @property
    def name(self) -> str:
        return self.member.removesuffix(".npy")


def headers(path: Path) -> dict[str, Header]:
    """By array name. Raises one of UNREADABLE, with a sentence for arrays that hold no numbers."""
    with zipfile.ZipFile(path) as archive:
        return {name.removesuffix(".npy"): _header(archive, name) for name in archive.namelist()}


@contextlib.contextmanager
def rows(path: Path, wanted: Mapping[str, Header]) -> Iterator[dict[str, Rows]]:
    """For each array a function that reads its next rows. Raises one of UNREADABLE."""
    with contextlib.ExitStack() as stack:
        archive = stack.enter_context(zipfile.ZipFile(path))
        yield {name: stack.enter_context(_rows(archive, header)) for name, header in wanted.items()}


def _header(archive: zipfile.ZipFile, member: str) -> Header:
    with archive.open(member) as f:
        return _parse(f, member)


def _parse(f: IO[bytes], member: str) -> Header:
    version = np.lib.format.read_magic(f)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(f)
    if dtype.hasobject or dtype.kind not in "fiub":
        raise ValueError(f"array {member.removesuffix('.npy')!r} is of type {dtype}, which is no number")
    if not shape or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"array {member.removesuffix('.npy')!r} is of shape {shape}: its first axis must be samples")
    return Header(member, tuple(shape), dtype, fortran and len(shape) > 1)


@contextlib.contextmanager
def _rows(archive: zipfile.ZipFile, header: Header) -> Iterator[Rows]:
    """Column-major arrays have no rows in the file and are read whole."""
    with archive.open(header.member) as f:
        if header.fortran:
            whole: Array = np.lib.format.read_array(f, allow_pickle=False)
            position = 0

            def from_memory(count: int) -> Array:
                nonlocal position
                position += count
                return whole[position - count : position]

            yield from_memory
            return
        _parse(f, header.member)
        width = math.prod(header.shape[1:])

        def from_file(count: int) -> Array:
            wanted = count * width * header.dtype.itemsize
            data = f.read(wanted)
            if len(data) != wanted:
                raise ValueError(f"array {header.name!r} ends early")
            return np.frombuffer(data, header.dtype).reshape(count, *header.shape[1:])

        yield from_file
