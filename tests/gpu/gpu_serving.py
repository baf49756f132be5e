"""A worker as a process on the GPU, an operator's wishes, and clients."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from gpu_models import HERE
from trtmodel_contract.codec import dumps
from trtmodel_contract.identity import LoadKey
from trtmodel_contract.manifest import Golden, Manifest, MemoryNeed
from trtmodel_worker.engines.base import allocate_anew
from trtmodel_worker.engines.tensorrt.runtime import TensorRtRuntime
from worker_harness import REVISION_1, REVISION_2, Bucket, Operator, WorkerProcess, eventually

ROOT = HERE.parents[1]
SHM_PREFIX = "trtmodel-gpu-"
READY_SECONDS = 180.0
GOLDEN_ROWS = 2
ASKED = dict(each.split("=", 1) for each in os.environ.get("TRTMODEL_GPU_SET", "").split())


def load(model, lanes=1):
    """An engine in this process."""
    return TensorRtRuntime().load(memoryview(model.plan.read_bytes()), model.profiles, lanes)


def load_key(runtime):
    key = TensorRtRuntime().load_key()
    return LoadKey(runtime, key.version, key.device, key.capability, key.mig)


def describe(model, engine, revision, runtime, put):
    """The manifest of the model's plan as an engine of `runtime`. `put` keeps bytes and says as what."""
    inputs = model.sample(GOLDEN_ROWS, seed=7)
    outputs = engine.create_lane().run(inputs, allocate_anew)
    arrays = {f"i{i}": inputs[s.name] for i, s in enumerate(engine.inputs)}
    arrays |= {f"o{i}": outputs[s.name] for i, s in enumerate(engine.outputs)}
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    tolerances = {name: 1e-2 * float(np.abs(array).max()) for name, array in outputs.items()}
    return Manifest(
        revision=revision, load_key=load_key(runtime), number=1, driver=TensorRtRuntime().driver(), build={},
        source_sha256="0" * 64, plan=put(model.plan.read_bytes()), inputs=engine.inputs, outputs=engine.outputs,
        profiles=model.profiles, memory=MemoryNeed(0, 0),
        golden=(Golden(put(buffer.getvalue()), GOLDEN_ROWS, tolerances),), tools={},
        created_at="2026-01-01T00:00:00Z",
    )  # fmt: skip


def publish(bucket, model, engine, revision, runtime):
    """Commit the model's plan as an engine of `runtime`; its manifest's digest."""
    manifest = describe(model, engine, revision, runtime, bucket.store.put_bytes)
    return bucket.store.put_bytes(dumps(manifest)).digest


def search_path():
    """Of a process that imports the worker, and what is here."""
    mine = [ROOT / "contract", ROOT / "worker", HERE, HERE / "plugin", ROOT / "tests", ROOT / "tests/worker"]
    return os.pathsep.join([*map(str, mine), *filter(None, [os.environ.get("PYTHONPATH", "")])])


