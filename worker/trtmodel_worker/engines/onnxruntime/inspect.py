"""Can this ONNX Runtime run the file, and if not, why? Its own loader is asked, since no table of supported operators
is as right; what it says is put into words that name the cause and the way out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import onnxruntime as ort
from trtmodel_contract.jobs import Reason

from trtmodel_worker.engines.building import Graph, GraphTensor, Rejected
from trtmodel_worker.engines.onnxruntime.run import DATATYPES, session_options

_PREFIX = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : (?:/\S+:\d+ .*?\) )?", re.DOTALL)
_IR = re.compile(r"Unsupported model IR version: (\d+), max supported IR version: (\d+)")
_OPSET = re.compile(r"Opset (\d+) is under development.*support for domain (\S+) is till opset (\d+)", re.DOTALL)
_NO_KERNEL = re.compile(r"Could not find an implementation for (\S+?)\((\d+)\) node with name '(.*?)'", re.DOTALL)
_NO_OPERATOR = re.compile(r"(\S*?):?([A-Za-z0-9_]+)\(-?\d+\) is not a registered function/op")
_NO_SCHEMA = re.compile(r'In Node, \("(.*?)", (\S+), "(.*?)".*No Op registered for', re.DOTALL)


def inspect(source: Path) -> Graph:
    """Inputs and outputs. Raises Rejected."""
    try:
        session = ort.InferenceSession(
            str(source),
            session_options(1, ort.GraphOptimizationLevel.ORT_DISABLE_ALL),
            providers=["CPUExecutionProvider"],
        )
    except Exception as e:
        raise _rejected(str(e)) from e
    inputs = tuple(_tensor("input", node) for node in session.get_inputs())
    return Graph(inputs, tuple(_tensor("output", node) for node in session.get_outputs()))


def _tensor(what: str, node: Any) -> GraphTensor:
    if DATATYPES.get(node.type) == "BYTES":
        text = f"{what} {node.name!r} holds strings: no data set has any and no gate compares them"
        raise Rejected(
            Reason.OPERATOR_UNSUPPORTED, f"{text}: take numbers there, and look texts up outside of the graph"
        )
    if node.type == "tensor(bfloat16)":
        text = f"{what} {node.name!r} is BF16, which neither NumPy nor most CPU kernels have"
        raise Rejected(Reason.OPERATOR_UNSUPPORTED, f"{text}: cast it to FP32 inside of the graph")
    if node.type not in DATATYPES:
        text = f"{what} {node.name!r} is of {node.type}, which workers do not serve: cast it inside of the graph"
        raise Rejected(Reason.OPERATOR_UNSUPPORTED, text)
    return GraphTensor(
        node.name, DATATYPES[node.type], tuple(d if isinstance(d, (int, str)) else "?" for d in node.shape)
    )


def _rejected(text: str) -> Rejected:
    version = f"ONNX Runtime {ort.__version__}"
    if match := _IR.search(text):
        found, most = match.groups()
        text = f"the model's IR version is {found}, {version} reads up to {most}: export it with an older exporter"
        return Rejected(Reason.MODEL_INVALID, f"{text} or set ir_version to {most}, which few graphs need to exceed")
    if match := _OPSET.search(text):
        found, domain, most = match.groups()
        text = f"the model uses opset {found} of {domain}, {version} supports up to {most}: export it with that opset"
        return Rejected(Reason.OPERATOR_UNSUPPORTED, text)
    if match := _NO_KERNEL.search(text):
        operator, opset, node = match.groups()
        text = f"{version} has no CPU kernel for {operator} (opset {opset}) with the types of node {node!r}"
        return Rejected(Reason.OPERATOR_UNSUPPORTED, f"{text}: cast to FP32 around it, or use another runtime")
    if match := _NO_OPERATOR.search(text):
        domain, operator = match.groups()
        text = f"operator {domain or 'ai.onnx'}:{operator} does not exist in {version}"
        return Rejected(Reason.OPERATOR_UNSUPPORTED, f"{text}: export the model without custom operators")
    if match := _NO_SCHEMA.search(text):
        node, operator, domain = match.groups()
        text = f"node {node!r}: operator {domain or 'ai.onnx'}:{operator} does not exist in {version}"
        return Rejected(Reason.OPERATOR_UNSUPPORTED, f"{text}: export the model without custom operators")
    return Rejected(Reason.MODEL_INVALID, f"{version} refuses the model: {_PREFIX.sub('', text).strip()[:500]}")
