"""An optional simpler graph to build from: constants folded, shape arithmetic and dead ends gone.

The library rewrites graphs by pattern, and has had faults that change answers. So it runs in a process of its own, and
its result is built from only if it has the same inputs and outputs and answers the data set's rows as the original
does, in every batch size of the profiles. Otherwise the original is built, and the manifest says why.

    original -> library -> same interface? -> keepPrecision still finds its nodes? -> same answers? -> simplified
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import numpy as np
import onnx
import onnxruntime as ort
from trtmodel_contract.identity import EngineSettings

from trtmodel_worker.builder import walk
from trtmodel_worker.builder.gate_shapes import batch_sizes
from trtmodel_worker.builder.golden import differences
from trtmodel_worker.builder.process import run_module
from trtmodel_worker.engines.base import Array
from trtmodel_worker.engines.building import Graph, Rejected
from trtmodel_worker.engines.onnxruntime.inspect import inspect
from trtmodel_worker.engines.onnxruntime.machine import cpu_quota
from trtmodel_worker.engines.onnxruntime.run import session_options
from trtmodel_worker.lifetime import end_with_parent
from trtmodel_worker.storage.external import size_of_model

LIBRARY = "onnxslim"
TOLERANCE = 1e-4  # of an output's greatest value: folding takes sums in another order
MOST_SECONDS = 900.0
MOST_BYTES = 2**31 - 1  # of a protobuf message
LOADED_MOST = 512 << 20  # bytes of a model: larger ones take more memory than a Job should
_FILE = "simplified.onnx"

log = logging.getLogger("trtmodel.stage")


class Rows(Protocol):
    """A data set, as far as it is needed here."""

    def head(self, rows: int) -> Mapping[str, Array]: ...


class _Unused(Exception):
    """The simplified graph is not built from. The text says why."""


def source(
    original: Path, engine: EngineSettings, graph: Graph, data: Rows, folder: Path
) -> tuple[Path, dict[str, str]]:
    """(the ONNX file to build from, what the manifest says of it). `folder` keeps the simplified file."""
    if not engine.simplify:
        return original, {}
    try:
        simplified = folder / _FILE
        before, after = _run(original, simplified)
        _same_interface(simplified, graph)
        _same_nodes_kept(simplified, engine)
        _same_answers(original, simplified, engine, graph, data)
    except _Unused as e:
        log.warning("the simplified graph is not used: %s", e)
        return original, {"simplified": f"no: {e}"}
    log.info("simplified by %s: %d nodes of %d", LIBRARY, after, before)
    return simplified, {"simplified": f"{LIBRARY} {version(LIBRARY)}", "simplifiedNodes": f"{after} of {before}"}


def _run(original: Path, simplified: Path) -> tuple[int, int]:
    """Nodes before and after."""
    size = size_of_model(original)
    if size > LOADED_MOST:
        raise _Unused(f"{LIBRARY} holds a model in memory several times, and this one has {size:,} bytes")
    arguments = ["trtmodel_worker.builder.simplify", str(original), str(simplified)]
    ended = run_module(arguments, MOST_SECONDS)
    if ended.code != 0 or not simplified.exists():
        raise _Unused(f"{LIBRARY} {ended}")
    return _nodes(original), _nodes(simplified)


def _nodes(path: Path) -> int:
    return sum(1 for _ in walk.nodes(onnx.load(path, load_external_data=False)))


def _same_interface(simplified: Path, graph: Graph) -> None:
    try:
        found = inspect(simplified)
    except Rejected as e:
        raise _Unused(f"the simplified graph does not load: {e.message}") from e
    if found.inputs != graph.inputs:
        raise _Unused(f"its inputs became {', '.join(str(t.spec()) for t in found.inputs)}")
    if [(t.name, t.datatype) for t in found.outputs] != [(t.name, t.datatype) for t in graph.outputs]:
        raise _Unused(f"its outputs became {', '.join(str(t.spec()) for t in found.outputs)}")


def _same_nodes_kept(simplified: Path, engine: EngineSettings) -> None:
    if engine.keep_precision is None:
        return
    nodes = list(onnx.load(simplified, load_external_data=False).graph.node)
    for pattern in engine.keep_precision.nodes:
        if not any(re.search(pattern, node.name) for node in nodes if node.name):
            raise _Unused(f"no node is left that keepPrecision {pattern!r} means")
    for operator in engine.keep_precision.operators:
        if all(node.op_type != operator for node in nodes):
            raise _Unused(f"no {operator} is left, which keepPrecision means")


def _same_answers(original: Path, simplified: Path, engine: EngineSettings, graph: Graph, data: Rows) -> None:
    sessions = [_session(path) for path in (original, simplified)]
    names = [tensor.name for tensor in graph.outputs]
    for rows in batch_sizes(graph, engine.profiles)[1]:
        inputs = dict(data.head(rows))
        try:
            expected, found = (dict(zip(names, session.run(names, inputs), strict=True)) for session in sessions)
        except Exception as e:
            raise _Unused(f"it cannot be compared on {rows} rows: {e}") from e
        for name, gap in differences(expected, found).items():
            limit = TOLERANCE * _greatest(expected[name])
            if not gap <= limit:
                text = f"output {name!r} of {rows} rows differs by {gap:.3g}, more than {limit:.3g}"
                raise _Unused(f"it changes answers: {text}")


def _session(path: Path) -> ort.InferenceSession:
    options = session_options(cpu_quota(), ort.GraphOptimizationLevel.ORT_ENABLE_BASIC)
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as e:
        raise _Unused(f"it does not load: {e}") from e


def _greatest(output: Array) -> float:
    if output.dtype.kind != "f":
        return 0.0
    return float(np.abs(output[np.isfinite(output)].astype(np.float64)).max(initial=0.0))


def main(arguments: list[str]) -> int:
    """``simplify original.onnx simplified.onnx``."""
    original, simplified = map(Path, arguments)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    end_with_parent()
    made = import_module(LIBRARY).slim(onnx.load(original))
    if made is None or made.ByteSize() > MOST_BYTES:
        print("the simplified graph would be larger than 2 GB", file=sys.stderr)
        return 1
    partial = simplified.with_suffix(".part")
    onnx.save(made, partial)
    partial.replace(simplified)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
