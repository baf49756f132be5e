"""Can TensorRT run the file? As far as it can be told without a GPU, which TensorRT's own parser needs: what that
refuses shows when the engine is built. The gate runs the same file with ONNX Runtime, so what that refuses is refused
here, too."""

from __future__ import annotations

from pathlib import Path

from trtmodel_contract.jobs import Reason

from trtmodel_worker.engines.building import Finding, Graph, GraphTensor, Rejected, Severity
from trtmodel_worker.engines.onnxruntime import inspect as onnxruntime
from trtmodel_worker.engines.tensorrt import compat

_SERVED = ("FP32", "FP16", "INT8", "INT32", "INT64", "UINT8", "BOOL")


def inspect(source: Path, version: str) -> Graph:
    """Inputs and outputs. Raises Rejected, with all findings."""
    graph = onnxruntime.inspect(source)
    problems = [_unserved("input", tensor, version) for tensor in graph.inputs]
    problems += [_unserved("output", tensor, version) for tensor in graph.outputs]
    found = tuple(problem for problem in problems if problem is not None)
    if found:
        raise Rejected(found[0].reason, found[0].text, found)
    return graph


def _unserved(what: str, tensor: GraphTensor, version: str) -> Finding | None:
    text = f"{what} {tensor.name!r} is {tensor.datatype}, which TensorRT {version} has not"
    if tensor.datatype not in _SERVED:
        return _unsupported(text, "cast it inside of the graph")
    if tensor.datatype == "INT64" and compat.parse(version) < (10,):
        return _unsupported(
            text, "make it INT32 and cast inside of the graph, or use an image with TensorRT 10 or newer"
        )
    return None


def _unsupported(message: str, way_out: str) -> Finding:
    return Finding(Severity.ERROR, Reason.OPERATOR_UNSUPPORTED, message, way_out)
