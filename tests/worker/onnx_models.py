"""Small ONNX models for tests, made with onnx.helper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

FLOAT = TensorProto.FLOAT
Shape = Sequence[int | str]
ValueInfo = tuple[str, int, Shape]


def save(
    path: Path,
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfo],
    outputs: Sequence[ValueInfo],
    weights: dict[str, np.ndarray] | None = None,
    ir: int = 9,
    opsets: Sequence[tuple[str, int]] = (("", 17),),
    check: bool = False,
) -> Path:
    graph = helper.make_graph(
        list(nodes),
        "test",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(*o) for o in opsets], ir_version=ir)
    if check:
        onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())
    return path


def node(op: str, inputs: Sequence[str], outputs: Sequence[str], name: str = "", **attributes: object) -> NodeProto:
    return helper.make_node(op, list(inputs), list(outputs), name=name, **attributes)


def relu(path: Path, dims: Shape = ("n", 4), ir: int = 9, opset: int = 17) -> Path:
    return save(path, [node("Relu", ["x"], ["y"])], [("x", FLOAT, dims)], [("y", FLOAT, dims)], None, ir, [("", opset)])


def square(path: Path) -> Path:
    """y = x * x: 300 overflows in half precision."""
    shape = ("n", 1)
    return save(path, [node("Mul", ["x", "x"], ["y"], "square")], [("x", FLOAT, shape)], [("y", FLOAT, shape)])


def linear(path: Path, width: int = 8, classes: int = 3, seed: int = 0) -> Path:
    """y = x W + b, a classifier of random weights."""
    random = np.random.default_rng(seed)
    weights = {
        "w": random.normal(size=(width, classes)).astype(np.float32),
        "b": random.normal(size=classes).astype(np.float32),
    }
    nodes = [node("MatMul", ["x", "w"], ["m"], "product"), node("Add", ["m", "b"], ["y"], "bias")]
    return save(path, nodes, [("x", FLOAT, ("n", width))], [("y", FLOAT, ("n", classes))], weights)


def convolution(path: Path) -> Path:
    """Conv, BatchNormalization, Relu, GlobalAveragePool, Gemm: what image exporters write."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float32)

    weights = {"k": normal(8, 3, 3, 3), "kb": normal(8), "scale": np.abs(normal(8)) + 0.5, "shift": normal(8)}
    weights |= {"mean": normal(8), "var": np.abs(normal(8)) + 0.5, "w": normal(5, 8), "b": normal(5)}
    nodes = [
        node("Conv", ["x", "k", "kb"], ["c"], "conv", pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["c", "scale", "shift", "mean", "var"], ["bn"], "norm"),
        node("Relu", ["bn"], ["r"], "relu"),
        node("GlobalAveragePool", ["r"], ["p"], "pool"),
        node("Flatten", ["p"], ["f"], "flatten"),
        node("Gemm", ["f", "w", "b"], ["y"], "head", transB=1),
    ]
    return save(path, nodes, [("x", FLOAT, ("n", 3, 8, 8))], [("y", FLOAT, ("n", 5))], weights)
