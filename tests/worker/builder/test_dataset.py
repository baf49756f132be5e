"""Data sets: what fits, what does not, and rows that are streamed."""

from __future__ import annotations

import contextlib
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trtmodel_contract.gate import Task
from trtmodel_contract.identity import Profile, ShapeRange
from trtmodel_contract.jobs import Reason
from trtmodel_worker.builder.dataset import DataSetFile, calibration_batches
from trtmodel_worker.engines.building import Graph, GraphTensor, Rejected

X = GraphTensor("x", "FP32", ("n", 3))
Y = GraphTensor("y", "FP32", ("n", 5))


def ramp(rows: int, dtype: Any = np.float32) -> np.ndarray:
    return np.arange(rows * 3, dtype=dtype).reshape(rows, 3)


def opened(path: Path, *inputs: GraphTensor, profiles: tuple[Profile, ...] = (), **arrays: np.ndarray) -> DataSetFile:
    np.savez(path, **arrays)
    return DataSetFile(path, "s3://d/x.npz", inputs or (X,), profiles)


def refused(path: Path, *inputs: GraphTensor, **options: Any) -> str:
    with pytest.raises(Rejected) as e:
        opened(path, *inputs, **options)
    assert e.value.reason is Reason.DATASET_INVALID
    assert "s3://d/x.npz" in e.value.message
    return e.value.message


def test_rows_come_in_batches_in_order_with_their_labels(tmp_path: Path) -> None:
    data = opened(tmp_path / "d.npz", x=ramp(7), labels=np.arange(7))
    batches = list(data.batches(rows=3, samples=100))
    assert [len(batch["x"]) for batch, _ in batches] == [3, 3, 1]
    assert np.array_equal(np.concatenate([batch["x"] for batch, _ in batches]), ramp(7))
    assert [labels.tolist() for _, labels in batches if labels is not None] == [[0, 1, 2], [3, 4, 5], [6]]


def test_no_more_samples_are_read_than_asked_for(tmp_path: Path) -> None:
    data = opened(tmp_path / "d.npz", x=ramp(7))
    assert [len(batch["x"]) for batch, _ in data.batches(rows=2, samples=3)] == [2, 1]
    assert not data.labelled


def test_the_head_is_repeated_to_the_size_that_is_wanted(tmp_path: Path) -> None:
    data = opened(tmp_path / "d.npz", x=ramp(2))
    assert np.array_equal(data.head(5)["x"], ramp(2)[[0, 1, 0, 1, 0]])


@pytest.mark.parametrize(
    "array", [np.asfortranarray(ramp(5)), ramp(5, ">f4"), ramp(5, np.float64)], ids=["fortran", "big-endian", "wide"]
)
def test_A07_any_layout_of_the_same_values_gives_the_same_rows(tmp_path: Path, array: np.ndarray) -> None:
    data = opened(tmp_path / "d.npz", x=array)
    batches = [batch["x"] for batch, _ in data.batches(2, 5)]
    assert np.array_equal(np.concatenate(batches), ramp(5))
    assert all(b.dtype == np.float32 and b.dtype.isnative and b.flags.c_contiguous for b in batches)


def test_compressed_archives_are_read_too(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "d.npz", x=ramp(5))
    data = DataSetFile(tmp_path / "d.npz", "u", (X,), ())
    assert np.array_equal(data.head(5)["x"], ramp(5))


