"""What clients feel of a change of engines: open-loop load at a share of the capacity, and one swap after the other.

    python bench/swap.py [--swaps 50] [--share 0.7]

The load generator is the demo's: requests leave on time whatever the answers do, a latency counts from when the request
was due, and every answer is checked. "before" is the quiet time before each swap, as long as the swap before it took:
what the machine itself does now and then is in a long time sooner than in a short one. "during" is from the wish to
half a second after the new routes; the old engine is not kept, so that each swap loads one. Printed is a table in
Markdown (medians over the swaps), the longest time that a CPU of the machine stood still by itself (stalls.py), the
ratio of the p99s, and the swaps that were far from the others.
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
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench" / "peers")]

from catalogue import Setup  # noqa: E402
from ending import sigterm_ends  # noqa: E402
from models import BenchModel, make  # noqa: E402
from processes import free_port  # noqa: E402
from stalls import Stalls  # noqa: E402
from us import Artifacts, OurServer  # noqa: E402

FIRST_QUIET_SECONDS = 10.0
FAR = 4.0  # times the usual maximum
MODEL = "m"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=50)
    parser.add_argument("--share", type=float, default=0.7, help="of the capacity")
    given = parser.parse_args()
    sigterm_ends()
    with tempfile.TemporaryDirectory() as folder, Stalls() as stalls:
        measure(Path(folder), given.swaps, given.share, stalls)


def measure(folder: Path, swaps: int, share: float, stalls: Stalls) -> None:
    model = make("magika", folder / "models")
    artifacts = Artifacts(folder / "artifacts")
    artifacts.get(model, 2)  # built before there is any load
    server = OurServer(artifacts, Setup(model, "binary", 2, 5.0, folder))
    server.start()
    try:
        with load(server, model, share, folder) as (port, rate):
            print(f"{date.today()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, "
                  f"load average {os.getloadavg()[0]:.1f}, Magika FP32, {rate:.0f} requests/s, {share:.0%} of the "
                  f"capacity\n", flush=True)  # fmt: skip
            found: list[Swap] = []
            for number in range(swaps):
                quiet = found[-1].seconds if found else FIRST_QUIET_SECONDS
                found.append(one(server, port, number, quiet, stalls))
            report(found)
    finally:
        server.stop()


@contextmanager
def load(
    server: OurServer, model: BenchModel, share: float, folder: Path, rate: float = 0.0, timeout: float = 5.0
) -> Iterator[tuple[int, float]]:
    """The demo's load on a server that starts: where its summaries are, and its `rate`, a `share` of the capacity if
    none is given."""
    url = f"http://127.0.0.1:{server.port}"
    wait_for(f"{url}/v2/health/ready", "the worker was not ready in time")
    (folder / "request").write_bytes(request(model.sample))
    np.savez(folder / "requests.npz", bytes=model.sample, labels=np.array([int(np.argmax(model.expected[0]))]))
    rate, port = rate or share * capacity(server.port, folder / "request"), free_port()
    command = [sys.executable, str(ROOT / "examples/magika/load.py"), "--url", url, "--model", MODEL]
    command += ["--requests", str(folder / "requests.npz"), "--rate", f"{rate:.1f}", "--seconds", "86400"]
    command += ["--timeout", f"{timeout:g}", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)  # Ctrl-C is not for it
    try:
        wait_for(f"http://127.0.0.1:{port}/healthz", "the load generator did not start")
        yield port, rate
    finally:
        process.terminate()
        process.wait()


class Swap(NamedTuple):
    """The load's summaries before and during one swap, how long it took, and the longest stall of a CPU in each, ms."""

    before: dict[str, Any]
    during: dict[str, Any]
    seconds: float
    stalls: tuple[str, str]


def one(server: OurServer, port: int, number: int, quiet: float, stalls: Stalls) -> Swap:
    time.sleep(quiet)  # this is the measurement
    began, clock = time.time(), time.monotonic()
    server.change(1 + number % 2, 2 - number % 2, keep=False)
    seconds = time.time() - began
    time.sleep(1.0)  # what was due in it is answered by now
    stood = stalls.longest(clock - quiet, clock), stalls.longest(clock, clock + seconds + 0.5)
    return Swap(summary(port, began - quiet, began), summary(port, began, began + seconds + 0.5), seconds, stood)


def report(found: list[Swap]) -> None:
    print(
        "| | requests | failed | p50 ms | p99 ms | max ms | longest stall of a CPU, ms |\n|---|---|---|---|---|---|---|"
    )
    for n, (name, parts) in enumerate((("before", [s.before for s in found]), ("during", [s.during for s in found]))):
        sent, failed = sum(p["sent"] for p in parts), sum(p["failed"] for p in parts)
        figures = " | ".join(f"{median(p[q] for p in parts):.1f}" for q in ("p50", "p99"))
        stood = max((s.stalls[n] for s in found), key=lambda text: float(text) if text[0].isdigit() else 0.0)
        print(f"| {name} | {sent:,} | {failed} | {figures} | {max(p['max'] for p in parts):.1f} | {stood} |")
    for number, swap in enumerate(found):
        if max(swap.before["max"], swap.during["max"]) > FAR * median(s.during["max"] for s in found):
            print(f"\nSwap {number}: before it p99 {swap.before['p99']:.1f}, max {swap.before['max']:.1f} ms, stall "
                  f"{swap.stalls[0]}; during p99 {swap.during['p99']:.1f}, max {swap.during['max']:.1f}, stall "
                  f"{swap.stalls[1]}")  # fmt: skip
    ratios = [swap.during["p99"] / swap.before["p99"] for swap in found]
    print(f"\n{len(found)} swaps, {median(s.seconds for s in found):.1f} s (median) from the wish to the new routes. "
          f"p99 during a swap against before it: median {median(ratios):.2f}, worst {max(ratios):.2f}")  # fmt: skip


def request(sample: np.ndarray) -> bytes:
    tensor = {"name": "bytes", "datatype": "INT32", "shape": list(sample.shape)}
    asked = {"inputs": [{**tensor, "parameters": {"binary_data_size": sample.nbytes}}]}
    head = json.dumps({**asked, "parameters": {"binary_data_output": True}}).encode()
    lines = [
        f"POST /v2/models/{MODEL}/infer HTTP/1.1", "Host: m", "Content-Type: application/octet-stream",
        f"Content-Length: {len(head) + sample.nbytes}", f"Inference-Header-Content-Length: {len(head)}",
    ]  # fmt: skip
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + head + sample.astype("<i4").tobytes()


def capacity(port: int, request: Path) -> float:
    command = [sys.executable, str(ROOT / "bench/client.py"), str(port), str(request), "--concurrency", "4"]
    found = json.loads(subprocess.check_output([*command, "--seconds", "4"]))
    return float(found["requests"] / found["seconds"])


def summary(port: int, begin: float, end: float) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/summary?from={begin}&to={end}", timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def wait_for(url: str, trouble: str, seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    sys.exit(trouble)


if __name__ == "__main__":
    main()
