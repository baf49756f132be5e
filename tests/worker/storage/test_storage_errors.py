"""What S3 says, in words that name the cause and the way out."""

from __future__ import annotations

import datetime
import email.utils
from collections.abc import Mapping
from pathlib import Path

import pytest
from storage_servers import Answer, Stub
from trtmodel_contract.identity import Storage
from trtmodel_contract.jobs import Reason
from trtmodel_worker.storage import ArtifactStore, StorageError, fetch_uri
from trtmodel_worker.storage.errors import from_exception


def _error(code: str, **more: str) -> bytes:
    inner = "".join(f"<{k}>{v}</{k}>" for k, v in {"Code": code, "Message": f"{code} it is", **more}.items())
    return f"<?xml version='1.0'?><Error>{inner}</Error>".encode()


def _fetch(stub: Stub, storage: Storage, credentials: Path, tmp_path: Path) -> StorageError:
    with pytest.raises(StorageError) as e:
        fetch_uri("s3://models/m.onnx", storage, credentials, tmp_path / "cache")
    return e.value


@pytest.mark.parametrize(
    ("status", "code", "reason", "words"),
    [
        (404, "NoSuchKey", Reason.SOURCE_NOT_FOUND, "no such object"),
        (404, "NoSuchBucket", Reason.BUCKET_NOT_FOUND, "bucket does not exist"),
        (403, "AccessDenied", Reason.ACCESS_DENIED, "s3:GetObject"),
        (403, "InvalidAccessKeyId", Reason.ACCESS_DENIED, "Secret"),
        (403, "SignatureDoesNotMatch", Reason.ACCESS_DENIED, "Secret"),
        (403, "RequestTimeTooSkewed", Reason.STORAGE_UNAVAILABLE, "clock skew"),
    ],
)
def test_s3_errors_become_reasons_with_a_way_out(
    stub: Stub,
    stub_storage: Storage,
    credentials: Path,
    tmp_path: Path,
    status: int,
    code: str,
    reason: Reason,
    words: str,
) -> None:
    stub.answer = lambda *_: Answer(status, _error(code))
    error = _fetch(stub, stub_storage, credentials, tmp_path)
    assert error.reason is reason
    assert words in error.message
    assert "s3://models/m.onnx" in error.message


def test_D12_clock_skew_is_not_called_a_matter_of_rights(
    stub: Stub, stub_storage: Storage, credentials: Path, tmp_path: Path
) -> None:
    stub.answer = lambda *_: Answer(403, _error("RequestTimeTooSkewed"))
    error = _fetch(stub, stub_storage, credentials, tmp_path)
    assert error.reason is not Reason.ACCESS_DENIED
    assert "NTP" in error.message


@pytest.mark.parametrize(
    ("minutes", "words"),
    [(-20, "s ahead of"), (20, "s behind the"), (0, "wrong, correct its NTP")],
)
def test_D12_a_wrong_clock_is_said_to_be_how_wrong(minutes: int, words: str) -> None:
    theirs = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(minutes=minutes)
    refusal = Exception()
    refusal.response = {  # type: ignore[attr-defined]
        "Error": {"Code": "RequestTimeTooSkewed"},
        "ResponseMetadata": {"HTTPStatusCode": 403, "HTTPHeaders": {"date": email.utils.format_datetime(theirs)}},
    }
    assert words in from_exception(refusal, "s3://b/m").message


def test_D04_a_bucket_of_another_region_names_that_region_and_is_not_retried(
    stub: Stub, stub_storage: Storage, credentials: Path, tmp_path: Path
) -> None:
    def answer(method: str, *_: object) -> Answer:
        headers = {"x-amz-bucket-region": "eu-north-1"}
        return Answer(301, _error("PermanentRedirect"), headers) if method == "GET" else Answer(400, b"")

    stub.answer = answer
    error = _fetch(stub, stub_storage, credentials, tmp_path)
    assert error.reason is Reason.BUCKET_NOT_FOUND
    assert "eu-north-1" in error.message
    assert "spec.storage.region" in error.message
    assert not error.transient
    assert len(stub.requests) < 5


def test_an_endpoint_that_nobody_listens_on_is_unavailable(credentials: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="endpoint") as e:
        ArtifactStore(Storage("engines", endpoint="http://127.0.0.1:1"), "ml", credentials).get_manifest("0" * 64)
    assert e.value.reason is Reason.STORAGE_UNAVAILABLE
    assert e.value.transient


def test_without_credentials_the_message_names_the_field(
    stub_storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(StorageError, match=r"spec\.storage\.credentialsSecret") as e:
        fetch_uri("s3://models/m.onnx", stub_storage, tmp_path / "absent", tmp_path / "cache")
    assert e.value.reason is Reason.ACCESS_DENIED


def test_D01_uploads_carry_no_checksums_that_stores_do_not_know(
    stub: Stub, stub_storage: Storage, credentials: Path
) -> None:
    def answer(method: str, _path: str, headers: Mapping[str, str]) -> Answer:
        names = {name.lower() for name in headers}
        unknown = {n for n in names if n.startswith(("x-amz-checksum", "x-amz-sdk-checksum", "x-amz-trailer"))}
        refused = unknown or "aws-chunked" in headers.get("Content-Encoding", "") or "content-length" not in names
        return Answer(411, _error("MissingContentLength")) if method == "PUT" and refused else Answer(200)

    stub.answer = answer
    assert ArtifactStore(stub_storage, "ml", credentials).put_bytes(b"plan").size == 4


def test_D01_a_store_that_still_refuses_gets_the_hint_at_the_setting(
    stub: Stub, stub_storage: Storage, credentials: Path
) -> None:
    stub.answer = lambda *_: Answer(411, _error("MissingContentLength"))
    with pytest.raises(StorageError, match="AWS_REQUEST_CHECKSUM_CALCULATION"):
        ArtifactStore(stub_storage, "ml", credentials).put_bytes(b"plan")


def test_rotated_keys_are_used_without_a_restart(stub: Stub, stub_storage: Storage, credentials: Path) -> None:
    seen: list[str] = []

    def answer(_method: str, _path: str, headers: Mapping[str, str]) -> Answer:
        seen.append(headers["Authorization"].split("Credential=")[1].split("/")[0])
        return Answer(200)

    stub.answer = answer
    store = ArtifactStore(stub_storage, "ml", credentials)
    store.put_bytes(b"1")
    (credentials / "AWS_ACCESS_KEY_ID").write_text("rotated")
    store.put_bytes(b"2")
    assert seen == ["trtmodel", "rotated"]


def test_a_bucket_that_does_not_exist_is_said_to_be_missing_where_the_store_is_asked_for_its_clock(
    stub: Stub, stub_storage: Storage, credentials: Path
) -> None:
    """The first that a collector asks; the answer to HEAD has no body, so no word of S3's for it."""
    with pytest.raises(StorageError, match="the bucket does not exist: create it") as e:
        ArtifactStore(stub_storage, "ml", credentials).objects.now()
    assert (e.value.reason, e.value.transient) == (Reason.BUCKET_NOT_FOUND, False)
    assert stub.requests == [("HEAD", "/engines")]