@pytest.mark.parametrize("name", ["input:0", "/a/b", 'a"b\\c', "имя 名", "labels"])
def test_A11_arrays_have_the_names_of_inputs_whatever_is_in_them(tmp_path: Path, name: str) -> None:
    data = opened(tmp_path / "d.npz", GraphTensor(name, "FP32", ("n", 3)), **{name: ramp(2)})
    assert np.array_equal(data.head(2)[name], ramp(2))
    assert not data.labelled


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"z": ramp(3)}, "lacks ['x']"),
        ({"x": ramp(3), "label": ramp(3)}, "unknown arrays ['label']"),
        ({"x": ramp(0)}, "no sample"),
        ({"x": np.ones((3, 4), np.float32)}, "[3, 4]"),
        ({"x": np.ones(3, np.float32)}, "[3]"),
        ({"x": ramp(3, np.int64)}, "int64"),
        ({"x": ramp(3), "labels": np.arange(2)}, "different numbers of samples"),
        ({"x": np.array([["a"] * 3])}, "no number"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, arrays: Any, words: str) -> None:
    assert words in refused(tmp_path / "d.npz", **arrays)


def sharded(folder: Path, *shards: dict[str, np.ndarray]) -> Path:
    for i, arrays in enumerate(shards):
        place = folder / f"part-{i}" / "x.npz"
        place.parent.mkdir()
        np.savez(place, **arrays)
    (folder / "README.md").write_text("about the data")
    return folder


def test_a_directory_is_read_file_by_file_and_batches_reach_over_their_ends(tmp_path: Path) -> None:
    whole, numbers = ramp(11), np.arange(11)
    parts = [slice(0, 3), slice(3, 3), slice(3, 10), slice(10, 11)]
    folder = sharded(tmp_path, *({"x": whole[part], "labels": numbers[part]} for part in parts))
    data = DataSetFile(folder, "u", (X,), ())
    assert (data.samples, data.labelled) == (11, True)
    batches = list(data.batches(4, 100))
    assert [len(batch["x"]) for batch, _ in batches] == [4, 4, 3]
    assert np.array_equal(np.concatenate([batch["x"] for batch, _ in batches]), whole)
    assert np.concatenate([labels for _, labels in batches if labels is not None]).tolist() == numbers.tolist()
    assert [len(batch["x"]) for batch, _ in data.batches(4, 5)] == [4, 1]


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"x": ramp(2)}, "part-1/x.npz: it and part-0/x.npz do not both have ['labels']"),
        ({"x": ramp(2), "labels": np.ones((2, 2))}, "array 'labels' has samples of shape [2], those in part-0/x.npz"),
        ({"x": np.ones((2, 4), np.float32), "labels": np.arange(2)}, "part-1/x.npz: array 'x' is of shape [2, 4]"),
        ({"z": ramp(2), "labels": np.arange(2)}, "part-1/x.npz: it lacks ['x']"),
    ],
)
def test_a_file_that_does_not_fit_the_others_is_refused_by_name(
    tmp_path: Path, second: dict[str, np.ndarray], words: str
) -> None:
    folder = sharded(tmp_path, {"x": ramp(2), "labels": np.arange(2)}, second)
    with pytest.raises(Rejected) as e:
        DataSetFile(folder, "s3://d/", (X,), ())
    assert e.value.reason is Reason.DATASET_INVALID
    assert words in e.value.message


def test_A27_a_directory_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match=r"without any \*\.npz"):
        DataSetFile(sharded(tmp_path), "s3://d/", (X,), ())


def test_chosen_samples_come_in_full_batches(tmp_path: Path) -> None:
    data = opened(tmp_path / "d.npz", x=ramp(9), labels=np.arange(9))
    found = [batch["x"] for batch in data.chosen([7, 0, 4, 40], 2)]
    assert np.array_equal(np.concatenate(found), ramp(9)[[0, 4, 7, 0]])


def test_a_model_of_one_batch_size_is_calibrated_in_full_batches_and_others_with_each_sample_once(
    tmp_path: Path,
) -> None:
    def rows(tensor: GraphTensor, samples: int) -> list[list[float]]:
        data = opened(tmp_path / "d.npz", tensor, x=ramp(7))
        return [batch["x"][:, 0].tolist() for batch in calibration_batches(data, 4, samples)]

    fixed = GraphTensor("x", "FP32", (4, 3))
    assert rows(fixed, 7) == [[0, 3, 6, 9], [12, 15, 18, 12]]
    assert rows(fixed, 4) == [[0, 3, 6, 9]]
    assert rows(fixed, 1) == [[0, 0, 0, 0]]
    assert rows(X, 7) == [[0, 3, 6, 9], [12, 15, 18]]


