"""Servers for storage tests: a stub whose answers a test sets, and the project's real S3 gateway."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from trtmodel_contract.identity import Storage

ACCESS, SECRET = "trtmodel", "trtmodel-test-only"


@dataclass
class Answer:
    """`cut` leaves out that many bytes of the body that Content-Length promises."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int = 0


@dataclass
class Stub:
    """An HTTP server. `answer` is asked with (method, path, headers) for every request."""

    url: str
    answer: Callable[[str, str, Mapping[str, str]], Answer] = lambda _method, _path, _headers: Answer(404)
    requests: list[tuple[str, str]] = field(default_factory=list)


@pytest.fixture
def stub() -> Iterator[Stub]:
    found = Stub("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            self.rfile.read(length)
            found.requests.append((self.command, self.path))
            given = found.answer(self.command, self.path, self.headers)
            self.send_response(given.status)
            for name, value in given.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(given.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(given.body[: len(given.body) - given.cut])
            if given.cut:
                self.close_connection = True

        do_GET = do_PUT = do_HEAD = _handle  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield found
    server.shutdown()
    server.server_close()


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


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    cache = Path(os.environ.get("TRTMODEL_CACHE", Path.home() / ".cache/trtmodel"))
    binaries = sorted(cache.glob("bin/versitygw-*/versitygw"))
    if not binaries:
        pytest.fail("versitygw is not built: run make cluster-up once")
    root = tmp_path_factory.mktemp("s3")
    for bucket in ("engines", "models"):
        (root / bucket).mkdir()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
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
