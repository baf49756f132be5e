"""Copying an engine: the same digest on the other side, every byte verified, as often as one likes."""

from __future__ import annotations

from pathlib import Path

import pytest
from bucket_fill import KEY, figures, keys, open_bucket, plan_path, publish
from trtmodel_contract import storelayout as layout
from trtmodel_contract.gate import Task
from trtmodel_contract.jobs import Reason
from trtmodel_contract.keeping import Cause, Revocation
from trtmodel_worker.builder.copying import Copied, copy
from trtmodel_worker.engines.building import Rejected
from trtmodel_worker.storage import ArtifactStore, StorageError

REVISION = "0123456789"


@pytest.fixture
def staging(tmp_path: Path) -> ArtifactStore:
    return open_bucket(tmp_path, namespace="staging")


@pytest.fixture
def production(tmp_path: Path) -> ArtifactStore:
    return open_bucket(tmp_path, bucket="elsewhere", namespace="production")


def copied(source: ArtifactStore, destination: ArtifactStore, digest: str, folder: Path) -> Copied:
    return copy(source, destination, digest, folder / "cache", lambda _: None)


def test_a_copied_engine_is_found_by_the_jobs_of_the_other_side_with_its_figures(
    staging: ArtifactStore, production: ArtifactStore, tmp_path: Path
) -> None:
    digest = publish(staging)
    done = copied(staging, production, digest, tmp_path)
    assert (done.number, done.sent, done.figures) == (1, 3, 1)
    assert production.find(REVISION, KEY) == (digest, staging.get_manifest(digest))
    assert production.missing(digest, done.manifest) == ""
    assert production.get_figures(digest, "3" * 64, Task.RAW, 100) == figures(digest)
    assert keys(production) == keys(staging)
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_what_is_there_is_not_sent_again_and_stays_one_engine(
    staging: ArtifactStore, production: ArtifactStore, tmp_path: Path
) -> None:
    digest = publish(staging)
    copied(staging, production, digest, tmp_path)
    before = keys(production)
    again = copied(staging, production, digest, tmp_path)
    assert (again.number, again.sent, keys(production)) == (1, 0, before)


def test_a_damaged_copy_heals(staging: ArtifactStore, production: ArtifactStore, tmp_path: Path) -> None:
    digest = publish(staging, plan=b"plan")
    copied(staging, production, digest, tmp_path)
    plan_path(tmp_path, production, digest, "elsewhere").write_bytes(b"evil")
    assert copied(staging, production, digest, tmp_path).sent == 1
    assert plan_path(tmp_path, production, digest, "elsewhere").read_bytes() == b"plan"


def test_a_damaged_source_is_refused_before_the_other_side_sees_an_engine(
    staging: ArtifactStore, production: ArtifactStore, tmp_path: Path
) -> None:
    digest = publish(staging, plan=b"plan")
    plan_path(tmp_path, staging, digest).write_bytes(b"evil")
    with pytest.raises(StorageError) as e:
        copied(staging, production, digest, tmp_path)
    assert e.value.reason is Reason.DIGEST_MISMATCH
    assert production.builds(REVISION) == []


def test_a_copy_is_the_one_that_jobs_find_where_another_build_was_before(
    staging: ArtifactStore, production: ArtifactStore, tmp_path: Path
) -> None:
    publish(production, plan=b"their own")
    digest = publish(staging)
    assert copied(staging, production, digest, tmp_path).number == 2
    found = production.find(REVISION, KEY)
    assert found is not None
    assert found[0] == digest


def test_a_copy_that_lies_below_a_newer_build_becomes_the_one_that_jobs_find(
    staging: ArtifactStore, production: ArtifactStore, tmp_path: Path
) -> None:
    digest = publish(staging)
    copied(staging, production, digest, tmp_path)
    newer = publish(production, plan=b"their own")
    assert [copied(staging, production, digest, tmp_path).number for _ in range(2)] == [3, 3]
    assert production.find(REVISION, KEY) == (digest, staging.get_manifest(digest))
    production.revoke(REVISION, KEY, digest, Revocation(Cause.BY_HAND, "it is bad"))
    assert [build.revoked for build in production.builds(REVISION)] == [True, False, True]
    assert production.find(REVISION, KEY) == (newer, production.get_manifest(newer))


def test_a_copy_above_which_all_builds_are_revoked_stays_where_it_is(
    staging: ArtifactStore, production: ArtifactStore, tmp_path: Path
) -> None:
    digest = publish(staging)
    copied(staging, production, digest, tmp_path)
    newer = publish(production, plan=b"their own")
    production.revoke(REVISION, KEY, newer, Revocation(Cause.BY_HAND, "it is bad"))
    assert copied(staging, production, digest, tmp_path).number == 1


@pytest.mark.parametrize("where", ["source", "destination"])
def test_a_revoked_engine_is_not_copied(
    staging: ArtifactStore, production: ArtifactStore, tmp_path: Path, where: str
) -> None:
    digest = publish(staging)
    copied(staging, production, digest, tmp_path)
    side = staging if where == "source" else production
    side.revoke(REVISION, KEY, digest, Revocation(Cause.BY_HAND, "it is bad"))
    with pytest.raises(Rejected, match="revoked"):
        copied(staging, production, digest, tmp_path)


def test_an_engine_that_does_not_exist_is_said_to_be_missing(
    staging: ArtifactStore, production: ArtifactStore, tmp_path: Path
) -> None:
    with pytest.raises(StorageError, match="no such") as e:
        copied(staging, production, "a" * 64, tmp_path)
    assert e.value.reason is Reason.SOURCE_NOT_FOUND


def test_what_strangers_put_among_the_figures_neither_ends_the_copy_nor_leaves_its_place(
    staging: ArtifactStore, production: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = publish(staging)
    prefix = layout.gates_prefix(staging.root, digest)
    strange = [b"[" * 100_000, b'{"digest": 5, "size": "x"}', b'{"digest": "../../up", "size": 1}', b"\xff"]
    for number, data in enumerate(strange):
        staging.objects.put(f"{prefix}{number}.json", data)
    listed = [*staging.objects.list(prefix), f"{prefix}../../../outside.json"]
    monkeypatch.setattr(staging.objects, "list", lambda key: iter(listed if key == prefix else ()))
    staging.objects.put(f"{prefix}../../../outside.json", b"{}")
    done = copied(staging, production, digest, tmp_path)
    assert (done.sent, done.figures) == (3, 1 + len(strange))
    assert not any(key.endswith("outside.json") for key in production.objects.list(""))
