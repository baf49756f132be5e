"""Faults under load: hosts killed and stopped, runs that fail. Every answer is compared; prints a table in Markdown.

    python bench/faults.py [--times 100] [--seconds 30] [--restarts 1000] [--only kill-sibling ...]

    kill-sibling, kill-standby    SIGKILL of a host, with another host of its engine, or with the standby's
    stop-sibling, stop-standby    SIGSTOP of a host; it wakes up some tenths of a second later, and writes late
    recoverable                   one run in a hundred fails, for --seconds
    restarts                      hosts are replaced --restarts times: what the front holds before and after

A request is hit if it was under way when the fault came, or came while the host was stopped; quiet if none came within
half a second of it. In brackets: the slowest of those in whose time no CPU of the machine stood still by itself
(stalls.py). Served is the engine of the tests; a run takes --work seconds.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = [str(ROOT / "worker"), str(ROOT / "contract")]
TESTS = ROOT / "tests"
sys.path[:0] = [*PACKAGES, *map(str, (TESTS, TESTS / "worker", TESTS / "worker" / "ladder"))]

from clients import Clients, Seen, held, kill, lanes_are, metric, settled, stopped  # noqa: E402
from ending import sigterm_ends  # noqa: E402
from stalls import Stalls  # noqa: E402
from worker_harness import REVISION_1, REVISION_2, Bucket, Operator, WorkerProcess, eventually  # noqa: E402

QUIET_SECONDS = 0.5
FACTORS = {REVISION_1: 2.0, REVISION_2: 3.0}
HEAD = """\
| scenario | faults | requests | failed | wrong | quiet p50 / p99 / max ms | hit | hit p50 / p99 / max ms | counted |
|---|---|---|---|---|---|---|---|---|"""

Interval = tuple[float, float]
STALLS = Stalls()


@dataclass(frozen=True)
class Server:
    """`spared`: processes of the standby, which nothing is done to."""

    worker: WorkerProcess
    spared: frozenset[int]
    lanes: int

    def hosts(self) -> list[int]:
        return [pid for pid in self.worker.host_pids() if pid not in self.spared]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=100, help="faults of each kind")
    parser.add_argument("--seconds", type=float, default=30.0, help="of faults in one run of a hundred")
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--pause", type=float, default=0.005, help="seconds of a client between two requests")
    parser.add_argument("--work", type=float, default=0.002, help="seconds of a run")
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    given = parser.parse_args()
    sigterm_ends()
    logging.disable(logging.CRITICAL)
    gc.disable()  # a look at 100,000 outcomes takes tens of ms, in which none of the clients hears its answer
    command = " ".join(["python bench/faults.py", *sys.argv[1:]])
    print(f"{date.today()}, {os.cpu_count()} cores, Python {platform.python_version()}, {given.clients} clients, "
          f"{1e3 * given.work:g} ms for each run: `{command}`\n\n{HEAD}")  # fmt: skip
    with STALLS:
        for name in given.only:
            with tempfile.TemporaryDirectory() as folder:
                for line in SCENARIOS[name](Path(folder), given):
                    print(line, flush=True)


@contextmanager
def serving(
    folder: Path, behaviour: Mapping[str, object], *, hosts: int = 1, standby: bool = False, **environment: str
) -> Iterator[Server]:
    operator, bucket = Operator(), Bucket(folder / "bucket")
    worker = WorkerProcess(folder / "worker", operator, bucket, TRTMODEL_HOSTS=str(hosts), **environment)
    stable = operator.artifact(REVISION_1, bucket.publish(REVISION_1, {"factor": 2.0, **behaviour})[0])
    worker.point(stable)
    try:
        worker.start().wait_ready()
        first = set(worker.host_pids())
        if standby:
            other = operator.artifact(REVISION_2, bucket.publish(REVISION_2, {"factor": 3.0, **behaviour})[0])
            worker.desire(stable, standby=other)
            worker.wait_engine(other.manifest_digest)
        yield Server(worker, frozenset(set(worker.host_pids()) - first), 2 * hosts)
    finally:
        worker.stop()


def under_load(
    server: Server, given: argparse.Namespace, fault: Callable[[int], Interval]
) -> tuple[Clients, list[Interval]]:
    """The faults come one after the other, each when all hosts are up again and some quiet time has passed."""
    faults = []
    with Clients(server.worker.port, FACTORS, given.clients, rows=(1, 2, 3), pause=given.pause) as clients:
        for turn in range(given.times):
            lanes_are(server.worker, server.lanes)
            time.sleep(2 * QUIET_SECONDS)
            hosts = server.hosts()
            faults.append(fault(hosts[turn % len(hosts)]))
        lanes_are(server.worker, server.lanes)
        time.sleep(2 * QUIET_SECONDS)
    return clients, faults


def killed(worker: WorkerProcess, pid: int) -> Interval:
    deaths = metric(worker, "host_deaths_total")
    now = time.monotonic()
    kill(pid)
    eventually(lambda: metric(worker, "host_deaths_total") > deaths, "the front has seen it")
    return now, now


def paused(pid: int, seconds: float) -> Interval:
    began = time.monotonic()
    with stopped(pid):
        time.sleep(seconds)
    return began, time.monotonic()


def hosts(signal: str, helper: str) -> Callable[[Path, argparse.Namespace], Iterator[str]]:
    def run(folder: Path, given: argparse.Namespace) -> Iterator[str]:
        alone, choice = helper == "standby", random.Random(1)
        with serving(folder, {"work": given.work}, hosts=1 if alone else 2, standby=alone) as server:

            def fault(pid: int) -> Interval:
                if signal == "SIGKILL":
                    return killed(server.worker, pid)
                return paused(pid, choice.uniform(0.1, 0.8))

            clients, faults = under_load(server, given, fault)
            counted = count(server.worker, "hedges", "hedge_wins", "replays", "host_deaths")
        yield line(f"{signal}, with {helper}", clients, faults, counted)

    return run


def recoverable(folder: Path, given: argparse.Namespace) -> Iterator[str]:
    """A request cannot be told from its client to have been hit: two runs, one of them without faults."""
    for share in (0.0, 0.01):
        behaviour = {"work": given.work, "sometimes": {"share": share, "do": "recoverable"}}
        with serving(folder / str(share), behaviour, hosts=1, TRTMODEL_CONTEXTS="4") as server:
            with Clients(server.worker.port, FACTORS, given.clients, rows=(1, 2, 3), pause=given.pause) as clients:
                time.sleep(given.seconds)
            faults = int(metric(server.worker, "rebuilt_lanes_total"))  # one for each
            counted = count(server.worker, "retries", "rebuilt_lanes", "batches", "host_deaths")
        yield line(f"{share:.0%} of runs fail", clients, [], counted, str(faults) if faults else "")


def restarts(folder: Path, given: argparse.Namespace) -> Iterator[str]:
    if not given.restarts:
        return
    with serving(folder, {}, hosts=2) as server:
        worker = server.worker

        def replace(times: int) -> None:
            for _ in range(times):
                lanes_are(worker, server.lanes)
                killed(worker, server.hosts()[0])
            lanes_are(worker, server.lanes)

        replace(10)
        before = settled(lambda: held(worker))
        replace(given.restarts)
        after = settled(lambda: held(worker))
        yield f"\n{given.restarts} restarts of hosts. The front before: {before}; after: {after}"


def line(name: str, clients: Clients, faults: Sequence[Interval], counted: str, happened: str = "") -> str:
    seen = clients.seen
    hit = [s for s in seen if any(s.started <= end and s.ended >= begin for begin, end in faults)]
    quiet = [s for s in seen if not any(_near(s, fault) for fault in faults)]
    cells = [name, happened or str(len(faults)), f"{len(seen):,}", str(len(clients.failures)), str(len(clients.wrong)),
             times(quiet), str(len(hit)), times(hit), counted]  # fmt: skip
    bad = "".join(f"\n{text}" for text in clients.bad[:3])
    return f"| {' | '.join(cells)} |{bad}"


def _near(seen: Seen, fault: Interval) -> bool:
    return seen.started <= fault[1] + QUIET_SECONDS and seen.ended >= fault[0] - QUIET_SECONDS


def times(seen: Sequence[Seen]) -> str:
    if not seen:
        return "-"
    stalls = STALLS.between(min(s.started for s in seen), max(s.ended for s in seen))
    ordered = sorted(seen, key=lambda s: s.seconds)
    spared = (s for s in reversed(ordered) if not any(a <= s.ended and b >= s.started for a, b in stalls))
    most = f"{1e3 * next(spared).seconds:.1f}" if STALLS.known else "not known"
    p50, p99, slowest = (1e3 * ordered[at].seconds for at in (len(ordered) // 2, int(0.99 * len(ordered)), -1))
    return f"{p50:.1f} / {p99:.1f} / {slowest:.1f} ({most})"


def count(worker: WorkerProcess, *names: str) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {metric(worker, f'{name}_total'):.0f}" for name in names)


SCENARIOS: dict[str, Callable[[Path, argparse.Namespace], Iterator[str]]] = {
    "kill-sibling": hosts("SIGKILL", "sibling"),
    "kill-standby": hosts("SIGKILL", "standby"),
    "stop-sibling": hosts("SIGSTOP", "sibling"),
    "stop-standby": hosts("SIGSTOP", "standby"),
    "recoverable": recoverable,
    "restarts": restarts,
}

if __name__ == "__main__":
    main()
