"""What thousands of TRTModels cost the operator: a real etcd and API server, hollow Jobs and workers.

    python bench/operator/run.py --models 1000 [--workers 3] [--idle 330] [--only cold,restart,idle,...] [--save]

Scenarios, in this order: `cold` (nothing -> every model serves), `restart` (an operator starts beside models that all
serve -> every one was looked at), `idle` (nothing happens), `changes` (100 models get another source at once), `storm`
(1,000 do), `relist` (the API server is killed and starts again), `leader` (the leader is killed amid 100 changes).
`--save` writes JSON and Markdown to bench/results. The machine is shared by all parts, so times are upper bounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from datetime import date
from pathlib import Path

from stand import ROOT, OperatorProcess, Stand, api_requests, model_path, serving, settled, usage

RESULTS = ROOT / "bench" / "results"
CHANGES, STORM = 100, 1000
MOST_SECONDS = 3600.0
COLUMNS = ("scenario", "what", "figure")

Rows = list[tuple[str, str, str]]


class Bench:
    """Runs scenarios on one stand; `rows` is what they found."""

    def __init__(self, stand: Stand, idle: float) -> None:
        self.stand, self._idle_seconds = stand, idle
        self.rows: Rows = []
        self.operator: OperatorProcess | None = None
        self._round = 0

    async def run(self, name: str) -> None:
        print(f"{name} ...", flush=True)
        await getattr(self, f"_{name}")()
        for row in self.rows:
            if row[0] == name:
                print("   ", *row[1:], sep="  ", flush=True)

    def _add(self, scenario: str, what: str, figure: str) -> None:
        self.rows.append((scenario, what, figure))

    def _leader(self) -> OperatorProcess:
        if self.operator is None:
            self.operator = self.stand.start_operator()
            self.operator.until(self.operator.leads)
        return self.operator

    async def _cold(self) -> None:
        operator, n = self._leader(), self.stand.count
        began, calls, cpu = time.monotonic(), api_requests(operator), usage(operator.process.pid).cpu
        await self.stand.create_models()
        created = time.monotonic() - began
        await self._until(lambda: serving(operator) >= n, operator)
        took = time.monotonic() - began
        await self._until_settled("")
        self._add("cold", "created", f"{created:.1f} s")
        self._add("cold", "nothing -> all serve", f"{took:.1f} s")
        self._cost("cold", operator, calls, cpu, n)

    async def _restart(self) -> None:
        if self.operator is not None:
            began = time.monotonic()
            self.stand.end(self.operator)
            self._add("restart", "SIGTERM -> ended", f"{time.monotonic() - began:.2f} s")
        began, self.operator = time.monotonic(), None
        self.operator = operator = self.stand.start_operator()
        await self._until(lambda: serving(operator) >= self.stand.count, operator)
        self._add("restart", "start -> all reconciled", f"{time.monotonic() - began:.1f} s")
        self._cost("restart", operator, 0.0, 0.0, self.stand.count)

    async def _idle(self) -> None:
        operator, n = self._leader(), self.stand.count
        await asyncio.sleep(min(20.0, self._idle_seconds))
        calls, cpu, began = api_requests(operator), usage(operator.process.pid).cpu, time.monotonic()
        await asyncio.sleep(self._idle_seconds)
        took, now = time.monotonic() - began, usage(operator.process.pid)
        requests = api_requests(operator) - calls
        self._add("idle", f"CPU over {took:.0f} s", f"{100 * (now.cpu - cpu) / took:.1f} % of a core")
        self._add("idle", "API requests a minute", f"{60 * requests / took:.0f}")
        self._add("idle", "API requests per model in 5 minutes", f"{300 * requests / took / n:.2f}")
        self._add("idle", "memory", f"{now.resident:.0f} MiB, at most {now.peak:.0f}")

    async def _changes(self) -> None:
        await self._wave("changes", CHANGES)

    async def _storm(self) -> None:
        await self._wave("storm", STORM)

    async def _relist(self) -> None:
        operator = self._leader()
        cpu = usage(operator.process.pid).cpu
        self.stand.plane.kill_server()
        began = time.monotonic()
        self.stand.plane.start_server()
        self._add("relist", "the API server was away", f"{time.monotonic() - began:.1f} s")
        await self._wave("relist", 10)
        self._add("relist", "operator's CPU", f"{usage(operator.process.pid).cpu - cpu:.1f} s")

    async def _leader_change(self) -> None:
        old, standby = self._leader(), self.stand.start_operator()
        standby.until(lambda: standby.probe("/readyz")[0] == 200)
        keys, mark = list(self.stand.keys(min(CHANGES, self.stand.count))), self._mark()
        await self.stand.change(keys, mark)
        self.stand.end(old, signal.SIGKILL)
        began, self.operator = time.monotonic(), standby
        await self._until(standby.leads, standby)
        self._add("leader_change", "SIGKILL -> another leads", f"{time.monotonic() - began:.1f} s")
        await self._until_settled(mark, keys)
        self._add("leader_change", "SIGKILL -> all changes promoted", f"{time.monotonic() - began:.1f} s")
        twice = await self._jobs_beyond_one(mark)
        self._add("leader_change", "Jobs made twice", str(twice))

    async def _wave(self, scenario: str, size: int) -> None:
        operator = self._leader()
        keys, mark = list(self.stand.keys(min(size, self.stand.count))), self._mark()
        calls, cpu = api_requests(operator), usage(operator.process.pid).cpu
        async with self.stand.first_jobs(mark) as seen:
            began = time.monotonic()
            written = await self.stand.change(keys, mark)
            writing = time.monotonic() - began
            await self._until(lambda: len(seen) >= len(keys), operator)
            waits = sorted(seen[key] - written[key] for key in keys)
        await self._until_settled(mark, keys)
        took = time.monotonic() - began
        self._add(scenario, f"{len(keys)} changes written in", f"{writing:.1f} s")
        p50, p95 = waits[len(waits) // 2], waits[int(len(waits) * 0.95)]
        self._add(scenario, "write -> first Job: p50, p95, most", f"{p50:.2f}, {p95:.2f}, {waits[-1]:.2f} s")
        self._add(scenario, "all promoted after", f"{took:.1f} s")
        self._cost(scenario, operator, calls, cpu, len(keys))

    def _cost(self, scenario: str, operator: OperatorProcess, calls: float, cpu: float, n: int) -> None:
        now = usage(operator.process.pid)
        self._add(scenario, "API requests per model", f"{(api_requests(operator) - calls) / n:.1f}")
        self._add(scenario, "operator's CPU per model", f"{1000 * (now.cpu - cpu) / n:.1f} ms")
        self._add(scenario, "memory", f"{now.resident:.0f} MiB, at most {now.peak:.0f}")

    def _mark(self) -> str:
        self._round += 1
        return f"r{self._round}-{int(time.time())}"

    async def _jobs_beyond_one(self, mark: str) -> int:
        """Of each model and kind there is one Job for a source."""
        jobs, _ = await self.stand.kube.list_all("/apis/batch/v1/jobs")
        made: Counter[tuple[str, ...]] = Counter()
        for job in jobs:
            if any(f"/{mark}/" in e.get("value", "") for e in job["spec"]["template"]["spec"]["containers"][0]["env"]):
                labels = job["metadata"]["labels"]
                made[job["metadata"]["namespace"], labels["trtmodel.io/model"], labels["trtmodel.io/kind"]] += 1
        return sum(count - 1 for count in made.values())

    async def _until(self, condition: Callable[[], bool], operator: OperatorProcess) -> None:
        deadline = time.monotonic() + MOST_SECONDS
        while not condition():
            if operator.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"it does not get there:\n{operator.log[-4000:]}")
            await asyncio.sleep(0.1)

    async def _until_settled(self, mark: str, keys: Collection[tuple[str, str]] | None = None) -> None:
        waiting = list(self.stand.keys(self.stand.count) if keys is None else keys)
        deadline = time.monotonic() + MOST_SECONDS
        while waiting:
            got = await asyncio.gather(*(self.stand.kube.call("GET", model_path(k)) for k in waiting[:50]))
            unsettled = [k for k, model in zip(waiting[:50], got, strict=True) if not settled(model, mark)]
            waiting = unsettled + waiting[50:]
            if unsettled:
                await asyncio.sleep(0.2)
            if time.monotonic() > deadline:
                raise SystemExit(f"{len(waiting)} do not settle, such as {waiting[0]}")


SCENARIOS = ("cold", "restart", "idle", "changes", "storm", "relist", "leader_change")


async def measure(folder: Path, given: argparse.Namespace, then: Callable[[Rows], Awaitable[None]]) -> None:
    environment = dict(pair.split("=", 1) for pair in given.set)
    async with Stand(folder, given.models, given.workers, environment) as stand:
        bench = Bench(stand, given.idle)
        for name in SCENARIOS:
            if name in given.only:
                await bench.run(name)
        await then(bench.rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--workers", type=int, default=3, help="of each model")
    parser.add_argument("--idle", type=float, default=330.0, help="seconds; less than 300 shows no resync")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SCENARIOS))
    parser.add_argument("--set", action="append", default=[], help="NAME=VALUE for the operator's environment")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--keep", type=Path, help="folder for logs and state, which is kept")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended

    async def then(rows: Rows) -> None:
        text = table(rows, given)
        print(text)
        if given.save:
            name = RESULTS / f"operator-{date.today()}-{given.models}"
            name.with_suffix(".md").write_text(text + "\n")
            document = {"command": vars(given) | {"keep": None}, "machine": machine(), "rows": rows}
            name.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")

    folder = given.keep or Path(tempfile.mkdtemp(prefix="operator-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        asyncio.run(measure(folder, given, then))
    finally:
        if given.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def machine() -> str:
    model = next((r for r in Path("/proc/cpuinfo").read_text().splitlines() if r.startswith("model name")), ": unknown")
    return f"{len(os.sched_getaffinity(0))} cores of {model.partition(': ')[2]}, Python {platform.python_version()}"


def table(rows: Rows, given: argparse.Namespace) -> str:
    head = (
        f"`python bench/operator/run.py --models {given.models} --workers {given.workers}`, {date.today()}, "
        f"{machine()}; etcd, API server, hollow cluster and operator share the cores.\n"
    )
    lines = [f"| {' | '.join(row)} |" for row in (COLUMNS, ("---",) * len(COLUMNS), *rows)]
    return "\n".join([head, *lines])


if __name__ == "__main__":
    main()
