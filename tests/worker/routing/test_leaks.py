"""What fails leaves nothing behind, and what anybody may send makes nothing grow."""

from __future__ import annotations

import itertools
import json
import random
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trtmodel_contract.control import EngineState
from trtmodel_contract.manifest import TensorSpec
from worker_harness import REVISION_1, REVISION_2, Bucket, Load, Operator, WorkerProcess, eventually, fp32

FACTORS = {REVISION_1: 1.0, REVISION_2: 2.0}
OTHER = (TensorSpec("y", "FP64", (-1, 4)),)


def broken(bucket: Bucket, number: int) -> str:
    """The digest of an engine that cannot be loaded, each fifth one for another reason."""
    revision, behaviour = f"{number:010d}", {"n": number}
    if number % 5 == 0:
        return bucket.publish(revision, behaviour, change=lambda m: replace(m, outputs=OTHER))[0]
    if number % 5 == 1:
        return bucket.publish(revision, behaviour, golden=lambda x: x + 1)[0]
    if number % 5 == 2:
        inputs, outputs = ([TensorSpec(name, "FP32", (-1, 8 + number))] for name in "xy")  # an arena of its own
        return bucket.publish(revision, {**behaviour, "refuse": "no room"}, inputs=inputs, outputs=outputs)[0]
    if number % 5 == 3:
        return bucket.publish(revision, {**behaviour, "fault": {"when": 0.0, "do": "recoverable"}})[0]
    digest, manifest = bucket.publish(revision, behaviour)
    path = bucket.blob_path(manifest.plan.digest)
    path.write_bytes(path.read_bytes()[:-1] + b" ")
    return digest


def held(worker: WorkerProcess) -> dict[str, int]:
    """Descriptors, memory files among them, mappings of memory files, and hosts."""
    proc = Path(f"/proc/{worker.pid}")
    links = []
    for entry in (proc / "fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except OSError:
            continue
    return {
        "descriptors": len(links),
        "memory files": sum("memfd:" in link for link in links),
        "mapped": (proc / "maps").read_text().count("memfd:"),
        "hosts": len(worker.host_pids()),
    }


def kib(worker: WorkerProcess, what: str) -> int:
    text = Path(f"/proc/{worker.pid}/status").read_text()
    return int(text.split(f"{what}:")[1].split()[0])


@pytest.mark.long
def test_E04_twenty_broken_engines_leave_no_descriptor_memory_or_host_behind_and_a_good_one_follows(
    worker: WorkerProcess, bucket: Bucket, operator: Operator
) -> None:
    v1, v2 = (operator.artifact(r, bucket.publish(r, {"factor": f})[0]) for r, f in FACTORS.items())
    worker.point(v1)
    worker.start()
    worker.wait_ready()
    reasons = set()

    def refuse(number: int) -> None:
        digest = broken(bucket, number)
        worker.desire(v1, operator.artifact(f"{number:010d}", digest), weight=100)
        reasons.add(worker.wait_engine(digest, EngineState.FAILED).reason)
        worker.desire(v1)
        eventually(lambda: worker.engine(digest) is None, "it is let go of")

    for number in range(5):  # what is set up once, is now
        refuse(number)
    before = held(worker)
    memory = kib(worker, "VmRSS")
    with Load(worker.port, FACTORS, clients=1) as load:
        for number in range(5, 25):
            refuse(number)
        load.wait_for(1)
    assert load.failures == []
    assert set(load.seen) == {REVISION_1}
    assert {"DigestMismatch", "SelfTestFailed", "CannotLoad", "WarmUpFailed"} <= reasons

    def as_before() -> bool:
        now = held(worker)
        return all(now[what] <= before[what] for what in before)

    try:
        eventually(as_before, "everything was given back")
    except AssertionError as e:
        raise AssertionError(f"{e}: {before} before, {held(worker)} now") from None
    assert kib(worker, "VmRSS") < memory * 1.1 + 4096
    worker.desire(v2, standby=v1)
    worker.wait_routed(v2.manifest_digest)
    assert worker.infer_rows([[1] * 4]).revision == REVISION_2


def exchange(port: int, requests: list[bytes]) -> dict[int, int]:
    """Send them over one connection, a hundred at a time; how many were answered with which status."""
    found: dict[int, int] = {}
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection, connection.makefile("rb") as answers:
        for i in range(0, len(requests), 100):
            batch = requests[i : i + 100]
            connection.sendall(b"".join(batch))
            for _ in batch:
                status = int(answers.readline().split()[1])
                length = 0
                while (line := answers.readline()) != b"\r\n":
                    name, _, value = line.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                answers.read(length)
                found[status] = found.get(status, 0) + 1
    return found


def post(path: str, document: Any) -> bytes:
    body = json.dumps(document).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: m\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def series(worker: WorkerProcess) -> set[str]:
    lines = (line for line in worker.metrics().splitlines() if not line.startswith("#"))
    return {line.rpartition(" ")[0] for line in lines}


def test_G04_no_path_model_id_or_tensor_name_of_a_client_becomes_a_label(
    worker: WorkerProcess, bucket: Bucket, operator: Operator
) -> None:
    draw = random.Random(1)
    words = (f"{draw.getrandbits(64):x}" for _ in itertools.count())
    good = fp32([1, 2, 3, 4], [1, 4])

    def some(count: int) -> list[bytes]:
        made = [post(f"/v2/models/{next(words)}/infer", good) for _ in range(4 * count)]
        made += [f"GET /{next(words)} HTTP/1.1\r\nhost: {next(words)}\r\n\r\n".encode() for _ in range(4 * count)]
        made += [post("/v2/models/m/infer", {**good, "id": next(words)}) for _ in range(count)]
        made += [post(f"/v2/models/m/versions/{next(words)}/infer", good) for _ in range(count)]
        tensor = good["inputs"][0]
        made += [post("/v2/models/m/infer", {"inputs": [{**tensor, "name": next(words)}]}) for _ in range(count)]
        return made

    worker.point(operator.artifact(REVISION_1, bucket.publish(REVISION_1)[0]))
    worker.start()
    worker.wait_ready()
    exchange(worker.port, some(100))
    before, memory = series(worker), kib(worker, "VmRSS")
    assert exchange(worker.port, some(1000)) == {404: 9000, 200: 1000, 400: 1000}
    assert series(worker) == before
    assert kib(worker, "VmRSS") < memory * 1.1 + 4096
    labels = {part for name in before for part in name.partition("{")[2].rstrip("}").split(",") if "=" in part}
    kinds = {label.partition("=")[0] for label in labels}
    assert kinds <= {"revision", "status", "reason", "le", "output", "generation", "implementation", "major", "minor",
                     "patchlevel", "version", "what"}  # fmt: skip
