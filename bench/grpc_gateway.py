"""How many ModelInfer calls the gRPC gateway carries, and what HTTP feels of it. 8 KB raw input, a model that copies.

    python bench/grpc_gateway.py [--seconds 3] [--rounds 5]

Calls are made on the same cores by grpc_client.py, a Python client in a process of its own, and by h2load of nghttp2
(Debian: nghttp2-client) where it is installed, whose share is small. HTTP is one connection on a fixed schedule; its
latency is measured alone and while gRPC runs at half of the best rate that the same client reached (h2load where it is
installed: the Python client would take a third of one core from what is measured), in turns. The CPU time per call says
something on a busy machine too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from http.client import HTTPConnection
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = [str(ROOT / "worker"), str(ROOT / "contract")]
sys.path[:0] = [*PACKAGES, str(ROOT / "tests"), str(ROOT / "tests" / "worker")]

from ending import sigterm_ends  # noqa: E402
from free_ports import free_port  # noqa: E402
from overhead import children_seconds, cpu_seconds  # noqa: E402
from trtmodel_contract.manifest import TensorSpec  # noqa: E402
from trtmodel_worker.gateway import inference_pb2 as pb  # noqa: E402
from trtmodel_worker.slices import FRONT_SECONDS, ask_for_slices  # noqa: E402
from worker_harness import (  # noqa: E402
    PLUGIN,
    REVISION_1,
    Bucket,
    Operator,
    WorkerProcess,
    binary_fp32,
    eventually,
)

WIDTH = 2048
HTTP_RATE = 200.0
CONNECTIONS, MOST_AT_ONCE = 4, 64  # of gRPC in the background


@dataclass(frozen=True)
class Sample:
    """Times in ms; CPU time per call in us: gateway, front, hosts, client."""

    rate: float
    p50: float
    p99: float
    costs: tuple[float, ...]


class Bench:
    def __init__(self, worker: WorkerProcess, target: str, message: Path, seconds: float) -> None:
        self.worker, self.target, self.message, self.seconds = worker, target, message, seconds
        self.gateway = eventually(lambda: gateway_pid(worker), "the gateway runs")

    def command(self, *more: str) -> list[str]:
        client = str(ROOT / "bench" / "grpc_client.py")
        return [sys.executable, client, self.target, str(self.message), "--seconds", str(self.seconds), *more]

    def python(self, clients: int) -> dict[str, float]:
        out = subprocess.check_output(self.command("--concurrency", str(clients)), timeout=self.seconds + 60)
        found: dict[str, float] = json.loads(out)
        return found

    def h2load_command(self, connections: int, each: int, seconds: float, *more: str) -> list[str]:
        """`each`: calls at once on every connection."""
        body, message = self.message.with_name("framed"), self.message.read_bytes()
        body.write_bytes(b"\0" + len(message).to_bytes(4, "big") + message)
        return [
            "h2load", "-t1", f"-c{connections}", f"-m{each}", f"-D{max(1, round(seconds))}", *more, "-d", str(body),
            "-H", "content-type: application/grpc", "-H", "te: trailers",
            f"http://{self.target}/inference.GRPCInferenceService/ModelInfer",
        ]  # fmt: skip

    def h2load(self, clients: int) -> dict[str, float]:
        """It does not understand gRPC: an answer with less data than the first had is no answer."""
        connections = min(4, clients)
        log = self.message.with_name("log")
        log.unlink(missing_ok=True)
        command = self.h2load_command(connections, clients // connections, self.seconds, f"--log-file={log}")
        out = subprocess.check_output(command, text=True, timeout=self.seconds + 60)
        times = sorted(int(line.split()[2]) for line in log.read_text().splitlines())
        data = re.search(r"\((\d+)\) data", out)
        assert data is not None, out
        bad = 0 if int(data[1]) >= len(times) * (4 * WIDTH) else len(times)
        at = lambda part: times[int(part * len(times))] / 1e3  # noqa: E731
        seconds = max(1, round(self.seconds))
        return {"requests": len(times), "seconds": seconds, "p50_ms": at(0.5), "p99_ms": at(0.99), "bad": bad}

    def sample(self, load: Callable[[int], dict[str, float]], clients: int) -> Sample:
        pids = ([self.gateway], [self.worker.pid], self.worker.host_pids())
        before = [*(sum(map(cpu_seconds, p)) for p in pids), children_seconds()]
        found = load(clients)
        after = [*(sum(map(cpu_seconds, p)) for p in pids), children_seconds()]
        if found["bad"] or not found["requests"]:
            sys.exit(f"{found['bad']} calls failed\n{self.worker.tail()}")
        costs = tuple(1e6 * (b - a) / found["requests"] for a, b in zip(before, after, strict=True))
        return Sample(found["requests"] / found["seconds"], found["p50_ms"], found["p99_ms"], costs)

    @contextmanager
    def background(self, rate: float) -> Iterator[None]:
        """gRPC at a fixed rate while the block runs."""
        seconds = self.seconds + 2.0
        if shutil.which("h2load"):
            command = self.h2load_command(CONNECTIONS, MOST_AT_ONCE, seconds, f"--rps={rate / CONNECTIONS:.0f}")
        else:
            command = self.command("--rate", str(rate))
            command[command.index("--seconds") + 1] = str(seconds)
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            time.sleep(1.0)  # its first calls connect
            yield
            process.wait(60)

    def http(self) -> tuple[float, float]:
        """(p50, p99) in ms. On a machine of its own the client would not wait for the gateway's slice to end (3 ms),
        so here it interrupts it."""
        ask_for_slices(FRONT_SECONDS)
        try:
            return self._http()
        finally:
            ask_for_slices(0.0)  # what is started later has the kernel's

    def _http(self) -> tuple[float, float]:
        body, headers = binary_fp32([0.5] * WIDTH, [1, WIDTH], parameters={"binary_data_output": True})
        headers = {k.replace("_", "-"): v for k, v in headers.items()}
        connection = HTTPConnection("127.0.0.1", self.worker.port)
        times = []
        begun = time.perf_counter()
        for number in range(int(self.seconds * HTTP_RATE)):
            due = begun + number / HTTP_RATE
            time.sleep(max(0.0, due - time.perf_counter()))
            connection.request("POST", "/v2/models/m/infer", body, headers)
            response = connection.getresponse()
            response.read()
            assert response.status == 200, response.status
            times.append(time.perf_counter() - due)
        times.sort()
        return 1e3 * times[len(times) // 2], 1e3 * times[int(0.99 * len(times))]


def gateway_pid(worker: WorkerProcess) -> int:
    found = subprocess.run(["pgrep", "-P", str(worker.pid), "-f", "trtmodel_worker.gateway"],
                           capture_output=True, text=True, check=False)  # fmt: skip
    return int(found.stdout.split()[0]) if found.stdout else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64])
    given = parser.parse_args()
    sigterm_ends()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        operator, bucket, port = Operator(), Bucket(folder / "bucket"), free_port()
        tensors = {"inputs": [TensorSpec("x", "FP32", (-1, WIDTH))], "outputs": [TensorSpec("y", "FP32", (-1, WIDTH))]}
        digest, _ = bucket.publish(REVISION_1, **tensors)
        path = os.pathsep.join([str(PLUGIN), *PACKAGES])
        worker = WorkerProcess(folder / "w", operator, bucket, TRTMODEL_GRPC_PORT=str(port), PYTHONPATH=path)
        worker.point(operator.artifact(REVISION_1, digest))
        worker.start()
        try:
            worker.wait_ready()
            message = folder / "message"
            tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, WIDTH])
            request = pb.ModelInferRequest(model_name="m", inputs=[tensor], raw_input_contents=[bytes(4 * WIDTH)])
            message.write_bytes(request.SerializeToString())
            run(Bench(worker, f"127.0.0.1:{port}", message, given.seconds), given)
        finally:
            worker.stop()


def run(bench: Bench, given: argparse.Namespace) -> None:
    before = os.getloadavg()[0]
    loads = {"Python": bench.python}
    if shutil.which("h2load"):
        loads["h2load"] = bench.h2load
    bench.sample(bench.python, 16)  # caches are warm in what is measured
    samples: dict[tuple[str, int], list[Sample]] = {(name, n): [] for name in loads for n in given.clients}
    for _ in range(given.rounds):
        for name, clients in samples:
            samples[name, clients].append(bench.sample(loads[name], clients))
    client = "h2load" if "h2load" in loads else "Python"
    best = max(median(s.rate for s in found) for (name, _), found in samples.items() if name == client)
    alone, beside = [], []
    for _ in range(given.rounds):
        alone.append(bench.http())
        with bench.background(best / 2):
            beside.append(bench.http())
    print(
        f"{date.today()}, {platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, load average "
        f"{before:.1f} before and {os.getloadavg()[0]:.1f} after, Python {platform.python_version()}, medians of "
        f"{given.rounds} rounds of {given.seconds:g} s\n"
    )
    print("| client | callers | calls/s (lowest to highest) | p50 ms | p99 ms "
          "| CPU us per call: gateway | front | host | client |\n|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    for (name, clients), found in samples.items():
        rates = sorted(s.rate for s in found)
        costs = " | ".join(f"{median(column):.0f}" for column in zip(*(s.costs for s in found), strict=True))
        print(f"| {name} | {clients} | {median(rates):,.0f} ({rates[0]:,.0f} to {rates[-1]:,.0f}) "
              f"| {median(s.p50 for s in found):.3f} | {median(s.p99 for s in found):.3f} | {costs} |")  # fmt: skip
    print(f"\n| HTTP at {HTTP_RATE:g}/s | p50 ms | p99 ms |\n|---|---|---|")
    for name, pairs in (("alone", alone), (f"while gRPC runs at {best / 2:,.0f}/s", beside)):
        print(f"| {name} | {median(p[0] for p in pairs):.3f} | {median(p[1] for p in pairs):.3f} |")


if __name__ == "__main__":
    main()
