"""Shapes beyond the data set's own: which are run, and what an engine that is wrong in one of them gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx_models as models
import pytest
from trtmodel_contract.gate import GateFigures, Task, Thresholds, Verdict, judge
from trtmodel_contract.identity import Profile, ShapeRange
from trtmodel_contract.jobs import DataSet, Reason
from trtmodel_worker.builder import gate
from trtmodel_worker.builder.dataset import DataSetFile
from trtmodel_worker.builder.gate_shapes import batch_sizes, corners, fitted
from trtmodel_worker.engines.building import Graph, GraphTensor, Rejected
from trtmodel_worker.engines.registry import builder

Inputs = Mapping[str, np.ndarray]
SHORT = Profile({"x": ShapeRange((1, 1), (2, 4), (8, 6))})
LONG = Profile({"x": ShapeRange((1, 7), (1, 8), (2, 16))})


class Wrong:
    """A lane that answers as the model, but for some shapes."""

    def __init__(self, reference: gate.Reference, change: Callable[[np.ndarray], np.ndarray], shape: tuple[int, int]):
        self.reference, self.change, self.shape = reference, change, shape
        self.seen: set[tuple[int, ...]] = set()

    def run(self, inputs: Inputs, allocate: object) -> dict[str, np.ndarray]:
        self.seen.add(inputs["x"].shape)
        found = self.reference.run(inputs)
        return {n: self.change(a) if inputs["x"].shape == self.shape else a for n, a in found.items()}


def two_outputs(path: Path) -> Path:
    """y = -x and the sum of each row, of any length."""
    nodes = [
        models.node("Neg", ["x"], ["y"]),
        models.node("ReduceSum", ["x", "axes"], ["sum"], keepdims=0),
    ]
    outputs = [("y", models.FLOAT, ("n", "length")), ("sum", models.FLOAT, ("n",))]
    weights = {"axes": np.array([1], np.int64)}
    return models.save(path, nodes, [("x", models.FLOAT, ("n", "length"))], outputs, weights)


def measured(
    folder: Path, change: Callable[[np.ndarray], np.ndarray], shape: tuple[int, int]
) -> tuple[gate.Measured, Wrong]:
    source = two_outputs(folder / "m.onnx")
    np.savez(folder / "d.npz", x=np.random.default_rng(1).normal(size=(50, 5)).astype(np.float32))
    graph = builder("ONNXRuntime").inspect(source)
    profiles = (SHORT, LONG)
    data = DataSetFile(folder / "d.npz", "d", graph.inputs, profiles)
    lane = Wrong(gate.Reference(source, 1), change, shape)
    asked = DataSet("d", 50, "0" * 64)
    return gate.measure(lane.reference, lane, graph, data, asked, Task.RAW, profiles), lane


def verdict(figures: GateFigures) -> Verdict:
    return judge(figures, Thresholds()).verdict


def test_every_corner_of_every_profile_and_every_power_of_two_is_run(tmp_path: Path) -> None:
    found, lane = measured(tmp_path, lambda a: a, (0, 0))
    assert lane.seen == {(1, 5), (2, 5), (4, 5), (8, 5), (1, 1), (2, 4), (8, 6), (1, 7), (1, 8), (2, 16)}
    assert verdict(found.figures) is Verdict.PASS
    assert found.figures.samples == 50
    assert set(found.figures.outputs) == {"y", "sum"}
    assert "x 2x16" in found.findings.shapes


@pytest.mark.parametrize("shape", [(4, 5), (1, 1), (8, 6), (1, 8), (2, 16)])
@pytest.mark.parametrize("change", [lambda a: -a, lambda a: a * np.nan, lambda a: a[:-1]], ids=["wrong", "nan", "cut"])
def test_an_engine_that_is_wrong_in_a_single_shape_fails(
    tmp_path: Path, shape: tuple[int, int], change: Callable[[np.ndarray], np.ndarray]
) -> None:
    if shape[0] == 1 and change(np.ones((1, 1))).size == 0:
        change = lambda a: a[..., :0]  # noqa: E731
    found, _ = measured(tmp_path, change, shape)
    assert verdict(found.figures) is Verdict.FAIL


def test_a_model_that_itself_cannot_run_a_shape_of_the_profile_is_refused(tmp_path: Path) -> None:
    nodes = [models.node("Add", ["x", "w"], ["y"])]
    weights = {"w": np.ones(5, np.float32)}
    dims = ("n", "length")
    source = models.save(tmp_path / "m", nodes, [("x", models.FLOAT, dims)], [("y", models.FLOAT, dims)], weights)
    np.savez(tmp_path / "d.npz", x=np.ones((9, 5), np.float32))
    graph = builder("ONNXRuntime").inspect(source)
    profiles = (Profile({"x": ShapeRange((1, 5), (1, 5), (1, 6))}),)
    data = DataSetFile(tmp_path / "d.npz", "d", graph.inputs, profiles)
    reference = gate.Reference(source, 1)
    lane = Wrong(reference, lambda a: a, (0, 0))
    with pytest.raises(Rejected, match="x 1x6") as e:
        gate.measure(reference, lane, graph, data, DataSet("d", 9, "0" * 64), Task.RAW, profiles)
    assert e.value.reason is Reason.DATASET_INVALID


def test_A17_without_a_reference_there_is_no_gate(tmp_path: Path) -> None:
    nodes = [models.node("Relu", ["x"], ["h"], "n"), models.node("Abs", ["h"], ["y"], "n")]
    source = models.save(tmp_path / "m", nodes, [("x", models.FLOAT, ("n", 4))], [("y", models.FLOAT, ("n", 4))])
    with pytest.raises(Rejected, match="nothing to compare the engine with") as e:
        gate.Reference(source, 1)
    assert e.value.reason is Reason.MODEL_INVALID


def test_a_fixed_batch_is_the_only_size() -> None:
    graph = Graph((GraphTensor("x", "FP32", (3, 4)),), ())
    assert batch_sizes(graph, ()) == (3, (3,))


def test_sizes_between_are_powers_of_two_and_the_samples_run_in_the_best() -> None:
    graph = Graph((GraphTensor("x", "FP32", ("n", 4)),), ())
    profile = Profile({"x": ShapeRange((3, 4), (12, 4), (33, 4))})
    assert batch_sizes(graph, (profile,)) == (12, (3, 4, 8, 12, 16, 32, 33))
    assert batch_sizes(graph, (profile,), most=4)[0] == 4
    assert batch_sizes(graph, (profile,), most=1)[0] == 3


def test_inputs_without_a_range_follow_the_batch() -> None:
    profile = Profile({"x": ShapeRange((1, 2), (1, 2), (4, 3))})
    assert corners((profile,), {"x": (9, 2), "z": (9, 7)}) == [{"x": (4, 3), "z": (4, 7)}]
    assert corners((), {"x": (9, 2)}) == []


def test_values_are_cut_off_or_begin_again() -> None:
    x = np.arange(6).reshape(2, 3)
    assert fitted({"x": x}, {"x": (3, 2)})["x"].tolist() == [[0, 1], [3, 4], [0, 1]]
    assert fitted({"x": x}, {"x": (1, 5)})["x"].tolist() == [[0, 1, 2, 0, 1]]


def with_anchors(path: Path, rows: int, declared: int | str) -> Path:
    """y = -x, and numbers that are the same whatever x is."""
    nodes = [models.node("Neg", ["x"], ["y"]), models.node("Identity", ["w"], ["anchors"])]
    outputs = [("y", models.FLOAT, (declared, 4)), ("anchors", models.FLOAT, (rows, 6))]
    weights = {"w": np.arange(rows * 6, dtype=np.float32).reshape(rows, 6)}
    return models.save(path, nodes, [("x", models.FLOAT, ("n", 4))], outputs, weights)


def of_anchors(
    folder: Path, rows: int, declared: int | str, change: Callable[[np.ndarray], np.ndarray], shape: tuple[int, int]
) -> Verdict:
    source = with_anchors(folder / "m.onnx", rows, declared)
    np.savez(folder / "d.npz", x=np.random.default_rng(1).normal(size=(50, 4)).astype(np.float32))
    graph = builder("ONNXRuntime").inspect(source)
    profiles = (Profile({"x": ShapeRange((1, 4), (rows, 4), (8, 4))}),)
    data = DataSetFile(folder / "d.npz", "d", graph.inputs, profiles)
    lane = Wrong(gate.Reference(source, 1), change, shape)
    asked = DataSet("d", 50, "0" * 64)
    return verdict(gate.measure(lane.reference, lane, graph, data, asked, Task.RAW, profiles).figures)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_an_output_that_is_the_same_for_every_batch_is_no_contradiction(tmp_path: Path, rows: int) -> None:
    assert of_anchors(tmp_path, rows, "n", lambda a: a, (0, 0)) is Verdict.PASS


@pytest.mark.parametrize("declared", ["n", 1], ids=["told", "said to be one row"])
def test_beside_such_an_output_one_with_a_row_for_each_sample_is_compared_in_every_size(
    tmp_path: Path, declared: int | str
) -> None:
    assert of_anchors(tmp_path, 1, declared, lambda a: -a if len(a) == 4 else a, (4, 4)) is Verdict.FAIL
