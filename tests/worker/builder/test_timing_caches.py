"""Timing caches in the bucket: builders that run at once lose nothing of each other, and there are never many."""

from __future__ import annotations

from pathlib import Path

import pytest
from bucket_fill import keys, open_bucket
from trtmodel_contract.identity import LoadKey
from trtmodel_worker.builder import timing
from trtmodel_worker.storage import ArtifactStore

A10 = LoadKey("TensorRT", "10.16.0", "NVIDIA A10", "8.6")


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return open_bucket(tmp_path)


class Build:
    """A build whose builder knows a set of kernels: what it read and what it measured itself."""

    def __init__(self, store: ArtifactStore, work: Path, key: LoadKey = A10, driver: str = "570") -> None:
        self._at = (store, key, driver, work)
        self._folder = work / timing.FOLDER
        self._read = timing.fetch(*self._at)
        self.knows = {line for path in self._folder.glob("*.cache") for line in path.read_text().split()}

    def end(self, *measured: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / timing.BUILT).write_text("\n".join(sorted(self.knows | set(measured))))
        timing.publish(*self._at, self._read)


def test_a_build_starts_with_what_builds_before_it_measured(store: ArtifactStore, tmp_path: Path) -> None:
    Build(store, tmp_path / "1").end("a")
    Build(store, tmp_path / "2").end("b")
    assert Build(store, tmp_path / "3").knows == {"a", "b"}
    assert len(keys(store, "timing")) == 1


def test_builds_at_the_same_time_lose_nothing_of_each_other(store: ArtifactStore, tmp_path: Path) -> None:
    Build(store, tmp_path / "0").end("old")
    running = [Build(store, tmp_path / str(n)) for n in (1, 2, 3)]
    for number, build in enumerate(running):
        build.end(f"new{number}")
    assert len(keys(store, "timing")) == 3
    last = Build(store, tmp_path / "4")
    assert last.knows == {"old", "new0", "new1", "new2"}
    last.end()
    assert len(keys(store, "timing")) == 1


def test_a_build_that_measured_nothing_new_changes_nothing(store: ArtifactStore, tmp_path: Path) -> None:
    Build(store, tmp_path / "1").end("a")
    before = keys(store, "timing")
    Build(store, tmp_path / "2").end()
    assert keys(store, "timing") == before


def test_a_damaged_cache_is_left_out_and_goes(store: ArtifactStore, tmp_path: Path) -> None:
    Build(store, tmp_path / "1").end("a")
    (damaged,) = keys(store, "timing")
    (tmp_path / "engines" / store.root / damaged).write_text("evil")
    build = Build(store, tmp_path / "2")
    assert build.knows == set()
    build.end("b")
    assert Build(store, tmp_path / "3").knows == {"b"}
    assert damaged not in keys(store, "timing")


@pytest.mark.parametrize(
    "other",
    [
        (LoadKey("TensorRT", "10.16.1", "NVIDIA A10", "8.6"), "570"),
        (LoadKey("TensorRT", "10.16.0", "NVIDIA A100", "8.6"), "570"),
        (LoadKey("TensorRT", "10.16.0", "NVIDIA A10", "8.6", "1g.10gb"), "570"),
        (A10, "575"),
    ],
)
def test_another_version_device_or_driver_shares_nothing(
    store: ArtifactStore, tmp_path: Path, other: tuple[LoadKey, str]
) -> None:
    Build(store, tmp_path / "1").end("a")
    assert Build(store, tmp_path / "2", *other).knows == set()


def test_storage_that_fails_costs_a_slower_build_and_no_more(tmp_path: Path) -> None:
    store = open_bucket(tmp_path)
    (tmp_path / "engines").rmdir()
    (tmp_path / "engines").write_text("no directory")
    build = Build(store, tmp_path / "1")
    assert build.knows == set()
    build.end("a")
