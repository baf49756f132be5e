"""The gate: the engine, through the code path that serves, against ONNX Runtime FP32 on the original file.

Samples run in batches of the profile's optimum. Each other batch size of the profiles (least and greatest) runs over
the first samples, and must answer as the optimum did. Sizes add no samples: repeats would only pretend to be proof.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from trtmodel_contract.gate import GateFigures, Task
from trtmodel_contract.identity import Profile
from trtmodel_contract.jobs import DataSet

from trtmodel_worker.builder.dataset import DataSetFile
from trtmodel_worker.builder.figures import OutputSums, Top1Counts
from trtmodel_worker.engines.base import Array, Lane, allocate_anew
from trtmodel_worker.engines.building import Graph

SIZE_SAMPLES = 16  # at least, per batch size: one sample that tips a rounding should not decide


class Reference:
    """ONNX Runtime FP32 on the original file, without the optimisations that the engine is made with."""

    def __init__(self, source: Path, threads: int) -> None:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
        self.outputs = tuple(output.name for output in self._session.get_outputs())

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return dict(zip(self.outputs, self._session.run(None, dict(inputs)), strict=True))


def batch_sizes(graph: Graph, profiles: tuple[Profile, ...], most: int = 0) -> tuple[int, tuple[int, ...]]:
    """(batch size for the samples, all batch sizes that the engine must run). With `most`, the first is at most that
    where the graph and the profiles allow it."""
    leading = {t.name: t.dims[0] for t in graph.inputs if t.dims}
    fixed = [d for d in leading.values() if isinstance(d, int)]
    if fixed:
        return fixed[0], (fixed[0],)
    ranges = [allowed for profile in profiles for allowed in profile.inputs.values()]
    sizes = {size[0] for allowed in ranges for size in (allowed.min, allowed.opt, allowed.max)}
    first = ranges[0]
    return (max(first.min[0], min(first.opt[0], most)) if most else first.opt[0]), tuple(sorted(sizes))


def measure(
    reference: Reference,
    lane: Lane,
    graph: Graph,
    data: DataSetFile,
    asked: DataSet,
    task: Task,
) -> GateFigures:
    """Figures without a manifest digest, which is not known before the engine is published. Raises Rejected,
    EngineError."""
    rows, sizes = batch_sizes(graph, data.profiles)
    sums = {tensor.name: OutputSums() for tensor in graph.outputs}
    scores = scores_output(graph) if task is Task.CLASSIFICATION else ""
    top1 = Top1Counts(data.labelled)
    truth = graph.outputs[0].name if task is Task.REGRESSION else ""
    compared = 0
    for batch, labels in data.batches(rows, asked.samples):
        count = len(next(iter(batch.values())))
        expected, found = _both(reference, lane, batch, rows, count)
        for name, total in sums.items():
            total.add(expected[name], found[name], count)
        if scores:
            top1.add(expected[scores], found[scores], labels)
        if truth and labels is not None:
            sums[truth].add_truth(expected[truth], found[truth], labels)
        compared += count
    for size in sizes:
        if size != rows:
            inputs = data.head(math.ceil(max(SIZE_SAMPLES, size) / size) * size)
            usual, other = _in_batches(lane, inputs, rows), _in_batches(lane, inputs, size)
            for name in usual.keys() & other.keys():
                sums[name].add_size(usual[name], other[name])
    return GateFigures(
        manifest_digest="",
        dataset_digest=asked.digest,
        task=task,
        samples=compared,
        labelled=data.labelled,
        outputs={name: total.figures() for name, total in sums.items()},
        top1=top1.figures() if scores else None,
        shapes_checked=sizes,
    )


def scores_output(graph: Graph) -> str:
    """The output whose greatest value is the class: the first of shape [batch, classes]."""
    return next(o.name for o in graph.outputs if len(o.dims) == 2 and o.dims[1] != 1 and o.datatype.startswith("FP"))


def _both(
    reference: Reference, lane: Lane, batch: Mapping[str, Array], rows: int, count: int
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Answers of both to `batch`. A last batch that is too small for the engine is filled up and trimmed."""
    full = batch
    if count < rows:
        full = {name: np.resize(array, (rows, *array.shape[1:])) for name, array in batch.items()}
    expected, found = reference.run(full), dict(lane.run(full, allocate_anew))
    if count == rows:
        return expected, found
    return _trim(expected, rows, count), _trim(found, rows, count)


def _in_batches(lane: Lane, inputs: Mapping[str, Array], size: int) -> dict[str, Array]:
    """Answers to all rows of `inputs`, `size` at a time; without outputs that have no row for each sample."""
    total = len(next(iter(inputs.values())))
    parts: dict[str, list[Array]] = {}
    for start in range(0, total, size):
        batch = {name: array[start : start + size] for name, array in inputs.items()}
        count = len(next(iter(batch.values())))
        full = {name: np.resize(array, (size, *array.shape[1:])) for name, array in batch.items()}
        for name, array in _trim(lane.run(full, allocate_anew), size, count).items():
            if array.ndim and len(array) == count:
                parts.setdefault(name, []).append(array)
    joined = {name: np.concatenate(arrays) for name, arrays in parts.items() if _stackable(arrays)}
    return {name: array for name, array in joined.items() if len(array) == total}


def _stackable(arrays: Sequence[Array]) -> bool:
    return len({array.shape[1:] for array in arrays}) == 1


def _trim(outputs: Mapping[str, Array], rows: int, count: int) -> dict[str, Array]:
    return {n: a[:count] if a.ndim and a.shape[0] == rows else a for n, a in outputs.items()}
