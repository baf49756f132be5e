"""Other versions of a model, as a team might make them: same answers in FP32, and not the same in production.

    python examples/magika/variants.py model.onnx OUT

writes to OUT
    damaged.onnx   bit for bit the same answers in FP32, destroyed by INT8 and by FP16: the accuracy gate must stop it
    slow.onnx      bit for bit the same answers in every precision, several times slower: only the analysis can stop it
    tagged.onnx    the same graph with another version in its metadata: another source, the same answers and speed

Damaged. A training run without weight decay can leave a network in which some channels are huge and the weights behind
them tiny. Here every eighth channel of the last hidden layer is multiplied by 2**16 and its weights divided by 2**16,
which in FP32 loses nothing (a power of two moves the exponent only). INT8 has one scale for the whole layer: with the
large channels in it, all others round to 0. FP16 ends at 65,504 and some channels pass it.

Slow. The model gets a branch that takes sines of its input over and over and adds floor(0.5 + sine / 4), which is 0.
No optimiser knows that, so it is computed for every request; it holds no Conv, MatMul or Gemm, so INT8 does not help.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

OUTLIER = 2.0**16
EVERY = 8
SINES = 40
COPIES = 64  # of the input, side by side: the work of one sine grows with it


def damaged(model: ModelProto) -> ModelProto:
    """Outlier channels in front of the last MatMul. Raises ValueError for a graph without a MatMul by constants."""
    changed = _copy(model)
    graph = changed.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    matmul = next((n for n in reversed(graph.node) if n.op_type == "MatMul" and n.input[1] in constants), None)
    if matmul is None:
        raise ValueError("the graph has no MatMul by constants: no channel to make larger")
    hidden, weights = matmul.input
    values = numpy_helper.to_array(constants[weights])
    factors = np.ones(len(values), np.float32)
    factors[::EVERY] = OUTLIER
    graph.initializer.extend(
        [
            numpy_helper.from_array(factors, "outliers/factors"),
            numpy_helper.from_array(values / factors[:, None], "outliers/weights"),
        ]
    )
    matmul.input[:] = ["outliers/hidden", "outliers/weights"]
    if not any(weights in node.input for node in graph.node):
        graph.initializer.remove(constants[weights])
    before = list(graph.node).index(matmul)
    graph.node.insert(before, helper.make_node("Mul", [hidden, "outliers/factors"], ["outliers/hidden"], "outliers"))
    return changed


def slow(model: ModelProto) -> ModelProto:
    """A branch that costs SINES passes over COPIES copies of the input and adds exactly zero to the first output."""
    changed = _copy(model)
    graph = changed.graph
    source, output = graph.input[0].name, graph.output[0].name
    last = next(node for node in graph.node if output in node.output)
    last.output[list(last.output).index(output)] = "busy/answer"
    constants: dict[str, NDArray[np.generic]] = {
        "busy/axis": np.array([1], np.int64),
        "busy/copies": np.linspace(0.5, 1.5, COPIES, dtype=np.float32).reshape(1, COPIES, 1),
        "busy/quarter": np.array(0.25, np.float32),
        "busy/half": np.array(0.5, np.float32),
    }
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    nodes = [
        helper.make_node("Cast", [source], ["busy/float"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["busy/float", "busy/axis"], ["busy/row"]),
        helper.make_node("Mul", ["busy/row", "busy/copies"], ["busy/0"]),
        *(helper.make_node("Sin", [f"busy/{i}"], [f"busy/{i + 1}"]) for i in range(SINES)),
        helper.make_node("ReduceMax", [f"busy/{SINES}"], ["busy/most"], axes=[1, 2], keepdims=0),
        helper.make_node("Mul", ["busy/most", "busy/quarter"], ["busy/small"]),
        helper.make_node("Add", ["busy/small", "busy/half"], ["busy/between"]),
        helper.make_node("Floor", ["busy/between"], ["busy/flat"]),
        helper.make_node("Unsqueeze", ["busy/flat", "busy/axis"], ["busy/zero"]),
        helper.make_node("Add", ["busy/answer", "busy/zero"], [output]),
    ]
    for node in nodes:
        node.name = node.output[0]
    graph.node.extend(nodes)
    return changed


def tagged(model: ModelProto, version: str) -> ModelProto:
    """The same graph under another version."""
    changed = _copy(model)
    helper.set_model_props(changed, {**{p.key: p.value for p in changed.metadata_props}, "version": version})
    return changed


def _copy(model: ModelProto) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(model)
    return copy


def write(source: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    model = onnx.load(source)
    for name, variant in (("damaged", damaged(model)), ("slow", slow(model)), ("tagged", tagged(model, "2"))):
        onnx.checker.check_model(variant, full_check=True)
        onnx.save(variant, out / f"{name}.onnx")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    write(arguments.model, arguments.out)
