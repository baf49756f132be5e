"""A real S3 server behind a proxy that misbehaves: right bytes or a clear error, and never for ever."""

from __future__ import annotations

import datetime
import hashlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import onnx_models as models
import pytest
from fault_proxy import Fault, FaultProxy, Request, cut, damaged, lost, refused
from job_harness import Jobs, profiles
from storage_servers import Gateway
from trtmodel_contract.exitcodes import JobExit
from trtmodel_contract.gate import Task
from trtmodel_contract.identity import EngineSettings, Storage
from trtmodel_contract.jobs import DataSet, JobResult, Reason
from trtmodel_worker.storage import ArtifactStore, StorageError, download, fetch_source, fetch_uri, s3
from trtmodel_worker.storage.backends import open_store
from trtmodel_worker.storage.partial import PART_BYTES

pytestmark = pytest.mark.long

BIG = hashlib.sha256(b"model").digest() * (5 * PART_BYTES // 64)
DIGEST = hashlib.sha256(BIG).hexdigest()
PLAN = hashlib.sha256(b"plan").digest() * (1 << 19)  # 16 MB
SLOW_DOWN = refused("503 Slow Down", "SlowDown")
EXPIRED = refused("400 Bad Request", "ExpiredToken")


@pytest.fixture
def proxy(gateway: Gateway) -> Iterator[FaultProxy]:
    with FaultProxy(urlsplit(gateway.endpoint).port or 0).running() as found:
        yield found


@pytest.fixture
def storage(proxy: FaultProxy) -> Storage:
    return Storage("engines", endpoint=proxy.endpoint)


@pytest.fixture(scope="module")
def uri(gateway: Gateway) -> str:
    gateway.client().put_object(Bucket="models", Key="faults/m.onnx", Body=BIG)
    return "s3://models/faults/m.onnx"


def is_part(request: Request) -> bool:
    return request.method == "GET" and "range" in request.headers


def is_get(request: Request) -> bool:
    return request.method == "GET"


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize(
    ("fault", "times"),
    [
        (Fault(is_part, 2, after=cut), 5),
        (Fault(is_part, 2, before=SLOW_DOWN), 5),
        (Fault(is_get, 2, before=b""), 6),
        (Fault(is_part, 1, after=damaged), 7),
        (Fault(is_part, 2, before=EXPIRED), 5),
        (Fault(is_get, 1, before=refused("403 Forbidden", "RequestTimeTooSkewed")), 5),
    ],
    ids=["cut in mid-object", "503", "no answer", "wrong bytes", "expired credentials", "clock skew"],
)
def test_a_download_through_a_fault_ends_with_the_right_bytes(
    proxy: FaultProxy, storage: Storage, credentials: Path, tmp_path: Path, uri: str, fault: Fault, times: int
) -> None:
    proxy.faults.append(Fault(fault.when, fault.times, fault.before, fault.after))
    found = fetch_uri(uri, storage, credentials, tmp_path / "cache", DIGEST)
    assert found.path.read_bytes() == BIG
    assert files(tmp_path / "cache") == [f"sha256/{DIGEST}"]
    assert len(proxy.seen) <= 4 + times


def test_a_download_that_trickles_is_taken_up_again_and_ends_with_the_right_bytes(
    proxy: FaultProxy, storage: Storage, credentials: Path, tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "SLOW_SECONDS", 1.0)
    proxy.faults.append(Fault(is_part, 2, slow=True))
    found = fetch_uri(uri, storage, credentials, tmp_path / "cache", DIGEST)
    assert found.path.read_bytes() == BIG
    assert files(tmp_path / "cache") == [f"sha256/{DIGEST}"]
    assert proxy.faults[0].times == 0


@pytest.mark.parametrize(
    ("fault", "reason", "words", "most"),
    [
        (Fault(is_part, 10**6, after=cut), Reason.STORAGE_UNAVAILABLE, "early|cannot be reached", 700),
        (Fault(is_get, 10**6, before=SLOW_DOWN), Reason.STORAGE_UNAVAILABLE, "503 SlowDown", 9),
        (Fault(is_get, 10**6, before=b""), Reason.STORAGE_UNAVAILABLE, "cannot be reached", 9),
        (Fault(is_part, 10**6, after=damaged), Reason.DIGEST_MISMATCH, DIGEST, 8),
        (Fault(is_get, 10**6, before=EXPIRED), Reason.STORAGE_UNAVAILABLE, "credentials have expired", 9),
        (
            Fault(is_get, 10**6, before=refused("403 Forbidden", "RequestTimeTooSkewed")),
            Reason.STORAGE_UNAVAILABLE,
            "clock skew.*NTP",
            9,
        ),
        (Fault(is_get, 10**6, before=refused("403 Forbidden", "AccessDenied")), Reason.ACCESS_DENIED, "GetObject", 1),
    ],
    ids=["cut", "503", "no answer", "wrong bytes", "expired credentials", "clock skew", "denied"],
)
def test_a_fault_that_stays_is_a_clear_error_after_a_bounded_time(
    proxy: FaultProxy,
    storage: Storage,
    credentials: Path,
    tmp_path: Path,
    uri: str,
    fault: Fault,
    reason: Reason,
    words: str,
    most: int,
) -> None:
    proxy.faults.append(Fault(fault.when, fault.times, fault.before, fault.after))
    with pytest.raises(StorageError, match=words) as e:
        fetch_uri(uri, storage, credentials, tmp_path / "cache", DIGEST)
    assert e.value.reason is reason
    assert uri in e.value.message
    assert files(tmp_path / "cache/sha256") == []
    assert len(proxy.seen) <= most


def test_D12_a_wrong_clock_is_named_with_how_wrong_it_is(
    gateway: Gateway, credentials: Path, tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's own refusal of a signature that is 20 minutes old."""
    from botocore import auth

    real = auth.get_current_datetime
    monkeypatch.setattr(auth, "get_current_datetime", lambda *a, **k: real(*a, **k) - datetime.timedelta(minutes=20))
    with pytest.raises(StorageError, match="clock skew") as e:
        fetch_uri(uri, gateway.storage(), credentials, tmp_path / "cache")
    assert (e.value.reason, e.value.transient) == (Reason.STORAGE_UNAVAILABLE, True)


def test_an_object_that_is_replaced_in_mid_download_is_never_mixed(
    gateway: Gateway, proxy: FaultProxy, storage: Storage, credentials: Path, tmp_path: Path
) -> None:
    s3_client = gateway.client()
    put = s3_client.put_object
    put(Bucket="models", Key="faults/replaced", Body=BIG)

    def replace(answer: bytes) -> bytes:
        put(Bucket="models", Key="faults/replaced", Body=BIG[::-1])
        return answer

    proxy.faults.append(Fault(is_part, 1, after=replace))
    found = fetch_uri("s3://models/faults/replaced", storage, credentials, tmp_path / "cache")
    assert found.digest in (DIGEST, hashlib.sha256(BIG[::-1]).hexdigest())
    assert found.path.read_bytes() in (BIG, BIG[::-1])


def test_A13_a_prefix_over_s3_comes_whole_through_faults(
    gateway: Gateway, proxy: FaultProxy, storage: Storage, credentials: Path, tmp_path: Path
) -> None:
    put = gateway.client().put_object
    content = {"model.onnx": b"model", "w/big": BIG, **{f"w/{n}": bytes([n]) for n in range(9)}}
    for name, data in content.items():
        put(Bucket="models", Key=f"faults/prefix/{name}", Body=data)
    put(Bucket="models", Key="faults/prefix-beside/model.onnx", Body=b"another")
    proxy.faults += [Fault(is_part, 2, after=cut), Fault(is_get, 2, before=SLOW_DOWN)]
    found = fetch_source("s3://models/faults/prefix/", storage, credentials, tmp_path / "cache")
    folder = found.path.parent
    assert {name: (folder / name).read_bytes() for name in files(folder)} == content


def is_complete(request: Request) -> bool:
    return request.method == "POST" and "uploadId=" in request.target


def is_upload_part(request: Request) -> bool:
    return request.method == "PUT" and "partNumber=" in request.target


def is_put(request: Request) -> bool:
    return request.method == "PUT"


def is_abort(request: Request) -> bool:
    return request.method == "DELETE" and "uploadId=" in request.target


@pytest.fixture
def small_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "MULTIPART_BYTES", 8 << 20)
    monkeypatch.setattr(s3, "UPLOAD_PART_BYTES", 5 << 20)


@pytest.mark.usefixtures("small_uploads")
@pytest.mark.parametrize(
    "fault",
    [
        Fault(is_complete, 1, after=lost),
        Fault(is_complete, 1, before=b""),
        Fault(is_upload_part, 2, before=SLOW_DOWN),
        Fault(is_upload_part, 2, after=lost),
        Fault(is_upload_part, 5, before=b""),
        Fault(is_upload_part, 2, before=EXPIRED),
    ],
    ids=["complete done and lost", "complete lost", "503", "part done and lost", "no answer", "expired credentials"],
)
def test_an_upload_through_a_fault_is_there_once_and_leaves_no_parts(
    gateway: Gateway, proxy: FaultProxy, storage: Storage, credentials: Path, tmp_path: Path, fault: Fault
) -> None:
    proxy.faults.append(Fault(fault.when, fault.times, fault.before, fault.after))
    (tmp_path / "plan").write_bytes(PLAN)
    blob = ArtifactStore(storage, "uploads", credentials).put_file(tmp_path / "plan")
    again = ArtifactStore(gateway.storage(), "uploads", credentials).fetch_blob(blob.digest, blob.size, tmp_path / "c")
    assert again.read_bytes() == PLAN
    assert unfinished(gateway) == []
    assert proxy.faults[0].times == 0


def unfinished(gateway: Gateway) -> list[str]:
    found = gateway.client().list_multipart_uploads(Bucket="engines")
    return [upload["Key"] for upload in found.get("Uploads", ())]


@pytest.mark.usefixtures("small_uploads")
@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (SLOW_DOWN, Reason.STORAGE_UNAVAILABLE),
        (refused("403 Forbidden", "AccessDenied"), Reason.ACCESS_DENIED),
        (refused("403 Forbidden", "RequestTimeTooSkewed"), Reason.STORAGE_UNAVAILABLE),
    ],
)
def test_an_upload_that_fails_for_good_leaves_no_parts(
    gateway: Gateway,
    proxy: FaultProxy,
    storage: Storage,
    credentials: Path,
    tmp_path: Path,
    before: bytes,
    reason: Reason,
) -> None:
    (tmp_path / "plan").write_bytes(PLAN[::-1])
    proxy.faults.append(Fault(is_upload_part, 10**6, before=before))
    with pytest.raises(StorageError) as e:
        ArtifactStore(storage, "failed", credentials).put_file(tmp_path / "plan")
    assert e.value.reason is reason
    assert unfinished(gateway) == []
    assert not (gateway.root / "engines/trtmodel/failed/blobs").exists() or not files(
        gateway.root / "engines/trtmodel/failed/blobs"
    )
    assert proxy.count(is_upload_part) < 100


