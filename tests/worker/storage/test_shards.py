"""A folder of data files as one data set: its identity, its order, and what is refused."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from trtmodel_contract.identity import Storage
from trtmodel_contract.jobs import CalibrationRequest, DataSet
from trtmodel_worker.builder.dataset import DataSetFile
from trtmodel_worker.builder.sources import Place
from trtmodel_worker.engines.building import GraphTensor
from trtmodel_worker.storage import Fetched, NotFound
from trtmodel_worker.storage.shards import fetch_folder

X = GraphTensor("x", "FP32", ("n", 1))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    for i, name in enumerate(("b.npz", "a/z.npz", "a é+#.npz")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        np.savez(folder / name, x=np.full((2, 1), i, np.float32))
    (folder / "notes.txt").write_text("not data")
    return folder


def fetched(data: Path, cache: Path) -> Fetched:
    return fetch_folder(f"file://{data}/", Storage("b"), None, cache, ".npz")


def test_a_folder_is_fetched_as_one_data_set_in_the_order_of_the_names(data: Path, tmp_path: Path) -> None:
    found = fetched(data, tmp_path / "cache")
    assert sorted(str(p.relative_to(found.path)) for p in found.path.rglob("*.npz")) == [
        "a é+#.npz",
        "a/z.npz",
        "b.npz",
    ]
    opened = DataSetFile(found.path, "u", (X,), ())
    assert [batch["x"].ravel().tolist() for batch, _ in opened.batches(6, 100)] == [[2, 2, 1, 1, 0, 0]]


def test_its_identity_is_that_of_names_and_contents(data: Path, tmp_path: Path) -> None:
    first = fetched(data, tmp_path / "cache").digest
    os.utime(data / "b.npz", (1, 1))
    (data / "notes.txt").write_text("other notes")
    assert fetched(data, tmp_path / "other").digest == first
    (data / "b.npz").rename(data / "c.npz")
    renamed = fetched(data, tmp_path / "cache").digest
    np.savez(data / "c.npz", x=np.full((2, 1), 9, np.float32))
    assert len({first, renamed, fetched(data, tmp_path / "cache").digest}) == 3


def test_what_was_damaged_in_the_cache_is_replaced(data: Path, tmp_path: Path) -> None:
    found = fetched(data, tmp_path / "cache")
    (found.path / "b.npz").unlink()
    (found.path / "b.npz").write_bytes(b"damaged")
    again = fetched(data, tmp_path / "cache")
    assert again == found
    assert DataSetFile(again.path, "u", (X,), ()).samples == 6


def test_jobs_take_a_folder_where_the_uri_ends_in_a_slash(data: Path, tmp_path: Path) -> None:
    place = Place(Storage("b"), None, tmp_path / "cache")
    whole = place.dataset(DataSet(f"file://{data}/", 100))
    one = place.calibration(CalibrationRequest(DataSet(f"file://{data}/b.npz", 100)))
    assert (whole.path.is_dir(), one.path.is_dir()) == (True, False)
    with pytest.raises(NotFound) as e:
        place.dataset(DataSet(f"file://{tmp_path}/nothing/", 100))
    assert e.value.message.startswith("verify.dataset: ")


def test_a_folder_without_data_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not data")
    with pytest.raises(NotFound, match=r"no \.npz file below it"):
        fetch_folder(f"file://{tmp_path}/", Storage("b"), None, tmp_path / "cache", ".npz")


def test_many_that_fetch_one_folder_into_one_cache_never_miss_it(data: Path, tmp_path: Path) -> None:
    whole = fetched(data, tmp_path / "cache")
    inode = whole.path.stat().st_ino

    def fetch_often(_: int) -> None:
        for _ in range(15):
            found = fetched(data, tmp_path / "cache")
            assert DataSetFile(found.path, "u", (X,), ()).samples == 6

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fetch_often, range(4)))
    assert whole.path.stat().st_ino == inode  # what others read by its path is not taken away
