"""Which nodes does a reduced precision hurt? Asked when the gate has failed, on a few samples and in bounded time.

1. run the graph in FP32 and reduced, every value side by side: how much does each node add to the error?
2. keep the greatest suspects one at a time: what is then the error of the outputs?
3. keep the best of them together, one after the other, until it is small or nothing helps
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from trtmodel_worker.builder.report import Kept, Sensitivity
from trtmodel_worker.engines.base import Array
from trtmodel_worker.engines.onnxruntime import machine
from trtmodel_worker.engines.onnxruntime.run import session_options
from trtmodel_worker.engines.precision.reduced import Reduced

SAMPLES = 16
SECONDS = 120.0
SUSPECTS = 8
MOST_KEPT = 4
_ENOUGH = 0.2  # of the error that there was: what is left is spread over all nodes
_HELPS = 0.95
_VALUES_BYTES = 512 << 20  # of all values of one run: beyond it, every second one, and so on

Inputs = Mapping[str, Array]


def find(graph: Reduced, samples: Sequence[Inputs], folder: Path, seconds: float = SECONDS) -> Sensitivity | None:
    """None if no node stands out. `samples` are batches."""
    deadline = time.monotonic() + seconds
    model = onnx.load(graph.prepared)
    operators = {node.name: node.op_type for node in model.graph.node}
    trial = _Trial(graph, model, samples, folder)
    before = trial.error(graph.kept)
    suspects = [name for name in trial.suspects() if name not in graph.kept][:SUSPECTS]
    alone: list[tuple[float, str]] = []
    for name in suspects:
        if time.monotonic() > deadline:
            break
        alone.append((trial.error(graph.kept | {name}), name))
    found: list[Kept] = []
    least, keep = before, graph.kept
    for _, name in sorted(alone, key=lambda entry: entry[0]):
        enough = math.isfinite(least) and least <= _ENOUGH * before
        if enough or len(found) == MOST_KEPT or time.monotonic() > deadline:
            break
        error = trial.error(keep | {name})
        if error < least * _HELPS or (math.isfinite(error) and not math.isfinite(least)):
            keep, least = keep | {name}, error
            found.append(Kept(f"^{re.escape(name)}$", name, operators[name], _number(error)))
    if not found:
        return None
    return Sensitivity(sum(len(next(iter(s.values()))) for s in samples), _number(before), tuple(found))


class _Trial:
    """Compares the graph in FP32 with itself reduced, on the same samples."""

    def __init__(self, graph: Reduced, model: onnx.ModelProto, samples: Sequence[Inputs], folder: Path) -> None:
        self._graph, self._model, self._samples, self._folder = graph, model, samples, folder
        self._outputs = [output.name for output in model.graph.output]
        session = _session(graph.prepared)
        self._expected = [session.run(self._outputs, dict(s)) for s in samples]

    def error(self, keep: Collection[str]) -> float:
        """The greatest relative error of any output; infinite where one is no number and should be."""
        target = self._folder / "trial.onnx"
        if not set(self._graph.nodes) - set(keep):
            return math.inf  # nothing would be left to reduce: that is no way out
        self._graph.write(keep, target)
        session = _session(target)
        found = [session.run(self._outputs, dict(s)) for s in self._samples]
        return max(_relative([e[i] for e in self._expected], [f[i] for f in found]) for i in range(len(self._outputs)))

    def suspects(self) -> list[str]:
        """Nodes that can be reduced, worst first: by what they add to the error of their inputs."""
        target = self._folder / "trial.onnx"
        self._graph.write(self._graph.kept, target)
        typed = {v.name for v in self._model.graph.value_info if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT}
        typed |= {output.name for output in self._model.graph.output}
        reduced = {name for node in onnx.load(target, load_external_data=False).graph.node for name in node.output}
        names = [name for node in self._model.graph.node for name in node.output if name in typed & reduced]
        both = [
            _session(_exposed(path, names, self._folder / f"exposed-{i}.onnx"))
            for i, path in enumerate((self._graph.prepared, target))
        ]
        errors: dict[str, float] = {}
        for part in _portions(names, both[0], self._samples[0]):
            # One batch tells enough about single values; the outputs are compared on all.
            expected, found = (session.run(part, dict(self._samples[0])) for session in both)
            errors |= {name: _relative([e], [f]) for name, e, f in zip(part, expected, found, strict=True)}
        added: dict[str, float] = {}
        can = set(self._graph.nodes)
        for node in self._model.graph.node:
            if node.name in can:
                after = max((errors.get(name, 0.0) for name in node.output), default=0.0)
                came = max((errors.get(name, 0.0) for name in node.input), default=0.0)
                added[node.name] = 0.0 if math.isinf(came) else after - came
        return sorted((name for name in added if added[name] > 0), key=lambda name: -added[name])


def _session(path: Path) -> ort.InferenceSession:
    options = session_options(machine.cpu_quota(), ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _exposed(path: Path, names: Sequence[str], target: Path) -> Path:
    model = onnx.load(path)
    there = {output.name for output in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in there)
    onnx.save(model, target)
    return target


def _portions(names: Sequence[str], session: ort.InferenceSession, sample: Inputs) -> list[list[str]]:
    """So many at a time that they fit into memory; judged by the first few."""
    first = session.run(list(names[:8]), dict(sample))
    each = max(1, sum(value.nbytes for value in first) // max(1, len(first)))
    size = max(1, _VALUES_BYTES // each)
    return [list(names[i : i + size]) for i in range(0, len(names), size)]


def _relative(expected: Sequence[Array], found: Sequence[Array]) -> float:
    squares = lengths = 0.0
    for e, f in zip(expected, found, strict=True):
        if e.shape != f.shape:
            return math.inf
        wide, other = np.asarray(e, np.float64), np.asarray(f, np.float64)
        known = np.isfinite(wide)
        if not np.isfinite(other[known]).all():
            return math.inf
        squares += float(((wide[known] - other[known]) ** 2).sum())
        lengths += float((wide[known] ** 2).sum())
    if squares == 0:
        return 0.0
    return math.sqrt(squares / lengths) if lengths > 0 else math.inf


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
