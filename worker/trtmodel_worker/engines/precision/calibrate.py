"""Ranges of activations from data, in memory that does not grow with the data.

ONNX Runtime's own calibrators either keep every activation (1.9 GB for 200 samples of a small model) or, fed batch by
batch, keep the first batch's bin width for ever, so that a later, larger value makes as many new bins as it takes.
Here a histogram has a fixed number of bins: when a value is beyond it, pairs of bins are joined and the range doubles,
which loses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from trtmodel_contract.jobs import Reason

from trtmodel_worker.engines.base import Array
from trtmodel_worker.engines.building import Rejected
from trtmodel_worker.engines.onnxruntime import machine
from trtmodel_worker.engines.onnxruntime.run import session_options

METHODS = ("Entropy", "MinMax")
BINS = 2048
LEVELS = 128  # of one sign in INT8
_STEP = 16  # bins between two thresholds that are tried: 121 of them


@dataclass(frozen=True)
class Range:
    low: float
    high: float


def ranges(
    model: onnx.ModelProto, tensors: Collection[str], batches: Iterable[Mapping[str, Array]], method: str, folder: Path
) -> dict[str, Range]:
    """Of the `tensors` that hold floats. Raises Rejected for data that is empty or that the model does not run with."""
    session, names = _session(model, tensors, folder)
    seen = {name: (_Histogram() if method == "Entropy" else _Extremes()) for name in names}
    empty = True
    for batch in batches:
        try:
            values = session.run(names, dict(batch))
        except Exception as e:
            text = f"the model does not run with the calibration data: {e}"
            raise Rejected(Reason.DATASET_INVALID, text) from e
        for name, value in zip(names, values, strict=True):
            seen[name].add(value)
        empty = False
    if empty:
        raise Rejected(Reason.DATASET_INVALID, "the calibration data set is empty: ranges are never guessed")
    unknown = [name for name, found in seen.items() if found.read and found.low > found.high]
    if unknown:
        text = f"with the calibration data every value of {unknown[0]!r} is NaN or infinite: ranges are never guessed"
        raise Rejected(Reason.DATASET_INVALID, f"{text}; look at the data set's own values")
    return {name: found.range() for name, found in seen.items()}


class _Extremes:
    """The least and the greatest finite value."""

    def __init__(self) -> None:
        self.low, self.high = np.inf, -np.inf
        self.read = 0  # values, finite or not

    def add(self, values: Array) -> None:
        self.read += values.size
        finite = values[np.isfinite(values)]
        if finite.size:
            self.low = min(self.low, float(finite.min()))
            self.high = max(self.high, float(finite.max()))

    def range(self) -> Range:
        return Range(self.low, self.high) if self.low <= self.high else Range(0.0, 0.0)


class _Histogram(_Extremes):
    """Magnitudes in BINS bins, and the range that loses the least information when it has LEVELS levels (Migacz, 8-bit
    inference with TensorRT, GTC 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: NDArray[np.int64] = np.zeros(BINS, np.int64)
        self.top = 0.0

    def add(self, values: Array) -> None:
        super().add(values)
        sizes = np.abs(values[np.isfinite(values)].astype(np.float64))
        most = float(sizes.max(initial=0.0))
        if most == 0.0:
            return
        if self.top == 0.0:
            self.top = 2.0 ** math.ceil(math.log2(most))  # of whatever batch comes first, bins have the same edges
        while self.top < most:
            self.counts = np.concatenate([self.counts.reshape(-1, 2).sum(axis=1), np.zeros(BINS // 2, np.int64)])
            self.top *= 2
        # What is 0 fits any scale: after a Relu it would drown everything else.
        bins = np.minimum(sizes[sizes > 0] / self.top * BINS, BINS - 1).astype(np.int64)
        self.counts += np.bincount(bins, minlength=BINS)

    def range(self) -> Range:
        whole = super().range()
        if self.top == 0.0:
            return whole
        threshold = _threshold(self.counts) / BINS * self.top
        return Range(max(whole.low, -threshold), min(whole.high, threshold))


def _threshold(counts: NDArray[np.int64]) -> int:
    """The number of bins that are kept; what is beyond is clipped."""
    used = int(np.flatnonzero(counts)[-1]) + 1
    candidates = [*range(LEVELS, used, _STEP), used] if used > LEVELS else [used]
    return min(candidates, key=lambda kept: _divergence(counts, kept))


def _divergence(counts: NDArray[np.int64], kept: int) -> float:
    """Kullback-Leibler divergence of what is left of the distribution, outliers clipped, from its quantised form."""
    inside = counts[:kept].astype(np.float64)
    clipped = inside.copy()
    clipped[-1] += counts[kept:].sum()
    level = np.arange(kept) * LEVELS // kept
    there = inside > 0
    sums = np.bincount(level, weights=inside, minlength=LEVELS)
    filled = np.bincount(level, weights=there.astype(np.float64), minlength=LEVELS)
    quantised = np.where(there, (sums / np.maximum(filled, 1))[level], 0.0)
    p, q = clipped / clipped.sum(), quantised / max(quantised.sum(), 1e-300)
    # A bin that only clipped values are in has no counterpart: it costs as if it had the least there is.
    both = p > 0
    return float((p[both] * np.log(p[both] / np.maximum(q[both], 1e-9))).sum())


def _session(
    model: onnx.ModelProto, tensors: Collection[str], folder: Path
) -> tuple[ort.InferenceSession, tuple[str, ...]]:
    """A session whose outputs are those of the tensors that are floats, and their names."""
    augmented = onnx.ModelProto()
    augmented.CopyFrom(model)
    graph = augmented.graph
    typed: dict[str, Any] = {v.name: v for v in (*graph.input, *graph.output, *graph.value_info)}
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
    names = tuple(
        name for name in sorted(tensors) if name in typed and typed[name].type.tensor_type.elem_type in floats
    )
    there = {output.name for output in graph.output}
    graph.output.extend(typed[name] for name in names if name not in there)
    path = folder / "calibrated.onnx"
    onnx.save(augmented, path)
    options = session_options(machine.cpu_quota(), ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]), names
