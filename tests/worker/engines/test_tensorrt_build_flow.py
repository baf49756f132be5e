"""What the builder asks of TensorRT, in which version, and what it makes of its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_models as models
import pytest
from trt_builder_world import Device, World, install
from trtmodel_contract.identity import EngineSettings, Profile, ShapeRange
from trtmodel_contract.jobs import Reason
from trtmodel_worker.engines.base import OutOfMemory
from trtmodel_worker.engines.building import CalibrationData, Rejected
from trtmodel_worker.engines.tensorrt import timing
from trtmodel_worker.engines.tensorrt.build import TensorRtBuilder
from trtmodel_worker.engines.tensorrt.device import CudaError

OLD, MIDDLE, NEW = "8.6.0", "10.16.1.11", "11.4.0.106"
PROFILES = (Profile({"x": ShapeRange((1, 8), (4, 8), (32, 8))}),)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], World]:
    return lambda version: install(monkeypatch, version)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return models.linear(tmp_path / "linear.onnx")


def settings(precision: str = "FP32", **more: Any) -> EngineSettings:
    return EngineSettings("TensorRT", precision, profiles=PROFILES, **more)


def batches(count: int = 3) -> Iterator[Mapping[str, Any]]:
    generator = np.random.default_rng(0)
    for _ in range(count):
        yield {"x": generator.standard_normal((4, 8)).astype(np.float32)}


def test_8_6_is_told_what_later_versions_know(world: Callable[[str], World], source: Path, tmp_path: Path) -> None:
    asked = world(OLD)
    done = TensorRtBuilder().build(
        source, settings("FP16", workspace_bytes=1 << 30, optimization_level=1), None, tmp_path / "plan"
    )
    assert (tmp_path / "plan").read_bytes() == b"plan"
    assert asked.networks[0].flags == 1  # explicit batch, a bit
    assert (asked.config.flags, asked.config.cleared) == (["FP16"], ["TF32"])
    assert asked.config.features == [("PROFILE_SHARING_0806", True)]
    assert asked.config.limits == {"WORKSPACE": 1 << 30}
    assert asked.config.profiles == [{"x": ((1, 8), (4, 8), (32, 8))}]
    assert {k: done[k] for k in ("precisionPath", "optimizationLevel", "layersByType", "layersByPrecision")} == {
        "precisionPath": "flags", "optimizationLevel": "1", "layersByType": "gemm 1", "layersByPrecision": "FP32 1",
    }  # fmt: skip


def test_11_is_given_a_graph_of_half_precision_and_no_flag(
    world: Callable[[str], World], source: Path, tmp_path: Path
) -> None:
    asked = world(NEW)
    done = TensorRtBuilder().build(source, settings("FP16"), None, tmp_path / "plan")
    assert (done["precisionPath"], asked.config.flags, asked.networks[0].flags) == ("graph", [], 0)
    assert asked.config.features == []


def test_10_takes_q_dq_in_a_network_of_strong_types(
    world: Callable[[str], World], source: Path, tmp_path: Path
) -> None:
    asked = world(MIDDLE)
    calibration = CalibrationData(batches(), "MinMax", per_channel=True)
    done = TensorRtBuilder().build(source, settings("INT8"), calibration, tmp_path / "plan")
    assert (done["precisionPath"], asked.config.flags, asked.networks[0].flags) == ("graph", [], 1 << 1)
    assert done["quantizedNodes"] == "1 of 1"


def test_where_the_parser_refuses_q_dq_the_calibrator_reads_the_same_data(
    world: Callable[[str], World], source: Path, tmp_path: Path
) -> None:
    asked = world(OLD)
    asked.refuse = lambda nodes: [
        (i, "UNSUPPORTED_NODE", "only activation types allowed") for i, n in enumerate(nodes) if "Quantize" in n.op_type
    ]
    calibration = CalibrationData(batches(5), "Entropy", per_channel=True)
    done = TensorRtBuilder().build(source, settings("INT8"), calibration, tmp_path / "plan")
    assert (done["precisionPath"], done["calibrationBatches"]) == ("flags", "5")
    assert (asked.batches, asked.config.flags) == (5, ["INT8"])
    assert asked.config.calibration_profile == {"x": ((4, 8),) * 3}


def test_where_a_quantised_node_has_no_kernel_the_calibrator_is_tried(
    world: Callable[[str], World], source: Path, tmp_path: Path
) -> None:
    asked = world(OLD)
    asked.plans = [None]
    asked.errors = ["10: Error Code 10: Internal Error (Could not find any implementation for node product.)"]
    calibration = CalibrationData(batches(), "Entropy", per_channel=True)
    done = TensorRtBuilder().build(source, settings("INT8"), calibration, tmp_path / "plan")
    assert done["precisionPath"] == "flags"
    asked.plans = [None, None]
    calibration = CalibrationData(batches(), "Entropy", per_channel=True)
    with pytest.raises(Rejected, match="no kernel on this GPU for product") as refused:
        TensorRtBuilder().build(source, settings("INT8"), calibration, tmp_path / "plan")
    assert refused.value.reason is Reason.OPERATOR_UNSUPPORTED


def test_calibration_data_that_cannot_be_read_is_the_reason_and_not_the_engine(
    world: Callable[[str], World], source: Path, tmp_path: Path
) -> None:
    def broken() -> Iterator[Mapping[str, Any]]:
        yield from batches(1)
        raise Rejected(Reason.DATASET_INVALID, "the data set ends early")

    world(OLD)
    with pytest.raises(Rejected, match="ends early"):
        TensorRtBuilder().build(
            source, settings("INT8"), CalibrationData(broken(), "MinMax", per_channel=True), tmp_path / "plan"
        )
    assert not (tmp_path / "plan").exists()


def test_a_calibrator_that_could_not_be_fed_makes_no_engine(
    world: Callable[[str], World], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise CudaError("cudaMemcpy", 1, "cudaErrorInvalidValue", "invalid argument")

    asked = world(OLD)
    asked.refuse = lambda nodes: [(0, "UNSUPPORTED_NODE", "no") for n in nodes if "Quantize" in n.op_type]
    monkeypatch.setattr(Device, "call", broken)
    calibration = CalibrationData(batches(), "MinMax", per_channel=True)
    with pytest.raises(CudaError, match="invalid argument"):
        TensorRtBuilder().build(source, settings("INT8"), calibration, tmp_path / "plan")
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize(("version", "name"), [(OLD, "'bias'"), (MIDDLE, "'named bias'")])
def test_the_node_that_the_parser_refuses_is_found_by_number_or_by_name(
    version: str, name: str, world: Callable[[str], World], source: Path, tmp_path: Path
) -> None:
    asked = world(version)
    asked.refuse = lambda _nodes: [(1, "UNSUPPORTED_NODE", "no importer")]
    with pytest.raises(Rejected) as refused:
        TensorRtBuilder().build(source, settings(), None, tmp_path / "plan")
    assert f"node {name} (Add): no importer [UNSUPPORTED_NODE]" in refused.value.message
    assert refused.value.findings[0].operator == "Add"


def test_an_output_whose_shape_only_the_data_tells_is_refused_below_10(
    world: Callable[[str], World], source: Path, tmp_path: Path
) -> None:
    asked = world(OLD)
    asked.only_data_tells = True
    with pytest.raises(
        Rejected, match=r"outputs \['y'\].*TensorRT 8\.6\.0.*ONNXRuntime.*TensorRT 10.*fixed"
    ) as refused:
        TensorRtBuilder().build(source, settings(), None, tmp_path / "plan")
    assert refused.value.reason is Reason.OPERATOR_UNSUPPORTED
    assert not (tmp_path / "plan").exists()
    asked = world(MIDDLE)
    asked.only_data_tells = True
    TensorRtBuilder().build(source, settings(), None, tmp_path / "plan")
    assert (tmp_path / "plan").exists()


def test_what_tensorrt_said_of_a_build_that_failed_is_told(
    world: Callable[[str], World], source: Path, tmp_path: Path
) -> None:
    asked = world(OLD)
    asked.plans, asked.errors = (
        [None, None],
        ["4: [network.cpp::validate::3008] Error Code 4: Internal Error (something)"],
    )
    with pytest.raises(Rejected, match="Internal Error") as refused:
        TensorRtBuilder().build(source, settings(), None, tmp_path / "plan")
    assert refused.value.reason is Reason.BUILD_FAILED
    asked.errors = ["1: Error Code 1: Cuda Runtime (out of memory)"]
    with pytest.raises(OutOfMemory):
        TensorRtBuilder().build(source, settings(), None, tmp_path / "plan")


def test_a_graph_with_q_dq_needs_no_data_and_is_not_quantised_again(
    world: Callable[[str], World], source: Path, tmp_path: Path
) -> None:
    scale, zero = {"s": np.float32(0.1)}, {"z": np.int8(0)}
    nodes = [
        models.node("QuantizeLinear", ["x", "s", "z"], ["q"], "to"),
        models.node("DequantizeLinear", ["q", "s", "z"], ["y"], "from"),
    ]
    shape = ("n", 8)
    weights = {name: np.array(value) for name, value in (scale | zero).items()}
    models.save(source, nodes, [("x", models.FLOAT, shape)], [("y", models.FLOAT, shape)], weights)
    asked = world(OLD)
    unread = CalibrationData(iter(()), "MinMax", per_channel=True)
    done = TensorRtBuilder().build(source, settings("INT8"), unread, tmp_path / "plan")
    assert (done["quantizedNodes"], asked.config.flags) == ("as in the source", ["INT8"])


def test_what_was_measured_is_kept_for_the_next_build_of_this_device(
    world: Callable[[str], World], source: Path, tmp_path: Path
) -> None:
    world(OLD)
    first = TensorRtBuilder().build(source, settings(), None, tmp_path / "plan")
    again = TensorRtBuilder().build(source, settings(), None, tmp_path / "plan")
    assert (first["timingCaches"], again["timingCaches"]) == ("0", "1")
    key = "8.6.0 NVIDIA H200 9.0 580.1"
    assert timing.unpack((tmp_path / "timing" / "built.cache").read_bytes(), key) == b"timed"
