"""What front and engine host add to a bare inference, and how many requests they carry. A null model (Identity, 8 KB).

    python bench/overhead.py [--seconds 5]

Everything is measured in one run on this machine: bare inference in this process through the same engine, then over
HTTP at several concurrencies. The CPU time per request is given too: unlike the rates, it says something on a busy
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "worker"), str(ROOT / "tests" / "worker" / "builder")]

import onnx_models  # noqa: E402
import onnxruntime  # noqa: E402
from job_harness import make_jobs, profiles, save_npz  # noqa: E402
from trtmodel_contract.gate import Task  # noqa: E402
from trtmodel_contract.identity import EngineSettings  # noqa: E402
from trtmodel_worker.engines.registry import runtime  # noqa: E402
from trtmodel_worker.storage import ArtifactStore  # noqa: E402
from worker_harness import MODEL, Bucket, Operator, WorkerProcess, binary_fp32, fp32  # noqa: E402

WIDTH = 2048
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--lanes", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), given.seconds, given.lanes)


def measure(folder: Path, seconds: float, lanes: int) -> None:
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
    bare = bare_inference(ArtifactStore(jobs.storage, MODEL.namespace, None), artifact.manifest_digest, folder, seconds)

    operator, bucket = Operator(), Bucket(folder / "unused")
    bucket.storage = jobs.storage
    worker = WorkerProcess(
        folder / "worker", operator, bucket, TRTMODEL_RUNTIME="ONNXRuntime", TRTMODEL_CONTEXTS=str(lanes)
    )
    signed = operator.artifact(result.build.revision, artifact.manifest_digest)
    worker.point(signed, load_key=artifact.load_key)
    worker.start()
    try:
        worker.wait_ready()
        print(f"{date.today()}, {platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, "
              f"load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, "
              f"ONNX Runtime {onnxruntime.__version__}, {lanes} lanes")  # fmt: skip
        print(f"bare inference, in process: p50 {bare:.3f} ms\n")
        print("| request | clients | requests/s | p50 ms | p99 ms | over bare ms | front us | host us | client us |")
        print("|---|---|---|---|---|---|---|---|---|")
        for name, request in requests(folder):
            for clients in (1, 16, 64):
                print(row(worker, name, request, clients, seconds, bare), flush=True)
    finally:
        worker.stop()


def bare_inference(store: ArtifactStore, digest: str, folder: Path, seconds: float) -> float:
    """p50 in ms of the same engine, called directly."""
    manifest = store.get_manifest(digest)
    plan = store.fetch_blob(manifest.plan.digest, manifest.plan.size, folder / "cache").read_bytes()
    lane = runtime("ONNXRuntime").load(memoryview(plan), manifest.profiles, 1).create_lane()
    inputs, output = {"x": np.ones((1, WIDTH), np.float32)}, np.empty((1, WIDTH), np.float32)
    allocate: Callable[..., np.ndarray] = lambda *_: output  # noqa: E731
    times = []
    end = time.perf_counter() + seconds / 5
    while time.perf_counter() < end:
        started = time.perf_counter()
        lane.run(inputs, allocate)
        times.append(time.perf_counter() - started)
    return 1e3 * sorted(times)[len(times) // 2]


def requests(folder: Path) -> list[tuple[str, Path]]:
    body, headers = binary_fp32([0.5] * WIDTH, [1, WIDTH], parameters={"binary_data_output": True})
    text = json.dumps(fp32([0.5] * WIDTH, [1, WIDTH])).encode()
    length = headers["Inference_Header_Content_Length"]
    made = []
    for name, kind, more, data in (
        ("binary", "application/octet-stream", f"Inference-Header-Content-Length: {length}\r\n", body),
        ("JSON", "application/json", "", text),
    ):
        head = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: m\r\nContent-Type: {kind}\r\n{more}"
        path = folder / name
        path.write_bytes(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        made.append((name, path))
    return made


def row(worker: WorkerProcess, name: str, request: Path, clients: int, seconds: float, bare: float) -> str:
    (host,) = worker.host_pids()
    before = cpu_seconds(worker.pid), cpu_seconds(host), os.times().children_user + os.times().children_system
    command = [sys.executable, str(ROOT / "bench" / "client.py"), str(worker.port), str(request)]
    out = subprocess.check_output([*command, "--concurrency", str(clients), "--seconds", str(seconds)])
    after = cpu_seconds(worker.pid), cpu_seconds(host), os.times().children_user + os.times().children_system
    found = json.loads(out)
    if found["bad"]:
        sys.exit(f"{found['bad']} answers were not 200")
    rate, p50 = found["requests_per_second"], found["p50_ms"]
    costs = " | ".join(f"{1e6 * (b - a) / (rate * seconds):.0f}" for a, b in zip(before, after, strict=True))
    return f"| {name} | {clients} | {rate:,.0f} | {p50:.3f} | {found['p99_ms']:.3f} | {p50 - bare:.3f} | {costs} |"


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


if __name__ == "__main__":
    main()
