"""A real worker under the byte fuzzer: it must neither fail, nor grow, nor say that it met a defect of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from byte_fuzz import Fuzzer, Tally, Violation
from worker_harness import REVISION_1, Bucket, Operator, WorkerProcess, eventually

GROWTH_BYTES = 48 << 20
FIRST = 3000  # requests after which memory is looked at for the first time: caches and buffers are filled by then
EVERY = 50_000


@dataclass(frozen=True)
class Held:
    resident: int
    descriptors: int
    threads: int

    def __str__(self) -> str:
        return f"{self.resident >> 20} MiB, {self.descriptors} descriptors, {self.threads} threads"


def held(pid: int) -> Held:
    status = (Path("/proc") / str(pid) / "status").read_text()
    number = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith(("VmRSS", "Thr"))}
    descriptors = len(list((Path("/proc") / str(pid) / "fd").iterdir()))
    return Held(int(number["VmRSS"]) * 1024, descriptors, int(number["Threads"]))


def serve(directory: Path, **environment: str) -> WorkerProcess:
    """A ready worker: x:FP32[1..8, 4] -> y = 2 x."""
    operator, bucket = Operator(), Bucket(directory / "bucket")
    worker = WorkerProcess(directory / "worker", operator, bucket, TRTMODEL_REQUEST_TIMEOUT_SECONDS="30", **environment)
    worker.point(operator.artifact(REVISION_1, bucket.publish(REVISION_1, {"factor": 2.0})[0]))
    worker.start()
    worker.wait_ready()
    return worker


def fuzzed(
    directory: Path,
    seed: int,
    requests: int,
    seconds: float = float("inf"),
    say: Callable[[str], None] = lambda _: None,
) -> Tally:
    """Raises Violation."""
    worker = serve(directory)
    try:
        return _fuzzed(worker, seed, requests, seconds, say)
    finally:
        code = worker.stop()
        if code != 0:
            raise Violation(f"the worker ended with {code}: {worker.tail()}")


def _fuzzed(worker: WorkerProcess, seed: int, requests: int, seconds: float, say: Callable[[str], None]) -> Tally:
    hosts = worker.host_pids()
    until = time.monotonic() + seconds
    tally = Fuzzer(worker.port, seed).run(FIRST, seconds)
    before = held(worker.pid)
    say(f"after {tally}: {before}")
    part = 0
    while tally.bad < requests and time.monotonic() < until:
        part += 1
        more = Fuzzer(worker.port, seed + (part << 32)).run(min(EVERY, requests - tally.bad), until - time.monotonic())
        tally += more
        say(f"after {tally}: {held(worker.pid)}")
    _well(worker, before, hosts)
    return tally


def _well(worker: WorkerProcess, before: Held, hosts: list[int]) -> None:
    assert worker.process is not None
    if worker.process.poll() is not None:
        raise Violation(f"the worker ended: {worker.tail()}")
    try:
        eventually(lambda: held(worker.pid).descriptors <= before.descriptors, "no descriptor is left")
    except AssertionError as e:
        raise Violation(f"{e}: {before}, then {held(worker.pid)}") from e
    after = held(worker.pid)
    if after.threads > before.threads or after.resident > before.resident + GROWTH_BYTES:
        raise Violation(f"it grew from {before} to {after}")
    if worker.host_pids() != hosts:
        raise Violation(f"engine hosts died: {hosts} are now {worker.host_pids()}")
    if "Traceback" in worker.log.read_text():
        raise Violation(f"it met a defect of its own: {worker.log.read_text()[-6000:]}")
