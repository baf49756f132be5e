"""Lanes of the ONNX Runtime engine: outputs where the caller wants them, shapes as they are, errors by class."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx_models as models
import pytest
from onnx import TensorProto
from trtmodel_contract.identity import Profile, ShapeRange
from trtmodel_worker.engines.base import CannotLoad, InvalidInput, Lane, Recoverable
from trtmodel_worker.engines.registry import runtime


def load(path: Path, profiles: tuple[Profile, ...] = (), lanes: int = 1) -> Any:
    return runtime("ONNXRuntime").load(memoryview(path.read_bytes()), profiles, lanes)


def run(lane: Lane, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    return dict(lane.run(inputs, lambda _name, dtype, shape: np.full(shape, 77, dtype)))


def test_outputs_are_written_into_the_arrays_that_the_caller_gave(tmp_path: Path) -> None:
    lane = load(models.relu(tmp_path / "m")).create_lane()
    mine = np.full((2, 4), 9, np.float32)
    found = lane.run({"x": np.array([[-1, 2, -3, 4]] * 2, np.float32)}, lambda *_: mine)
    assert found["y"] is mine
    assert mine.tolist() == [[0, 2, 0, 4]] * 2


def test_a_full_region_is_the_callers_error_not_the_engines(tmp_path: Path) -> None:
    def allocate(*_: object) -> np.ndarray:
        raise ValueError("region is full")

    with pytest.raises(ValueError, match="region is full"):
        load(models.relu(tmp_path / "m")).create_lane().run({"x": np.ones((1, 4), np.float32)}, allocate)


def test_A22_an_output_whose_shape_depends_on_data_has_its_real_shape_each_time(tmp_path: Path) -> None:
    nodes = [models.node("NonZero", ["x"], ["y"])]
    for dims in ((1, "k"), (1, "n")):  # the second lies: it says that the output is as long as the input
        path = models.save(tmp_path / "m", nodes, [("x", models.FLOAT, ("n",))], [("y", TensorProto.INT64, dims)])
        lane = load(path).create_lane()
        for values, expected in (([1, 2, 3], [[0, 1, 2]]), ([0, 5, 0], [[1]]), ([0, 0, 0], [[]])):
            found = run(lane, x=np.array(values, np.float32))["y"]
            assert found.tolist() == expected
            assert found.shape == (1, len(expected[0]))
        x = np.array([1, 2, 3], np.float32)
        assert lane.bind({"x": x}, lambda _name, dtype, shape: np.empty(shape, dtype)) is None  # it was wrong once


def test_outputs_whose_shape_the_graph_does_not_tell_are_written_in_place_from_the_second_run_on(
    tmp_path: Path,
) -> None:
    path = models.save(
        tmp_path / "m", [models.node("Slice", ["x", "from", "to"], ["y"])], [("x", models.FLOAT, ("n", 2))],
        [("y", models.FLOAT, ("k", 2))], {"from": np.array([0], np.int64), "to": np.array([1 << 30], np.int64)},
    )  # fmt: skip
    lane = load(path).create_lane()
    for rows in (1, 3):
        x = np.full((rows, 2), rows, np.float32)
        mine = np.zeros((rows, 2), np.float32)
        assert lane.bind({"x": x}, lambda *_, mine=mine: mine) is None
        assert run(lane, x=x)["y"].tolist() == x.tolist()
        bound = lane.bind({"x": x}, lambda *_, mine=mine: mine)
        for value in (5, 6):
            x[...] = value
            assert bound.run()
            assert mine.tolist() == x.tolist()


def test_a_bound_run_reads_its_inputs_anew_each_time(tmp_path: Path) -> None:
    lane = load(models.relu(tmp_path / "m")).create_lane()
    x, mine = np.zeros((2, 4), np.float32), np.zeros((2, 4), np.float32)
    bound = lane.bind({"x": x}, lambda *_: mine)
    for value in (1.0, -1.0, 7.0):
        x[...] = value
        assert bound.run()
        assert mine.tolist() == [[max(value, 0.0)] * 4] * 2
    assert bound.outputs["y"] is mine


def test_an_array_with_gaps_is_refused_and_not_read_wrongly(tmp_path: Path) -> None:
    lane = load(models.relu(tmp_path / "m")).create_lane()
    with pytest.raises(InvalidInput, match="not C-contiguous"):
        run(lane, x=np.zeros((2, 8), np.float32)[:, ::2])


def test_strings_come_and_go_as_str(tmp_path: Path) -> None:
    shape = ("n", 2)
    path = models.save(
        tmp_path / "m", [models.node("Identity", ["s"], ["t"])], [("s", TensorProto.STRING, shape)],
        [("t", TensorProto.STRING, shape)],
    )  # fmt: skip
    engine = load(path)
    assert (engine.inputs[0].datatype, engine.outputs[0].datatype) == ("BYTES", "BYTES")
    lane = engine.create_lane()
    words = np.array([["a", ""], ["ü", "\U0001f600"]], np.object_)
    assert lane.bind({"s": words}, lambda *_: words) is None
    assert run(lane, s=words)["t"].tolist() == words.tolist()


def test_A07_strided_and_foreign_arrays_made_contiguous_give_the_same_answer(tmp_path: Path) -> None:
    lane = load(models.linear(tmp_path / "m", width=4)).create_lane()
    plain = np.arange(8, dtype=np.float32).reshape(2, 4)
    expected = run(lane, x=plain)["y"]
    wide = np.zeros((2, 8), np.float32)
    wide[:, ::2] = plain
    for other in (wide[:, ::2], np.asfortranarray(plain), plain.astype(">f4")):
        assert np.array_equal(run(lane, x=np.ascontiguousarray(other, np.float32))["y"], expected)


def test_A24_a_batch_outside_of_the_profile_is_the_requests_fault(tmp_path: Path) -> None:
    profile = Profile({"x": ShapeRange((1, 4), (2, 4), (3, 4))})
    lane = load(models.relu(tmp_path / "m"), (profile,)).create_lane()
    run(lane, x=np.ones((3, 4), np.float32))
    with pytest.raises(InvalidInput, match="profile"):
        run(lane, x=np.ones((4, 4), np.float32))


def test_A24_a_graph_with_a_frozen_batch_takes_only_that(tmp_path: Path) -> None:
    lane = load(models.relu(tmp_path / "m", dims=(1, 4))).create_lane()
    with pytest.raises(InvalidInput, match=r"\[2, 4\].*\[1, 4\]"):
        run(lane, x=np.ones((2, 4), np.float32))


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"x": np.ones((1, 4), np.float64)}, "float64"),
        ({"x": np.ones((1, 5), np.float32)}, r"\[1, 5\]"),
        ({"x": np.ones(4, np.float32)}, r"\[4\]"),
        ({"z": np.ones((1, 4), np.float32)}, "unknown inputs"),
        ({}, "missing inputs"),
    ],
)
def test_inputs_that_do_not_fit_are_the_requests_fault(tmp_path: Path, inputs: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        run(load(models.relu(tmp_path / "m")).create_lane(), **inputs)


def test_an_index_beyond_a_table_is_the_requests_fault_and_a_failing_node_is_not(tmp_path: Path) -> None:
    table = {"w": np.ones((3, 2), np.float32)}
    x = ("x", TensorProto.INT64, ("n",))
    gather = models.save(
        tmp_path / "g", [models.node("Gather", ["w", "x"], ["y"])], [x], [("y", models.FLOAT, ("n", 2))], table
    )
    with pytest.raises(InvalidInput, match="out of data bounds"):
        run(load(gather).create_lane(), x=np.array([7]))
    inputs = [("x", models.FLOAT, ("n",)), ("s", TensorProto.INT64, (2,))]
    reshape = models.save(
        tmp_path / "r", [models.node("Reshape", ["x", "s"], ["y"])], inputs, [("y", models.FLOAT, ("a", "b"))]
    )
    with pytest.raises(Recoverable, match="cannot be reshaped"):
        run(load(reshape).create_lane(), x=np.ones(6, np.float32), s=np.array([4, 2]))


def test_A19_weights_that_are_also_inputs_are_no_inputs(tmp_path: Path) -> None:
    inputs = [("x", models.FLOAT, (1,)), ("k", models.FLOAT, (1,))]
    nodes = [models.node("Mul", ["x", "k"], ["y"])]
    weights = {"k": np.array([2], np.float32)}
    path = models.save(tmp_path / "m", nodes, inputs, [("y", models.FLOAT, (1,))], weights, 3, [("", 8)])
    engine = load(path)
    assert [spec.name for spec in engine.inputs] == ["x"]
    lane = engine.create_lane()
    assert run(lane, x=np.ones(1, np.float32))["y"].tolist() == [2]
    with pytest.raises(InvalidInput, match=r"unknown inputs \['k'\]"):
        run(lane, x=np.ones(1, np.float32), k=np.array([5], np.float32))


@pytest.mark.parametrize("name", ["input:0", "onnx::Conv_1", "/a/b", "имя 名", 'a"b\\c'])
def test_A11_names_are_kept_byte_for_byte(tmp_path: Path, name: str) -> None:
    shape = ("n", 2)
    path = models.save(
        tmp_path / "m",
        [models.node("Relu", [name], ["y"])],
        [(name, models.FLOAT, shape)],
        [("y", models.FLOAT, shape)],
    )
    engine = load(path)
    assert engine.inputs[0].name == name
    assert run(engine.create_lane(), **{name: np.ones((1, 2), np.float32)})["y"].tolist() == [[1, 1]]


def test_A03_bool_tensors_work(tmp_path: Path) -> None:
    shape = ("n",)
    path = models.save(
        tmp_path / "m",
        [models.node("Not", ["m"], ["y"])],
        [("m", TensorProto.BOOL, shape)],
        [("y", TensorProto.BOOL, shape)],
    )
    engine = load(path)
    assert engine.inputs[0].datatype == "BOOL"
    assert run(engine.create_lane(), m=np.array([True, False]))["y"].tolist() == [False, True]


@pytest.mark.parametrize("content", [b"", b"no plan", b"\0" * 100])
def test_bytes_that_are_no_plan_cannot_be_loaded(content: bytes) -> None:
    with pytest.raises(CannotLoad):
        runtime("ONNXRuntime").load(memoryview(content), (), 1)


def test_lanes_of_one_engine_run_side_by_side_and_agree_bit_for_bit(tmp_path: Path) -> None:
    engine = load(models.linear(tmp_path / "m", width=64, classes=64), lanes=4)
    lanes = [engine.create_lane() for _ in range(4)]
    x = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    expected = run(lanes[0], x=x)["y"]
    wrong: list[int] = []

    def work(number: int) -> None:
        wrong.extend(number for _ in range(50) if not np.array_equal(run(lanes[number], x=x)["y"], expected))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
