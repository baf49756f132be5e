"""A plan whose large weights are used where they lie: no copy of them is made, and answers are the same."""

from __future__ import annotations

import gc
import mmap
import weakref
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from trtmodel_contract.identity import EngineSettings
from trtmodel_worker.engines.base import CannotLoad, allocate_anew
from trtmodel_worker.engines.onnxruntime import OnnxRuntime, build, plans
from trtmodel_worker.engines.onnxruntime.build import OnnxBuilder
from trtmodel_worker.engines.onnxruntime.run import OnnxEngine

WIDTH = 200  # 160,000 bytes a weight, more than stays in the graph
RANDOM = np.random.default_rng(5)


def weight(name: str, *shape: int, dtype: type = np.float32) -> TensorProto:
    return numpy_helper.from_array((RANDOM.normal(size=shape) / 16).astype(dtype), name)


def saved(folder: Path, nodes: list[onnx.NodeProto], weights: list[TensorProto]) -> Path:
    """With its weights in another file."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", WIDTH]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save_model(model, folder / "model.onnx", save_as_external_data=True, location="data", size_threshold=0)
    return folder / "model.onnx"


def products(folder: Path) -> Path:
    """Products of weights in FP32 and in FP16, a small one, and one in the body of an If."""
    body = helper.make_graph(
        [helper.make_node("MatMul", ["c", "inner"], ["then"])],
        "body",
        [],
        [helper.make_tensor_value_info("then", TensorProto.FLOAT, ["n", WIDTH])],
        [weight("inner", WIDTH, WIDTH)],
    )
    other = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["else"])],
        "other",
        [],
        [helper.make_tensor_value_info("else", TensorProto.FLOAT, ["n", WIDTH])],
    )
    nodes = [
        helper.make_node("MatMul", ["x", "w32"], ["a"]),
        helper.make_node("Cast", ["w16"], ["w16f"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["a", "w16f"], ["b"]),
        helper.make_node("Add", ["b", "bias"], ["c"]),
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"]),
        helper.make_node("If", ["positive"], ["y"], then_branch=body, else_branch=other),
    ]
    weights = [weight("w32", WIDTH, WIDTH), weight("w16", WIDTH, WIDTH, dtype=np.float16), weight("bias", WIDTH)]
    return saved(folder, nodes, [*weights, numpy_helper.from_array(np.array(0, np.float32), "zero")])


def built(source: Path, plan: Path) -> memoryview:
    OnnxBuilder().build(source, EngineSettings("ONNXRuntime"), None, plan)
    with plan.open("rb") as f:
        return memoryview(mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ))


def answers(plan: memoryview) -> list[np.ndarray]:
    lane = OnnxRuntime().load(plan, (), 1).create_lane()
    rows = np.random.default_rng(1).normal(size=(3, WIDTH)).astype(np.float32)
    return [np.array(lane.run({"x": sign * np.abs(rows)}, allocate_anew)["y"]) for sign in (1, -1)]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> memoryview:
    monkeypatch.setattr(build, "APART_FROM", 1)
    return built(products(tmp_path), tmp_path / "apart")


def test_a_plan_with_its_weights_apart_answers_as_one_with_them_inside(tmp_path: Path, plan: memoryview) -> None:
    contents = plans.read(plan)
    assert contents is not None
    assert any(w.nbytes == WIDTH * WIDTH * 4 for w in contents.weights.values())
    assert len(contents.graph) < WIDTH * WIDTH * 4 + 20_000, "beside the If's weight, no large one is in the graph"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "APART_FROM", 1 << 40)
        plain = built(tmp_path / "model.onnx", tmp_path / "inside")
    assert plans.read(plain) is None
    for apart, inside in zip(answers(plan), answers(plain), strict=True):
        np.testing.assert_array_equal(apart, inside)


def test_weights_are_used_where_they_lie(plan: memoryview) -> None:
    contents = plans.read(plan)
    assert contents is not None
    for name, array in contents.weights.items():
        assert np.shares_memory(array, np.frombuffer(plan, np.uint8)), name
        assert array.ctypes.data % 64 == 0, name
        assert not array.flags.writeable, name


def test_a_lane_keeps_the_plans_memory_which_onnx_runtime_reads_from(plan: memoryview) -> None:
    mapped = mmap.mmap(-1, len(plan))
    mapped.write(plan)
    alive = weakref.ref(mapped)
    lane = OnnxRuntime().load(memoryview(mapped), (), 1).create_lane()
    del mapped
    gc.collect()
    assert alive() is not None
    del lane
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("left", [20, 40, 2_000, 100_000])
def test_a_plan_that_was_cut_off_is_none(plan: memoryview, left: int) -> None:
    with pytest.raises(CannotLoad, match="does not load the plan"):
        OnnxEngine(memoryview(bytes(plan[:left])), (), 1)


def test_of_large_weights_no_second_copy_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime keeps a copy in another order of what it multiplies with; not of weights as large as these."""
    seen: list[str] = []
    monkeypatch.setattr("trtmodel_worker.engines.onnxruntime.run.UNPACKED_FROM", 1)
    monkeypatch.setattr(build, "APART_FROM", 1)
    made = built(products(tmp_path), tmp_path / "apart")
    import onnxruntime as ort

    real = ort.SessionOptions.add_session_config_entry

    def noted(self: ort.SessionOptions, key: str, value: str) -> None:
        seen.append(f"{key}={value}")
        real(self, key, value)

    monkeypatch.setattr(ort.SessionOptions, "add_session_config_entry", noted)
    answers(made)
    assert "session.disable_prepacking=1" in seen
