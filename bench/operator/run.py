"""What thousands of TRTModels cost the operator: a real etcd and API server, hollow Jobs and workers.

    python bench/operator/run.py --models 1000 [--workers 3] [--idle 60] [--only start,idle,...] [--save]

Scenarios, in this order: `cold` (nothing -> every model serves; only where it is asked for: without it the models serve
when the bench begins), `start` (an operator starts beside models that all serve -> every one was looked at), `idle`
(nothing happens), `changes` (100 models get another source at once), `handover` (three times 100 do; amid that the
leader is told to end, is killed, stands still and wakes up when another leads), `storm` (1,000 do; amid that the leader
is killed), `relist` (100 do; amid that the API server is killed and starts again, so that everything is listed anew).
After each wave of changes it is counted what was lost and what was done twice.
`--save` writes JSON and Markdown to bench/results. What is said of time is of a machine that all parts share: each
scenario says which of them used how much of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from stand import (
    KUBERNETES_VERSION,
    MODELS,
    ROOT,
    OperatorProcess,
    Stand,
    api_requests,
    model_path,
    passes,
    promoted,
    serving,
    settled,
    usage,
)

RESULTS = ROOT / "bench" / "results"
CHANGES = 100
AMID = 0.3  # of the changes of a wave are promoted when the leader, or the API server, goes
LEASE_SECONDS = 12.0  # after which a leader that could not renew its lease has ended
MOST_SECONDS, SETTLE_SECONDS = 3600.0, 900.0
COLUMNS = ("scenario", "what", "figure")

Rows = list[tuple[str, str, str]]
Figures = dict[str, dict[str, float]]  # what the curves are drawn from: scenario -> name -> value
Key = tuple[str, str]


@dataclass(frozen=True)
class Wave:
    """Changes that were written together. `mark` is in the source of each; `promoted` is what the leader had counted
    before, `since` and `began` are when it began, by the clock and by the monotonic one."""

    mark: str
    keys: list[Key]
    promoted: float
    since: float
    began: float


class Bench:
    """Runs scenarios on one stand; `rows` is what they found, for people, `figures` for the curves."""

    def __init__(self, stand: Stand, idle: float, storm: int) -> None:
        self.stand, self._idle_seconds, self._storm_size = stand, idle, storm
        self.rows: Rows = []
        self.figures: Figures = {}
        self.operator: OperatorProcess | None = None
        self._ended = 0.0  # CPU seconds of operators that ended
        self._round = 0

    async def run(self, name: str) -> None:
        print(f"{name} ...", flush=True)
        before, began = self._cpu(), time.monotonic()
        await getattr(self, f"_{name}")()
        took, spent = time.monotonic() - began, self._cpu()
        # What began anew in between counts from there.
        parts = [
            f"{part} {now - (was if (was := before.get(part, 0.0)) <= now else 0.0):.1f}" for part, now in spent.items()
        ]
        self._add(name, f"CPU seconds, of {took:.0f} s", ", ".join(parts))
        for row in self.rows:
            if row[0] == name:
                print("   ", *row[1:], sep="  ", flush=True)

    def _add(self, scenario: str, what: str, figure: str, **numbers: float) -> None:
        self.rows.append((scenario, what, figure))
        self.figures.setdefault(scenario, {}).update(numbers)

    def _cpu(self) -> dict[str, float]:
        """CPU seconds so far of each part, and of this process."""
        plane = self.stand.plane
        pids = {"etcd": plane.pid("etcd"), "API server": plane.pid("kube-apiserver"), "hollow": self.stand.hollow.pid}
        spent = {name: usage(pid).cpu for name, pid in pids.items()}
        spent["operators"] = self._ended + (usage(self.operator.process.pid).cpu if self.operator else 0.0)
        return spent | {"bench": time.process_time()}

    def _leader(self) -> OperatorProcess:
        if self.operator is None or self.operator.process.poll() is not None:
            self.operator = self.stand.start_operator()
            self.operator.until(self.operator.leads)
        return self.operator

    async def _cold(self) -> None:
        operator, n = self._leader(), self.stand.count
        began, calls, cpu = time.monotonic(), api_requests(operator), usage(operator.process.pid).cpu
        await self.stand.create_models()
        created = time.monotonic() - began
        await self._until(lambda: serving(operator) >= n, operator, 1.0)
        took = time.monotonic() - began
        await self._until_settled("")
        self._add("cold", "created", f"{created:.1f} s")
        self._add("cold", "nothing -> all serve", f"{took:.1f} s", seconds=took)
        self._cost("cold", operator, calls, cpu, n)

    async def _start(self) -> None:
        if self.operator is not None:
            began = time.monotonic()
            self._ended += usage(self.operator.process.pid).cpu
            self.stand.end(self.operator)
            self._add("start", "SIGTERM -> ended", f"{time.monotonic() - began:.2f} s")
        began, n = time.monotonic(), self.stand.count
        self.operator = operator = self.stand.start_operator()
        await self._until(lambda: passes(operator) >= n, operator)
        await self._until(lambda: serving(operator) >= n, operator, 2.0)
        took = time.monotonic() - began
        self._add("start", "start -> all reconciled", f"{took:.1f} s", seconds=took)
        self._add("start", "writes to the API, leases left out", f"{self._writes(operator):.0f}")
        self._cost("start", operator, 0.0, 0.0, n)

    async def _idle(self) -> None:
        operator, n = self._leader(), self.stand.count
        await asyncio.sleep(min(20.0, self._idle_seconds))
        calls, cpu, began = api_requests(operator), usage(operator.process.pid).cpu, time.monotonic()
        await asyncio.sleep(self._idle_seconds)
        took, now = time.monotonic() - began, usage(operator.process.pid)
        requests = api_requests(operator) - calls
        share, each = 100 * (now.cpu - cpu) / took, 300 * requests / took / n
        self._add("idle", f"CPU over {took:.0f} s", f"{share:.1f} % of a core", cpu=share)
        self._add("idle", "API requests a minute", f"{60 * requests / took:.0f}")
        self._add("idle", "API requests per model in 5 minutes", f"{each:.2f}", requests=each)
        self._memory("idle", operator)

    async def _changes(self) -> None:
        operator = self._leader()
        calls, cpu = api_requests(operator), usage(operator.process.pid).cpu
        wave = await self._begin("changes", CHANGES)
        await self._until(lambda: promoted(operator) - wave.promoted >= len(wave.keys), operator)
        await self._until_settled(wave.mark, wave.keys, 1.0)
        took = time.monotonic() - wave.began
        self._reactions("changes", wave)
        self._add("changes", "all promoted after", f"{took:.1f} s", seconds=took)
        self._cost("changes", operator, calls, cpu, len(wave.keys))
        await self._account("changes", wave)

    async def _relist(self) -> None:
        operator = self._leader()
        wave = await self._begin("relist", CHANGES)
        await self._part_of(wave, operator)
        began = time.monotonic()
        self.stand.plane.kill_server()
        self.stand.plane.start_server()
        away = time.monotonic() - began
        self._add("relist", "API server killed amid that, away for", f"{away:.1f} s", away=away)
        await asyncio.sleep(LEASE_SECONDS)
        if operator.process.poll() is not None:  # as a kubelet would
            operator = self._leader()
            self._add("relist", "its lease ran out meanwhile", "another process goes on")
        await self._account("relist", wave)
        self._memory("relist", operator)

    async def _handover(self) -> None:
        for how in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
            await self._change_leader("handover", CHANGES, how)

    async def _storm(self) -> None:
        await self._change_leader("storm", self._storm_size, signal.SIGKILL)

    async def _change_leader(self, scenario: str, size: int, how: signal.Signals) -> None:
        old, standby = self._leader(), self.stand.start_operator()
        standby.until(lambda: standby.probe("/readyz")[0] == 200)
        wave = await self._begin(scenario, size)
        await self._part_of(wave, old)
        self._reactions(scenario, wave)
        self._memory(scenario, old)
        spent = usage(old.process.pid).cpu
        old.process.send_signal(how)
        sent, self.operator = time.monotonic(), standby
        await self._until(standby.leads, standby, 0.05)
        took = time.monotonic() - sent
        self._add(scenario, f"{how.name} amid that -> another leads", f"{took:.1f} s", **{how.name.lower(): took})
        if how is signal.SIGSTOP:
            old.process.send_signal(signal.SIGCONT)
            woke = time.monotonic()
            code = await asyncio.to_thread(old.process.wait, 60)
            self._add(
                scenario, "it wakes up, and ends after", f"{time.monotonic() - woke:.1f} s, with exit code {code}"
            )
        await asyncio.to_thread(old.process.wait, 60)
        self._ended += spent
        await self._account(scenario, wave)

    async def _begin(self, scenario: str, size: int) -> Wave:
        """So many models get another source, all at once."""
        self._round += 1
        mark, keys = f"r{self._round}-{int(time.time())}", list(self.stand.keys(min(size, self.stand.count)))
        wave = Wave(mark, keys, promoted(self._leader()), time.time(), time.monotonic())
        await self.stand.change(keys, mark)
        self._add(scenario, f"{len(keys)} changes written in", f"{time.monotonic() - wave.began:.1f} s")
        return wave

    async def _part_of(self, wave: Wave, operator: OperatorProcess) -> None:
        """Returns when a part of its rollouts ended: others are on their way, and some have hardly begun."""
        await self._until(lambda: promoted(operator) - wave.promoted >= AMID * len(wave.keys), operator)

    async def _account(self, scenario: str, wave: Wave) -> None:
        """Waits until all are what they were told to be, and counts what was lost, and what was done twice."""
        lost = await self._unsettled(wave.keys, wave.mark)
        took = time.monotonic() - wave.began
        made, ended = await self._jobs_beyond_one(wave.mark), await self._promotions_beyond_one(wave.keys)
        self._add(scenario, "all settled after", f"{took:.0f} s", settled=took)
        before = self.figures[scenario]
        sums = {"lost": before.get("lost", 0) + lost, "twice": before.get("twice", 0) + made + ended}
        self._add(scenario, "changes lost; Jobs made, promotions done twice", f"{lost}; {made}, {ended}", **sums)

    def _reactions(self, scenario: str, wave: Wave) -> None:
        found = self.stand.audit.reactions(wave.since)
        waits = sorted(found[key] for key in wave.keys if key in found)
        if len(waits) < len(wave.keys):
            self._add(scenario, "without a reaction", str(len(wave.keys) - len(waits)))
        p50, p95 = waits[len(waits) // 2], waits[int(len(waits) * 0.95)]
        text = f"{p50:.2f}, {p95:.2f}, {waits[-1]:.2f} s"
        self._add(scenario, "write -> first action: p50, p95, most", text, p50=p50, p95=p95)

    def _cost(self, scenario: str, operator: OperatorProcess, calls: float, cpu: float, n: int) -> None:
        used, requests = 1000 * (usage(operator.process.pid).cpu - cpu) / n, (api_requests(operator) - calls) / n
        self._add(scenario, "API requests per model", f"{requests:.1f}", requests=requests)
        self._add(scenario, "operator's CPU per model", f"{used:.1f} ms", milliseconds=used)
        self._memory(scenario, operator)

    def _memory(self, scenario: str, operator: OperatorProcess) -> None:
        now = usage(operator.process.pid)
        self._add(scenario, "memory", f"{now.resident:.0f} MiB, at most {now.peak:.0f}", memory=now.resident)

    def _writes(self, operator: OperatorProcess) -> float:
        name = "trtmodel_operator_api_requests_total"
        counted = operator.metrics(name)
        reads = ('verb="GET"', 'verb="WATCH"', 'resource="leases"')
        return sum(n for (found, labels), n in counted.items() if found == name and not any(r in labels for r in reads))

    async def _jobs_beyond_one(self, mark: str) -> int:
        """Of each model and kind there is one Job for a source."""
        jobs, _ = await self.stand.kube.list_all("/apis/batch/v1/jobs")
        made: Counter[tuple[str, ...]] = Counter()
        for job in jobs:
            if any(f"/{mark}/" in e.get("value", "") for e in job["spec"]["template"]["spec"]["containers"][0]["env"]):
                labels = job["metadata"]["labels"]
                made[job["metadata"]["namespace"], labels["trtmodel.io/model"], labels["trtmodel.io/kind"]] += 1
        return sum(count - 1 for count in made.values())

    async def _promotions_beyond_one(self, keys: Collection[Key]) -> int:
        """Each wave has a source of its own, so each revision becomes stable once."""
        models, _ = await self.stand.kube.list_all(MODELS)
        twice = 0
        for model in (m for m in models if (m["metadata"]["namespace"], m["metadata"]["name"]) in set(keys)):
            ended = [h["revision"] for h in model["status"].get("history") or () if h["outcome"] == "Promoted"]
            twice += len(ended) - len(set(ended))
        return twice

    async def _until(self, condition: Callable[[], bool], operator: OperatorProcess, every: float = 0.2) -> None:
        deadline = time.monotonic() + MOST_SECONDS
        while not condition():
            if operator.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"it does not get there:\n{operator.log[-4000:]}")
            await asyncio.sleep(every)

    async def _unsettled(self, keys: Collection[Key], mark: str) -> int:
        """How many do not serve what they were told after the longest time that this may take."""
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                await self._until_settled(mark, keys, 2.0)
        except TimeoutError:
            got = [await self.stand.kube.call("GET", model_path(key)) for key in keys]
            return sum(not settled(model, mark) for model in got)
        return 0

    async def _until_settled(self, mark: str, keys: Collection[Key] | None = None, every: float = 0.2) -> None:
        waiting = list(self.stand.keys(self.stand.count) if keys is None else keys)
        deadline = time.monotonic() + MOST_SECONDS
        while waiting:
            got = await asyncio.gather(*(self.stand.kube.call("GET", model_path(k)) for k in waiting[:50]))
            unsettled = [k for k, model in zip(waiting[:50], got, strict=True) if not settled(model, mark)]
            waiting = unsettled + waiting[50:]
            if unsettled:
                await asyncio.sleep(every)
            if time.monotonic() > deadline:
                raise SystemExit(f"{len(waiting)} do not settle, such as {waiting[0]}")


SCENARIOS = ("cold", "start", "idle", "changes", "handover", "storm", "relist")


async def measure(folder: Path, given: argparse.Namespace, then: Callable[[Rows, Figures], Awaitable[None]]) -> None:
    environment = dict(pair.split("=", 1) for pair in given.set)
    seeded = "cold" not in given.only
    async with Stand(folder, given.models, given.workers, environment, seeded=seeded) as stand:
        bench = Bench(stand, given.idle, given.storm)
        try:
            for name in SCENARIOS:
                if name in given.only:
                    await bench.run(name)
        finally:
            await then(bench.rows, bench.figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--workers", type=int, default=3, help="of each model")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds")
    parser.add_argument("--storm", type=int, default=1000, help="changes of the storm")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SCENARIOS[1:]))
    parser.add_argument("--set", action="append", default=[], help="NAME=VALUE for the operator's environment")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--keep", type=Path, help="folder for logs and state, which is kept")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended

    async def then(rows: Rows, figures: Figures) -> None:
        print(table(rows))
        if given.save:
            save(given.models, given.workers, rows, figures)

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


def commit() -> str:
    said = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return said.stdout.strip() or "unknown"


def command() -> str:
    return " ".join(["python", "bench/operator/run.py", *sys.argv[1:]])


def save(models: int, workers: int, rows: Rows, figures: Figures) -> None:
    """Beside what other runs of today found at this commit: scenarios may be measured one by one."""
    file = RESULTS / f"operator-{date.today()}-{models}.json"
    found: dict[str, Any] = {
        "date": str(date.today()), "commit": commit(), "kubernetes": KUBERNETES_VERSION, "machine": machine(),
        "models": models, "workers": workers, "commands": [command()], "figures": figures, "rows": rows,
    }  # fmt: skip
    if file.exists() and (before := json.loads(file.read_text())).get("commit") == found["commit"]:
        found["commands"] = [*before["commands"], command()]
        found["figures"] = before["figures"] | figures
        found["rows"] = [tuple(row) for row in before["rows"] if row[0] not in figures] + rows
    file.write_text(json.dumps(found, indent=1) + "\n")
    text = table(sorted(found["rows"], key=lambda row: SCENARIOS.index(row[0])), found["commands"])
    file.with_suffix(".md").write_text(text + "\n")


def table(rows: Rows, commands: Sequence[str] = ()) -> str:
    head = (
        f"{', '.join(f'`{c}`' for c in commands or [command()])}, {date.today()}, commit {commit()}, {machine()}, "
        f"Kubernetes {KUBERNETES_VERSION}; etcd, API server, hollow cluster, bench and operator share the cores.\n"
    )
    lines = [f"| {' | '.join(row)} |" for row in (COLUMNS, ("---",) * len(COLUMNS), *rows)]
    return "\n".join([head, *lines])


if __name__ == "__main__":
    main()
