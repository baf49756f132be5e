"""Artifacts: blobs, then the manifest; the highest unrevoked build wins; nothing is believed without its digest."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest
from trtmodel_contract import storelayout
from trtmodel_contract.codec import sha256_hex
from trtmodel_contract.gate import GateFigures, OutputFigures, Task
from trtmodel_contract.identity import LoadKey, Storage
from trtmodel_contract.jobs import Reason
from trtmodel_contract.manifest import Blob, Manifest, MemoryNeed
from trtmodel_worker.storage import ArtifactStore, NotFound, StorageError

KEY = LoadKey("ONNXRuntime", "1.32.0", "cpu-x86_64", "avx2")
REVISION = "0123456789"


def manifest(number: int = 1, key: LoadKey = KEY, created: str = "2026-01-01T00:00:00Z") -> Manifest:
    return Manifest(
        REVISION, key, number, "", {}, "0" * 64, Blob("1" * 64, 3), (), (), (), MemoryNeed(0, 1), (), {}, created
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "engines").mkdir()
    return tmp_path / "engines"


@pytest.fixture
def store(root: Path) -> ArtifactStore:
    return ArtifactStore(Storage("engines", endpoint=f"file://{root.parent}"), "ml", None)


def test_a_blob_comes_back_by_its_digest(store: ArtifactStore, tmp_path: Path) -> None:
    blob = store.put_bytes(b"plan")
    assert store.fetch_blob(blob.digest, blob.size, tmp_path / "cache").read_bytes() == b"plan"


def test_a_blob_whose_content_changed_is_refused(store: ArtifactStore, root: Path, tmp_path: Path) -> None:
    blob = store.put_bytes(b"plan")
    (root / f"trtmodel/ml/blobs/sha256/{blob.digest}").write_bytes(b"evil")
    with pytest.raises(StorageError) as e:
        store.fetch_blob(blob.digest, blob.size, tmp_path / "cache")
    assert e.value.reason is Reason.DIGEST_MISMATCH


@pytest.mark.parametrize("said", [4, 0])
def test_a_blob_that_grew_is_refused_before_it_fills_the_disk(
    store: ArtifactStore, root: Path, tmp_path: Path, said: int
) -> None:
    blob = store.put_bytes(b"plan")
    with (root / f"trtmodel/ml/blobs/sha256/{blob.digest}").open("wb") as f:
        f.truncate(1 << 26)
    with pytest.raises(StorageError, match="longer than the expected") as e:
        store.fetch_blob(blob.digest, said, tmp_path / "cache")
    assert e.value.reason is Reason.DIGEST_MISMATCH
    assert [p for p in (tmp_path / "cache").rglob("*") if p.is_file()] == []


def test_a_manifest_is_found_by_its_digest_and_by_its_load_key(store: ArtifactStore) -> None:
    digest, _ = store.commit(manifest())
    assert store.get_manifest(digest) == manifest()
    assert store.find(REVISION, KEY) == (digest, manifest())
    assert store.find(REVISION, LoadKey("ONNXRuntime", "1.32.0", "cpu-x86_64", "avx512")) is None


def test_a_manifest_whose_bytes_changed_is_refused(store: ArtifactStore, root: Path) -> None:
    digest, _ = store.commit(manifest())
    path = root / f"trtmodel/ml/blobs/sha256/{digest}"
    path.write_bytes(path.read_bytes().replace(b'"number":1', b'"number":2'))
    with pytest.raises(StorageError, match="somebody changed it"):
        store.get_manifest(digest)


def test_nothing_is_found_before_the_manifest_is_there(store: ArtifactStore) -> None:
    store.put_bytes(b"plan")
    assert list(store.current(REVISION)) == []
    assert store.look_up(REVISION, KEY).next_number == 1


def test_the_highest_unrevoked_build_wins(store: ArtifactStore, root: Path) -> None:
    for number in (1, 2, 10):
        store.commit(manifest(number))
    assert store.find(REVISION, KEY)[1].number == 10  # type: ignore[index]
    (root / storelayout.revoked_key("trtmodel/ml", REVISION, KEY, 10)).write_bytes(b"")
    assert store.find(REVISION, KEY)[1].number == 2  # type: ignore[index]
    assert store.look_up(REVISION, KEY).next_number == 11


def test_who_commits_second_gets_the_first_ones_manifest(store: ArtifactStore) -> None:
    first, second = manifest(created="2026-01-01T00:00:01Z"), manifest(created="2026-01-01T00:00:02Z")
    digest, _ = store.commit(first)
    assert store.commit(second) == (digest, first)


def test_of_many_that_commit_at_once_all_agree(store: ArtifactStore) -> None:
    found: list[str] = []
    barrier = threading.Barrier(8)

    def commit(n: int) -> None:
        barrier.wait()
        found.append(store.commit(manifest(created=f"2026-01-01T00:00:0{n}Z"))[0])

    threads = [threading.Thread(target=commit, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 8


def test_figures_are_kept_by_data_set_task_and_samples(store: ArtifactStore) -> None:
    output = OutputFigures(1.0, 1.0, 0.0, 0.0, 0, False)
    figures = GateFigures("2" * 64, "3" * 64, Task.RAW, 90, False, {"y": output})
    store.put_figures(figures, samples=100)
    assert store.get_figures("2" * 64, "3" * 64, Task.RAW, 100) == figures
    assert store.get_figures("2" * 64, "4" * 64, Task.RAW, 100) is None
    assert store.get_figures("2" * 64, "3" * 64, Task.RAW, 200) is None
    assert store.get_figures("2" * 64, "3" * 64, Task.EMBEDDING, 100) is None


def test_of_two_jobs_that_measure_the_same_the_first_ones_figures_count(store: ArtifactStore, root: Path) -> None:
    output = OutputFigures(1.0, 1.0, 0.0, 0.0, 0, False)
    first = GateFigures("2" * 64, "3" * 64, Task.RAW, 90, False, {"y": output})
    second = dataclasses.replace(first, outputs={"y": dataclasses.replace(output, max_abs=0.1)})
    assert store.put_figures(first, 100) == first
    assert store.put_figures(second, 100) == first
    (path,) = (root / "trtmodel/ml/gates").rglob("*.json")
    path.write_bytes(b"{}")
    assert store.put_figures(second, 100) == second
    assert store.get_figures("2" * 64, "3" * 64, Task.RAW, 100) == second


def test_namespaces_do_not_see_each_other(store: ArtifactStore, root: Path) -> None:
    digest, _ = store.commit(manifest())
    other = ArtifactStore(Storage("engines", endpoint=f"file://{root.parent}"), "other", None)
    with pytest.raises(NotFound):
        other.get_manifest(digest)
    assert list(other.current(REVISION)) == []


def test_a_missing_bucket_is_its_own_reason(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="create it") as e:
        ArtifactStore(Storage("absent", endpoint=f"file://{tmp_path}"), "ml", None)
    assert e.value.reason is Reason.BUCKET_NOT_FOUND


def test_a_manifest_of_another_schema_is_refused(store: ArtifactStore) -> None:
    blob = store.put_bytes(b'{"schema":"trtmodel.io/manifest/v9"}')
    with pytest.raises(StorageError, match="another version"):
        store.get_manifest(blob.digest)
    assert blob.digest == sha256_hex(b'{"schema":"trtmodel.io/manifest/v9"}')


def test_manifests_of_all_load_keys_are_listed(store: ArtifactStore) -> None:
    other = dataclasses.replace(KEY, capability="avx512")
    store.commit(manifest())
    store.commit(manifest(key=other))
    assert {found.load_key for _, found in store.current(REVISION)} == {KEY, other}
