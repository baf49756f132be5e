from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from trtmodel_contract.identity import Profile, ShapeRange
from trtmodel_worker.alone import samples
from trtmodel_worker.alone.shapes import BadShape, parse, profiles
from trtmodel_worker.builder.dataset import DataSetFile
from trtmodel_worker.engines.building import Graph, GraphTensor, Rejected


def graph(**inputs: tuple[int | str, ...]) -> Graph:
    return Graph(tuple(GraphTensor(name, "FP32", dims) for name, dims in inputs.items()), ())


@pytest.mark.parametrize(
    ("text", "name", "ranges"),
    [
        ("x:1x3", "x", ((1, 1), (3, 3))),
        ("x:1-32x3", "x", ((1, 32), (3, 3))),
        ("input:0:5", "input:0", ((5, 5),)),
    ],
)
def test_a_shape_is_read(text: str, name: str, ranges: tuple[tuple[int, int], ...]) -> None:
    assert parse(text) == (name, ranges)


@pytest.mark.parametrize("text", ["", "x", "x:", ":1x2", "x:1x", "x:0x2", "x:3-2", "x:-1", "x:1,2", "x:1x2 "])
def test_what_is_no_shape_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(BadShape, match="write NAME:1-32x3x224x224"):
        parse(text)


def test_a_model_of_fixed_shapes_has_no_profile() -> None:
    assert profiles(graph(x=(1, 3)), (), 32) == ()


def test_the_leading_free_dimension_is_the_batch() -> None:
    assert profiles(graph(x=("n", 3)), (), 32) == (Profile({"x": ShapeRange((1, 3), (8, 3), (32, 3))}),)
    assert profiles(graph(x=("?", 3)), (), 4) == (Profile({"x": ShapeRange((1, 3), (4, 3), (4, 3))}),)


def test_what_is_said_goes_before_and_holds_for_all_dimensions_of_its_name() -> None:
    found = profiles(graph(x=("n", "length"), mask=("n", "length"), fixed=(2, 2)), ("x:2-4x10-20",), 32)
    same = ShapeRange((2, 10), (4, 20), (4, 20))
    assert found == (Profile({"x": same, "mask": same}),)


def test_an_input_whose_shape_nobody_knows_is_named() -> None:
    with pytest.raises(Rejected, match=r"input 'mask' is of shape \[n, \?\].*--shape 'mask:1-32xN'"):
        profiles(graph(x=("n", 3), mask=("n", "?")), (), 32)


def test_random_inputs_fit_the_model_and_index_no_table_out_of_bounds(tmp_path: Path) -> None:
    found = Graph((GraphTensor("ids", "INT64", ("n", "length")), GraphTensor("x", "FP16", (8, 2))), ())
    allowed = profiles(found, ("ids:1-8x5",), 32)
    data = samples.write(tmp_path / "random.npz", found, allowed)
    opened = DataSetFile(tmp_path / "random.npz", data.uri, found.inputs, allowed)
    batch = opened.head(8)
    assert batch["ids"].shape == (8, 5)
    assert set(np.unique(batch["ids"])) == {0, 1}
    assert batch["x"].dtype == np.float16
