"""Why ONNX Runtime refuses a model: all causes, in words that name node, operator and the way out.

Its loader stops at the first cause. What can be put right in a copy (a version, names that stand twice) is put right,
and the copy loaded again; and each kind of node is offered to it alone, to find all operators that it lacks.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import onnxruntime as ort
from google.protobuf.message import DecodeError, EncodeError
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper
from trtmodel_contract.jobs import Reason

from trtmodel_worker.engines.building import Finding, Severity
from trtmodel_worker.engines.onnxruntime.run import session_options

VERSION = f"ONNX Runtime {ort.__version__}"
_PREFIX = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : (?:/\S+:\d+ .*?\) )?", re.DOTALL)
_FROM = re.compile(r"Load model from .{1,4096}? failed:\s*", re.DOTALL)  # a temporary path
_ROUNDS = 5  # of putting right and loading again
_MOST_KINDS = 400  # of nodes that are offered alone
_CONSTANT_BYTES = 4096  # larger ones decide no types
_SHOWN = 5
_WORDS = 500
_IR = re.compile(r"Unsupported model IR version: (\d+), max supported IR version: (\d+)")
_OPSET = re.compile(r"Opset (\d+) is under development.*support for domain (\S+) is till opset (\d+)", re.DOTALL)
_SAME_NAME = re.compile(r"same node name \((.*?)\)", re.DOTALL)
_NO_KERNEL = re.compile(r"Could not find an implementation for (\S+?)\((\d+)\) node with name '(.*?)'", re.DOTALL)
_NO_OPERATOR = re.compile(r"(\S*?):?([A-Za-z0-9_]+)\(-?\d+\) is not a registered function/op")
_NO_SCHEMA = re.compile(r'In Node, \("(.*?)", (\S+), "(.*?)".*No Op registered for', re.DOTALL)


@dataclass
class _Kind:
    """Nodes that are one to a runtime: the same operator on the same types."""

    sample: NodeProto
    nodes: list[NodeProto] = field(default_factory=list)


def open_session(model: str | bytes) -> ort.InferenceSession:
    """A session for questions, not for runs: nothing is optimised, and weights are not touched, so that those in other
    files take no memory."""
    options = session_options(1, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    options.add_session_config_entry("session.disable_prepacking", "1")
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def words(error: str) -> str:
    """What ONNX Runtime says, without codes and places in its source."""
    return _FROM.sub("", _PREFIX.sub("", error)).strip()[:_WORDS]


def find(source: Path, error: str) -> list[Finding]:
    """At least one. `error` is what the loader said to `source`."""
    try:
        model = onnx.load(source, load_external_data=False)
        _forget_large_weights(model.graph)
        return _find(model, error)
    except (DecodeError, EncodeError, UnicodeError, ValueError):  # too damaged to be asked about more
        return [_told(error)]


def _find(model: ModelProto, error: str) -> list[Finding]:
    found: list[Finding] = []
    for _ in range(_ROUNDS):
        cured = _put_right(model, error)
        if cured is None:
            break
        found.append(cured)
        try:
            open_session(model.SerializeToString())
        except Exception as e:  # noqa: BLE001 - of every kind that it has
            error = str(e)
        else:
            return found
    lacking = list(_lacking(model))
    if not lacking or not _of_operators(error):
        lacking.insert(0, _told(error))
    return found + lacking


def _told(error: str) -> Finding:
    """The loader's own words, where nothing better is known."""
    if match := _NO_KERNEL.search(error):
        operator, opset, node = match.groups()
        return _no_kernel(operator, opset, [node])
    if match := _NO_OPERATOR.search(error):
        return _no_operator(match[1], match[2], [])
    if match := _NO_SCHEMA.search(error):
        node, operator, domain = match.groups()
        return _no_operator(domain, operator, [node])
    return _invalid(f"{VERSION} refuses the model: {words(error)}", "")


def _of_operators(error: str) -> bool:
    return any(pattern.search(error) for pattern in (_NO_KERNEL, _NO_OPERATOR, _NO_SCHEMA))


def _put_right(model: ModelProto, error: str) -> Finding | None:
    if match := _IR.search(error):
        version, most = match.groups()
        model.ir_version = int(most)
        text = f"the model's IR version is {version}, {VERSION} reads up to {most}"
        return _invalid(text, f"export it with an older exporter or set ir_version to {most}, which few graphs exceed")
    if match := _OPSET.search(error):
        version, domain, most = match.groups()
        for opset in model.opset_import:
            if (opset.domain or "ai.onnx") == domain and opset.version > int(most):
                opset.version = int(most)
        text = f"the model uses opset {version} of {domain}, {VERSION} supports up to {most}"
        return Finding(Severity.ERROR, Reason.OPERATOR_UNSUPPORTED, text, f"export it with opset {most}", domain=domain)
    if match := _SAME_NAME.search(error):
        names = {match[1]: None}
        for graph in _graphs(model.graph):
            names |= {n: None for n, count in Counter(n.name for n in graph.node if n.name).items() if count > 1}
            for node in graph.node:
                node.ClearField("name")
        text = f"nodes of the same node name ({', '.join([*names][:_SHOWN])})"
        return _invalid(text, f"{VERSION} needs unique names: export it again, or delete the names", [*names])
    return None


