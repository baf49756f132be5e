"""A worker for one engine of the local store.

It is the worker of a pod, with what the operator gives it there: a signed pointer to boot from, and the keys to trust.
Here both are made for the run, in a directory that is removed at its end.

    trtmodel serve --- end_with_parent ---> front --- end_with_parent ---> engine hosts
"""

from __future__ import annotations

import base64
import contextlib
import errno
import http.client
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from trtmodel_contract.codec import canonical, dumps, encode
from trtmodel_contract.control import (
    KEYS_FILE,
    POINTER_FILE,
    POINTER_SIGNATURE_FILE,
    BootPointer,
    PointerEntry,
    SignedArtifact,
)
from trtmodel_contract.identity import ModelRef, Storage
from trtmodel_contract.manifest import Manifest
from trtmodel_contract.signing import KeySet, Signature, artifact_payload, key_id, pointer_payload

from trtmodel_worker.alone.home import Home, model_ref
from trtmodel_worker.alone.say import say

POLL_SECONDS = 0.05
ANSWER_SECONDS = 5.0
MOST_EXAMPLE_VALUES = 16
EXIT_STOPPED_HARD = 130


class Unusable(Exception):
    """An address cannot be used. The text says which, and what to do."""


@dataclass(frozen=True)
class Serving:
    """What `trtmodel serve` was told. `grpc` 0: none."""

    name: str
    host: str
    http: int
    grpc: int
    metrics: int
    contexts: str
    hosts: int


def require_ports(serving: Serving) -> None:
    """Before anything is built for it: every port is free. Raises Unusable."""
    ports = {"--http": serving.http, "--grpc": serving.grpc, "--metrics": serving.metrics}
    taken: dict[int, str] = {}
    for option, port in ports.items():
        if not port:
            continue
        if port in taken:
            raise Unusable(f"{taken[port]} and {option} are both {port}: give each its own port")
        taken[port] = option
        _bind(serving.host, port, option).close()


def run(serving: Serving, digest: str, manifest: Manifest, home: Home) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit code. Raises Unusable."""
    with tempfile.TemporaryDirectory(dir=home.root, prefix="run-") as directory:
        mounted = Path(directory)
        control = _free_port(serving.host)
        _write_mounts(mounted, model_ref(serving.name), home.storage, digest, manifest)
        say("there is no operator: the worker trusts a key of this run, so no signature of an operator is checked")
        # A session of its own: Ctrl-C in a terminal goes to this process, which then ends the worker in good order.
        process = subprocess.Popen(
            [sys.executable, "-m", "trtmodel_worker.alone.front"],
            env=_environment(serving, manifest, mounted, control),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            if _wait_until_ready(process, serving):
                say(_welcome(serving, manifest))
            return process.wait()
        except KeyboardInterrupt:
            return _end(process)
        finally:
            process.kill()
            process.wait()


def _end(process: subprocess.Popen[bytes]) -> int:
    say("ending: what was accepted is answered first (once more to end at once)")
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait()
    except KeyboardInterrupt:
        return EXIT_STOPPED_HARD


def _write_mounts(directory: Path, model: ModelRef, storage: Storage, digest: str, manifest: Manifest) -> None:
    """Pointer, signature and keys, as ConfigMaps lie in a pod. The private key is not kept."""
    private = Ed25519PrivateKey.generate()
    public = private.public_key().public_bytes_raw()

    def sign(payload: bytes) -> Signature:
        return Signature(key_id(public), base64.b64encode(private.sign(payload)).decode())

    artifact = SignedArtifact(manifest.revision, digest, sign(artifact_payload(model, digest)))
    entry = PointerEntry(manifest.revision, {str(manifest.load_key): artifact})
    text = BootPointer(model, storage, 1, entry).text()
    (directory / POINTER_FILE).write_bytes(text)
    (directory / POINTER_SIGNATURE_FILE).write_bytes(canonical(encode(sign(pointer_payload(text)))))
    (directory / KEYS_FILE).write_bytes(dumps(KeySet({key_id(public): base64.b64encode(public).decode()})))


def _environment(serving: Serving, manifest: Manifest, mounted: Path, control: int) -> dict[str, str]:
    """What the operator's Deployment says to a worker. Variables TRTMODEL_* of the user say the rest."""
    return {
        "TRTMODEL_DRAIN_SECONDS": "0",  # nobody balances load onto it
        **os.environ,
        "POD_NAME": socket.gethostname() or "localhost",
        "POD_UID": str(uuid.uuid4()),
        "POD_NAMESPACE": model_ref(serving.name).namespace,
        "TRTMODEL_MODEL": serving.name,
        "TRTMODEL_MODEL_UID": model_ref(serving.name).uid,
        "TRTMODEL_RUNTIME": manifest.load_key.runtime,
        "TRTMODEL_CONTEXTS": serving.contexts,
        "TRTMODEL_HOSTS": str(serving.hosts),
        "TRTMODEL_POINTER_DIR": str(mounted),
        "TRTMODEL_KEYS_DIR": str(mounted),
        "TRTMODEL_CREDENTIALS_DIR": str(mounted / "none"),
        "TRTMODEL_CACHE_DIR": str(mounted / "cache"),
        "TRTMODEL_BIND": serving.host,
        "TRTMODEL_HTTP_PORT": str(serving.http),
        "TRTMODEL_GRPC_PORT": str(serving.grpc),
        "TRTMODEL_METRICS_PORT": str(serving.metrics),
        "TRTMODEL_CONTROL_PORT": str(control),
    }


