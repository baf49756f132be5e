"""FP16 and BF16 as the type that the graph states: for runtimes that compute in what is written there (TensorRT's
strongly typed networks, the only ones from version 11 on).

Every node that is not kept gets its floats in half precision and answers in it. Casts are put where a value goes from
one kind of node to the other, one for each value. Inputs and outputs of the graph keep their types.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper
from trtmodel_contract.identity import EngineSettings
from trtmodel_contract.jobs import Reason

from trtmodel_worker.engines.building import Rejected
from trtmodel_worker.engines.onnxruntime.graph import prepare
from trtmodel_worker.engines.precision.keep import NamedNode, kept

TYPES = {"FP16": TensorProto.FLOAT16, "BF16": TensorProto.BFLOAT16}
OPSETS = {"FP16": 13, "BF16": 22}
"""The least opsets whose operators take the type: Conv knows BF16 from 22 on."""

# Their floats are parameters (scales, regions of interest), or they state the type that they give themselves.
_AS_THEY_ARE = {
    "Cast", "CastLike", "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "Resize", "Upsample",
    "RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "ConstantOfShape", "Constant", "Range",
    "EyeLike", "NonMaxSuppression", "RoiAlign", "If", "Loop", "Scan",
}  # fmt: skip


class HalfGraph:
    """A Reduced graph of FP16 or BF16. Raises Rejected."""

    def __init__(self, source: Path, settings: EngineSettings, folder: Path) -> None:
        self._precision = settings.precision
        self.prepared = folder / "prepared.onnx"
        self._model = prepare(source, self.prepared, OPSETS[settings.precision])
        before = [NamedNode(n.name, n.op_type) for n in onnx.load(source, load_external_data=False).graph.node]
        nodes = [NamedNode(n.name, n.op_type) for n in self._model.graph.node]
        self.kept = kept(settings.keep_precision, nodes, before)
        graph = self._model.graph
        self._floats = {
            value.name
            for value in (*graph.value_info, *graph.output, *graph.input)
            if value.type.tensor_type.elem_type == TensorProto.FLOAT
        } | {weight.name for weight in graph.initializer if weight.data_type == TensorProto.FLOAT}
        self.nodes = tuple(node.name for node in graph.node if self._can_be_half(node))
        if not self.nodes:
            text = f"{self._precision} was asked for, but no node of the graph computes with FP32 numbers"
            raise Rejected(Reason.PRECISION_UNSUPPORTED, text)

    def write(self, keep: Collection[str], target: Path) -> dict[str, str]:
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        half = set(self.nodes) - set(keep)
        if not half:
            text = f"{self._precision} was asked for, but keepPrecision keeps every node of the graph"
            raise Rejected(Reason.PRECISION_UNSUPPORTED, text)
        _Writer(model.graph, self._floats, TYPES[self._precision]).write(half)
        onnx.save(model, target)
        return {"reducedNodes": f"{len(half)} of {len(model.graph.node)}", "keptNodes": str(len(keep))}

    def _can_be_half(self, node: NodeProto) -> bool:
        touches = any(name in self._floats for name in (*node.input, *node.output))
        return touches and node.op_type not in _AS_THEY_ARE and node.domain in ("", "ai.onnx")


class _Writer:
    """Rewrites one graph. `floats` are the names of its FP32 values."""

    def __init__(self, graph: onnx.GraphProto, floats: Collection[str], kind: int) -> None:
        self._graph, self._floats, self._kind = graph, floats, kind
        self._weights = {weight.name: weight for weight in graph.initializer}
        self._nodes: list[NodeProto] = []
        self._halves: dict[str, str] = {}  # FP32 value -> its half
        self._only_half: dict[str, str] = {}  # FP32 value that no node gives any more -> its half

    def write(self, half: Collection[str]) -> None:
        outputs = {output.name for output in self._graph.output}
        for node in self._graph.node:
            if node.name not in half:
                for name in self._needs(node):
                    self._widen(name)
                self._nodes.append(node)
                continue
            for i, name in enumerate(node.input):
                if name in self._floats:
                    node.input[i] = self._half_of(name)
            self._nodes.append(node)
            for i, name in enumerate(node.output):
                if name in self._floats:
                    node.output[i] = self._halves[name] = self._only_half[name] = f"{name}/half"
                    if name in outputs:
                        self._widen(name)
        del self._graph.node[:]
        self._graph.node.extend(self._nodes)
        del self._graph.value_info[:]  # types have changed: whoever needs them infers them
        used = {name for node in self._nodes for name in self._needs(node)} | outputs
        for weight in [weight for weight in self._graph.initializer if weight.name not in used]:
            self._graph.initializer.remove(weight)

    def _needs(self, node: NodeProto) -> list[str]:
        """What a node reads, its subgraphs included."""
        names = list(node.input)
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                for inner in graph.node:
                    names += self._needs(inner)
        return names

    def _widen(self, name: str) -> None:
        """Give `name` again, for those that want it in FP32."""
        if name in self._only_half:
            half = self._only_half.pop(name)
            self._nodes.append(helper.make_node("Cast", [half], [name], name=f"{name}/wide", to=TensorProto.FLOAT))

    def _half_of(self, name: str) -> str:
        if name not in self._halves:
            self._halves[name] = half = f"{name}/half"
            if name in self._weights:
                self._graph.initializer.append(rounded(self._weights[name], half, self._kind))
            else:
                self._nodes.append(helper.make_node("Cast", [name], [half], name=half, to=self._kind))
        return self._halves[name]


def rounded(weight: TensorProto, name: str, kind: int) -> TensorProto:
    """A weight beyond the type's range becomes infinite: the gate sees what that does."""
    values = numpy_helper.to_array(weight)
    with np.errstate(over="ignore"):
        return numpy_helper.from_array(values.astype(helper.tensor_dtype_to_np_dtype(kind)), name)