class Served:
    """A worker with the model's plan as its stable engine, and the same plan as another revision. `apart`: it has
    three quarters of the processors to itself and knows it, as a pod of whole CPUs does; clients have the others."""

    def __init__(self, folder, model, engine, runtime="TensorRT", lanes=4, hosts=1, *, apart=False, **environment):
        self.folder, self.model, self.apart = folder, model, apart
        if apart:
            environment["TRTMODEL_FRONT_CORE"] = "Own"
        self.operator, self.bucket = Operator(), Bucket(folder / "bucket")
        self.key = load_key(runtime)
        digests = [publish(self.bucket, model, engine, r, runtime) for r in (REVISION_1, REVISION_2)]
        self.engines = [self.operator.artifact(r, d) for r, d in zip((REVISION_1, REVISION_2), digests, strict=True)]
        kept = {n: os.environ[n] for n in ("LD_LIBRARY_PATH", "PYTHONHOME", "CUDA_VISIBLE_DEVICES") if n in os.environ}
        settings = {
            "TRTMODEL_RUNTIME": runtime, "TRTMODEL_CONTEXTS": str(lanes), "TRTMODEL_HOSTS": str(hosts),
            "TRTMODEL_SHARED_MEMORY_PREFIX": SHM_PREFIX, "TRTMODEL_BATCH_BUCKETS": "1,2,4,8,16,32",
            "PYTHONPATH": search_path(), **kept, **ASKED, **environment,
        }  # fmt: skip
        self.worker = WorkerProcess(folder / "worker", self.operator, self.bucket, **settings)
        self.clients = 0

    def __enter__(self):
        self.worker.point(self.engines[0], load_key=self.key)
        began = time.monotonic()
        with self._processors(first=True):
            self.worker.start()
        eventually(self._ready, f"the worker is ready\n{self.worker.tail()}", READY_SECONDS)
        self.ready_seconds = time.monotonic() - began
        return self

    def _ready(self):
        assert self.worker.process.poll() is None, self.worker.tail()
        try:
            return self.worker.get("/v2/health/ready").status == 200
        except OSError:
            return False

    def __exit__(self, *_):
        self.worker.stop()
        log = os.environ.get("OUT")
        if log:
            (Path(log) / f"worker-{self.folder.name}.log").write_text(self.worker.log.read_text()[-60000:])

    def _processors(self, first):
        return processors(first) if self.apart else contextlib.nullcontext()

    def hosts(self):
        return self.worker.host_pids()

    def request(self, rows=1, shared_memory=False):
        """A file with a whole request."""
        return write_request(self.worker, self.folder, self.model.sample(rows), shared_memory)

    def answers(self, rows=1):
        """One request's status and first output."""
        data = self.request(rows).read_bytes()
        head, _, body = data.partition(b"\r\n\r\n")
        headers = dict(line.split(": ") for line in head.decode().split("\r\n")[1:])
        connection = http.client.HTTPConnection("127.0.0.1", self.worker.port, timeout=30)
        try:
            connection.request("POST", "/v2/models/m/infer", body, headers)
            response = connection.getresponse()
            found = response.read()
            assert response.status == 200, found[:500]
            at = int(response.getheader("inference-header-content-length"))
            shape = json.loads(found[:at])["outputs"][0]["shape"]
            return np.frombuffer(found[at:], np.float32).reshape(shape)
        finally:
            connection.close()

    def client(self, request, concurrency, seconds, pause=0.0, how=""):
        """A client that runs meanwhile; `result` waits for it."""
        with self._processors(first=False):
            return start_client(self.worker.port, request, concurrency, seconds, pause, how)

    def measure(self, request, concurrency, seconds, processes=1, how=""):
        """Percentiles and rate of clients that do nothing else."""
        before = self.spent()
        clients = [self.client(request, concurrency, seconds, how=how) for _ in range(processes)]
        results = [client.result() for client in clients]
        parts = {name: round(1e3 * (now - before[name][0]) / max(1, count - before[name][1]), 3)
                 for name, (now, count) in self.spent().items()}  # fmt: skip
        took = np.concatenate([r.ms for r in results])
        bad = [text for r in results for text in r.bad]
        return {**percentiles(took), "per_second": round(len(took) / seconds, 1), "mean_ms_in": parts, "bad": len(bad),
                "why": bad[:3]}  # fmt: skip

    def spent(self):
        """Seconds and requests until now, by part: waiting for a lane, in the engine, all within the worker."""
        text = self.worker.metrics()
        return {
            part: (_sum(text, f"{part}_seconds_sum"), _sum(text, f"{part}_seconds_count"))
            for part in ("queue", "compute", "request")
        }


