"""The chart's caBundle is SSL_CERT_FILE of the operator's process: whom it trusts when it calls what stands outside."""

from __future__ import annotations

import http.server
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

SECONDS = 60
CALL = """
import asyncio, sys
from trtmodel_operator.adapters.addresses import Addresses
from trtmodel_operator.adapters.calls import CallError, Calls

async def ask(address):
    calls = Calls(Addresses([address]))
    try:
        print(await calls.post(address, b"", {}, 20.0))
    except CallError as e:
        print(e)
    finally:
        await calls.close()

asyncio.run(ask(sys.argv[1]))
"""


class Approves(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        pass


def authority(folder: Path, name: str) -> Path:
    """One that signed its own certificate, for localhost; with its key in the same file."""
    made = [folder / f"{name}.key", folder / f"{name}.crt"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}",
               "-addext", "subjectAltName=DNS:localhost", "-keyout", made[0], "-out", made[1]]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
    (folder / f"{name}.pem").write_bytes(made[0].read_bytes() + made[1].read_bytes())
    return made[1]


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Of a server whose certificate `ours` signed."""
    authority(tmp_path, "ours")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ours.pem")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Approves)
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"https://localhost:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def called(address: str, trusted: Path) -> str:
    """What an operator says that trusts these authorities."""
    environment = {**os.environ, "SSL_CERT_FILE": str(trusted)}
    done = subprocess.run(
        [sys.executable, "-c", CALL, address],
        capture_output=True, text=True, timeout=SECONDS, check=True, env=environment,
    )  # fmt: skip
    return done.stdout.strip()


def test_an_address_is_called_whose_certificate_an_authority_of_ones_own_signed_and_no_other(
    tmp_path: Path, address: str
) -> None:
    assert called(address, tmp_path / "ours.crt") == "(200, b'ok')"
    said = called(address, authority(tmp_path, "other"))
    assert "cannot be reached" in said
    assert "certificate verify failed" in said.lower()
