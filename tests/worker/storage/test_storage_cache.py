"""The disk of the cache: full, read-only, too small for everything."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from storage_servers import PART, Answer, Stub, objects
from trtmodel_contract.identity import Storage
from trtmodel_contract.jobs import Reason
from trtmodel_worker.alone.home import Home
from trtmodel_worker.storage import StorageError, cache, fetch_source, fetch_uri
from trtmodel_worker.storage.cache import shrink
from trtmodel_worker.storage.partial import Partial

NOWHERE = Storage("engines")
BIG = hashlib.sha256(b"cache").digest() * (5 << 18)  # 40 MB
OLD = 1_000_000_000


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=False, capture_output=True)
    if made.returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def cached(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / cache.FILES).iterdir())


def no_space(uri: str, folder: Path) -> StorageError:
    with pytest.raises(StorageError, match="ephemeral storage") as e:
        fetch_uri(uri, NOWHERE, None, folder)
    assert e.value.reason is Reason.NO_SPACE
    assert files(folder) == []
    return e.value


def test_what_does_not_fit_is_refused_before_it_is_read(stub: Stub, small: Path) -> None:
    stub.answer = objects(m=BIG)
    assert f"{len(BIG):,} bytes do not fit" in no_space(f"{stub.url}/m", small).message
    assert stub.spans == [""]


def test_a_disk_that_is_full_in_the_middle_is_its_own_reason_and_nothing_is_left(
    stub: Stub, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else may take the room that there was."""
    stub.answer = objects(m=BIG, whole=BIG[: 6 << 20])
    for module in (cache, __import__("trtmodel_worker.storage.download", fromlist=["download"])):
        monkeypatch.setattr(module, "require_room", lambda *_: None)
    assert "no space left" in no_space(f"{stub.url}/m", small).message
    assert "no space left" in no_space(f"{stub.url}/whole", small).message
    assert len(stub.spans) < 8