def test_a_shape_outside_of_every_profile_is_refused(tmp_path: Path) -> None:
    tensor = GraphTensor("x", "FP32", ("n", "length"))
    profile = Profile({"x": ShapeRange((1, 1), (1, 2), (1, 2))})
    assert "outside of every profile" in refused(tmp_path / "d.npz", tensor, profiles=(profile,), x=ramp(3))


def test_of_several_profiles_only_those_count_that_allow_the_data(tmp_path: Path) -> None:
    tensor = GraphTensor("x", "FP32", ("n", "length"))
    short = Profile({"x": ShapeRange((1, 1), (1, 4), (4, 4))})
    long = Profile({"x": ShapeRange((1, 5), (1, 8), (2, 8))})
    data = opened(tmp_path / "d.npz", tensor, profiles=(long, short), x=ramp(3))
    assert data.profiles == (short,)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_no_damage_makes_reading_fail_in_another_way(tmp_path: Path, save: Any) -> None:
    path = tmp_path / "d.npz"
    save(path, x=ramp(100), labels=np.arange(100))
    whole, chance = path.read_bytes(), random.Random(3)
    for _ in range(700):
        damaged = bytearray(whole)
        for _ in range(chance.choice((1, 2, 6))):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        path.write_bytes(damaged)
        with contextlib.suppress(Rejected):
            data = DataSetFile(path, "u", (X,), ())
            data.head(4)
            assert sum(len(batch["x"]) for batch, _ in data.batches(4, 100)) == data.samples


@pytest.mark.parametrize("shape", ["(-5, 3)", "(True, 3)", "()", "(" * 3000])
def test_a_header_that_makes_no_sense_is_refused(tmp_path: Path, shape: str) -> None:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(60))
    with pytest.raises(Rejected) as e:
        DataSetFile(tmp_path / "d.npz", "u", (X,), ()).head(4)
    assert e.value.reason is Reason.DATASET_INVALID


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.array([{"a": 1}], dtype=object))
    with pytest.raises(Rejected, match="no number"):
        DataSetFile(tmp_path / "d.npz", "u", (X,), ())


@pytest.mark.parametrize("content", [b"", b"<html>", b"PK\x03\x04 cut off"])
def test_a_file_that_is_no_npz_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "d.npz").write_bytes(content)
    with pytest.raises(Rejected, match="no npz"):
        DataSetFile(tmp_path / "d.npz", "u", (X,), ())


def test_numbers_beyond_the_inputs_type_are_refused_not_wrapped(tmp_path: Path) -> None:
    tensor = GraphTensor("x", "UINT8", ("n", 3))
    data = opened(tmp_path / "d.npz", tensor, x=np.array([[1, 2, 256]]))
    with pytest.raises(Rejected, match="256, beyond uint8"):
        list(data.batches(1, 1))


@pytest.mark.parametrize(
    ("task", "labels", "good"),
    [
        (Task.CLASSIFICATION, np.arange(2), True),
        (Task.CLASSIFICATION, np.ones(2, np.float32), False),
        (Task.CLASSIFICATION, np.ones((2, 5), np.int64), False),
        (Task.REGRESSION, np.ones((2, 5), np.float32), True),
        (Task.REGRESSION, np.ones((2, 4), np.float32), False),
    ],
)
def test_labels_must_be_what_the_task_compares_with(tmp_path: Path, task: Task, labels: Any, good: bool) -> None:
    data = opened(tmp_path / "d.npz", x=ramp(2), labels=labels)
    if good:
        data.check_labels(Graph((X,), (Y,)), task)
    else:
        with pytest.raises(Rejected, match="labels"):
            data.check_labels(Graph((X,), (Y,)), task)
