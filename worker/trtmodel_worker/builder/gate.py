"""The gate: the engine, through the code path that serves, against ONNX Runtime FP32 on the original file.

Samples run in batches of the profile's optimum. Each other batch size runs over the first samples, and must answer as
the optimum did. Shapes of the profiles that the data set does not have are run with its values, cut off or repeated,
and must answer as the reference does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
from trtmodel_contract.gate import GateFigures, Task
from trtmodel_contract.identity import Profile
from trtmodel_contract.jobs import DataSet, Reason

from trtmodel_worker.builder.dataset import DataSetFile
from trtmodel_worker.builder.figures import OutputSums, Top1Counts
from trtmodel_worker.builder.gate_shapes import batch_sizes, corners, fitted, said
from trtmodel_worker.builder.observed import Findings, Observer
from trtmodel_worker.engines.base import Array, Lane, allocate_anew
from trtmodel_worker.engines.building import Graph, Rejected
from trtmodel_worker.engines.onnxruntime.run import unpacked_if_large
from trtmodel_worker.storage.external import size_of_model

SIZE_SAMPLES = 16  # at least, per batch size: one sample that tips a rounding should not decide


class Reference:
    """ONNX Runtime FP32 on the original file, without the optimisations that the engine is made with. Raises Rejected
    where there is no answer: without a reference nothing is proven."""

    def __init__(self, source: Path, threads: int) -> None:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        unpacked_if_large(options, size_of_model(source))
        try:
            self._session = ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
        except Exception as e:
            text = f"ONNX Runtime cannot load the model, so there is nothing to compare the engine with: {e}"
            raise Rejected(Reason.MODEL_INVALID, text) from e
        self.outputs = tuple(output.name for output in self._session.get_outputs())

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        try:
            found = self._session.run(None, dict(inputs))
        except MemoryError:
            raise
        except Exception as e:
            shapes = said({name: array.shape for name, array in inputs.items()})
            text = f"the original model itself does not run with {shapes}: {e}"
            raise Rejected(Reason.DATASET_INVALID, f"{text}: correct the data set, or the profile") from e
        return dict(zip(self.outputs, found, strict=True))


@dataclass(frozen=True)
class Measured:
    figures: GateFigures
    findings: Findings


def measure(
    reference: Reference,
    lane: Lane,
    graph: Graph,
    data: DataSetFile,
    asked: DataSet,
    task: Task,
    profiles: tuple[Profile, ...] = (),
) -> Measured:
    """Figures without a manifest digest, which is not known before the engine is published. `profiles` are all of the
    engine. Raises Rejected, EngineError."""
    rows, sizes = batch_sizes(graph, data.profiles)
    sums = {tensor.name: OutputSums() for tensor in graph.outputs}
    scores = scores_output(graph) if task is Task.CLASSIFICATION else ""
    observer = Observer(tuple(sums), scores)
    top1 = Top1Counts(data.labelled)
    truth = graph.outputs[0].name if task is Task.REGRESSION else ""
    compared = 0
    for batch, labels in data.batches(rows, asked.samples):
        count = len(next(iter(batch.values())))
        expected, found = _both(reference, lane, batch, rows, count)
        errors = {name: total.add(expected[name], found[name], count) for name, total in sums.items()}
        if scores:
            top1.add(expected[scores], found[scores], labels)
        if truth and labels is not None:
            sums[truth].add_truth(expected[truth], found[truth], labels)
        observer.add(expected, found, errors, labels, count)
        compared += count
    _run_sizes(lane, data, rows, sizes, sums, _of_fixed_length(graph))
    observer.shapes += [said({t.name: (size, *data.shapes[t.name][1:]) for t in graph.inputs}) for size in sizes]
    observer.shapes += _run_corners(reference, lane, data, profiles, sums)
    figures = GateFigures(
        manifest_digest="",
        dataset_digest=asked.digest,
        task=task,
        samples=compared,
        labelled=data.labelled,
        outputs={name: total.figures() for name, total in sums.items()},
        top1=top1.figures() if scores else None,
        shapes_checked=sizes,
    )
    return Measured(figures, observer.findings())


def _of_fixed_length(graph: Graph) -> set[str]:
    """Outputs that by the graph have a number of rows, whatever the batch: in one size they have the batch's length by
    accident."""
    return {tensor.name for tensor in graph.outputs if tensor.dims and isinstance(tensor.dims[0], int)}


def _run_sizes(
    lane: Lane, data: DataSetFile, rows: int, sizes: Sequence[int], sums: Mapping[str, OutputSums], fixed: set[str]
) -> None:
    for size in sizes:
        if size != rows:
            inputs = data.head(math.ceil(max(SIZE_SAMPLES, size) / size) * size)
            usual, other = _in_batches(lane, inputs, rows), _in_batches(lane, inputs, size)
            for name, right in usual.items():
                if name in fixed and name not in other:
                    continue
                sums[name].add_repeat(right, other.get(name, right[:0]))  # not a row for each sample: wrong


def _run_corners(
    reference: Reference,
    lane: Lane,
    data: DataSetFile,
    profiles: tuple[Profile, ...],
    sums: Mapping[str, OutputSums],
) -> list[str]:
    """What was run, in words."""
    ran = []
    for shapes in corners(profiles, data.shapes):
        inputs = fitted(data.head(next(iter(shapes.values()))[0]), shapes)
        expected, found = reference.run(inputs), lane.run(inputs, allocate_anew)
        for name, total in sums.items():
            total.add_repeat(expected[name], found[name])
        ran.append(said(shapes))
    return ran


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