def test_a_source_that_does_not_fit_leaves_nothing(small: Path, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    for name, size in (("m.onnx", 1 << 20), ("a", 1 << 20), ("b", 4 << 20)):
        (tmp_path / "m" / name).write_bytes(b"\0" * size)
    with pytest.raises(StorageError, match="do not fit") as e:
        fetch_source(f"file://{tmp_path}/m/", NOWHERE, None, small)
    assert e.value.reason is Reason.NO_SPACE
    assert files(small) == []


@pytest.mark.usefixtures("small_parts")
def test_a_part_of_a_source_makes_room_when_the_rest_does_not_fit(
    stub: Stub, stub_storage: Storage, credentials: Path, small: Path
) -> None:
    stub.answer = objects(m_onnx=external("w"), w=BIG)
    with pytest.raises(StorageError, match="do not fit") as e:
        fetch_source("s3://models/m.onnx", stub_storage, credentials, small)
    assert e.value.reason is Reason.NO_SPACE
    assert files(small) == []
    stub.answer = objects(m_onnx=external("w"))
    with pytest.raises(StorageError, match="no such object"):
        fetch_source("s3://models/m.onnx", stub_storage, credentials, small)
    partial = next(p for p in (small / "partial").iterdir() if p.suffix != ".parts")
    assert files(small) == [f"partial/{partial.name}", f"partial/{partial.name}.parts"]


def external(name: str) -> bytes:
    """A model of some size whose weight lies in the file `name`."""
    made = onnx.ModelProto(doc_string="x" * (PART + 1))
    weight = made.graph.initializer.add(name="w", data_location=onnx.TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value=name)
    return made.SerializeToString()


def test_a_read_only_cache_is_named_with_the_way_out(small: Path, tmp_path: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    (tmp_path / "m").write_bytes(b"model")
    with pytest.raises(StorageError, match="cannot be written to: Read-only file system: mount a volume") as e:
        fetch_uri(f"file://{tmp_path}/m", NOWHERE, None, small)
    assert (e.value.reason, e.value.transient) == (Reason.NO_SPACE, True)


def test_a_cache_that_turns_read_only_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").write_bytes(b"model")

    def fails(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(StorageError, match="read-only") as e:
        fetch_uri(f"file://{tmp_path}/m", NOWHERE, None, tmp_path / "cache")
    assert e.value.reason is Reason.NO_SPACE
    assert files(tmp_path / "cache") == []


def entry(folder: Path, name: str, size: int, used: float) -> None:
    path = folder / "sha256" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\0" * size)
    os.utime(path, (used, used))


def test_a_cache_with_a_limit_loses_what_nobody_used_for_longest(tmp_path: Path) -> None:
    for n in range(5):
        entry(tmp_path, f"{n}", 100, OLD + n)
    source = tmp_path / "sources/5"
    source.mkdir(parents=True)
    (source / "w").write_bytes(b"\0" * 100)
    os.utime(source, (OLD - 1, OLD - 1))
    assert shrink(tmp_path, 350) == 300
    assert files(tmp_path) == ["sha256/2", "sha256/3", "sha256/4"]
    assert shrink(tmp_path, 350) == 0


def test_what_was_used_lately_is_not_taken_from_under_its_reader(tmp_path: Path) -> None:
    entry(tmp_path, "old", 100, OLD)
    (tmp_path / "m").write_bytes(b"model")
    digest = fetch_uri(f"file://{tmp_path}/m", NOWHERE, None, tmp_path).digest
    assert shrink(tmp_path, 0) == 100
    os.utime(tmp_path / "sha256" / digest, (OLD, OLD))
    fetch_uri(f"file://{tmp_path}/m", NOWHERE, None, tmp_path, digest)
    assert shrink(tmp_path, 0) == 0
    os.utime(tmp_path / "sha256" / digest, (OLD, OLD))
    assert shrink(tmp_path, 0) == 5


def test_without_a_cluster_the_limit_is_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path)
    for n in range(3):
        entry(home.files, f"{n}", 100, OLD + n)
    with home.in_use():
        assert len(files(home.files)) == 3
    monkeypatch.setenv("TRTMODEL_CACHE_BYTES", "150")
    with home.in_use():
        assert files(home.files) == ["sha256/2"]
    monkeypatch.setenv("TRTMODEL_CACHE_BYTES", "1Gi")
    with pytest.raises(StorageError, match="whole number of bytes"), home.in_use():
        pass


def test_what_dead_processes_left_goes_and_what_is_being_written_stays(tmp_path: Path) -> None:
    for folder in ("tmp", "partial"):
        (tmp_path / folder).mkdir()
        for name in ("fresh", "stale"):
            (tmp_path / folder / name).write_bytes(b"x" * 10)
    (tmp_path / "tmp/folder").mkdir()
    (tmp_path / "tmp/folder/file").write_bytes(b"x" * 10)
    for name in ("tmp/stale", "partial/stale", "tmp/folder"):
        os.utime(tmp_path / name, (OLD, OLD))
    assert shrink(tmp_path, 1 << 20) == 30
    assert files(tmp_path) == ["partial/fresh", "tmp/fresh"]


def test_a_partial_file_has_one_writer(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        first, second = (Partial(tmp_path, "name", 100) for _ in range(2))
        stack.callback(first.close)
        stack.callback(second.close)
        assert first.path == tmp_path / "name"
        assert second.path != first.path


def test_a_partial_file_that_was_just_moved_to_its_place_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before finishes between our opening and our locking."""
    real = fcntl.flock

    def flock(file: int, how: int) -> None:
        (tmp_path / "name").rename(tmp_path / "complete")
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    mine = Partial(tmp_path, "name", 100)
    mine.write(b"mine", 0)
    assert (tmp_path / "complete").read_bytes() == b""
    mine.discard()


@pytest.mark.usefixtures("small_parts")
def test_a_journal_that_lies_is_not_believed(tmp_path: Path) -> None:
    zeros = hashlib.sha256(b"\0" * PART).hexdigest()
    (tmp_path / "name.parts").write_text(f"0 {'f' * 64}\n1 {zeros}\n7 {zeros}\nrubbish\n1")
    partial = Partial(tmp_path, "name", 2 * PART + 1)
    assert partial.there == {1}
    partial.discard()
    assert files(tmp_path) == []


def test_an_empty_object_is_an_object(stub: Stub, tmp_path: Path) -> None:
    stub.answer = lambda *_: Answer(200, b"", {"ETag": '"1"', "Accept-Ranges": "bytes"})
    assert fetch_uri(f"{stub.url}/m", NOWHERE, None, tmp_path / "cache").size == 0
