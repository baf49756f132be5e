"""The commands that keep a bucket in order, as a user types them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from bucket_fill import MODEL, age, keys, open_bucket, publish, revoked
from trtmodel_contract.exitcodes import JobExit
from trtmodel_worker.alone.artifacts import open_at
from trtmodel_worker.alone.main import main
from trtmodel_worker.builder import pins
from trtmodel_worker.storage import ArtifactStore, StorageError


@pytest.fixture(autouse=True)
def _handler_of_sigterm() -> Iterator[None]:
    """The command sets its own."""
    former = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, former)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return open_bucket(tmp_path)


@pytest.fixture
def where(tmp_path: Path, store: ArtifactStore) -> str:
    """The namespace's directory, as a URI."""
    folder = tmp_path / "engines" / store.root
    folder.mkdir(parents=True, exist_ok=True)
    return f"file://{folder}"


def trtmodel(tmp_path: Path, *arguments: str) -> int:
    return main(["cache", *arguments, "--cache", str(tmp_path / "home")])


def test_engines_are_listed_with_the_digest_that_the_other_commands_take(
    store: ArtifactStore, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = publish(store), publish(store, plan=b"longer plan")
    assert trtmodel(tmp_path, "revoke", where, first, "--reason", "bad") == JobExit.DONE
    capsys.readouterr()
    assert trtmodel(tmp_path, "list", where) == JobExit.DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"{first} 0123456789 test-1-cpu 1 2026-01-01T00:00:00Z 4 bytes revoked",
        f"{second} 0123456789 test-1-cpu 2 2026-01-01T00:00:00Z 11 bytes",
    ]


def test_an_engine_is_copied_to_another_namespace(
    store: ArtifactStore, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = publish(store)
    other = tmp_path / "engines/trtmodel/production"
    other.mkdir()
    assert trtmodel(tmp_path, "copy", digest, where, str(other)) == JobExit.DONE
    assert "number 1 there: 3 files" in capsys.readouterr().out
    assert keys(open_bucket(tmp_path, namespace="production")) == keys(store)
    assert list((tmp_path / "home").glob("work-*")) == []


def test_revoking_twice_says_so_and_an_unknown_digest_is_an_error(
    store: ArtifactStore, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = publish(store)
    assert trtmodel(tmp_path, "revoke", where, digest, "--reason", "bad") == 0
    assert trtmodel(tmp_path, "revoke", where, digest, "--reason", "bad") == 0
    assert "was revoked before" in capsys.readouterr().out
    assert revoked(store) == [True]
    assert trtmodel(tmp_path, "revoke", where, "a" * 64, "--reason", "bad") == 1
    assert "no engine with the digest" in capsys.readouterr().err


def test_collecting_shows_first_and_removes_only_when_told(
    store: ArtifactStore, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, _ = publish(store, "1111111111", b"one"), publish(store, "2222222222", b"two")
    age(tmp_path)
    assert trtmodel(tmp_path, "collect", where) == JobExit.REJECTED
    assert "--without-pins" in capsys.readouterr().err
    pins.pin(store, "c", MODEL, [kept])
    assert trtmodel(tmp_path, "collect", where) == 0
    assert "nothing pins it" in capsys.readouterr().out
    assert revoked(store, "2222222222") == [False]
    assert trtmodel(tmp_path, "collect", where, "--delete") == 0
    assert "out of use: engines 1; they go in a run that is 5 minutes later" in capsys.readouterr().out
    assert (revoked(store, "1111111111"), revoked(store, "2222222222")) == ([False], [True])


@pytest.mark.parametrize("where", ["s3://", "s3://engines", "/absent/dir/x/y", "s3://engines/a b/ml"])
def test_a_place_that_is_none_is_refused_with_its_form(where: str) -> None:
    with pytest.raises(StorageError) as e:
        open_at(where, "", "", "")
    assert where in e.value.message


def test_a_place_in_s3_is_bucket_prefix_and_namespace() -> None:
    store = open_at("s3://engines/deep/prefix/ml/", "http://127.0.0.1:1", "", "")
    assert (store.root, store.objects.where("k")) == ("deep/prefix/ml", "s3://engines/k")


@pytest.mark.parametrize("grace", ["1", "2w", "-1d", ""])
def test_a_grace_that_is_no_time_is_refused(where: str, tmp_path: Path, grace: str) -> None:
    with pytest.raises(SystemExit):
        trtmodel(tmp_path, "collect", where, f"--grace={grace}")


def test_an_engine_that_was_revoked_is_not_copied_and_no_retry_is_called_for(
    store: ArtifactStore, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = publish(store)
    target = tmp_path / "engines" / "trtmodel" / "production"
    target.mkdir(parents=True)
    assert trtmodel(tmp_path, "revoke", where, digest, "--reason", "bad") == JobExit.DONE
    assert trtmodel(tmp_path, "copy", digest, where, str(target)) == JobExit.REJECTED
    assert "is revoked: it may not be used any more" in capsys.readouterr().err
    assert not list(target.rglob("manifest.json"))
