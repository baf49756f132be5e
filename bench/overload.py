"""Four times the requests that the worker can answer, for a minute, and what is left of its service.

    python bench/overload.py [--seconds 60] [--factor 4] [--deadline 1] [--server-cpus 0,1] [--client-cpus 2-7]

Open loop: requests are due on time whatever the answers do, and nobody waits longer than the deadline, which the worker
has as its request's time limit, too. Every answer is compared. Served is Magika, two at a time. With the CPUs named,
worker and client do not take each other's time; without, the capacity is measured with the client's share, too, which
grows with the number of requests. Printed is a table in Markdown: what was answered in time against the capacity before
(goodput), how many requests waited for a lane at most, the answers' p99 against the deadline, memory, and how soon
after it a single request is answered as fast as before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from datetime import date
from http.client import HTTPException
from pathlib import Path
from statistics import median

import uvloop

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench" / "peers")]

import protocols  # noqa: E402
from catalogue import US, Setup  # noqa: E402
from clients import offer  # noqa: E402
from ending import sigterm_ends  # noqa: E402
from measure import Client, ServerError, until_right  # noqa: E402
from models import make  # noqa: E402
from processes import command_line, cpu_seconds, pss_mib  # noqa: E402
from us import Artifacts, OurServer  # noqa: E402

PARALLEL = 2
ALONE = 50  # requests of one client, one after the other, before and after
RECOVERY_SECONDS = 30.0
LOOK_SECONDS, LOOKS_PER_MEMORY = 0.5, 10
QUEUE = re.compile(r"^trtmodel_queue_length\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)


class Watch:
    """What the worker holds while it is overloaded: requests that wait, memory in MiB (PSS). It takes time from what is
    measured: some milliseconds of the front for each look at requests, tens of its own for each look at memory."""

    def __init__(self, server: OurServer) -> None:
        self._server, self._stop = server, threading.Event()
        self.waiting: list[float] = []
        self.memory: list[float] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        looks = 0
        while not self._stop.wait(LOOK_SECONDS):
            with urllib.request.urlopen(f"http://127.0.0.1:{self._server.metrics_port}/metrics", timeout=30) as answer:
                self.waiting.append(sum(map(float, QUEUE.findall(answer.read().decode()))))
            if looks % LOOKS_PER_MEMORY == 0:
                self.memory.append(pss_mib(self._server.pids()))
            looks += 1

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


class Cost:
    """Processor time from now on, by who took it."""

    def __init__(self, server: OurServer) -> None:
        self._server, self._begun, self._before = server, time.monotonic(), self._spent(server)

    def since(self) -> str:
        seconds = time.monotonic() - self._begun
        now = self._spent(self._server)
        return ", ".join(f"{(b - a) / seconds:.2f}" for a, b in zip(self._before, now, strict=True))

    @staticmethod
    def _spent(server: OurServer) -> tuple[float, float, float]:
        front, *others = server.pids()
        hosts = [pid for pid in others if "trtmodel_worker.host serve" in command_line(pid)]
        own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
        return (
            cpu_seconds([front]),
            cpu_seconds(hosts),
            own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--factor", type=float, default=4.0, help="of the capacity")
    parser.add_argument("--deadline", type=float, default=1.0, help="seconds")
    parser.add_argument("--server-cpus", type=cpus, default=set())
    parser.add_argument("--client-cpus", type=cpus, default=set())
    given = parser.parse_args()
    sigterm_ends()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), given)


def cpus(text: str) -> set[int]:
    """Such as 0,1 or 2-7."""
    found: set[int] = set()
    for part in text.split(","):
        low, _, high = part.partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    return found


def measure(folder: Path, given: argparse.Namespace) -> None:
    all_cpus = os.sched_getaffinity(0)
    model = make("magika", folder / "models")
    setup = Setup(model, "binary", PARALLEL, given.deadline, folder)
    kind, path = US.formats["binary"]
    request = protocols.build(kind, path, model)

    def right(headers: dict[str, str], body: bytes) -> bool:
        try:
            return model.version_of(protocols.read(kind, model, headers, body)) == 1
        except (ValueError, KeyError, IndexError):
            return False

    server = OurServer(Artifacts(folder / "artifacts"), setup)
    os.sched_setaffinity(0, given.server_cpus or all_cpus)
    server.start()
    os.sched_setaffinity(0, given.client_cpus or all_cpus)
    try:
        until_right(US, setup, server)
        (folder / "request").write_bytes(request.bytes())
        before = alone(server, setup)
        cost = Cost(server)
        best = capacity(server.port, folder / "request")
        usual, idle_mib = cost.since(), pss_mib(server.pids())
        watch, cost = Watch(server), Cost(server)
        uvloop.install()
        found = asyncio.run(
            offer(server.port, request.bytes(), given.factor * best, given.seconds, given.deadline, right)
        )
        ended, spent = time.monotonic(), cost.since()
        watch.stop()
        after = recovered(server, setup, before, ended)
        print(f"{date.today()}, {len(given.server_cpus or all_cpus)} cores for the worker, {len(given.client_cpus)} of "
              f"its own for the client, Python {platform.python_version()}: "
              f"`{' '.join(['python bench/overload.py', *sys.argv[1:]])}`\n")  # fmt: skip
        good = sorted(found["good"])
        rows = {
            "capacity, req/s": f"{best:.0f}",
            "offered, req/s": f"{given.factor * best:.0f} for {given.seconds:g} s",
            "answered right and in time, req/s": f"{len(good) / given.seconds:.0f}, "
            f"{100 * len(good) / given.seconds / best:.0f} % of the capacity",
            "p50, p99, max of these, ms": ", ".join(f"{1e3 * at(good, q):.0f}" for q in (0.5, 0.99, 1.0))
            + f" (deadline {1e3 * given.deadline:.0f})",
            "refused; late; broken; wrong": "; ".join(
                f"{len(found[kind]):,}" for kind in ("refused", "late", "broken", "wrong")
            ),
            "p99 of a refusal, ms": f"{1e3 * at(sorted(found['refused']), 0.99):.0f}",
            "most that waited for a lane": f"{max(watch.waiting):.0f}",
            "memory before, then the most, MiB": f"{idle_mib:.0f}, {max(watch.memory):.0f}",
            "memory in the first and the last quarter, MiB": f"{quarter(watch.memory, 0):.0f}, "
            f"{quarter(watch.memory, 3):.0f}",
            "CPUs in use: front, hosts, client, with as many as are answered": usual,
            "and overloaded": spent,
            "one client alone, p50 ms before; as fast again after": f"{1e3 * before:.1f}; {after}",
        }
        print("| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items()))
    finally:
        server.stop()


def alone(server: OurServer, setup: Setup) -> float:
    """p50 in seconds."""
    client, times = Client(US, setup.model, setup.body, server.port), []
    for _ in range(ALONE):
        begun = time.monotonic()
        client.ask()
        times.append(time.monotonic() - begun)
    client.close()
    return median(times)


def capacity(port: int, request: Path) -> float:
    command = [sys.executable, str(ROOT / "bench/client.py"), str(port), str(request), "--concurrency", "16"]
    found = json.loads(subprocess.check_output([*command, "--seconds", "5"]))
    return float(found["requests"] / found["seconds"])


def recovered(server: OurServer, setup: Setup, before: float, ended: float) -> str:
    """When a client alone is answered within 1.5 times of what it took before."""
    client = Client(US, setup.model, setup.body, server.port)
    while time.monotonic() < ended + RECOVERY_SECONDS:
        begun = time.monotonic()
        try:
            client.ask()
        except (OSError, HTTPException, ServerError):  # refused: it is not over
            time.sleep(0.01)
            continue
        if time.monotonic() - begun < 1.5 * before:
            client.close()
            return f"{begun - ended:.2f} s"
    return f"not within {RECOVERY_SECONDS:g} s"


def at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0


def quarter(values: Sequence[float], number: int) -> float:
    size = max(1, len(values) // 4)
    return median(values[number * size : (number + 1) * size])


if __name__ == "__main__":
    main()
