"""Can this ONNX Runtime run the file, and if not, why? Its own loader is asked, since no table of supported operators
is as right; what it says is put into words that name the cause and the way out. It names the first cause only: the
others are found by `faults`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtmodel_contract.jobs import Reason

from trtmodel_worker.engines.building import Finding, Graph, GraphTensor, Rejected, Severity
from trtmodel_worker.engines.onnxruntime import faults
from trtmodel_worker.engines.onnxruntime.run import DATATYPES


def inspect(source: Path) -> Graph:
    """Inputs and outputs. Raises Rejected, with all findings."""
    try:
        session = faults.open_session(str(source))
    except Exception as e:
        found = tuple(faults.find(source, str(e)))
        raise Rejected(found[0].reason, found[0].text, found) from e
    problems = [_unserved("input", node) for node in session.get_inputs()]
    problems += [_unserved("output", node) for node in session.get_outputs()]
    found = tuple(problem for problem in problems if problem is not None)
    if found:
        raise Rejected(found[0].reason, found[0].text, found)
    inputs = tuple(_tensor(node) for node in session.get_inputs())
    return Graph(inputs, tuple(_tensor(node) for node in session.get_outputs()))


def _tensor(node: Any) -> GraphTensor:
    dims = tuple(d if isinstance(d, (int, str)) else "?" for d in node.shape)
    return GraphTensor(node.name, DATATYPES[node.type], dims)


def _unserved(what: str, node: Any) -> Finding | None:
    """Why workers cannot serve a tensor of this type; None if they can."""
    name = f"{what} {node.name!r}"
    if DATATYPES.get(node.type) == "BYTES":
        text = f"{name} holds strings: no data set has any and no gate compares them"
        return _unsupported(text, "take numbers there, and look texts up outside of the graph")
    if node.type == "tensor(bfloat16)":
        text = f"{name} is BF16, which neither NumPy nor most CPU kernels have"
        return _unsupported(text, "cast it to FP32 inside of the graph")
    if node.type.startswith(("seq(", "map(", "optional(", "sparse_tensor(")):
        text = f"{name} is {node.type}, and a request holds tensors only"
        maps = "map(" in node.type
        hint = "export scikit-learn models with options={'zipmap': False}" if maps else "give tensors there instead"
        return _unsupported(text, hint)
    if node.type not in DATATYPES:
        text = f"{name} is of {node.type}, which workers do not serve"
        return _unsupported(text, "cast it inside of the graph")
    return None


def _unsupported(message: str, way_out: str) -> Finding:
    return Finding(Severity.ERROR, Reason.OPERATOR_UNSUPPORTED, message, way_out)
