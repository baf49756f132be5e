"""Large objects come in parts: each of one version, none twice, whatever happens on the way."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from storage_servers import PART, Answer, Respond, Stub, objects, ranged
from trtmodel_contract.identity import Storage
from trtmodel_contract.jobs import Reason
from trtmodel_worker.storage import StorageError, download, fetch_uri

pytestmark = pytest.mark.usefixtures("small_parts")

NOWHERE = Storage("engines")
DEADLINE_SECONDS = 30
BIG = hashlib.sha256(b"big").digest() * (5 * PART // 64)  # two parts and a half
OTHER = BIG[::-1]
DIGEST = hashlib.sha256(BIG).hexdigest()
SPANS = [
    f"{a}-{b - 1}" for a, b in ((0, PART), (PART, 2 * PART), (2 * PART, len(BIG)))
]  # fmt: skip


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def get(stub: Stub, tmp_path: Path, expected: str = "") -> bytes:
    return fetch_uri(f"{stub.url}/m.onnx", NOWHERE, None, tmp_path / "cache", expected).path.read_bytes()


def faulty(respond: Respond, *faults: Callable[[Answer], Answer], on: str) -> Respond:
    """The first answers to requests of range `on` are made faulty, one after the other."""
    left = list(faults)
    lock = threading.Lock()

    def answer(method: str, path: str, headers: Mapping[str, str]) -> Answer:
        good = respond(method, path, headers)
        with lock:
            if headers.get("Range", "") == f"bytes={on}" and left:
                return left.pop(0)(good)
        return good

    return answer


def test_a_large_file_comes_in_parts_of_one_version(stub: Stub, tmp_path: Path) -> None:
    conditions: list[str] = []

    def answer(method: str, path: str, headers: Mapping[str, str]) -> Answer:
        if "Range" in headers:
            conditions.append(headers.get("If-Match", ""))
        return objects(m_onnx=BIG)(method, path, headers)

    stub.answer = answer
    assert get(stub, tmp_path) == BIG
    assert sorted(stub.spans) == sorted(["", *SPANS])
    assert len(set(conditions)) == 1
    assert conditions[0].startswith('"')
    assert files(tmp_path / "cache") == [f"sha256/{DIGEST}"]


def test_a_connection_that_is_cut_goes_on_at_the_byte_where_it_was(stub: Stub, tmp_path: Path) -> None:
    def cut(good: Answer) -> Answer:
        good.cut = 100_000
        return good

    stub.answer = faulty(objects(m_onnx=BIG), cut, on=SPANS[1])
    assert get(stub, tmp_path) == BIG
    assert f"{2 * PART - 100_000}-{2 * PART - 1}" in stub.spans


def test_what_is_there_already_is_not_fetched_again(stub: Stub, tmp_path: Path) -> None:
    broken = [lambda _: Answer(503)] * 9
    stub.answer = faulty(objects(m_onnx=BIG), *broken, on=SPANS[2])
    with pytest.raises(StorageError, match="503") as e:
        get(stub, tmp_path)
    assert e.value.transient
    assert stub.spans.count(SPANS[2]) == 9
    assert (stub.spans.count(SPANS[0]), stub.spans.count(SPANS[1])) == (1, 1)
    stub.spans.clear()
    assert get(stub, tmp_path) == BIG
    assert stub.spans == ["", SPANS[2]]
    assert files(tmp_path / "cache") == [f"sha256/{DIGEST}"]


def test_a_part_that_was_damaged_on_the_disk_is_fetched_again(stub: Stub, tmp_path: Path) -> None:
    stub.answer = faulty(objects(m_onnx=BIG), *[lambda _: Answer(503)] * 9, on=SPANS[2])
    with pytest.raises(StorageError):
        get(stub, tmp_path)
    partial = next(p for p in (tmp_path / "cache/partial").iterdir() if p.suffix != ".parts")
    with partial.open("r+b") as f:
        f.seek(PART + 5)
        f.write(b"damage")
    stub.spans.clear()
    assert get(stub, tmp_path) == BIG
    assert sorted(stub.spans) == sorted(["", SPANS[1], SPANS[2]])


def test_D13_a_process_that_is_killed_in_mid_download_is_gone_on_with(stub: Stub, tmp_path: Path) -> None:
    held = threading.Event()

    def answer(method: str, path: str, headers: Mapping[str, str]) -> Answer:
        if headers.get("Range", "") == f"bytes={SPANS[2]}":
            held.wait(DEADLINE_SECONDS)
        return objects(m_onnx=BIG)(method, path, headers)

    stub.answer = answer
    code = (
        "import sys; from pathlib import Path; from trtmodel_contract.identity import Storage;"
        "from trtmodel_worker.storage import download, fetch_uri, partial;"
        "partial.PART_BYTES = download.PART_BYTES = int(sys.argv[3]);"
        "fetch_uri(sys.argv[1], Storage('engines'), None, Path(sys.argv[2]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, f"{stub.url}/m.onnx", tmp_path / "cache", str(PART)])
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while sum(p.read_text().count("\n") for p in (tmp_path / "cache").glob("partial/*.parts")) < 2:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait(DEADLINE_SECONDS)
        held.set()
    stub.spans.clear()
    assert get(stub, tmp_path) == BIG
    assert stub.spans == ["", SPANS[2]]


@pytest.mark.parametrize("conditional", [True, False])
def test_two_versions_are_never_mixed(stub: Stub, tmp_path: Path, conditional: bool) -> None:
    def answer(_method: str, _path: str, headers: Mapping[str, str]) -> Answer:
        if not conditional:  # a server that does not know If-Match says only what it sends
            headers = {k: v for k, v in headers.items() if k != "If-Match"}
        return ranged(BIG if len(stub.spans) <= 2 else OTHER, headers)

    stub.answer = answer
    assert get(stub, tmp_path) == OTHER
    assert files(tmp_path / "cache/partial") == []


def test_what_changes_all_the_time_is_refused(stub: Stub, tmp_path: Path) -> None:
    stub.answer = lambda _method, _path, headers: ranged(BIG, headers, f'"{len(stub.spans)}"')
    with pytest.raises(StorageError, match="changed while it was read") as e:
        get(stub, tmp_path)
    assert e.value.reason is Reason.STORAGE_UNAVAILABLE
    assert files(tmp_path / "cache") == []
    assert len(stub.spans) < 20


def test_a_file_that_is_written_while_it_is_read_is_read_anew(tmp_path: Path) -> None:
    from trtmodel_worker.storage.backends import FileRemote

    path = tmp_path / "m"
    path.write_bytes(b"a" * 100)
    remote = FileRemote(path)
    with remote.open() as (_, reader):
        assert reader.read(100) == b"a" * 100
        path.write_bytes(b"b" * 100)
        with pytest.raises(StorageError, match="changed while it was read") as e:
            reader.read(100)
    assert e.value.transient


def test_a_server_that_ignores_ranges_is_read_in_one_go(stub: Stub, tmp_path: Path) -> None:
    stub.answer = lambda *_: Answer(200, BIG, {"ETag": '"1"', "Accept-Ranges": "bytes"})
    assert get(stub, tmp_path) == BIG
    assert files(tmp_path / "cache") == [f"sha256/{DIGEST}"]


@pytest.mark.parametrize(
    ("modified", "parts"), [("Mon, 02 Jan 2006 15:04:05 GMT", True), ("Fri, 31 Dec 9999 23:59:59 GMT", False)]
)
def test_a_date_ties_parts_together_once_it_is_settled(stub: Stub, tmp_path: Path, modified: str, parts: bool) -> None:
    conditions = set()

    def answer(_method: str, _path: str, headers: Mapping[str, str]) -> Answer:
        conditions.add(headers.get("If-Unmodified-Since", ""))
        found = ranged(BIG, headers)
        found.headers = {k: v for k, v in found.headers.items() if k != "ETag"} | {"Last-Modified": modified}
        return found

    stub.answer = answer
    assert get(stub, tmp_path) == BIG
    assert (modified in conditions) is parts
    assert (len(stub.spans) > 1) is parts


def test_a_weak_etag_ties_nothing_together(stub: Stub, tmp_path: Path) -> None:
    stub.answer = lambda _method, _path, headers: ranged(BIG, headers, 'W/"1"')
    assert get(stub, tmp_path) == BIG
    assert stub.spans == [""]


def test_wrong_bytes_on_the_way_are_fetched_again(stub: Stub, tmp_path: Path) -> None:
    def damaged(good: Answer) -> Answer:
        good.body = b"?" + good.body[1:]
        return good

    stub.answer = faulty(objects(m_onnx=BIG), damaged, on=SPANS[1])
    assert get(stub, tmp_path, DIGEST) == BIG


def test_wrong_bytes_twice_are_what_lies_there(stub: Stub, tmp_path: Path) -> None:
    stub.answer = objects(m_onnx=OTHER)
    with pytest.raises(StorageError, match=DIGEST) as e:
        get(stub, tmp_path, DIGEST)
    assert e.value.reason is Reason.DIGEST_MISMATCH
    assert files(tmp_path / "cache") == []
    assert stub.spans.count("") == 2


@pytest.mark.parametrize("content", [b"x" * 200, BIG])
def test_a_connection_that_trickles_is_given_up(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(download, "SLOW_SECONDS", 0.1)

    def slow(good: Answer) -> Answer:
        good.pace = 0.02
        return good

    on = "" if content is not BIG else SPANS[0]
    respond = faulty(objects(m_onnx=content), slow, on=on)
    stub.answer = (
        respond
        if on
        else lambda method, path, headers: (
            slow(respond(method, path, headers)) if len(stub.spans) == 1 else respond(method, path, headers)
        )
    )
    assert get(stub, tmp_path) == content
    assert len(stub.spans) > len(content) // PART + 1


def test_a_store_that_only_trickles_is_an_error_that_says_so(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "SLOW_SECONDS", 0.1)
    stub.answer = lambda *_: Answer(200, b"x" * 1000, pace=0.02)
    with pytest.raises(StorageError, match="check the network") as e:
        get(stub, tmp_path)
    assert (e.value.reason, len(stub.spans)) == (Reason.STORAGE_UNAVAILABLE, 3)
    assert files(tmp_path / "cache") == []


def test_two_downloads_of_one_object_at_once_do_not_disturb_each_other(stub: Stub, tmp_path: Path) -> None:
    stub.answer = objects(m_onnx=BIG)
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(get(stub, tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    assert found == [BIG] * 3
    assert files(tmp_path / "cache") == [f"sha256/{DIGEST}"]


MEMORY = """
import hashlib, resource, sys
from pathlib import Path
from trtmodel_contract.identity import Storage
from trtmodel_worker.storage import fetch_source

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

before = peak()
source = fetch_source(sys.argv[1], Storage("engines"), None, Path(sys.argv[2]))
print(source.size, peak() - before)
"""


def test_a_large_source_is_never_in_memory(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m/m.onnx").write_bytes(b"no model")
    with (tmp_path / "m/m.onnx.data").open("wb") as f:
        f.truncate(300 << 20)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, f"file://{tmp_path}/m/", tmp_path / "cache"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    size, grown = map(int, done.stdout.split())
    assert size == (300 << 20) + 8
    assert grown < 32 << 20
