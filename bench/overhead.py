"""What front and engine host add to a bare inference, and how many requests they carry. A null model (Identity, 8 KB).

    python bench/overhead.py [--seconds 3] [--rounds 5]

Everything is measured in one run on this machine, in turns: bare inference in this process through the same engine,
then over HTTP at each concurrency, as often as there are rounds. The table has medians. The CPU time per request is
given too: unlike the rates, it says something on a busy machine.

The load is made by wrk (https://github.com/wg/wrk), whose share of the two cores is small; without it by client.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = [str(ROOT / "worker"), str(ROOT / "contract")]
TESTS = ROOT / "tests"
sys.path[:0] = [*PACKAGES, *map(str, (TESTS, TESTS / "worker", TESTS / "worker" / "builder"))]

import onnx_models  # noqa: E402
import onnxruntime  # noqa: E402
from ending import sigterm_ends  # noqa: E402
from job_harness import make_jobs, profiles, save_npz  # noqa: E402
from trtmodel_contract.gate import Task  # noqa: E402
from trtmodel_contract.identity import EngineSettings  # noqa: E402
from trtmodel_worker.engines.base import Lane  # noqa: E402
from trtmodel_worker.engines.registry import runtime  # noqa: E402
from trtmodel_worker.storage import ArtifactStore  # noqa: E402
from worker_harness import MODEL, Bucket, Operator, WorkerProcess, binary_fp32, fp32  # noqa: E402

WIDTH = 2048
TICKS = os.sysconf("SC_CLK_TCK")
TARGET = "/v2/models/m/infer"


@dataclass(frozen=True)
class Kind:
    """A request that is sent again and again. `files`: as the load generators want it."""

    name: str
    raw: Path
    script: Path


@dataclass(frozen=True)
class Sample:
    """Times in ms; CPU time per request in us: front, hosts, client."""

    rate: float
    p50: float
    p99: float
    costs: tuple[float, float, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--kinds", nargs="+", default=["binary", "JSON"], choices=["binary", "JSON"])
    given = parser.parse_args()
    sigterm_ends()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), given)


def measure(folder: Path, given: argparse.Namespace) -> None:
    source = onnx_models.save(
        folder / "null.onnx",
        [onnx_models.node("Identity", ["x"], ["y"])],
        [("x", onnx_models.FLOAT, ("n", WIDTH))],
        [("y", onnx_models.FLOAT, ("n", WIDTH))],
    )
    data = save_npz(folder / "eval.npz", x=np.random.default_rng(1).normal(size=(600, WIDTH)).astype(np.float32))
    engine = EngineSettings("ONNXRuntime", profiles=profiles("x", WIDTH))
    jobs = make_jobs(folder, source, data, engine=engine, task=Task.RAW)
    code, result = jobs.build()
    if code or result.build is None:
        sys.exit(result.message)
    artifact = result.build.artifact
    lane = bare_lane(ArtifactStore(jobs.storage, MODEL.namespace, None), artifact.manifest_digest, folder)

    operator, bucket = Operator(), Bucket(folder / "unused")
    bucket.storage = jobs.storage
    settings = {
        "TRTMODEL_RUNTIME": "ONNXRuntime",
        "TRTMODEL_CONTEXTS": str(given.lanes),
        "PYTHONPATH": os.pathsep.join(PACKAGES),
    }
    worker = WorkerProcess(folder / "worker", operator, bucket, **settings)
    signed = operator.artifact(result.build.revision, artifact.manifest_digest)
    worker.point(signed, load_key=artifact.load_key)
    worker.start()
    try:
        worker.wait_ready()
        run(worker, lane, requests(folder, given.kinds), given)
    finally:
        worker.stop()


def run(worker: WorkerProcess, lane: Lane, kinds: list[Kind], given: argparse.Namespace) -> None:
    load = wrk_load
    if shutil.which("wrk") is None:
        print("wrk is not installed (Debian: apt-get install wrk): client.py, which costs more, makes the load\n")
        load = client_load
    before = os.getloadavg()[0]
    bare: list[float] = []
    samples: dict[tuple[str, int], list[Sample]] = {(k.name, n): [] for k in kinds for n in given.clients}
    for kind in kinds:
        load(worker.port, kind, 16, 1.0)  # caches and branch predictors are warm in what is measured
    for _ in range(given.rounds):
        bare.append(bare_inference(lane, given.seconds / 5))
        for kind in kinds:
            for clients in given.clients:
                samples[kind.name, clients].append(sample(worker, load, kind, clients, given.seconds))
    print(
        f"{date.today()}, {platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, "
        f"load average {before:.1f} before and {os.getloadavg()[0]:.1f} after, Python {platform.python_version()}, "
        f"ONNX Runtime {onnxruntime.__version__}, {given.lanes} lanes, medians of {given.rounds} rounds of "
        f"{given.seconds:g} s, load by {'wrk' if load is wrk_load else 'client.py'}\n"
    )
    nothing = median(bare)
    print(f"Bare inference, in process: p50 {nothing:.3f} ms\n")
    print("| request | clients | requests/s (lowest to highest) | p50 ms | p99 ms | p50 over bare ms "
          "| CPU us per request: front | host | client |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for (name, clients), found in samples.items():
        rates = sorted(s.rate for s in found)
        p50 = median(s.p50 for s in found)
        costs = " | ".join(f"{median(column):.0f}" for column in zip(*(s.costs for s in found), strict=True))
        print(f"| {name} | {clients} | {median(rates):,.0f} ({rates[0]:,.0f} to {rates[-1]:,.0f}) | {p50:.3f} "
              f"| {median(s.p99 for s in found):.3f} | {p50 - nothing:.3f} | {costs} |")  # fmt: skip


def bare_lane(store: ArtifactStore, digest: str, folder: Path) -> Lane:
    manifest = store.get_manifest(digest)
    plan = store.fetch_blob(manifest.plan.digest, manifest.plan.size, folder / "cache").read_bytes()
    return runtime("ONNXRuntime").load(memoryview(plan), manifest.profiles, 1).create_lane()


def bare_inference(lane: Lane, seconds: float) -> float:
    """p50 in ms of the same engine, called directly."""
    inputs, output = {"x": np.ones((1, WIDTH), np.float32)}, np.empty((1, WIDTH), np.float32)
    allocate: Callable[..., np.ndarray] = lambda *_: output  # noqa: E731
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        lane.run(inputs, allocate)
        times.append(time.perf_counter() - started)
    return 1e3 * median(times)


def requests(folder: Path, names: list[str]) -> list[Kind]:
    body, more = binary_fp32([0.5] * WIDTH, [1, WIDTH], parameters={"binary_data_output": True})
    length = {"Inference-Header-Content-Length": more["Inference_Header_Content_Length"]}
    text = json.dumps(fp32([0.5] * WIDTH, [1, WIDTH])).encode()
    made = []
    for name, headers, data in (
        ("binary", {"Content-Type": "application/octet-stream", **length}, body),
        ("JSON", {"Content-Type": "application/json"}, text),
    ):
        raw, content, script = folder / name, folder / f"{name}.body", folder / f"{name}.lua"
        lines = [f"POST {TARGET} HTTP/1.1", "Host: m", *(f"{k}: {v}" for k, v in headers.items())]
        raw.write_bytes("\r\n".join((*lines, f"Content-Length: {len(data)}", "", "")).encode() + data)
        content.write_bytes(data)
        script.write_text(lua(content, headers))
        if name in names:
            made.append(Kind(name, raw, script))
    return made


def lua(content: Path, headers: dict[str, str]) -> str:
    """wrk's script. Without a function `request` wrk makes it once and sends the same bytes always."""
    lines = [
        'wrk.method = "POST"',
        f'local file = io.open("{content}", "rb")',
        'wrk.body = file:read("*a")',
        "file:close()",
        *(f'wrk.headers["{name}"] = "{value}"' for name, value in headers.items()),
        "function done(summary, latency)",
        "  local e = summary.errors",
        "  local bad = e.connect + e.read + e.write + e.status + e.timeout",
        '  local form = \'\\n{"requests": %d, "seconds": %.6f, "p50_ms": %.6f, "p99_ms": %.6f, "bad": %d}\\n\'',
        "  io.write(string.format(form, summary.requests, summary.duration / 1e6,",
        "    latency:percentile(50) / 1e3, latency:percentile(99) / 1e3, bad))",
        "end",
    ]
    return "\n".join((*lines, ""))


