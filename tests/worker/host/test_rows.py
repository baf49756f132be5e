"""Row independence: which models may have rows of different requests in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_models as models
import pytest
from onnx import TensorProto
from trtmodel_contract.identity import LoadKey, Profile, ShapeRange
from trtmodel_contract.manifest import Blob, Manifest, MemoryNeed
from trtmodel_worker.engines.base import Allocate, Array, Lane, Recoverable, Sticky
from trtmodel_worker.engines.registry import runtime
from trtmodel_worker.host.pace import Pace
from trtmodel_worker.host.proving import Sample, SelfTestFailed
from trtmodel_worker.host.rows import why_not_batchable

FLOAT, INT64 = models.FLOAT, TensorProto.INT64
WIDE = ("n", 4)


def verdict(
    path: Path,
    inputs: dict[str, np.ndarray],
    low: int = 1,
    high: int = 8,
    profiles: tuple[Profile, ...] | None = None,
    wrap: Any = lambda lane: lane,
) -> str:
    """What is said of a real model whose golden rows are `inputs`."""
    if profiles is None:
        shapes = {name: array.shape[1:] for name, array in inputs.items()}
        profiles = (Profile({n: ShapeRange((low, *s), (low, *s), (high, *s)) for n, s in shapes.items()}),)
    engine = runtime("ONNXRuntime").load(memoryview(path.read_bytes()), profiles, 1)
    lane = engine.create_lane()
    outputs = dict(lane.run(inputs, lambda _name, dtype, shape: np.empty(shape, dtype)))
    tolerances = {
        name: 1e-4 * float(np.abs(array).max(initial=0)) if array.dtype.kind == "f" else 0.0
        for name, array in outputs.items()
    }
    manifest = Manifest(
        "r", LoadKey("ONNXRuntime", "1", "cpu"), 1, "", {}, "0" * 64, Blob("1" * 64, 1), engine.inputs, engine.outputs,
        profiles, MemoryNeed(0, 0), (), {}, "2026-01-01T00:00:00Z",
    )  # fmt: skip
    return why_not_batchable(wrap(lane), manifest, [Sample("golden", inputs, outputs, tolerances)], Pace())


def rows(count: int, width: int = 4, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


def graph(path: Path, nodes: Sequence[Any], weights: dict[str, np.ndarray] | None = None, out: Any = WIDE) -> Path:
    return models.save(path, nodes, [("x", FLOAT, WIDE)], [("y", FLOAT, out)], weights)


def axes(*values: int) -> dict[str, np.ndarray]:
    return {"axes": np.array(values, np.int64)}


@pytest.mark.parametrize("count", [1, 2, 5, 40])
@pytest.mark.parametrize(("low", "high"), [(1, 2), (1, 8), (3, 8), (1, 64)])
def test_a_model_whose_rows_are_independent_is_found_to_be(tmp_path: Path, count: int, low: int, high: int) -> None:
    if not low <= count <= high:
        count = low
    assert verdict(models.linear(tmp_path / "m", width=4), {"x": rows(count)}, low, high) == ""


def test_a_convolution_and_a_table_of_words_have_independent_rows(tmp_path: Path) -> None:
    image = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)
    assert verdict(models.convolution(tmp_path / "c"), {"x": image}) == ""
    table = models.save(
        tmp_path / "t", [models.node("Gather", ["w", "x"], ["y"])], [("x", INT64, ("n", 3))],
        [("y", FLOAT, ("n", 3, 2))], {"w": rows(10, 2)},
    )  # fmt: skip
    assert verdict(table, {"x": np.array([[9, 8, 7], [9, 9, 9]])}) == ""  # doubled, they would be outside of the table


SEES_THE_BATCH = {
    "softmax over the batch": ([models.node("Softmax", ["x"], ["y"], axis=0)], None),
    "less the batch's mean": (
        [models.node("ReduceMean", ["x"], ["m"], axes=[0]), models.node("Sub", ["x", "m"], ["y"])],
        None,
    ),
    "less the batch's least": (
        [models.node("ReduceMin", ["x"], ["m"], axes=[0]), models.node("Sub", ["x", "m"], ["y"])],
        None,
    ),
    "sum of the rows before": ([models.node("CumSum", ["x", "axis"], ["y"])], {"axis": np.array(0, np.int64)}),
    "sum of the rows after": (
        [models.node("CumSum", ["x", "axis"], ["y"], reverse=1)],
        {"axis": np.array(0, np.int64)},
    ),
    "normalised by the batch": ([models.node("LpNormalization", ["x"], ["y"], axis=0)], None),
    "quantised by the batch's range": (
        [
            models.node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
            models.node("DequantizeLinear", ["q", "s", "z"], ["y"]),
        ],
        None,
    ),
    "rows in the opposite order": (
        [models.node("Slice", ["x", "from", "to", "axis", "step"], ["y"])],
        {name: np.array([v], np.int64) for name, v in (("from", -1), ("to", -(2**31)), ("axis", 0), ("step", -1))},
    ),
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", SEES_THE_BATCH)
def test_a_model_whose_rows_see_each_other_is_found_out(tmp_path: Path, name: str, count: int) -> None:
    nodes, weights = SEES_THE_BATCH[name]
    why = verdict(graph(tmp_path / "m", nodes, weights), {"x": rows(count)})
    assert why == "what output 'y' is for a row depends on the other rows of its batch"


def test_golden_rows_that_are_all_the_same_hide_nothing(tmp_path: Path) -> None:
    ones = np.ones((4, 4), np.float32)
    path = graph(tmp_path / "m", [models.node("Softmax", ["x"], ["y"], axis=0)])
    assert "depends on the other rows" in verdict(path, {"x": ones})
    assert verdict(models.linear(tmp_path / "l", width=4), {"x": ones}) == ""


def test_a_tensor_without_a_free_leading_dimension_is_named(tmp_path: Path) -> None:
    total = graph(tmp_path / "a", [models.node("ReduceSum", ["x"], ["y"], keepdims=0)], None, ())
    assert verdict(total, {"x": rows(2)}) == "output 'y' of shape [] has no free leading dimension"
    fixed = models.relu(tmp_path / "b", dims=(2, 4))
    assert verdict(fixed, {"x": rows(2)}, profiles=()) == "input 'x' of shape [2, 4] has no free leading dimension"


def test_an_output_with_another_number_of_rows_is_named(tmp_path: Path) -> None:
    path = graph(tmp_path / "m", [models.node("Concat", ["x", "x"], ["y"], axis=0)], None, ("k", 4))
    assert verdict(path, {"x": rows(2)}) == "output 'y' has 2 rows for a batch of 1"


def test_a_profile_of_one_row_allows_no_batch(tmp_path: Path) -> None:
    assert "no profile allows two rows" in verdict(models.relu(tmp_path / "m"), {"x": rows(1)}, 1, 1)


def test_a_graph_that_takes_one_batch_size_only_is_not_batched_and_serves(tmp_path: Path) -> None:
    """Exported with a batch of two, of which its shapes tell nothing."""
    nodes = [models.node("Add", ["x", "w"], ["a"]), models.node("Compress", ["a", "all"], ["y"], axis=0)]
    weights = {"w": rows(2), "all": np.ones(2, np.bool_)}
    why = verdict(graph(tmp_path / "m", nodes, weights, ("k", 4)), {"x": rows(2)}, 2, 8)
    assert why.startswith("the engine failed on golden rows in another order: ")
    assert "broadcast" in why


class Rounding:
    """A lane that adds in another order for each batch size, as kernels do."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane

    def run(self, inputs: Any, allocate: Allocate) -> dict[str, Array]:
        outputs = dict(self.lane.run(inputs, allocate))
        for array in outputs.values():
            array *= np.float32(1 + 4e-4 * (len(array) > 1))
        return outputs


