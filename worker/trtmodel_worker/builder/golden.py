"""Golden samples: what the built engine answered, so that a worker can tell that it holds the same engine.

Tolerances are absolute, per output: four times the spread seen over two loads (with another number of threads) and two
lanes, but at least a floor. The floor is relative to the output's greatest value: FP32 sums may be taken in another
order, and where values are rounded (FP16, INT8) such a difference can tip a rounding.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trtmodel_worker.builder.dataset import DataSetFile
from trtmodel_worker.builder.gate_shapes import batch_sizes
from trtmodel_worker.engines.base import Array, Lane, allocate_anew
from trtmodel_worker.engines.building import Graph

SPREAD_FACTOR = 4.0
FLOORS = {"FP32": 1e-4, "FP16": 5e-3, "BF16": 2e-2, "INT8": 2e-2, "FP8": 5e-2}
MOST_BYTES = 64 << 20  # of one sample set: workers hold it in memory at every self-test


@dataclass(frozen=True)
class GoldenSet:
    """Inputs and outputs of one batch size, and the greatest difference seen per output."""

    rows: int
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    spread: Mapping[str, float]

    def encode(self, graph: Graph) -> bytes:
        """The npz that the manifest's Golden describes."""
        arrays = {f"i{n}": self.inputs[tensor.name] for n, tensor in enumerate(graph.inputs)}
        arrays |= {f"o{n}": self.outputs[tensor.name] for n, tensor in enumerate(graph.outputs)}
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **arrays)
        return buffer.getvalue()


def record(graph: Graph, data: DataSetFile, lanes: Sequence[Lane]) -> list[GoldenSet]:
    """Run the first samples at the least and the best batch size on every lane."""
    best, sizes = batch_sizes(graph, data.profiles)
    found: list[GoldenSet] = []
    for rows in sorted({sizes[0], best}):
        inputs = data.head(rows)
        if found and sum(array.nbytes for array in inputs.values()) > MOST_BYTES:
            continue
        outputs = run(lanes[0], inputs)
        spread = dict.fromkeys(outputs, 0.0)
        for lane in lanes[1:]:
            spread = widest(spread, differences(outputs, run(lane, inputs)))
        found.append(GoldenSet(rows, inputs, outputs, spread))
    return found


def run(lane: Lane, inputs: Mapping[str, Array]) -> dict[str, Array]:
    return dict(lane.run(inputs, allocate_anew))


def differences(expected: Mapping[str, Array], found: Mapping[str, Array]) -> dict[str, float]:
    """Greatest absolute difference per output; infinite where shapes differ or one is not finite and the other is."""
    return {name: _difference(array, found[name]) for name, array in expected.items()}


def widest(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: max(one[name], other[name]) for name in one}


def tolerances(golden: GoldenSet, precision: str) -> dict[str, float]:
    return {
        name: max(SPREAD_FACTOR * golden.spread[name], _floor(array, precision))
        for name, array in golden.outputs.items()
    }


def _floor(output: Array, precision: str) -> float:
    if output.dtype.kind != "f":
        return 0.0
    finite = np.abs(output[np.isfinite(output)].astype(np.float64))
    return FLOORS[precision] * float(finite.max(initial=0.0))


def _difference(one: Array, other: Array) -> float:
    if one.shape != other.shape:
        return float("inf")
    first, second = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):
        same = (first == second) | (np.isnan(first) & np.isnan(second))
        gaps = np.where(same, 0.0, np.abs(first - second))
    return float(np.nan_to_num(gaps, nan=np.inf).max(initial=0.0))
