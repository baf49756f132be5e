"""Fetching: identity is the content, never a length, a time or an ETag."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from storage_servers import Answer, Stub
from trtmodel_contract.identity import Storage
from trtmodel_contract.jobs import Reason
from trtmodel_worker.storage import NotFound, StorageError, fetch_uri, prune
from trtmodel_worker.storage import cache as local

CONTENT = b"model bytes" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()
NOWHERE = Storage("engines")


def test_a_file_is_kept_under_its_digest(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(CONTENT)
    found = fetch_uri(f"file://{tmp_path}/model.onnx", NOWHERE, None, tmp_path / "cache")
    assert (found.digest, found.size, found.path.read_bytes()) == (DIGEST, len(CONTENT), CONTENT)
    assert list((tmp_path / "cache/tmp").iterdir()) == []


@pytest.mark.parametrize("name", ["a b+c#1/é.onnx", "x%20y.onnx", "a//b.onnx", "q?x=1&y", "..%2f..", "имя 名.onnx"])
def test_D10_odd_characters_in_a_path_mean_themselves(tmp_path: Path, name: str) -> None:
    path = tmp_path / "files" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    found = fetch_uri(f"file://{tmp_path}/files/{name}", NOWHERE, None, tmp_path / "cache")
    assert found.digest == DIGEST
    assert found.path == tmp_path / "cache/sha256" / DIGEST


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("s3://bucket/folder/", "folder"),
        ("s3://bucket", "s3://<bucket>/<key>"),
        ("model.onnx", "must start with"),
        ("ftp://host/model.onnx", "must start with"),
        ("file://relative/model.onnx", "absolute"),
    ],
)
def test_a_uri_that_names_no_file_is_refused_with_the_way_out(tmp_path: Path, uri: str, words: str) -> None:
    with pytest.raises(StorageError, match=words) as e:
        fetch_uri(uri, NOWHERE, None, tmp_path)
    assert e.value.reason is Reason.SOURCE_NOT_FOUND
    assert not e.value.transient


def test_D07_only_a_changed_content_changes_the_identity(tmp_path: Path, stub: Stub) -> None:
    etag = iter(['"d41d8cd98f00b204e9800998ecf8427e-4"', '"kms-random"', '"another"'])
    body = [CONTENT, CONTENT, CONTENT + b"!"]
    stub.answer = lambda *_: Answer(200, body.pop(0), {"ETag": next(etag)})
    digests = [fetch_uri(f"{stub.url}/m.onnx", NOWHERE, None, tmp_path / "cache").digest for _ in range(3)]
    assert digests[0] == digests[1] == DIGEST
    assert digests[2] == hashlib.sha256(CONTENT + b"!").hexdigest()


def test_a_body_that_ends_early_is_fetched_again(tmp_path: Path, stub: Stub) -> None:
    answers = [Answer(200, CONTENT, cut=100), Answer(503), Answer(200, CONTENT)]
    stub.answer = lambda *_: answers.pop(0)
    assert fetch_uri(f"{stub.url}/m.onnx", NOWHERE, None, tmp_path / "cache").digest == DIGEST
    assert not answers


def test_a_server_that_stays_broken_ends_in_a_transient_error(tmp_path: Path, stub: Stub) -> None:
    stub.answer = lambda *_: Answer(200, CONTENT, cut=1)
    with pytest.raises(StorageError, match="1 bytes early") as e:
        fetch_uri(f"{stub.url}/m.onnx", NOWHERE, None, tmp_path / "cache")
    assert e.value.reason is Reason.STORAGE_UNAVAILABLE
    assert e.value.transient
    assert list((tmp_path / "cache/sha256").iterdir()) == []


@pytest.mark.parametrize(
    ("status", "reason", "tries"),
    [
        (404, Reason.SOURCE_NOT_FOUND, 1),
        (403, Reason.ACCESS_DENIED, 1),
        (400, Reason.SOURCE_NOT_FOUND, 1),
        (500, Reason.STORAGE_UNAVAILABLE, 3),
    ],
)
def test_http_statuses_become_reasons(tmp_path: Path, stub: Stub, status: int, reason: Reason, tries: int) -> None:
    stub.answer = lambda *_: Answer(status)
    with pytest.raises(StorageError) as e:
        fetch_uri(f"{stub.url}/m.onnx", NOWHERE, None, tmp_path / "cache")
    assert e.value.reason is reason
    assert len(stub.requests) == tries


def test_other_content_than_expected_is_refused_and_not_kept(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"other")
    with pytest.raises(StorageError, match=DIGEST) as e:
        fetch_uri(f"file://{tmp_path}/m.onnx", NOWHERE, None, tmp_path / "cache", DIGEST)
    assert e.value.reason is Reason.DIGEST_MISMATCH
    assert list((tmp_path / "cache/sha256").iterdir()) == []


def test_a_cached_file_is_used_without_asking_the_storage(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(CONTENT)
    uri = f"file://{tmp_path}/m.onnx"
    fetch_uri(uri, NOWHERE, None, tmp_path / "cache")
    (tmp_path / "m.onnx").unlink()
    assert fetch_uri(uri, NOWHERE, None, tmp_path / "cache", DIGEST).size == len(CONTENT)
    with pytest.raises(NotFound):
        fetch_uri(uri, NOWHERE, None, tmp_path / "cache")


def test_a_damaged_cached_file_is_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(CONTENT)
    found = fetch_uri(f"file://{tmp_path}/m.onnx", NOWHERE, None, tmp_path / "cache")
    found.path.write_bytes(CONTENT[:-1] + b"?")
    again = fetch_uri(f"file://{tmp_path}/m.onnx", NOWHERE, None, tmp_path / "cache", DIGEST)
    assert again.path.read_bytes() == CONTENT


def test_a_cached_file_that_cannot_be_read_is_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(CONTENT)
    found = fetch_uri(f"file://{tmp_path}/m.onnx", NOWHERE, None, tmp_path / "cache")
    found.path.unlink()
    found.path.symlink_to(found.path)
    again = fetch_uri(f"file://{tmp_path}/m.onnx", NOWHERE, None, tmp_path / "cache", DIGEST)
    assert again.path.read_bytes() == CONTENT


def test_pruning_keeps_what_is_named_and_what_is_being_written(tmp_path: Path) -> None:
    for content in (b"1", b"2"):
        (tmp_path / "m").write_bytes(content)
        fetch_uri(f"file://{tmp_path}/m", NOWHERE, None, tmp_path / "cache")
    kept = hashlib.sha256(b"2").hexdigest()
    (tmp_path / "cache/tmp/fresh").write_bytes(b"x")
    (tmp_path / "cache/tmp/stale").write_bytes(b"x")
    os.utime(tmp_path / "cache/tmp/stale", (1, 1))
    assert prune(tmp_path / "cache", {kept}) == 2
    assert [p.name for p in (tmp_path / "cache/sha256").iterdir()] == [kept]
    assert [p.name for p in (tmp_path / "cache/tmp").iterdir()] == ["fresh"]
    assert local.lookup(tmp_path / "cache", kept) is not None
