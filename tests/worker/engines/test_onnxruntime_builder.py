"""What the builder writes into a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_models as models
import onnxruntime as ort
import pytest
from trtmodel_contract.identity import EngineSettings, KeepPrecision
from trtmodel_contract.jobs import Reason
from trtmodel_worker.engines.building import CalibrationData, Rejected
from trtmodel_worker.engines.precision import calibrate
from trtmodel_worker.engines.registry import builder, runtime


def build(source: Path, plan: Path, calibration: Any = None, **settings: Any) -> dict[str, str]:
    return dict(builder("ONNXRuntime").build(source, EngineSettings("ONNXRuntime", **settings), calibration, plan))


def answer(plan: Path, **inputs: np.ndarray) -> np.ndarray:
    lane = runtime("ONNXRuntime").load(memoryview(plan.read_bytes()), (), 1).create_lane()
    return lane.run(inputs, lambda _name, dtype, shape: np.empty(shape, dtype))["y"]


def original(source: Path, **inputs: np.ndarray) -> np.ndarray:
    return np.asarray(ort.InferenceSession(str(source)).run(None, inputs)[0])


def operators(plan: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(plan).graph.node)


def images(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 3, 8, 8)).astype(np.float32)


def calibration(count: int = 32, **changes: Any) -> CalibrationData:
    batches = ({"x": images(4, seed)} for seed in range(count // 4))
    return CalibrationData(batches, **{"method": "Entropy", "per_channel": True, **changes})


def test_a_plan_is_the_optimised_graph_and_answers_the_same(tmp_path: Path) -> None:
    source = models.convolution(tmp_path / "m.onnx")
    assert build(source, tmp_path / "plan")["precision"] == "FP32"
    assert operators(tmp_path / "plan")["BatchNormalization"] == 0
    x = images(5)
    assert np.allclose(answer(tmp_path / "plan", x=x), original(source, x=x), atol=1e-4)


def test_optimization_level_zero_leaves_the_graph_as_it_is(tmp_path: Path) -> None:
    source = models.convolution(tmp_path / "m.onnx")
    build(source, tmp_path / "plan", optimization_level=0)
    assert operators(tmp_path / "plan")["BatchNormalization"] == 1


@pytest.mark.parametrize("method", ["Entropy", "MinMax"])
def test_int8_quantises_convolutions_and_products_and_keeps_answers(tmp_path: Path, method: str) -> None:
    source = models.convolution(tmp_path / "m.onnx")
    done = build(source, tmp_path / "plan", calibration(method=method), precision="INT8")
    assert done["quantizedNodes"] == "2 of 2"
    found = operators(tmp_path / "plan")
    assert found["QLinearConv"] == 1
    assert found["Conv"] == found["MatMul"] == found["Gemm"] == 0
    assert found["Add"] == 1  # the bias of the Gemm, in float
    x = images(50)
    expected, answers = original(source, x=x), answer(tmp_path / "plan", x=x)
    assert np.corrcoef(expected.ravel(), answers.ravel())[0, 1] > 0.99
    assert not np.array_equal(expected, answers)


def test_A27_the_plan_says_how_much_of_it_is_int8(tmp_path: Path) -> None:
    source = models.convolution(tmp_path / "m.onnx")
    keep = KeepPrecision(("^head$",))
    done = build(source, tmp_path / "plan", calibration(), precision="INT8", keep_precision=keep)
    assert done["quantizedNodes"] == "1 of 2"
    assert operators(tmp_path / "plan")["QLinearConv"] == 1


def test_A27_an_empty_calibration_set_is_refused(tmp_path: Path) -> None:
    source = models.convolution(tmp_path / "m.onnx")
    with pytest.raises(Rejected, match="empty") as e:
        build(source, tmp_path / "plan", calibration(0), precision="INT8")
    assert e.value.reason is Reason.DATASET_INVALID
    assert not (tmp_path / "plan").exists()


def test_int8_of_a_graph_without_anything_to_quantise_is_refused(tmp_path: Path) -> None:
    data = CalibrationData([{"x": np.ones((1, 4), np.float32)}], "MinMax", True)
    with pytest.raises(Rejected, match="Conv") as e:
        build(models.relu(tmp_path / "m"), tmp_path / "plan", data, precision="INT8")
    assert e.value.reason is Reason.PRECISION_UNSUPPORTED


def test_calibration_reads_batch_by_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch is asked for before the one before it was seen, and none is kept."""
    events: list[str] = []

    def batches() -> Iterator[dict[str, np.ndarray]]:
        for seed in range(3):
            events.append("read")
            yield {"x": images(4, seed)}

    real = calibrate._Histogram.add

    def add(histogram: Any, values: np.ndarray) -> None:
        if events[-1] == "read":
            events.append("seen")
        real(histogram, values)

    monkeypatch.setattr(calibrate._Histogram, "add", add)
    data = CalibrationData(batches(), "Entropy", True)
    build(models.convolution(tmp_path / "m.onnx"), tmp_path / "plan", data, precision="INT8")
    assert events == ["read", "seen"] * 3


def test_A05_values_that_overflow_half_precision_do_so_in_an_fp16_plan(tmp_path: Path) -> None:
    source = models.square(tmp_path / "m.onnx")
    done = build(source, tmp_path / "plan", precision="FP16")
    assert done["roundedValues"] == "1"
    x = np.array([[1], [2], [3], [300]], np.float32)
    assert answer(tmp_path / "plan", x=x).ravel().tolist() == [1, 4, 9, np.inf]


def test_kept_nodes_are_not_rounded_to_half_precision(tmp_path: Path) -> None:
    source = models.square(tmp_path / "m.onnx")
    build(source, tmp_path / "plan", precision="FP16", keep_precision=KeepPrecision(("squ",)))
    assert answer(tmp_path / "plan", x=np.array([[300]], np.float32)).item() == 90_000


@pytest.mark.parametrize(("pattern", "words"), [("nothing-like-it", "matches no node"), ("(", "is no pattern")])
def test_a_keep_pattern_that_guards_nothing_is_refused(tmp_path: Path, pattern: str, words: str) -> None:
    with pytest.raises(Rejected, match=words):
        build(
            models.square(tmp_path / "m"), tmp_path / "plan", precision="FP16", keep_precision=KeepPrecision((pattern,))
        )


@pytest.mark.parametrize("precision", ["BF16", "FP8", "INT4"])
def test_a_precision_that_this_runtime_lacks_is_refused_never_widened(precision: str) -> None:
    with pytest.raises(Rejected, match=precision) as e:
        builder("ONNXRuntime").require(EngineSettings("ONNXRuntime", precision=precision), None, False)
    assert e.value.reason is Reason.PRECISION_UNSUPPORTED


def test_int8_without_calibration_is_refused_unless_the_graph_is_quantised() -> None:
    settings = EngineSettings("ONNXRuntime", precision="INT8")
    with pytest.raises(Rejected, match="calibration"):
        builder("ONNXRuntime").require(settings, None, False)
    builder("ONNXRuntime").require(settings, None, True)
    builder("ONNXRuntime").require(settings, "Entropy", False)
    with pytest.raises(Rejected, match="Percentile"):
        builder("ONNXRuntime").require(settings, "Percentile", False)
