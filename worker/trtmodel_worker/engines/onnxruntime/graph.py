"""A graph made ready for a change of precision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper

from trtmodel_worker.engines.onnxruntime import machine
from trtmodel_worker.engines.onnxruntime.run import session_options


def optimise(source: Path, target: Path, level: ort.GraphOptimizationLevel, without: tuple[str, ...] = ()) -> None:
    """Save `source` as ONNX Runtime optimises it for this machine."""
    options = session_options(machine.cpu_quota(), level)
    options.optimized_model_filepath = str(target)
    ort.InferenceSession(
        str(source), options, providers=["CPUExecutionProvider"], disabled_optimizers=list(without) or None
    )


def prepare(source: Path, target: Path, least_opset: int) -> onnx.ModelProto:
    """Constants folded and batch norms merged (ranges must be those of what runs), Gemm's bias split off, every node
    named, types and shapes inferred. Saved in `target`, since calibrators read files."""
    # MatMulAddFusion makes a Gemm of MatMul and Add, whose bias would be quantised, and a node that keepPrecision
    # does not know.
    optimise(source, target, ort.GraphOptimizationLevel.ORT_ENABLE_BASIC, without=("MatMulAddFusion",))
    model = onnx.load(target)
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), least_opset)
    if opset < least_opset:
        model = onnx.version_converter.convert_version(model, least_opset)
    _split_gemms(model.graph)
    _name_nodes(model.graph)
    model = onnx.shape_inference.infer_shapes(model)
    onnx.save(model, target)
    return model


def _split_gemms(graph: onnx.GraphProto) -> None:
    """Gemm(x, W, b) -> Add(MatMul(x, W'), b) where W is a constant and nothing is scaled."""
    weights = {w.name: w for w in graph.initializer}
    nodes = []
    for node in graph.node:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        plain = attributes.get("alpha", 1.0) == 1.0 and attributes.get("beta", 1.0) == 1.0
        if node.op_type != "Gemm" or not plain or attributes.get("transA", 0) or node.input[1] not in weights:
            nodes.append(node)
            continue
        weight = node.input[1]
        if attributes.get("transB", 0):
            weight = f"{node.output[0]}/weight"
            turned = np.ascontiguousarray(numpy_helper.to_array(weights[node.input[1]]).T)
            graph.initializer.append(numpy_helper.from_array(turned, weight))
        if len(node.input) < 3:
            nodes.append(onnx.helper.make_node("MatMul", [node.input[0], weight], node.output, name=node.name))
            continue
        product = f"{node.output[0]}/product"
        nodes.append(onnx.helper.make_node("MatMul", [node.input[0], weight], [product], name=node.name))
        nodes.append(onnx.helper.make_node("Add", [product, node.input[2]], node.output, name=f"{node.name}/bias"))
    del graph.node[:]
    graph.node.extend(nodes)


def _name_nodes(graph: onnx.GraphProto) -> None:
    for i, node in enumerate(graph.node):
        node.name = node.name or f"{node.op_type}/{i}"