def _wait_until_ready(process: subprocess.Popen[bytes], serving: Serving) -> bool:
    """False: it ended before."""
    while process.poll() is None:
        if _is_ready(_reachable(serving.host), serving.http):
            return True
        time.sleep(POLL_SECONDS)
    return False


def _is_ready(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    return False


def _welcome(serving: Serving, manifest: Manifest) -> str:
    host = _reachable(serving.host)
    base = f"http://{f'[{host}]' if ':' in host else host}"
    model = f"{base}:{serving.http}/v2/models/{serving.name}"
    grpc = f", gRPC at {host}:{serving.grpc}" if serving.grpc else ""
    example = _example(manifest)
    ask = f"curl {model}/infer -d '{json.dumps(example)}'" if example else f"curl {model}"
    return f"ready: {model}{grpc}, metrics at {base}:{serving.metrics}/metrics\n  {ask}"


def _example(manifest: Manifest) -> Mapping[str, object] | None:
    """A request of zeros, None if it were long."""
    least = manifest.profiles[0].inputs if manifest.profiles else {}
    shapes = {t.name: least[t.name].min if t.name in least else t.shape for t in manifest.inputs}
    counts = {name: math.prod(shape) for name, shape in shapes.items()}
    # Half precision has no JSON form in the protocol.
    if sum(counts.values()) > MOST_EXAMPLE_VALUES or any(t.datatype == "FP16" for t in manifest.inputs):
        return None
    return {
        "inputs": [
            {
                "name": t.name,
                "datatype": t.datatype,
                "shape": list(shapes[t.name]),
                "data": [False if t.datatype == "BOOL" else 0] * counts[t.name],
            }
            for t in manifest.inputs
        ]
    }


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104 - compared, not bound


def _free_port(host: str) -> int:
    with _bind(host, 0, "--host") as s:
        return int(s.getsockname()[1])


def _bind(host: str, port: int, option: str) -> socket.socket:
    """A bound socket. Raises Unusable."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        s = socket.socket(family, kind)
    except OSError as e:
        raise Unusable(f"--host {host}: {e.strerror or e}: give an address of this machine") from e
    try:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the worker does: a former one's last words linger
        s.bind(address)
        s.listen(1)
    except OSError as e:
        s.close()
        if e.errno == errno.EADDRNOTAVAIL:
            raise Unusable(f"--host {host}: it is no address of this machine") from e
        why = "is taken" if e.errno == errno.EADDRINUSE else f"cannot be used: {e.strerror}"
        raise Unusable(f"port {port} of {host} {why}: name another one with {option}") from e
    return s