def wrk_load(port: int, kind: Kind, clients: int, seconds: float) -> dict[str, float]:
    command = ["wrk", "-t1", f"-c{clients}", f"-d{max(1, round(seconds))}s", "-s", str(kind.script)]
    out = subprocess.check_output([*command, f"http://127.0.0.1:{port}{TARGET}"], timeout=seconds + 60)
    found: dict[str, float] = json.loads(out.splitlines()[-1])
    return found


def client_load(port: int, kind: Kind, clients: int, seconds: float) -> dict[str, float]:
    command = [sys.executable, str(ROOT / "bench" / "client.py"), str(port), str(kind.raw)]
    command += ["--concurrency", str(clients), "--seconds", str(seconds)]
    found: dict[str, float] = json.loads(subprocess.check_output(command, timeout=seconds + 60))
    return found


def sample(
    worker: WorkerProcess,
    load: Callable[[int, Kind, int, float], dict[str, float]],
    kind: Kind,
    clients: int,
    seconds: float,
) -> Sample:
    hosts = worker.host_pids()
    before = (cpu_seconds(worker.pid), sum(map(cpu_seconds, hosts)), children_seconds())
    found = load(worker.port, kind, clients, seconds)
    after = (cpu_seconds(worker.pid), sum(map(cpu_seconds, hosts)), children_seconds())
    if found["bad"] or not found["requests"]:
        sys.exit(f"{found['bad']:.0f} of {found['requests']:.0f} answers were not 200\n{worker.tail()}")
    front, host, client = (1e6 * (b - a) / found["requests"] for a, b in zip(before, after, strict=True))
    return Sample(found["requests"] / found["seconds"], found["p50_ms"], found["p99_ms"], (front, host, client))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
