"""Servers for storage tests: a stub whose answers a test sets, and the project's real S3 gateway."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from free_ports import free_port
from trtmodel_contract.identity import Storage
from trtmodel_worker.storage import download, fetch, partial, s3, source

ACCESS, SECRET = "trtmodel", "trtmodel-test-only"


@dataclass
class Answer:
    """`cut` leaves out that many bytes of the body that Content-Length promises. With `pace` the body comes a byte at a
    time, so many seconds apart."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int = 0
    pace: float = 0.0


Respond = Callable[[str, str, Mapping[str, str]], Answer]


@dataclass
class Stub:
    """An HTTP server. `answer` is asked with (method, path, headers) for every request. `spans` are the ranges that
    were asked for, '' for a whole object."""

    url: str
    answer: Respond = lambda _method, _path, _headers: Answer(404)
    requests: list[tuple[str, str]] = field(default_factory=list)
    spans: list[str] = field(default_factory=list)


def objects(**content: bytes) -> Respond:
    """A server of files as it should be: ranges, and an ETag that changes with the content. '.' is '_' in a name."""

    def respond(_method: str, path: str, headers: Mapping[str, str]) -> Answer:
        data = content.get(path.rpartition("/")[2].replace(".", "_"))
        return Answer(404) if data is None else ranged(data, headers)

    return respond


def ranged(data: bytes, headers: Mapping[str, str], etag: str = "") -> Answer:
    """What a server that holds `data` answers to a GET."""
    said = {"ETag": etag or f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"', "Accept-Ranges": "bytes"}
    if headers.get("If-Match", said["ETag"]) != said["ETag"]:
        return Answer(412)
    asked = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("Range", ""))
    if asked is None:
        return Answer(200, data, said)
    start, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
    return Answer(206, data[start : last + 1], {**said, "Content-Range": f"bytes {start}-{last}/{len(data)}"})


@pytest.fixture
def stub() -> Iterator[Stub]:
    with serving() as found:
        yield found


@contextlib.contextmanager
def serving(tls: ssl.SSLContext | None = None) -> Iterator[Stub]:
    """With `tls` it speaks https as `localhost`."""
    found = Stub("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            self.rfile.read(length)
            found.requests.append((self.command, self.path))
            found.spans.append(self.headers.get("Range", "").removeprefix("bytes="))
            given = found.answer(self.command, self.path, self.headers)
            self.send_response(given.status)
            for name, value in given.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(given.body)))
            self.end_headers()
            body = given.body[: len(given.body) - given.cut]
            self.close_connection = bool(given.cut or given.pace)
            with contextlib.suppress(ConnectionError):  # the other side may have seen enough
                if given.pace:
                    for n in range(len(body)):
                        self.wfile.write(body[n : n + 1])
                        time.sleep(given.pace)
                elif self.command != "HEAD":
                    self.wfile.write(body)

        do_GET = do_PUT = do_HEAD = _handle  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True  # one may be held up by a test that failed
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    found.url = f"https://localhost:{server.server_port}" if tls else f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield found
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses between attempts are for storage that is in trouble; here it is so on purpose."""
    for module in (download, fetch, s3, source):
        monkeypatch.setattr(module, "PAUSES_SECONDS", (0.01, 0.01))


PART = 1 << 18


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads in parts of `PART` bytes, so that large files can be small."""
    for module in (download, partial):
        monkeypatch.setattr(module, "PART_BYTES", PART)


@pytest.fixture
def credentials(tmp_path: Path) -> Path:
    folder = tmp_path / "credentials"
    folder.mkdir()
    (folder / "AWS_ACCESS_KEY_ID").write_text(f"{ACCESS}\n")
    (folder / "AWS_SECRET_ACCESS_KEY").write_text(f"{SECRET}\n")
    return folder


@pytest.fixture
def stub_storage(stub: Stub) -> Storage:
    return Storage("engines", endpoint=stub.url)


@dataclass(frozen=True)
class Gateway:
    """A running versitygw over a directory: buckets are its subdirectories."""

    endpoint: str
    root: Path

    def storage(self, bucket: str = "engines") -> Storage:
        return Storage(bucket, endpoint=self.endpoint)

    def client(self) -> Any:
        """Amazon's own, with the rights of the gateway's root."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=ACCESS,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    cache = Path(os.environ.get("TRTMODEL_CACHE", Path.home() / ".cache/trtmodel"))
    binaries = sorted(cache.glob("bin/versitygw-*/versitygw"))
    if not binaries:
        pytest.fail("versitygw is not built: run make cluster-up once")
    root = tmp_path_factory.mktemp("s3")
    for bucket in ("engines", "models"):
        (root / bucket).mkdir()
    port = free_port()
    command = [binaries[0], "--access", ACCESS, "--secret", SECRET, "--port", f"127.0.0.1:{port}", "--quiet"]
    with (root.parent / "gateway.log").open("wb") as log:
        process = subprocess.Popen([*command, "posix", root], stdout=log, stderr=log)
        try:
            _wait_for(port, process)
            yield Gateway(f"http://127.0.0.1:{port}", root)
        finally:
            process.terminate()
            process.wait(timeout=10)


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return
        except OSError:
            time.sleep(0.05)
    pytest.fail("the S3 gateway did not start")
