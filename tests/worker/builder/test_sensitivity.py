"""Which nodes a reduced precision hurts: found, named, and kept they help."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx_models as models
import pytest
from trtmodel_contract.identity import EngineSettings
from trtmodel_worker.builder import sensitivity
from trtmodel_worker.engines.building import CalibrationData
from trtmodel_worker.engines.onnxruntime.build import OnnxBuilder
from trtmodel_worker.engines.precision.reduced import ReducingBuilder
from trtmodel_worker.engines.tensorrt.build import TensorRtBuilder

WIDTH = 16
RANDOM = np.random.default_rng(0)


def weights() -> dict[str, np.ndarray]:
    names = ("w0", "w1", "w2", "w3")
    return {name: RANDOM.normal(0, WIDTH**-0.5, (WIDTH, WIDTH)).astype(np.float32) for name in names}


def chain(path: Path, middle: list[object], more: dict[str, np.ndarray]) -> Path:
    """Four products; `middle` is between the second and the third, from b to c."""
    nodes = [
        models.node("MatMul", ["x", "w0"], ["a"], "/first/MatMul"),
        models.node("MatMul", ["a", "w1"], ["b"], "/second/MatMul"),
        *middle,
        models.node("MatMul", ["c", "w2"], ["d"], "/third/MatMul"),
        models.node("MatMul", ["d", "w3"], ["y"], "/fourth/MatMul"),
    ]
    dims = ("n", WIDTH)
    return models.save(path, nodes, [("x", models.FLOAT, dims)], [("y", models.FLOAT, dims)], weights() | more)  # type: ignore[arg-type]


def samples(scale: float = 1.0) -> list[dict[str, np.ndarray]]:
    return [{"x": (scale * RANDOM.normal(size=(4, WIDTH))).astype(np.float32)} for _ in range(4)]


BUILDERS = pytest.mark.parametrize("builder", [OnnxBuilder(), TensorRtBuilder()], ids=["onnxruntime", "tensorrt"])


@BUILDERS
def test_A05_the_node_that_overflows_half_precision_is_named(tmp_path: Path, builder: ReducingBuilder) -> None:
    middle = [
        models.node("Mul", ["b", "large"], ["b1"], "/norm/Scale+1"),
        models.node("Mul", ["b1", "small"], ["c"], "/norm/Back"),
    ]
    more = {"large": np.array(1e6, np.float32), "small": np.array(1e-6, np.float32)}
    source = chain(tmp_path / "m.onnx", middle, more)
    graph = builder.reduced(source, EngineSettings("any", "FP16"), None, tmp_path)
    assert graph is not None
    found = sensitivity.find(graph, samples(), tmp_path)
    assert found is not None
    assert found.error is None  # no number
    assert found.samples == 16
    kept = found.kept[0]
    assert (kept.node, kept.operator) == ("/norm/Scale+1", "Mul")
    assert re.fullmatch(kept.pattern, "/norm/Scale+1")
    assert kept.error is not None


@BUILDERS
def test_the_product_whose_input_no_single_scale_fits_is_named(tmp_path: Path, builder: ReducingBuilder) -> None:
    """Some channels are thousands of times larger than the rest, and the weights behind them so much smaller."""
    factors = np.ones(WIDTH, np.float32)
    factors[::4] = 4096
    middle = [models.node("Mul", ["b", "factors"], ["c"], "/outliers")]
    source = chain(tmp_path / "m.onnx", middle, {"factors": factors})
    model = models.onnx.load(source)
    third = next(w for w in model.graph.initializer if w.name == "w2")
    scaled = models.numpy_helper.to_array(third) / factors[:, None]
    third.CopyFrom(models.numpy_helper.from_array(scaled, "w2"))
    models.onnx.save(model, source)
    calibration = CalibrationData(samples(), "MinMax", True)
    graph = builder.reduced(source, EngineSettings("any", "INT8"), calibration, tmp_path)
    assert graph is not None
    found = sensitivity.find(graph, samples(), tmp_path)
    assert found is not None
    assert found.kept[0].node == "/third/MatMul"
    assert found.error is not None
    assert found.kept[0].error is not None
    assert found.kept[0].error < 0.3 * found.error


def test_where_no_node_stands_out_nothing_is_said(tmp_path: Path) -> None:
    source = models.square(tmp_path / "m.onnx")
    graph = OnnxBuilder().reduced(source, EngineSettings("ONNXRuntime", "FP16"), None, tmp_path)
    assert graph is not None
    assert sensitivity.find(graph, [{"x": np.ones((4, 1), np.float32)}], tmp_path) is None


def test_to_keep_everything_is_no_advice(tmp_path: Path) -> None:
    source = models.square(tmp_path / "m.onnx")
    graph = OnnxBuilder().reduced(source, EngineSettings("ONNXRuntime", "FP16"), None, tmp_path)
    assert graph is not None
    assert sensitivity.find(graph, [{"x": np.full((4, 1), 300, np.float32)}], tmp_path) is None


def test_the_search_ends_when_its_time_is_over(tmp_path: Path) -> None:
    source = chain(tmp_path / "m.onnx", [models.node("Neg", ["b"], ["c"], "/neg")], {})
    graph = OnnxBuilder().reduced(source, EngineSettings("ONNXRuntime", "FP16"), None, tmp_path)
    assert graph is not None
    assert sensitivity.find(graph, samples(), tmp_path, seconds=0.0) is None


def test_fp32_reduces_nothing(tmp_path: Path) -> None:
    source = models.square(tmp_path / "m.onnx")
    assert OnnxBuilder().reduced(source, EngineSettings("ONNXRuntime", "FP32"), None, tmp_path) is None
