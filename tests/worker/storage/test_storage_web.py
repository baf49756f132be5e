"""What a server behind https:// may say, and what is not believed."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest
from storage_servers import Answer, Stub, ranged
from trtmodel_contract.identity import Storage
from trtmodel_contract.jobs import Reason
from trtmodel_worker.storage import StorageError, download, fetch_uri
from trtmodel_worker.storage.remote import Reader, Version
from trtmodel_worker.storage.web import UrlRemote, _Redirects, _version


def redirected(before: str, after: str) -> urllib.request.Request | None:
    return _Redirects().redirect_request(urllib.request.Request(before), None, 302, "Found", Message(), after)


@pytest.mark.parametrize(
    ("before", "after"),
    [("http://h/m.onnx", "http://other/m.onnx"), ("http://h/m.onnx", "https://h/m"), ("https://h/m", "https://cdn/m")],
)
def test_a_redirect_is_followed(before: str, after: str) -> None:
    request = redirected(before, after)
    assert request is not None
    assert request.full_url == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("https://h/m.onnx", "http://h/m.onnx"),
        ("https://h/m.onnx", "ftp://h/m.onnx"),
        ("http://h/m.onnx", "ftp://h/m.onnx"),
        ("http://h/m.onnx", "file:///etc/passwd"),
    ],
)
def test_a_redirect_to_what_is_less_safe_is_refused(before: str, after: str) -> None:
    with pytest.raises(StorageError, match="is not followed") as e:
        redirected(before, after)
    assert (e.value.reason, e.value.transient) == (Reason.SOURCE_NOT_FOUND, False)


@pytest.mark.parametrize("length", ["-5", "", "\u00b2", "9" * 5000, "0x10", "1_000"])
def test_a_length_that_is_none_is_a_fault_of_the_server(length: str) -> None:
    headers = Message()
    headers["Content-Length"] = length
    with pytest.raises(StorageError, match="which is no length") as e:
        _version("https://h/m.onnx", headers)
    assert e.value.transient


def test_a_length_that_is_not_told_is_unknown() -> None:
    assert _version("https://h/m.onnx", Message()).size is None


def test_what_states_no_length_ends_at_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that sends for ever would fill the disk of the node."""
    monkeypatch.setattr(download, "UNSTATED_MOST_BYTES", 1000)

    class Endless:
        def read(self, amount: int, /) -> bytes:
            return b"x" * min(amount, 600)

    class Unstated:
        what = "https://h/m.onnx"

        @contextlib.contextmanager
        def open(self) -> Iterator[tuple[Version, Reader]]:
            yield Version(None, ""), Endless()

    with pytest.raises(StorageError, match="1,000") as e:
        download.download(Unstated(), tmp_path)  # type: ignore[arg-type]
    assert not e.value.transient
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ("/mod\u00e8le \u540d.onnx", "/mod%C3%A8le%20%E5%90%8D.onnx"),
        ("/mod\u00e8le.onnx", "/mod%C3%A8le.onnx"),
        ("/m%20%C3%A8+(1)~.onnx?X-Sig=a%2Fb+c/d=&v='1'", "/m%20%C3%A8+(1)~.onnx?X-Sig=a%2Fb+c/d=&v='1'"),
        ("/[a]@b:c;d,e!$*.onnx", "/[a]@b:c;d,e!$*.onnx"),
    ],
)
def test_letters_of_any_language_in_an_address_are_escaped_and_what_is_escaped_stays(
    stub: Stub, tmp_path: Path, asked: str, sent: str
) -> None:
    stub.answer = lambda _method, _path, headers: ranged(b"model", headers)
    uri = stub.url + asked
    assert fetch_uri(uri, Storage("engines"), None, tmp_path / "cache").path.read_bytes() == b"model"
    assert {path for _, path in stub.requests} == {sent}
    stub.answer = lambda *_: Answer(404)
    with pytest.raises(StorageError) as e:
        fetch_uri(uri, Storage("engines"), None, tmp_path / "cache")
    assert e.value.message.startswith(uri)


@pytest.mark.parametrize("host", ["b\u00fccher.invalid", "\u0438\u043c\u044f.invalid:8443"])
def test_a_host_in_letters_of_any_language_is_looked_up_as_any_other(host: str) -> None:
    with pytest.raises(StorageError, match="cannot be reached") as e:
        UrlRemote(f"http://{host}/m.onnx").look()
    assert e.value.reason is Reason.STORAGE_UNAVAILABLE
