"""The same against a real S3 server."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import numpy as np
import onnx_models as models
import pytest
from boto3.s3.transfer import TransferConfig
from job_harness import Jobs, profiles
from storage_servers import Gateway
from test_artifacts import KEY, REVISION, manifest
from trtmodel_contract.gate import Task
from trtmodel_contract.identity import EngineSettings
from trtmodel_contract.jobs import DataSet, Reason
from trtmodel_worker.storage import ArtifactStore, NotFound, StorageError, fetch_uri

pytestmark = pytest.mark.long


def test_D07_the_same_content_has_one_identity_however_it_was_uploaded(
    gateway: Gateway, credentials: Path, tmp_path: Path
) -> None:
    content = bytes(range(256)) * (20 << 12)
    (tmp_path / "model").write_bytes(content)
    client = gateway.client()
    etags, digests = set(), set()
    for name, part in (("single", 64 << 20), ("five", 5 << 20), ("eight", 8 << 20)):
        config = TransferConfig(multipart_threshold=part, multipart_chunksize=part, use_threads=False)
        client.upload_file(str(tmp_path / "model"), "models", name, Config=config)  # type: ignore[attr-defined]
        etags.add(client.head_object(Bucket="models", Key=name)["ETag"])  # type: ignore[attr-defined]
        digests.add(fetch_uri(f"s3://models/{name}", gateway.storage(), credentials, tmp_path / name).digest)
    assert len(etags) == 3
    assert digests == {hashlib.sha256(content).hexdigest()}


@pytest.mark.parametrize("key", ["models/a b+c#1/é.onnx", "x%20y.onnx", "q?x=1&y.onnx", "k" * 200])
def test_D10_odd_keys_round_trip(gateway: Gateway, credentials: Path, tmp_path: Path, key: str) -> None:
    gateway.client().put_object(Bucket="models", Key=key, Body=key.encode())
    found = fetch_uri(f"s3://models/{key}", gateway.storage(), credentials, tmp_path / "cache")
    assert found.path.read_bytes() == key.encode()
    assert found.path.parent == tmp_path / "cache/sha256"


@pytest.mark.parametrize("key", ["../../etc/x", "a//b.onnx", "k" * 1100])
def test_D10_keys_that_this_store_cannot_hold_are_refused_clearly(
    gateway: Gateway, credentials: Path, tmp_path: Path, key: str
) -> None:
    with pytest.raises(StorageError, match="s3://models/"):
        fetch_uri(f"s3://models/{key}", gateway.storage(), credentials, tmp_path / "cache")
    assert not (tmp_path / "cache/sha256").exists() or not list((tmp_path / "cache/sha256").iterdir())


def test_D09_a_prefix_is_not_an_object(gateway: Gateway, credentials: Path, tmp_path: Path) -> None:
    client = gateway.client()
    for key in ("m/churn-logs", "m/churn-report", "lab/model.onnx", "lab-hf/model.onnx"):
        client.put_object(Bucket="models", Key=key, Body=key.encode())
    for uri in ("s3://models/m/churn", "s3://models/lab", "s3://models/lab/"):
        with pytest.raises(StorageError) as e:
            fetch_uri(uri, gateway.storage(), credentials, tmp_path / "cache")
        assert e.value.reason is Reason.SOURCE_NOT_FOUND


def test_missing_object_missing_bucket_and_wrong_keys_are_told_apart(
    gateway: Gateway, credentials: Path, tmp_path: Path
) -> None:
    def reason(uri: str) -> Reason:
        with pytest.raises(StorageError) as e:
            fetch_uri(uri, gateway.storage(), credentials, tmp_path / "cache")
        return e.value.reason

    assert reason("s3://models/absent") is Reason.SOURCE_NOT_FOUND
    assert reason("s3://no-such-bucket/m") is Reason.BUCKET_NOT_FOUND
    (credentials / "AWS_SECRET_ACCESS_KEY").write_text("wrong")
    assert reason("s3://models/absent") is Reason.ACCESS_DENIED


def test_an_artifact_round_trips_and_the_first_commit_wins(gateway: Gateway, credentials: Path, tmp_path: Path) -> None:
    store = ArtifactStore(gateway.storage(), "round-trip", credentials)
    blob = store.put_bytes(b"plan" * 100_000)
    assert store.fetch_blob(blob.digest, blob.size, tmp_path / "cache").stat().st_size == blob.size
    found: list[str] = []
    barrier = threading.Barrier(6)

    def commit(n: int) -> None:
        mine = ArtifactStore(gateway.storage(), "round-trip", credentials)
        barrier.wait()
        found.append(mine.commit(manifest(created=f"2026-01-01T00:00:0{n}Z"))[0])

    threads = [threading.Thread(target=commit, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert len(set(found)) == 1
    assert store.find(REVISION, KEY)[0] == found[0]  # type: ignore[index]
    with pytest.raises(NotFound):
        store.get_manifest("f" * 64)


def test_jobs_resolve_build_and_reuse_over_s3(gateway: Gateway, credentials: Path, tmp_path: Path) -> None:
    client = gateway.client()
    x = np.random.default_rng(0).normal(size=(700, 8)).astype(np.float32)
    models.linear(tmp_path / "model.onnx")
    np.savez(tmp_path / "eval.npz", x=x)
    client.upload_file(str(tmp_path / "model.onnx"), "models", "linear/model.onnx")  # type: ignore[attr-defined]
    client.upload_file(str(tmp_path / "eval.npz"), "models", "linear/eval.npz")  # type: ignore[attr-defined]
    jobs = Jobs(
        tmp_path,
        "s3://models/linear/model.onnx",
        EngineSettings("ONNXRuntime", profiles=profiles("x", 8)),
        DataSet("s3://models/linear/eval.npz", 700),
        Task.CLASSIFICATION,
        endpoint=gateway.endpoint,
    )
    variables = {"TRTMODEL_CREDENTIALS_DIR": str(credentials)}
    code, first = jobs.build(**variables)
    assert code == 0, first.message
    code, second = jobs.build(**variables)
    assert code == 0
    assert first.build is not None
    assert second.build is not None
    assert (first.build.reused, second.build.reused) == (False, True)
    assert first.build.artifact == second.build.artifact
    (credentials / "AWS_SECRET_ACCESS_KEY").write_text("wrong")
    code, denied = jobs.resolve(**variables)
    assert (code, denied.reason) == (42, Reason.ACCESS_DENIED)
