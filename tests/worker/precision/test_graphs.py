"""Q/DQ and casts as they are written for runtimes that compute in what the graph states."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_models as models
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper
from trtmodel_contract.identity import EngineSettings, KeepPrecision
from trtmodel_worker.engines.building import CalibrationData, Rejected
from trtmodel_worker.engines.precision.half import HalfGraph
from trtmodel_worker.engines.precision.int8 import TENSORRT, Int8Graph
from trtmodel_worker.engines.precision.rounded import RoundedGraph


def images(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 3, 8, 8)).astype(np.float32)


def answers(path: Path, x: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    return np.asarray(ort.InferenceSession(str(path), options).run(None, {"x": x})[0])


def half(folder: Path, source: Path, precision: str, keep: KeepPrecision | None = None) -> onnx.ModelProto:
    graph = HalfGraph(source, EngineSettings("TensorRT", precision, keep), folder)
    graph.write(graph.kept, folder / "half.onnx")
    model = onnx.load(folder / "half.onnx")
    onnx.checker.check_model(model, full_check=True)
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


def types(model: onnx.ModelProto) -> dict[str, int]:
    graph = model.graph
    found = {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.input, *graph.output)}
    return found | {weight.name: weight.data_type for weight in graph.initializer}


@pytest.mark.parametrize(("precision", "kind"), [("FP16", TensorProto.FLOAT16), ("BF16", TensorProto.BFLOAT16)])
def test_every_node_computes_in_half_and_the_graph_s_ends_keep_their_types(
    tmp_path: Path, precision: str, kind: int
) -> None:
    model = half(tmp_path, models.convolution(tmp_path / "m.onnx"), precision)
    found = types(model)
    for node in model.graph.node:
        if node.op_type != "Cast":
            assert {found[name] for name in node.output} == {kind}, node.name
    assert found["x"] == found["y"] == TensorProto.FLOAT
    assert Counter(node.op_type for node in model.graph.node)["Cast"] == 2
    assert not [w.name for w in model.graph.initializer if w.data_type == TensorProto.FLOAT]


def test_the_answers_are_those_of_half_precision(tmp_path: Path) -> None:
    source = models.convolution(tmp_path / "m.onnx")
    half(tmp_path, source, "FP16")
    x = images(20)
    expected, found = answers(source, x), answers(tmp_path / "half.onnx", x)
    assert np.allclose(expected, found, rtol=0.02, atol=0.02)
    assert not np.array_equal(expected, found)


def test_A05_what_overflows_half_precision_does_so_when_it_is_only_rounded(tmp_path: Path) -> None:
    """ONNX Runtime computes a graph of half precision in FP32 on a CPU: only pairs of casts show what a GPU does."""
    for precision, right in (("FP16", np.inf), ("BF16", 90_112)):
        graph = RoundedGraph(models.square(tmp_path / "m"), EngineSettings("TensorRT", precision), tmp_path)
        graph.write(graph.kept, tmp_path / "rounded.onnx")
        assert answers(tmp_path / "rounded.onnx", np.array([[3], [300]], np.float32)).ravel().tolist() == [9, right]


def test_kept_nodes_read_and_answer_in_fp32(tmp_path: Path) -> None:
    source = models.convolution(tmp_path / "m.onnx")
    model = half(tmp_path, source, "FP16", KeepPrecision((), operators=("Conv",)))
    found = types(model)
    conv = next(node for node in model.graph.node if node.op_type == "Conv")
    assert {found[name] for name in (*conv.input, *conv.output)} == {TensorProto.FLOAT}
    product = next(node for node in model.graph.node if node.op_type in ("MatMul", "Gemm"))
    assert {found[name] for name in product.input} == {TensorProto.FLOAT16}


def test_whole_numbers_are_left_alone(tmp_path: Path) -> None:
    nodes = [
        models.node("Gather", ["table", "ids"], ["rows"], "look-up"),
        models.node("ReduceMean", ["rows", "axes"], ["y"], "mean", keepdims=0),
    ]
    weights = {"table": np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32), "axes": np.array([1])}
    outputs = [("y", models.FLOAT, ("n", 4))]
    inputs = [("ids", TensorProto.INT64, ("n", 3))]
    source = models.save(tmp_path / "m", nodes, inputs, outputs, weights, opsets=[("", 18)])
    model = half(tmp_path, source, "FP16")
    found = types(model)
    assert (found["ids"], found["axes"]) == (TensorProto.INT64, TensorProto.INT64)
    assert found["table/half"] == TensorProto.FLOAT16


def test_a_graph_without_floats_has_no_half(tmp_path: Path) -> None:
    ints = ("n", 4)
    nodes = [models.node("Neg", ["x"], ["y"])]
    source = models.save(tmp_path / "m", nodes, [("x", TensorProto.INT64, ints)], [("y", TensorProto.INT64, ints)])
    with pytest.raises(Rejected, match="no node of the graph computes with FP32"):
        HalfGraph(source, EngineSettings("TensorRT", "FP16"), tmp_path)


def test_keeping_everything_is_no_half(tmp_path: Path) -> None:
    graph = HalfGraph(
        models.square(tmp_path / "m"), EngineSettings("TensorRT", "FP16", KeepPrecision((".",))), tmp_path
    )
    with pytest.raises(Rejected, match="keeps every node"):
        graph.write(graph.kept, tmp_path / "half.onnx")


def int8(folder: Path, keep: KeepPrecision | None = None) -> onnx.ModelProto:
    calibration = CalibrationData(({"x": images(4, seed)} for seed in range(8)), "MinMax", True)
    settings = EngineSettings("TensorRT", "INT8", keep)
    graph = Int8Graph(models.convolution(folder / "m.onnx"), settings, calibration, TENSORRT, folder)
    graph.write(graph.kept, folder / "int8.onnx")
    return onnx.load(folder / "int8.onnx")


def test_for_tensorrt_everything_is_symmetric_about_zero_and_weights_have_a_scale_for_each_channel(
    tmp_path: Path,
) -> None:
    model = int8(tmp_path)
    weights = {w.name: numpy_helper.to_array(w) for w in model.graph.initializer}
    quantizers = [node for node in model.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    zeros = [weights[node.input[2]] for node in quantizers]
    assert all(not zero.any() and zero.dtype == np.int8 for zero in zeros)
    assert {weights[node.input[1]].size for node in quantizers} == {1, 8, 5}  # tensors, channels of Conv, columns
    conv = next(node for node in model.graph.node if node.op_type == "Conv")
    assert weights[conv.input[2]].dtype == np.float32  # the bias
    x = images(50)
    expected, found = answers(tmp_path / "m.onnx", x), answers(tmp_path / "int8.onnx", x)
    assert np.corrcoef(expected.ravel(), found.ravel())[0, 1] > 0.98


def test_for_tensorrt_what_a_node_answers_is_not_quantized_by_itself(tmp_path: Path) -> None:
    model = int8(tmp_path)
    made_by = {name: node for node in model.graph.node for name in node.output}
    quantized = [made_by.get(node.input[0]) for node in model.graph.node if node.op_type == "QuantizeLinear"]
    assert not [node.name for node in quantized if node is not None and node.op_type in ("Conv", "MatMul", "Gemm")]


def test_an_operator_that_is_kept_is_not_quantized(tmp_path: Path) -> None:
    model = int8(tmp_path, KeepPrecision((), operators=("Conv",)))
    made_by = {name: node for node in model.graph.node for name in node.output}
    conv = next(node for node in model.graph.node if node.op_type == "Conv")
    assert conv.input[0] not in made_by
    product = next(node for node in model.graph.node if node.op_type in ("MatMul", "Gemm"))
    assert made_by[product.input[0]].op_type == "DequantizeLinear"