def _lacking(model: ModelProto) -> Iterator[Finding]:
    """Operators that this runtime lacks, each offered to it alone, with the types that it has in the graph."""
    own = {(f.domain, f.name) for f in model.functions}
    types = _types(model)
    constants = {w.name: w for w in model.graph.initializer if w.ByteSize() <= _CONSTANT_BYTES}
    missing: dict[tuple[str, str], list[str]] = {}
    for kind in _kinds(model, types, own):
        error = _offer(model, kind.sample, types, constants)
        names = [node.name or f"that makes {node.output[0]!r}" for node in kind.nodes if node.name or node.output]
        if match := _NO_KERNEL.search(error):
            yield _no_kernel(match[1], match[2], names, _types_of(kind.sample, types))
        elif _NO_OPERATOR.search(error) or _NO_SCHEMA.search(error):
            missing.setdefault((kind.sample.domain, kind.sample.op_type), []).extend(names)
    for (domain, operator), names in missing.items():
        yield _no_operator(domain, operator, names)


def _kinds(model: ModelProto, types: Mapping[str, TypeProto], own: set[tuple[str, str]]) -> list[_Kind]:
    kinds: dict[tuple[object, ...], _Kind] = {}
    everywhere = [node for graph in _graphs(model.graph) for node in graph.node]
    everywhere += [node for function in model.functions for node in function.node]
    for node in everywhere:
        inner = any(a.HasField("g") or a.graphs for a in node.attribute)  # nodes in there are offered by themselves
        if inner or (node.domain, node.op_type) in own:
            continue
        key = (node.domain, node.op_type, *(_type(types, name) for name in node.input))
        if key in kinds or len(kinds) < _MOST_KINDS:
            kinds.setdefault(key, _Kind(node)).nodes.append(node)
    return list(kinds.values())


def _offer(
    model: ModelProto, node: NodeProto, types: Mapping[str, TypeProto], constants: Mapping[str, TensorProto]
) -> str:
    """What the loader says to a model of this node alone; '' if nothing that is about its operator."""
    names = list(dict.fromkeys(name for name in node.input if name))
    known = all(name in types or name in constants for name in names)
    inputs = [
        helper.make_value_info(name, types.get(name) or helper.make_tensor_type_proto(TensorProto.FLOAT, None))
        for name in names
        if name not in constants
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    alone = helper.make_graph([node], "one", inputs, outputs, [constants[n] for n in names if n in constants])
    try:
        open_session(
            helper.make_model(alone, opset_imports=model.opset_import, ir_version=model.ir_version).SerializeToString()
        )
    except Exception as e:  # noqa: BLE001
        text = str(e)
        return text if known or not _NO_KERNEL.search(text) else ""  # of a type that was guessed
    return ""


def _types(model: ModelProto) -> dict[str, TypeProto]:
    """Types without shapes, of every value whose type is known."""
    with contextlib.suppress(Exception):  # of every kind; what the file states remains
        model = onnx.shape_inference.infer_shapes(model)
    found: dict[str, TypeProto] = {}
    for graph in _graphs(model.graph):
        for value in (*graph.input, *graph.value_info, *graph.output):
            if value.type.WhichOneof("value"):
                kept = TypeProto()
                kept.CopyFrom(value.type)
                if kept.HasField("tensor_type"):
                    kept.tensor_type.ClearField("shape")
                found.setdefault(value.name, kept)
        for weight in graph.initializer:
            found.setdefault(weight.name, helper.make_tensor_type_proto(weight.data_type, None))
    return found


def _type(types: Mapping[str, TypeProto], name: str) -> str:
    return types[name].SerializeToString().hex() if name in types else "?" if name else ""


def _types_of(node: NodeProto, types: Mapping[str, TypeProto]) -> str:
    numbers = [types[name].tensor_type.elem_type for name in node.input if name in types]
    return ", ".join(dict.fromkeys(TensorProto.DataType.Name(n) for n in numbers if n in TensorProto.DataType.values()))


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
                yield from _graphs(inner)


def _forget_large_weights(graph: GraphProto) -> None:
    """They become inputs: no data is needed to ask about types."""
    large = [w for w in graph.initializer if w.data_location == TensorProto.EXTERNAL]
    names, inputs = {w.name for w in large}, {v.name for v in graph.input}
    graph.input.extend(
        helper.make_tensor_value_info(w.name, w.data_type, list(w.dims)) for w in large if w.name not in inputs
    )
    kept = [w for w in graph.initializer if w.name not in names]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _no_kernel(operator: str, opset: str, nodes: list[str], types: str = "") -> Finding:
    with_types = f" ({types})" if types else ""
    text = f"{VERSION} has no CPU kernel for {operator} (opset {opset}) with the types{with_types} of {_named(nodes)}"
    domain, _, name = operator.rpartition(":")
    return Finding(
        Severity.ERROR, Reason.OPERATOR_UNSUPPORTED, text, "cast to FP32 around it, or use another runtime",
        nodes[0], name or operator, domain,
    )  # fmt: skip


def _no_operator(domain: str, operator: str, nodes: list[str]) -> Finding:
    where = f"{_named(nodes)}: " if nodes else ""
    text = f"{where}operator {domain or 'ai.onnx'}:{operator} does not exist in {VERSION}"
    return Finding(
        Severity.ERROR, Reason.OPERATOR_UNSUPPORTED, text, "export the model without custom operators",
        nodes[0] if nodes else "", operator, domain,
    )  # fmt: skip


def _named(nodes: list[str]) -> str:
    if len(nodes) == 1:
        return f"node {nodes[0]!r}"
    more = f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else ""
    return f"nodes {', '.join(repr(name) for name in nodes[:_SHOWN])}{more}"


def _invalid(message: str, way_out: str, nodes: list[str] | None = None) -> Finding:
    return Finding(Severity.ERROR, Reason.MODEL_INVALID, message, way_out, nodes[0] if nodes else "")
