"""FP16: every weight, and every value that a node computes, is rounded to half precision.

ONNX Runtime has no half arithmetic on x86. Given an FP16 graph it inserts casts, removes them in pairs and runs in
FP32 what was asked for in FP16, so that an overflow shows on another machine only. Here the rounding is written into
the graph as pairs of casts, which it keeps; arithmetic stays FP32. It is for accuracy as on a GPU, not for speed.
Magika is such a case: the sums of its first layer norm pass 65,504, and the gate stops it unless they are kept in FP32.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from trtmodel_worker.engines.onnxruntime.graph import prepare

# They only move or choose values, which are rounded already.
_MOVES = {
    "Reshape",
    "Transpose",
    "Slice",
    "Squeeze",
    "Unsqueeze",
    "Concat",
    "Expand",
    "Gather",
    "Identity",
    "Flatten",
    "Split",
    "Relu",
    "MaxPool",
    "GlobalMaxPool",
    "ReduceMax",
    "ReduceMin",
    "Max",
    "Min",
    "Neg",
    "Abs",
    "Tile",
    "Where",
    "DepthToSpace",
    "SpaceToDepth",
}


def to_fp16(source: Path, keep: Collection[str], target: Path) -> dict[str, str]:
    """Inputs and outputs keep their types. Nodes in `keep`, and those inside of If and Loop, are not rounded."""
    model = prepare(source, target, least_opset=1)
    graph = model.graph
    _round_weights(graph, {name for node in graph.node if node.name in keep for name in node.input})
    floats = {
        value.name
        for value in (*graph.value_info, *graph.output)
        if value.type.tensor_type.elem_type == TensorProto.FLOAT
    }
    nodes, rounded = [], 0
    for node in graph.node:
        nodes.append(node)
        if node.name in keep or node.op_type in _MOVES:
            continue
        for i, output in enumerate(node.output):
            if output in floats:
                node.output[i] = f"{output}/wide"
                nodes += _rounding(f"{output}/wide", output)
                rounded += 1
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.save(model, target)
    return {"arithmetic": "FP32, values rounded to FP16", "roundedValues": str(rounded), "keptNodes": str(len(keep))}


def _rounding(source: str, target: str) -> list[onnx.NodeProto]:
    half = f"{target}/half"
    return [
        helper.make_node("Cast", [source], [half], name=half, to=TensorProto.FLOAT16),
        helper.make_node("Cast", [half], [target], name=f"{target}/rounded", to=TensorProto.FLOAT),
    ]


def _round_weights(graph: onnx.GraphProto, keep: Collection[str]) -> None:
    for weight in graph.initializer:
        if weight.data_type == TensorProto.FLOAT and weight.name not in keep:
            with np.errstate(over="ignore"):  # a weight beyond 65,504 becomes infinite: the gate sees what it does
                rounded = numpy_helper.to_array(weight).astype(np.float16).astype(np.float32)
            weight.CopyFrom(numpy_helper.from_array(rounded, weight.name))
