"""FP16 and BF16 as rounding: every weight, and every value that a node computes, is rounded to half precision, while
arithmetic stays FP32.

ONNX Runtime has no half arithmetic on x86. Given an FP16 graph it inserts casts, removes them in pairs and runs in
FP32 what was asked for in FP16, so that an overflow shows on another machine only. Here the rounding is written into
the graph as pairs of casts, which it keeps. It is for accuracy as on a GPU, not for speed; and it shows which node of
an engine for a GPU overflows. Magika is such a case: the sums of its first layer norm pass 65,504, and the gate stops
it unless they are kept in FP32.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from trtmodel_contract.identity import EngineSettings

from trtmodel_worker.engines.onnxruntime.graph import prepare
from trtmodel_worker.engines.precision.half import TYPES, rounded
from trtmodel_worker.engines.precision.keep import NamedNode, kept

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


class RoundedGraph:
    """A Reduced graph. Inputs and outputs keep their types. Nodes inside of If and Loop are not rounded. Raises
    Rejected."""

    def __init__(self, source: Path, settings: EngineSettings, folder: Path) -> None:
        self._precision, self._kind = settings.precision, TYPES[settings.precision]
        self.prepared = folder / "prepared.onnx"
        # A cast to BF16 exists from opset 13 on.
        self._model = prepare(source, self.prepared, least_opset=1 if settings.precision == "FP16" else 13)
        graph = self._model.graph
        before = [NamedNode(n.name, n.op_type) for n in onnx.load(source, load_external_data=False).graph.node]
        self.kept = kept(settings.keep_precision, [NamedNode(n.name, n.op_type) for n in graph.node], before)
        self._floats = {
            value.name
            for value in (*graph.value_info, *graph.output)
            if value.type.tensor_type.elem_type == TensorProto.FLOAT
        }
        self.nodes = tuple(node.name for node in graph.node if self._computes(node))

    def write(self, keep: Collection[str], target: Path) -> dict[str, str]:
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        graph = model.graph
        self._round_weights(graph, {name for node in graph.node if node.name in keep for name in node.input})
        nodes, count = [], 0
        for node in graph.node:
            nodes.append(node)
            if node.name in keep or not self._computes(node):
                continue
            for i, output in enumerate(node.output):
                if output in self._floats:
                    node.output[i] = f"{output}/wide"
                    nodes += self._rounding(f"{output}/wide", output)
                    count += 1
        del graph.node[:]
        graph.node.extend(nodes)
        onnx.save(model, target)
        done = {"arithmetic": f"FP32, values rounded to {self._precision}", "roundedValues": str(count)}
        return done | {"keptNodes": str(len(keep))}

    def _computes(self, node: onnx.NodeProto) -> bool:
        return node.op_type not in _MOVES and any(output in self._floats for output in node.output)

    def _rounding(self, source: str, target: str) -> list[onnx.NodeProto]:
        half = f"{target}/half"
        return [
            helper.make_node("Cast", [source], [half], name=half, to=self._kind),
            helper.make_node("Cast", [half], [target], name=f"{target}/rounded", to=TensorProto.FLOAT),
        ]

    def _round_weights(self, graph: onnx.GraphProto, keep: Collection[str]) -> None:
        for weight in graph.initializer:
            if weight.data_type == TensorProto.FLOAT and weight.name not in keep:
                narrow = numpy_helper.to_array(rounded(weight, weight.name, self._kind))
                weight.CopyFrom(numpy_helper.from_array(narrow.astype(np.float32), weight.name))
