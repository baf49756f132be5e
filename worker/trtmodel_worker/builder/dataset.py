"""Data sets: an npz with one array per input, named like it, first axis samples, and optional `labels`; or a directory
of such files, read one after another in the order of their names.

Rows are streamed out of the archives, so that a data set need not fit into memory; the headers alone tell whether it
fits the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from trtmodel_contract.gate import Task
from trtmodel_contract.identity import Profile
from trtmodel_contract.jobs import Reason

from trtmodel_worker.builder import npz
from trtmodel_worker.builder.npz import Header
from trtmodel_worker.engines.base import DTYPES, Array
from trtmodel_worker.engines.building import Graph, GraphTensor, Rejected

LABELS = "labels"
SHARD = ".npz"


@dataclass(frozen=True)
class _Shard:
    """`name` is '' where the data set is this one file."""

    path: Path
    name: str
    headers: Mapping[str, Header]
    samples: int


class DataSetFile:
    """A local data set whose arrays fit `inputs`. Raises Rejected (DatasetInvalid) with the array, what is wrong and
    what was expected.

    `profiles` are those of the engine that allow its shapes: its samples say nothing about the others.
    """

    def __init__(self, path: Path, uri: str, inputs: Sequence[GraphTensor], profiles: tuple[Profile, ...]) -> None:
        self._uri, self._inputs = uri, inputs
        self._names = {tensor.name for tensor in inputs}
        self._shards = [self._shard(file, name) for file, name in self._files(path)]
        first = self._shards[0]
        for shard in self._shards[1:]:
            self._require_alike(first, shard)
        self._labels = first.headers.get(LABELS) if LABELS not in self._names else None
        self.shapes = {tensor.name: first.headers[tensor.name].shape for tensor in inputs}
        """Of each input's array in the first file, samples first."""
        self.profiles = tuple(p for p in profiles if all(self._within(p, tensor.name) for tensor in inputs))
        if profiles and not self.profiles:
            shapes = ", ".join(f"{name!r} {list(shape)}" for name, shape in self.shapes.items())
            raise self._invalid(f"its arrays are outside of every profile: {shapes}")
        self.samples = sum(shard.samples for shard in self._shards)
        if not self.samples:
            raise self._invalid("it holds no sample")

    @property
    def labelled(self) -> bool:
        return self._labels is not None

    @property
    def one_size(self) -> bool:
        """Whether the model takes batches of one size only."""
        return any(tensor.dims and isinstance(tensor.dims[0], int) for tensor in self._inputs)

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
        parts: list[dict[str, Array]] = []
        missing = min(rows, left)
        for shard in self._shards:
            try:
                with npz.rows(shard.path, self._wanted(shard)) as readers:
                    there = shard.samples
                    while there and left:
                        count = min(missing, there)
                        parts.append({name: self._as(name, read(count), shard) for name, read in readers.items()})
                        there, left, missing = there - count, left - count, missing - count
                        if not missing:
                            yield _joined(parts, LABELS if self._labels is not None else "")
                            parts, missing = [], min(rows, left)
            except npz.UNREADABLE as e:
                raise self._invalid(f"it cannot be read: {e}", shard.name) from e
            if not left:
                return

    def head(self, rows: int) -> dict[str, Array]:
        """The first samples, repeated until there are `rows`."""
        batch, _ = next(self.batches(min(rows, self.samples), rows))
        return {name: np.resize(array, (rows, *array.shape[1:])) for name, array in batch.items()}

    def chosen(self, indices: Sequence[int], rows: int) -> Iterator[dict[str, Array]]:
        """These samples, as far as there are such, in batches of exactly `rows`: the last is filled up."""
        wanted, position = set(indices), 0
        parts: list[dict[str, Array]] = []
        for batch, _ in self.batches(rows, max(wanted, default=-1) + 1):
            count = len(next(iter(batch.values())))
            there = [i - position for i in range(position, position + count) if i in wanted]
            position += count
            if there:
                parts.append({name: array[there] for name, array in batch.items()})
        if parts:
            whole, _ = _joined(parts, "")
            count = len(next(iter(whole.values())))
            full = {name: np.resize(a, (-(-count // rows) * rows, *a.shape[1:])) for name, a in whole.items()}
            for start in range(0, count, rows):
                yield {name: array[start : start + rows] for name, array in full.items()}

    def _files(self, path: Path) -> list[tuple[Path, str]]:
        if not path.is_dir():
            return [(path, "")]
        found = sorted((file.relative_to(path).as_posix(), file) for file in path.rglob(f"*{SHARD}") if file.is_file())
        if not found:
            raise self._invalid(f"it is a directory without any *{SHARD} file")
        return [(file, name) for name, file in found]

    def _shard(self, path: Path, name: str) -> _Shard:
        try:
            headers = npz.headers(path)
        except npz.UNREADABLE as e:
            raise self._invalid(f"it is no npz file: {e}", name) from e
        self._refuse_unknown(headers, name)
        for tensor in self._inputs:
            self._check(tensor, headers[tensor.name], name)
        counts = {header.name: header.shape[0] for header in headers.values()}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{array} {n}" for array, n in counts.items())
            raise self._invalid(f"its arrays hold different numbers of samples: {listed}", name)
        return _Shard(path, name, headers, next(iter(counts.values()), 0))

    def _refuse_unknown(self, headers: Mapping[str, Header], shard: str) -> None:
        unknown = headers.keys() - self._names - {LABELS}
        missing = self._names - headers.keys()
        if unknown or missing:
            what = f"it lacks {sorted(missing)}" if missing else f"it has unknown arrays {sorted(unknown)}"
            text = f"{what}: name the arrays like the inputs, {sorted(self._names)}, and '{LABELS}'"
            raise self._invalid(text, shard)

    def _require_alike(self, first: _Shard, other: _Shard) -> None:
        """Batches reach from one file into the next."""
        if first.headers.keys() != other.headers.keys():
            odd = sorted(first.headers.keys() ^ other.headers.keys())
            raise self._invalid(f"it and {first.name} do not both have {odd}", other.name)
        for name, header in other.headers.items():
            wanted = first.headers[name]
            if header.shape[1:] != wanted.shape[1:]:
                text = f"array {name!r} has samples of shape {list(header.shape[1:])}"
                raise self._invalid(f"{text}, those in {first.name} are of {list(wanted.shape[1:])}", other.name)

    def _check(self, tensor: GraphTensor, header: Header, shard: str) -> None:
        wanted = DTYPES[tensor.datatype]
        if header.dtype.kind not in ("f" if wanted.kind == "f" else "b" if wanted.kind == "b" else "iu"):
            raise self._invalid(f"array {tensor.name!r} is {header.dtype}, the input takes {tensor.datatype}", shard)
        fits = len(header.shape) == len(tensor.dims) > 0 and all(
            not isinstance(want, int) or want == got
            for want, got in zip(tensor.dims[1:], header.shape[1:], strict=True)
        )
        if not fits:
            text = f"array {tensor.name!r} is of shape {list(header.shape)}, the input of {list(tensor.dims)}"
            raise self._invalid(f"{text} (samples first)", shard)

    def _within(self, profile: Profile, name: str) -> bool:
        """Whether the profile allows the array's shape, whatever the batch size."""
        allowed = profile.inputs.get(name)
        if allowed is None:
            return True
        shape = self.shapes[name][1:]
        return all(low <= got <= high for low, got, high in zip(allowed.min[1:], shape, allowed.max[1:], strict=True))

    def _wanted(self, shard: _Shard) -> dict[str, Header]:
        names = [tensor.name for tensor in self._inputs]
        return {name: shard.headers[name] for name in (names if self._labels is None else [*names, LABELS])}

    def _as(self, name: str, array: Array, shard: _Shard) -> Array:
        """As the model takes it; labels as they are."""
        dtype: np.dtype[Any] = array.dtype.newbyteorder("=")
        if name in self._names:
            dtype = DTYPES[next(tensor.datatype for tensor in self._inputs if tensor.name == name)]
        if array.dtype.kind in "iu" and dtype.kind in "iu" and array.size:
            limits = np.iinfo(dtype)
            low, high = int(array.min()), int(array.max())
            if low < limits.min or high > limits.max:
                text = f"array {name!r} holds {low if low < limits.min else high}, beyond {dtype}"
                raise self._invalid(text, shard.name)
        return np.ascontiguousarray(array, dtype)

    def _invalid(self, text: str, shard: str = "") -> Rejected:
        where = f"{shard}: " if shard else ""
        return Rejected(Reason.DATASET_INVALID, f"data set {self._uri}: {where}{text}")


def _joined(parts: Sequence[Mapping[str, Array]], labels: str) -> tuple[dict[str, Array], Array | None]:
    whole = {name: parts[0][name] if len(parts) == 1 else np.concatenate([p[name] for p in parts]) for name in parts[0]}
    return whole, whole.pop(labels, None)


def calibration_batches(data: DataSetFile, rows: int, samples: int) -> Iterator[Mapping[str, Array]]:
    """Where the model takes one size only, the last is filled up. Elsewhere no sample counts twice."""
    for batch, _ in data.batches(rows, samples):
        if data.one_size:
            batch = {name: np.resize(array, (rows, *array.shape[1:])) for name, array in batch.items()}
        yield batch