@pytest.mark.usefixtures("small_uploads")
def test_D15_what_a_killed_upload_left_goes_with_the_next_one(
    gateway: Gateway, storage: Storage, credentials: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_client = gateway.client()
    for n in range(5):
        s3_client.create_multipart_upload(Bucket="engines", Key=f"trtmodel/left/blobs/sha256/{n}")  # type: ignore[attr-defined]
    (tmp_path / "plan").write_bytes(PLAN)
    store = ArtifactStore(storage, "left", credentials)
    store.put_file(tmp_path / "plan")
    assert len(unfinished(gateway)) == 5  # somebody may still be at it
    monkeypatch.setattr(s3, "LEFT_OVER_SECONDS", -60)
    store.put_file(tmp_path / "plan")
    assert unfinished(gateway) == []


@pytest.mark.usefixtures("small_uploads")
def test_D15_an_upload_that_cannot_even_be_ended_says_why_it_failed_and_goes_later(
    gateway: Gateway,
    proxy: FaultProxy,
    storage: Storage,
    credentials: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "plan").write_bytes(PLAN)
    store = ArtifactStore(storage, "broken", credentials)
    proxy.faults += [Fault(is_upload_part, 10**6, before=SLOW_DOWN), Fault(is_abort, 10**6, before=b"")]
    with pytest.raises(StorageError, match="503 SlowDown") as e:
        store.put_file(tmp_path / "plan")
    assert e.value.reason is Reason.STORAGE_UNAVAILABLE
    assert len(unfinished(gateway)) == 3
    proxy.faults.clear()
    monkeypatch.setattr(s3, "LEFT_OVER_SECONDS", -60)
    store.put_file(tmp_path / "plan")
    assert unfinished(gateway) == []


@pytest.mark.usefixtures("small_uploads")
def test_D15_without_the_right_to_clean_up_an_upload_still_succeeds(
    gateway: Gateway, proxy: FaultProxy, storage: Storage, credentials: Path, tmp_path: Path
) -> None:
    def is_listing(request: Request) -> bool:
        return request.method == "GET" and "uploads" in request.target

    proxy.faults.append(Fault(is_listing, 10**6, before=refused("403 Forbidden", "AccessDenied")))
    (tmp_path / "plan").write_bytes(PLAN)
    blob = ArtifactStore(storage, "no-rights", credentials).put_file(tmp_path / "plan")
    assert open_store(gateway.storage(), "engines", credentials).stat(f"trtmodel/no-rights/blobs/sha256/{blob.digest}")
    assert proxy.count(is_listing) > 0


@pytest.mark.parametrize(
    "fault", [Fault(is_put, 1, after=lost), Fault(is_put, 2, before=SLOW_DOWN), Fault(is_put, 1, before=b"")]
)
def test_a_commit_through_a_fault_is_made_once(
    proxy: FaultProxy, storage: Storage, credentials: Path, fault: Fault
) -> None:
    store = open_store(storage, "engines", credentials)
    key = f"faults/commit-{fault.times}-{fault.before!r:.9}"
    proxy.faults.append(Fault(fault.when, fault.times, fault.before, fault.after))
    store.put_new(key, b"mine")
    with store.open(key) as reader:
        assert reader.read(100) == b"mine"
    assert not store.put_new(key, b"theirs")


def every(count: int, when: Callable[[Request], bool]) -> Callable[[Request], bool]:
    """True for each `count`-th request for which `when` is true."""
    seen = itertools.count(1)
    return lambda request: when(request) and next(seen) % count == 0


def is_blob(request: Request) -> bool:
    return request.method == "GET" and "/blobs/sha256/" in request.target


def test_jobs_on_a_bad_network_publish_one_engine_and_all_of_it(
    gateway: Gateway, proxy: FaultProxy, credentials: Path, tmp_path: Path
) -> None:
    """Each fault again and again. A Job that gives up with "try again" is tried again, as the cluster does it."""
    x = np.random.default_rng(0).normal(size=(700, 8)).astype(np.float32)
    np.savez(tmp_path / "eval.npz", x=x)
    models.linear(tmp_path / "model.onnx", seed=15)
    for name in ("model.onnx", "eval.npz"):
        gateway.client().upload_file(str(tmp_path / name), "models", f"bad/{name}")
    proxy.faults += [
        Fault(every(3, lambda _: True), 10**6, before=SLOW_DOWN),
        Fault(every(4, is_put), 10**6, after=lost),
        Fault(every(5, is_get), 10**6, after=cut),
        Fault(every(2, is_blob), 10**6, after=damaged),
    ]
    jobs = Jobs(
        tmp_path,
        "s3://models/bad/model.onnx",
        EngineSettings("ONNXRuntime", profiles=profiles("x", 8)),
        DataSet("s3://models/bad/eval.npz", 700),
        Task.CLASSIFICATION,
        endpoint=proxy.endpoint,
    )

    def until_done(run: Callable[[], tuple[int, JobResult]]) -> JobResult:
        for _ in range(4):
            code, result = run()
            if code != JobExit.RETRY:
                break
        assert code == JobExit.DONE, result.message
        return result

    variables = {"TRTMODEL_CREDENTIALS_DIR": str(credentials)}
    resolved = until_done(lambda: jobs.resolve(**variables)).resolve
    assert resolved is not None
    built = until_done(lambda: jobs.build(resolved, **variables)).build
    again = until_done(lambda: jobs.build(resolved, **variables)).build
    assert built is not None
    assert again is not None
    assert again.reused
    assert again.artifact.manifest_digest == built.artifact.manifest_digest
    prefix = f"trtmodel/ml/engines/{resolved.revision}/"
    store = open_store(gateway.storage(), "engines", credentials)
    assert [key.rpartition("/")[2] for key in store.list(prefix)] == ["manifest.json"]
    for entry in store.entries("trtmodel/ml/blobs/sha256/"):
        content = (gateway.root / "engines" / entry.key).read_bytes()
        assert hashlib.sha256(content).hexdigest() == entry.key.rpartition("/")[2]
    assert {fault.times < 10**6 for fault in proxy.faults} == {True}
