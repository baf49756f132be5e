"""What a build Job does with an engine that it finds: it pins and reads it, and revokes it only for wrong bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from bucket_fill import MODEL, keys, open_bucket, plan_path, publish, revoked
from trtmodel_contract.codec import loads, sha256_hex
from trtmodel_contract.gate import Task, Thresholds
from trtmodel_contract.identity import EngineSettings, Storage
from trtmodel_contract.jobs import BuildTask, DataSet, Reason
from trtmodel_contract.keeping import Cause, Pin, Revocation
from trtmodel_contract.storelayout import blob_key
from trtmodel_worker.builder import publish as publisher
from trtmodel_worker.builder.build import Ended, build
from trtmodel_worker.builder.sources import Place
from trtmodel_worker.builder.stages import Answer, GoldenAnswer
from trtmodel_worker.engines.building import Graph
from trtmodel_worker.engines.registry import runtime
from trtmodel_worker.storage import ArtifactStore, StorageError
from trtmodel_worker.storage.backends import DirectoryStore

KEY = runtime("ONNXRuntime").load_key()
REVISION = "0123456789"


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return open_bucket(tmp_path)


def build_task(folder: Path) -> BuildTask:
    """Without a source: whoever has to build fails."""
    storage = Storage("engines", endpoint=f"file://{folder}")
    return BuildTask(
        model=MODEL,
        source_uri="file:///absent/model.onnx",
        source_sha256="0" * 64,
        revision=REVISION,
        storage=storage,
        engine=EngineSettings("ONNXRuntime"),
        calibration=None,
        dataset=DataSet("file:///absent.npz", 100, "3" * 64),
        verify_task=Task.RAW,
        thresholds=Thresholds(),
        cluster="c-1",
    )


def run(folder: Path) -> Ended:
    task = build_task(folder)
    work = folder / f"work-{len(list(folder.glob('work-*')))}"
    work.mkdir()
    return build(task, Place(task.storage, None, folder / "cache"), work, lambda _: None)


def marker(store: ArtifactStore) -> Revocation:
    (key,) = (key for key in store.objects.list(f"{store.root}/engines") if key.endswith("revoked"))
    return loads(Revocation, store.read(key))


def test_an_engine_with_figures_is_pinned_and_needs_neither_source_nor_data(
    store: ArtifactStore, tmp_path: Path
) -> None:
    digest = publish(store, key=KEY)
    ended = run(tmp_path)
    assert (ended.result.reused, ended.result.artifact.manifest_digest) == (True, digest)
    (pin,) = store.objects.list(f"{store.root}/pins/c-1/{MODEL.uid}/")
    assert loads(Pin, store.read(pin)) == Pin(MODEL, (digest,))


@pytest.mark.parametrize("content", [b"evil", b"longer than it was", None])
def test_one_whose_plan_is_not_what_the_manifest_says_is_revoked_and_not_used(
    store: ArtifactStore, tmp_path: Path, content: bytes | None
) -> None:
    plan = plan_path(tmp_path, store, publish(store, key=KEY))
    plan.write_bytes(content) if content is not None else plan.unlink()
    with pytest.raises(StorageError, match="absent/model"):
        run(tmp_path)
    assert revoked(store) == [True]
    assert marker(store).cause is Cause.DAMAGED
    assert store.look_up(REVISION, KEY).next_number == 2


def test_wrong_bytes_that_are_right_the_next_time_revoke_nothing(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = publish(store, key=KEY)
    real, asked = ArtifactStore.fetch_blob, set[str]()

    def flaky(self: ArtifactStore, wanted: str, size: int, folder: Path) -> Path:
        if wanted not in asked:
            asked.add(wanted)
            raise StorageError(Reason.DIGEST_MISMATCH, "a bit was flipped on the way")
        return real(self, wanted, size, folder)

    monkeypatch.setattr(ArtifactStore, "fetch_blob", flaky)
    assert run(tmp_path).result.artifact.manifest_digest == digest
    assert revoked(store) == [False]


def test_storage_that_fails_while_an_engine_is_read_revokes_nothing(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, key=KEY)

    def down(*_: object) -> Path:
        raise StorageError(Reason.STORAGE_UNAVAILABLE, "503", transient=True)

    monkeypatch.setattr(ArtifactStore, "fetch_blob", down)
    with pytest.raises(StorageError, match="503"):
        run(tmp_path)
    assert revoked(store) == [False]


def test_a_manifest_that_this_version_cannot_read_is_passed_over(store: ArtifactStore, tmp_path: Path) -> None:
    digest, other = publish(store, key=KEY), publish(store, key=KEY, plan=b"newer")
    (path,) = tmp_path.glob("engines/**/2/manifest.json")
    path.write_text('{"schema":"trtmodel.io/manifest/v9"}')
    assert run(tmp_path).result.artifact.manifest_digest == digest
    assert store.look_up(REVISION, KEY).next_number == 3
    assert other in "".join(keys(store))


def test_an_engine_that_was_revoked_by_hand_is_not_found_though_it_is_whole(
    store: ArtifactStore, tmp_path: Path
) -> None:
    first = publish(store, key=KEY)
    second = publish(store, key=KEY, plan=b"second")
    store.revoke(REVISION, KEY, second, Revocation(Cause.BY_HAND, "wrong answers"))
    assert run(tmp_path).result.artifact.manifest_digest == first
    assert dataclasses.asdict(marker(store))["message"] == "wrong answers"


@pytest.mark.parametrize("lost", ["plan", "golden", "manifest"])
def test_what_a_collector_removes_while_a_job_publishes_the_same_bytes_is_written_again(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """It saw an old blob that nobody names, the Job wrote it anew, it removed it, and the Job commits."""
    for name in ("plan", "golden"):
        (tmp_path / name).write_bytes(name.encode())
    put_new = type(store.objects).put_new

    def removed(self: DirectoryStore, key: str, data: bytes) -> bool:
        content = data if lost == "manifest" else lost.encode()
        self.delete(blob_key(store.root, sha256_hex(content)))
        return put_new(self, key, data)

    monkeypatch.setattr(DirectoryStore, "put_new", removed)
    proof = Answer(golden=(GoldenAnswer("golden", 1, {"y": 0.1}),), host_bytes=1)
    plan = tmp_path / "plan"
    published = publisher.publish(store, build_task(tmp_path), KEY, 1, "", Graph((), ()), plan, {}, proof)
    assert published is not None
    assert store.missing(*published) == ""
    assert store.find(REVISION, KEY) == published
