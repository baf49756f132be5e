"""A graph as ONNX Runtime optimises it, or made ready for a change of precision."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, external_data_helper, helper, numpy_helper
from trtmodel_contract.jobs import Reason

from trtmodel_worker.engines.base import OutOfMemory
from trtmodel_worker.engines.building import Rejected
from trtmodel_worker.engines.onnxruntime import faults, machine, plans
from trtmodel_worker.engines.onnxruntime.packing import pack
from trtmodel_worker.engines.onnxruntime.run import classify, session_options

APART_BYTES = 1 << 16  # smaller weights stay in the graph


def optimise(source: Path, target: Path, level: ort.GraphOptimizationLevel, without: tuple[str, ...] = ()) -> None:
    """Save `source` as ONNX Runtime optimises it for this machine. Raises Rejected for a graph that it cannot optimise,
    OutOfMemory."""
    options = session_options(machine.cpu_quota(), level)
    options.optimized_model_filepath = str(target)
    _optimise(source, options, without)
    _embed(source, target)


def optimise_apart(source: Path, plan: Path, level: ort.GraphOptimizationLevel) -> None:
    """The same as a plan whose large weights lie beside the graph: they are never in memory all at once. Raises
    Rejected, OutOfMemory."""
    with tempfile.TemporaryDirectory(dir=plan.parent) as directory:
        graph = Path(directory) / "graph.onnx"
        options = session_options(machine.cpu_quota(), level)
        options.optimized_model_filepath = str(graph)
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", plans.PLACE)
        least = "session.optimized_model_external_initializers_min_size_in_bytes"
        options.add_session_config_entry(least, str(APART_BYTES))
        options.add_session_config_entry("session.disable_prepacking", "1")  # copies for a session that runs nothing
        _optimise(source, options)
        pack(graph, graph.parent / plans.PLACE, plan)


def _optimise(source: Path, options: ort.SessionOptions, without: tuple[str, ...] = ()) -> None:
    try:
        ort.InferenceSession(
            str(source), options, providers=["CPUExecutionProvider"], disabled_optimizers=list(without) or None
        )
    except Exception as e:
        error = classify(e)
        if isinstance(error, OutOfMemory):
            raise error from e
        text = f"{faults.VERSION} loads the model, but cannot optimise it: {faults.words(str(e))}"
        raise Rejected(
            Reason.MODEL_INVALID, f"{text}: look at the node that is named, or lower optimizationLevel"
        ) from e


def _embed(source: Path, target: Path) -> None:
    """A plan is one file. ONNX Runtime writes external data that it did not change as it found it: by its place."""
    model = onnx.load(target, load_external_data=False)
    outside = [weight for weight in model.graph.initializer if weight.data_location == TensorProto.EXTERNAL]
    for weight in outside:
        if not any(entry.key == "length" for entry in weight.external_data):  # onnx would read on to the file's end
            size = math.prod(weight.dims) * helper.tensor_dtype_to_np_dtype(weight.data_type).itemsize
            weight.external_data.add(key="length", value=str(size))
    if outside:
        external_data_helper.load_external_data_for_model(model, str(source.parent))
        onnx.save(model, target)


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