def test_another_order_of_additions_is_no_dependence(tmp_path: Path) -> None:
    assert verdict(models.linear(tmp_path / "m", width=4), {"x": rows(5)}, wrap=Rounding) == ""


class Failing:
    """Fails at the third run."""

    def __init__(self, lane: Lane, error: Exception) -> None:
        self.lane, self.error, self.left = lane, error, 2

    def run(self, inputs: Any, allocate: Allocate) -> Any:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return self.lane.run(inputs, allocate)


def test_an_engine_that_is_poisoned_by_it_is_refused(tmp_path: Path) -> None:
    path = models.linear(tmp_path / "m", width=4)
    with pytest.raises(SelfTestFailed, match="an illegal address"):
        verdict(path, {"x": rows(2)}, wrap=lambda lane: Failing(lane, Sticky("an illegal address")))
    why = verdict(path, {"x": rows(2)}, wrap=lambda lane: Failing(lane, Recoverable("a launch failed")))
    assert why == "the engine failed on golden rows in another order: a launch failed"


def test_rows_are_judged_at_every_output(tmp_path: Path) -> None:
    nodes = [models.node("Relu", ["x"], ["y"]), models.node("Softmax", ["x"], ["z"], axis=0)]
    path = models.save(tmp_path / "m", nodes, [("x", FLOAT, WIDE)], [("y", FLOAT, WIDE), ("z", FLOAT, WIDE)])
    assert "output 'z'" in verdict(path, {"x": rows(2)})


def test_a_row_that_two_inputs_make_is_moved_as_one(tmp_path: Path) -> None:
    nodes = [models.node("Mul", ["x", "w"], ["y"])]
    path = models.save(tmp_path / "m", nodes, [("x", FLOAT, WIDE), ("w", FLOAT, WIDE)], [("y", FLOAT, WIDE)])
    found: list[Array] = [rows(3), rows(3, seed=9)]
    assert verdict(path, {"x": found[0], "w": found[1]}) == ""