@contextlib.contextmanager
def processors(first):
    """What is started meanwhile runs on the first three quarters of the processors, or on the others."""
    before = os.sched_getaffinity(0)
    numbers = sorted(before)
    cut = 3 * len(numbers) // 4
    os.sched_setaffinity(0, numbers[:cut] if first else numbers[cut:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def write_request(worker, folder, inputs, shared_memory):
    """A file with a whole request of one input, which is registered if it is to lie in shared memory."""
    ((name, array),) = inputs.items()
    rows = len(array)
    tensor = {"name": name, "datatype": "INT32" if array.dtype == np.int32 else "FP32", "shape": list(array.shape)}
    body = b"" if shared_memory else array.tobytes()
    if shared_memory:
        key = f"{SHM_PREFIX}{os.getpid()}-{rows}"
        Path("/dev/shm", key).write_bytes(array.tobytes())
        register = f"/v2/systemsharedmemory/region/{key}/register"
        worker.post(register, json.dumps({"key": key, "offset": 0, "byte_size": array.nbytes}).encode())
        tensor["parameters"] = {"shared_memory_region": key, "shared_memory_byte_size": array.nbytes}
    else:
        tensor["parameters"] = {"binary_data_size": array.nbytes}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    lines = [
        "POST /v2/models/m/infer HTTP/1.1", "Host: m", "Content-Type: application/octet-stream",
        f"Content-Length: {len(head) + len(body)}", f"Inference-Header-Content-Length: {len(head)}",
    ]  # fmt: skip
    path = folder / f"request-{rows}-{shared_memory}"
    path.write_bytes(("\r\n".join(lines) + "\r\n\r\n").encode() + head + body)
    return path


def start_client(port, request, concurrency, seconds, pause=0.0, how=""):
    command = [sys.executable, str(HERE / "gpu_client.py"), str(port), str(request), str(concurrency)]
    return Client(subprocess.Popen([*command, str(seconds), str(pause), how], stdout=subprocess.PIPE), seconds)


class Client:
    def __init__(self, process, seconds):
        self._process, self._seconds = process, seconds

    def stop(self):
        """What it saw until now."""
        self._process.terminate()
        return self.result()

    def result(self):
        out, _ = self._process.communicate(timeout=self._seconds + 60)
        assert self._process.returncode == 0
        found = json.loads(out)
        return Seen(np.array(found["sent"]), np.array(found["ms"]), found["bad"], found["turns"])


class Seen:
    """`turns`: which requests were the first that another revision answered, the very first one among them."""

    def __init__(self, sent, ms, bad, turns=()):
        self.sent, self.ms, self.bad, self.turns = sent, ms, bad, list(turns)

    def between(self, begin, end):
        """Latencies of requests that were under way then."""
        return self.ms[(self.sent <= end) & (self.sent + self.ms / 1e3 >= begin)]

    def outside(self, begin, end):
        return self.ms[(self.sent + self.ms / 1e3 < begin) | (self.sent > end)]


def percentiles(ms):
    if not len(ms):
        return {"count": 0}
    p50, p99, p999 = np.percentile(ms, [50, 99, 99.9])
    return {"count": len(ms), "p50_ms": round(float(p50), 3), "p99_ms": round(float(p99), 3),
            "p999_ms": round(float(p999), 3), "max_ms": round(float(ms.max()), 3)}  # fmt: skip


def busiest(pids, seconds):
    """The process that takes the most of the processors for so long. Two callers keep only the lanes busy that were
    free last."""
    before = {pid: _ticks(pid) for pid in pids}
    time.sleep(seconds)
    return max(pids, key=lambda pid: _ticks(pid) - before[pid])


def _ticks(pid):
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return int(user) + int(system)


@contextlib.contextmanager
def stopped(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def metric(worker, name):
    return _sum(worker.metrics(), name)


def _sum(text, name):
    lines = [line for line in text.splitlines() if line.startswith(f"trtmodel_{name}")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def quantile(worker, part, share):
    """Milliseconds that so large a share of all requests until now has taken at most in that part (queue, compute,
    request): the upper end of the histogram's bucket."""
    found = {}
    for line in worker.metrics().splitlines():
        if line.startswith(f"trtmodel_{part}_seconds_bucket") and "+Inf" not in line:
            limit = float(line.split('le="')[1].split('"')[0])
            found[limit] = found.get(limit, 0.0) + float(line.rsplit(" ", 1)[1])
    total = max(found.values(), default=0.0)
    return round(1e3 * min((limit for limit, count in found.items() if count >= share * total), default=0.0), 3)
