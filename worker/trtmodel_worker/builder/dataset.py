"""Data sets: an npz with one array per input, named like it, first axis samples, and optional `labels`.

Rows are streamed out of the archive, so that a data set need not fit into memory; the headers alone tell whether it
fits the model.
"""

from __future__ import annotations

import contextlib
import math
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from trtmodel_contract.gate import Task
from trtmodel_contract.identity import Profile
from trtmodel_contract.jobs import Reason

from trtmodel_worker.engines.base import DTYPES, Array
from trtmodel_worker.engines.building import Graph, GraphTensor, Rejected

LABELS = "labels"

# What zipfile, zlib and numpy raise for damaged bytes: bad offsets, methods and flags (RuntimeError: "encrypted", and
# NotImplementedError), broken streams, headers that are no Python.
_UNREADABLE = (
    OSError, ValueError, EOFError, RuntimeError, TypeError, zipfile.BadZipFile, zlib.error, tokenize.TokenError,
)  # fmt: skip


@dataclass(frozen=True)
class Header:
    """What an array's header states. `member` is its name in the archive."""

    member: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool


class DataSetFile:
    """A local npz whose arrays fit `inputs`. Raises Rejected (DatasetInvalid) with the array and what is wrong.

    `profiles` are those of the engine that allow its shapes: its samples say nothing about the others.
    """

    def __init__(self, path: Path, uri: str, inputs: Sequence[GraphTensor], profiles: tuple[Profile, ...]) -> None:
        self._path, self._uri, self._inputs = path, uri, inputs
        self._headers = self._read_headers()
        names = {tensor.name for tensor in inputs}
        self._labels = self._headers.get(LABELS) if LABELS not in names else None
        self._refuse_unknown(names)
        for tensor in inputs:
            self._check(tensor)
        self.profiles = tuple(p for p in profiles if all(self._within(p, tensor.name) for tensor in inputs))
        if profiles and not self.profiles:
            shapes = ", ".join(f"{t.name!r} {list(self._headers[t.name].shape)}" for t in inputs)
            raise self._invalid(f"its arrays are outside of every profile: {shapes}")
        counts = {h.member: h.shape[0] for h in self._headers.values() if h.shape}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{name.removesuffix('.npy')} {n}" for name, n in counts.items())
            raise self._invalid(f"its arrays hold different numbers of samples: {listed}")
        self.samples = next(iter(counts.values()), 0)
        if not self.samples:
            raise self._invalid("it holds no sample")

    @property
    def labelled(self) -> bool:
        return self._labels is not None

    def check_labels(self, graph: Graph, task: Task) -> None:
        """Labels must be what `task` compares with. Raises Rejected."""
        if self._labels is None:
            return
        shape, kind = self._labels.shape, self._labels.dtype.kind
        if task is Task.CLASSIFICATION and (len(shape) != 1 or kind not in "iu"):
            raise self._invalid(f"labels must be one class number per sample, they are {self._labels.dtype}{shape}")
        if task is Task.REGRESSION:
            first = graph.outputs[0].dims[1:]
            width = (
                math.prod(d for d in first if isinstance(d, int)) if all(isinstance(d, int) for d in first) else None
            )
            if kind not in "fiu" or (width is not None and math.prod(shape[1:]) != width):
                raise self._invalid(
                    f"labels are {self._labels.dtype}{shape}, output {graph.outputs[0].name!r} is {first}"
                )

    def batches(self, rows: int, samples: int) -> Iterator[tuple[dict[str, Array], Array | None]]:
        """The first `samples` samples in batches of `rows` (the last may be smaller), as the model's dtypes, and the
        labels of each batch. Raises Rejected for values that do not fit the dtype."""
        left = min(samples, self.samples)
        try:
            with contextlib.ExitStack() as stack:
                archive = stack.enter_context(zipfile.ZipFile(self._path))
                wanted: dict[str, tuple[Header, np.dtype[Any]]] = {
                    t.name: (self._headers[t.name], DTYPES[t.datatype]) for t in self._inputs
                }
                if self._labels is not None:
                    wanted[LABELS] = (self._labels, self._labels.dtype.newbyteorder("="))
                readers = {name: stack.enter_context(_rows(archive, h)) for name, (h, _) in wanted.items()}
                while left > 0:
                    count = min(rows, left)
                    left -= count
                    batch = {name: self._as(name, readers[name](count), dtype) for name, (_, dtype) in wanted.items()}
                    labels = batch.pop(LABELS) if self._labels is not None else None
                    yield batch, labels
        except _UNREADABLE as e:
            raise self._invalid(f"it cannot be read: {e}") from e

    def head(self, rows: int) -> dict[str, Array]:
        """The first samples, repeated until there are `rows`."""
        batch, _ = next(self.batches(min(rows, self.samples), rows))
        return {name: np.resize(array, (rows, *array.shape[1:])) for name, array in batch.items()}

    def _read_headers(self) -> dict[str, Header]:
        try:
            with zipfile.ZipFile(self._path) as archive:
                return {name.removesuffix(".npy"): _header(archive, name) for name in archive.namelist()}
        except _UNREADABLE as e:
            raise self._invalid(f"it is no npz file: {e}") from e

    def _refuse_unknown(self, names: set[str]) -> None:
        unknown = self._headers.keys() - names - {LABELS}
        missing = names - self._headers.keys()
        if unknown or missing:
            what = f"it lacks {sorted(missing)}" if missing else f"it has unknown arrays {sorted(unknown)}"
            raise self._invalid(f"{what}: name the arrays like the inputs, {sorted(names)}, and '{LABELS}'")

    def _check(self, tensor: GraphTensor) -> None:
        header = self._headers[tensor.name]
        wanted = DTYPES[tensor.datatype]
        if header.dtype.kind not in ("f" if wanted.kind == "f" else "b" if wanted.kind == "b" else "iu"):
            raise self._invalid(f"array {tensor.name!r} is {header.dtype}, the input takes {tensor.datatype}")
        fits = len(header.shape) == len(tensor.dims) > 0 and all(
            not isinstance(want, int) or want == got
            for want, got in zip(tensor.dims[1:], header.shape[1:], strict=True)
        )
        if not fits:
            text = f"array {tensor.name!r} is of shape {list(header.shape)}, the input of {list(tensor.dims)}"
            raise self._invalid(f"{text} (samples first)")

    def _within(self, profile: Profile, name: str) -> bool:
        """Whether the profile allows the array's shape, whatever the batch size."""
        allowed = profile.inputs.get(name)
        if allowed is None:
            return True
        shape = self._headers[name].shape[1:]
        return all(low <= got <= high for low, got, high in zip(allowed.min[1:], shape, allowed.max[1:], strict=True))

    def _as(self, name: str, array: Array, dtype: np.dtype[Any]) -> Array:
        if array.dtype.kind in "iu" and dtype.kind in "iu" and array.size:
            limits = np.iinfo(dtype)
            low, high = int(array.min()), int(array.max())
            if low < limits.min or high > limits.max:
                raise self._invalid(f"array {name!r} holds {low if low < limits.min else high}, beyond {dtype}")
        return np.ascontiguousarray(array, dtype)

    def _invalid(self, text: str) -> Rejected:
        return Rejected(Reason.DATASET_INVALID, f"data set {self._uri}: {text}")


def calibration_batches(data: DataSetFile, rows: int, samples: int) -> Iterator[Mapping[str, Array]]:
    for batch, _ in data.batches(rows, samples):
        yield batch


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
def _rows(archive: zipfile.ZipFile, header: Header) -> Iterator[Any]:
    """A function that reads the next rows. Column-major arrays have no rows in the file and are read whole."""
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
                raise ValueError(f"array {header.member.removesuffix('.npy')!r} ends early")
            return np.frombuffer(data, header.dtype).reshape(count, *header.shape[1:])

        yield from_file
