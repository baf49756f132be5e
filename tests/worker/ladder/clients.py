"""Many clients of one worker, each value distinct, every byte of every answer compared; and what is done to hosts."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from trtmodel_contract.manifest import TensorSpec
from worker_harness import REVISION_1, Answer, Bucket, ClientThreads, Operator, WorkerProcess, binary_fp32, eventually

Start = Callable[..., WorkerProcess]
DYNAMIC = {
    "inputs": (TensorSpec("x", "FP32", (-1, -1)),),
    "outputs": (TensorSpec("y", "FP32", (-1, -1)),),
}
FIRST_VALUE = 1000.0  # above those of warm-up, self-test and faults


@dataclass(frozen=True)
class Seen:
    """One request, as its client saw it. Times are of time.monotonic()."""

    started: float
    ended: float
    status: int
    revision: str

    @property
    def seconds(self) -> float:
        return self.ended - self.started


class Clients(ClientThreads):
    """Send without pause over kept connections, `rows` x `widths` at random. An answer must be what the revision that
    it names makes of the rows; one that is none of 200 and `allowed` is a failure. `pause`: seconds between two."""

    def __init__(
        self,
        port: int,
        factors: Mapping[str, float],
        clients: int = 8,
        *,
        rows: Sequence[int] = (1,),
        widths: Sequence[int] = (4,),
        allowed: Sequence[int] = (),
        pause: float = 0.0,
        path: str = "/v2/models/m/infer",
    ) -> None:
        super().__init__(clients)
        self._port, self._factors, self._path = port, factors, path
        self._rows, self._widths, self._allowed, self._pause = rows, widths, allowed, pause
        self.seen: list[Seen] = []
        self.failures: list[str] = []
        self.wrong: list[str] = []
        self.refusals: list[Answer] = []

    def wait_for(self, count: int, seconds: float = 60.0) -> None:
        """Until so many more requests were answered."""
        target = len(self.seen) + count
        eventually(lambda: len(self.seen) >= target or self.bad, f"{count} more answers", seconds)

    @property
    def bad(self) -> list[str]:
        return self.wrong + self.failures

    def by_revision(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for each in list(self.seen):
            if each.status == 200:
                found[each.revision] = found.get(each.revision, 0) + 1
        return found

    def _client(self, number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        choice, turn = random.Random(number), 0
        while not self._stop.is_set():
            turn += 1
            rows, width = choice.choice(self._rows), choice.choice(self._widths)
            # Exact in 32 bits: below 2 ** 24 in quarters, and no two rows of all clients near in time are the same.
            first = FIRST_VALUE + (number % 64) * 30_000 + turn * 8 % 30_000
            x = (first + np.arange(rows)[:, None] + np.arange(width)[None, :] % 4 / 4).astype(np.float32)
            started = time.monotonic()
            try:
                answer = ask(connection, self._path, x)
                self._check(x, answer, started)
            except (OSError, http.client.HTTPException) as e:
                with self._lock:
                    self.failures.append(f"{type(e).__name__}: {e}")
                connection.close()
            if self._pause:
                self._stop.wait(self._pause)
        connection.close()

    def _check(self, x: np.ndarray, answer: Answer, started: float) -> None:
        ended, revision = time.monotonic(), answer.revision or ""
        with self._lock:
            self.seen.append(Seen(started, ended, answer.status, revision))
            if answer.status in self._allowed:
                self.refusals.append(answer)
            elif answer.status != 200:
                self.failures.append(f"{answer.status} {answer.body[:300]!r}")
            else:
                found = values(answer, x.shape)
                if found is None or not np.array_equal(found, x * np.float32(self._factors[revision])):
                    self.wrong.append(f"{x.tolist()} to {revision} gave {found} ({answer.body[:200]!r})")


def ask(connection: http.client.HTTPConnection, path: str, x: np.ndarray) -> Answer:
    body, headers = binary_fp32(x.ravel().tolist(), list(x.shape), parameters={"binary_data_output": True})
    connection.request("POST", path, body, {k.replace("_", "-"): v for k, v in headers.items()})
    response = connection.getresponse()
    return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())


def ask_once(worker: WorkerProcess, x: np.ndarray, path: str = "/v2/models/m/infer") -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=60)
    try:
        return ask(connection, path, x)
    finally:
        connection.close()


def row(value: float, rows: int = 1, width: int = 4) -> np.ndarray:
    return np.full((rows, width), value, np.float32)


def values(answer: Answer, shape: Sequence[int]) -> np.ndarray | None:
    """What a binary answer holds, None if its shape is another one or its head does not agree with its headers."""
    head = int(answer.headers.get("inference-header-content-length", "0"))
    document = json.loads(answer.body[:head])
    if document["outputs"][0]["shape"] != list(shape) or document["model_version"] != answer.revision:
        return None
    count = int(np.prod(shape))
    if len(answer.body) != head + 4 * count:
        return None
    return np.array(struct.unpack(f"<{count}f", answer.body[head:]), np.float32).reshape(shape)


# -- hosts


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A host that does not run for a while. It may have been ended meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def metric(worker: WorkerProcess, name: str, revision: str = REVISION_1) -> float:
    """Of one revision, 0 if there is none yet."""
    pattern = rf'^trtmodel_{name}\{{revision="{revision}"\}} (\S+)$'
    found = re.search(pattern, worker.metrics(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def lanes_are(worker: WorkerProcess, count: int, revision: str = REVISION_1) -> None:
    eventually(lambda: metric(worker, "lanes", revision) == count, f"{count} lanes are up")


def counts(worker: WorkerProcess, digest: str = "", window: str = "") -> Any:
    """Attempts of the engine (of the only one, without a digest) in the newest window."""
    windows = worker.report().models["m"].windows
    engines = windows[window or list(windows)[-1]]
    return engines[digest] if digest else next(iter(engines.values()))


@dataclass(frozen=True)
class Served:
    worker: WorkerProcess
    digest: str


def serve(
    start_worker: Start, operator: Operator, bucket: Bucket, behaviour: Mapping[str, Any] | None = None,
    *, dynamic: bool = False, max_rows: int = 8, widths: tuple[int, int] = (2, 6), **environment: str,
) -> Served:  # fmt: skip
    """A ready worker whose engine doubles its input, with two lanes for each host."""
    from trtmodel_contract.identity import Profile, ShapeRange

    more: dict[str, Any] = {}
    if dynamic:
        low, high = widths
        more = {**DYNAMIC, "profiles": (Profile({"x": ShapeRange((1, low), (1, low), (max_rows, high))}),)}
    digest, _ = bucket.publish(REVISION_1, {"factor": 2.0, **(behaviour or {})}, max_rows=max_rows, **more)
    environment.setdefault("TRTMODEL_REQUEST_TIMEOUT_SECONDS", "30")
    worker = start_worker(**environment)
    worker.point(operator.artifact(REVISION_1, digest))
    worker.start()
    worker.wait_ready()
    return Served(worker, digest)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def held(worker: WorkerProcess) -> Mapping[str, int]:
    """What a leak in the front would show in."""
    process = Path(f"/proc/{worker.pid}")
    return {
        "descriptors": len(list((process / "fd").iterdir())),
        "threads": len(list((process / "task").iterdir())),
        "shared memory": (process / "maps").read_text().count("memfd:"),
    }


def settled(what: Callable[[], Any], seconds: float = 20.0) -> Any:
    """A value that stays for half a second."""
    deadline = time.monotonic() + seconds
    last, since = what(), time.monotonic()
    while time.monotonic() - since < 0.5 and time.monotonic() < deadline:
        time.sleep(0.02)
        now = what()
        if now != last:
            last, since = now, time.monotonic()
    return last
