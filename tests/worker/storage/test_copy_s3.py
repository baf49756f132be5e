"""`trtmodel cache copy` between two buckets of a real S3 server, as a user types it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from bucket_fill import KEY, keys, publish
from storage_servers import Gateway
from trtmodel_contract.exitcodes import JobExit
from trtmodel_contract.gate import Task
from trtmodel_worker.alone.main import main
from trtmodel_worker.storage import ArtifactStore, s3

pytestmark = pytest.mark.long

PLAN = bytes(range(256)) * 4096


@pytest.fixture(autouse=True)
def _handler_of_sigterm() -> Iterator[None]:
    """The command sets its own."""
    former = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, former)


def copied(gateway: Gateway, credentials: Path, tmp_path: Path, digest: str) -> int:
    return main(
        [
            *("cache", "copy", digest, "s3://engines/trtmodel/staging", "s3://models/trtmodel/released"),
            *("--from-endpoint", gateway.endpoint, "--from-credentials", str(credentials)),
            *("--to-endpoint", gateway.endpoint, "--to-credentials", str(credentials)),
            *("--cache", str(tmp_path / "home")),
        ]
    )


def test_an_engine_is_copied_with_its_proof_and_a_copy_that_was_cut_off_is_made_whole(
    gateway: Gateway,
    credentials: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    staging = ArtifactStore(gateway.storage("engines"), "staging", credentials)
    released = ArtifactStore(gateway.storage("models"), "released", credentials)
    digest = publish(staging, plan=PLAN)
    with monkeypatch.context() as patch:
        patch.setattr(s3.S3Store, "put_new", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert copied(gateway, credentials, tmp_path, digest) == 130
    assert released.find("0123456789", KEY) is None, "without its manifest nobody finds it"
    capsys.readouterr()
    assert copied(gateway, credentials, tmp_path, digest) == JobExit.DONE
    assert "is number 1 there: 0 files of 0 bytes sent, figures: 1" in capsys.readouterr().out
    found = released.find("0123456789", KEY)
    assert found is not None
    assert found[0] == digest
    plan = released.fetch_blob(found[1].plan.digest, len(PLAN), tmp_path / "cache")
    assert plan.read_bytes() == PLAN
    assert released.get_figures(digest, "3" * 64, Task.RAW, 100) == staging.get_figures(digest, "3" * 64, Task.RAW, 100)
    assert keys(released, "gates") == keys(staging, "gates")


def test_damaged_bytes_do_not_arrive(
    gateway: Gateway, credentials: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    staging = ArtifactStore(gateway.storage("engines"), "staging", credentials)
    released = ArtifactStore(gateway.storage("models"), "released", credentials)
    digest = publish(staging, "9999999999", plan=b"another plan")
    manifest = staging.get_manifest(digest)
    staging.objects.put(f"{staging.root}/blobs/sha256/{manifest.plan.digest}", b"another plam")
    assert copied(gateway, credentials, tmp_path, digest) == 1
    assert "sha256" in capsys.readouterr().err
    assert released.find("9999999999", KEY) is None
