"""Calibration data on its way: read once, one batch at a time, so that it need not fit into memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from trtmodel_contract.jobs import Reason

from trtmodel_worker.engines.base import Array
from trtmodel_worker.engines.building import Rejected
from trtmodel_worker.engines.tensorrt.device import Cuda

Batch = Mapping[str, Array]


class Spool:
    """Batches that can be read again: the first reading leaves them in `folder`."""

    def __init__(self, batches: Iterable[Batch], folder: Path) -> None:
        self._source, self._folder = iter(batches), folder
        self._kept: list[Path] = []

    def __iter__(self) -> Iterator[Batch]:
        for path in list(self._kept):
            with np.load(path, allow_pickle=False) as arrays:
                yield {name: arrays[name] for name in arrays.files}
        for batch in self._source:
            path = self._folder / f"batch-{len(self._kept)}.npz"
            np.savez(path, allow_pickle=False, **batch)
            self._kept.append(path)
            yield batch


class Feed:
    """To TensorRT's own calibrator, through device memory that stays.

    `rows` and `shapes` are those of the first batch: TensorRT calibrates in one shape. A last batch with fewer rows is
    filled up with its own; one that differs otherwise ends the feed with an error. Raises Rejected if there is no data,
    CudaError.
    """

    def __init__(self, cuda: Cuda, batches: Iterable[Batch]) -> None:
        iterator = iter(batches)
        first = next(iterator, None)
        if first is None:
            raise Rejected(Reason.DATASET_INVALID, "the calibration data set is empty: ranges are never guessed")
        self._cuda = cuda
        self._batches = itertools.chain([first], iterator)
        self.shapes = {name: array.shape for name, array in first.items()}
        self.rows = max((shape[0] for shape in self.shapes.values() if shape), default=1)
        self._places = {name: cuda.allocate(array.nbytes) for name, array in first.items()}
        self.given = 0
        self.failure: Exception | None = None

    def next(self, names: Sequence[str]) -> list[int] | None:
        """Called by TensorRT, which loses exceptions: the first is kept in `failure`, and ends the feed."""
        try:
            batch = next(self._batches, None)
            if batch is None:
                return None
            for name in names:
                self._copy(name, batch[name])
            self.given += 1
            return [self._places[name] for name in names]
        except Exception as e:  # noqa: BLE001
            self.failure = self.failure or e
            return None

    def release(self) -> None:
        """Raises CudaError."""
        for address in self._places.values():
            self._cuda.free(address)
        self._places = {}

    def _copy(self, name: str, array: Array) -> None:
        wanted = self.shapes[name]
        if array.shape[1:] != wanted[1:]:
            text = f"calibration batches differ in shape: {name!r} is {list(array.shape)} after {list(wanted)}"
            raise Rejected(Reason.DATASET_INVALID, f"{text}: use samples of one size")
        full = np.ascontiguousarray(np.resize(array, wanted))
        kind = self._cuda.runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._cuda.call("cudaMemcpy", self._places[name], full.ctypes.data, full.nbytes, kind)
