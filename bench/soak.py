"""What a worker holds after hours of load and many changes of engines: memory, descriptors, shared memory, threads.

    python bench/soak.py [--minutes 60] [--swaps 200] [--share 0.5] [--every 10] [--out FILE]

The load is the demo's: open loop, every answer checked, nothing retried. The swaps are spread evenly over the time, and
each loads an engine, since the old one is not kept. A row is taken when no swap runs and the old host is gone. The
first one counts after two swaps: what they make once (arena, caches, modules) stays. Printed, and written to a file row
by row, is a table in Markdown; SIGTERM or Ctrl-C ends it with a verdict on what there is.

The exit code is 1 if the last third of the rows (by medians) shows more than the first of what should not grow:
descriptors, memory files and processes not at all, the front's threads by no more than its pools may hold, memory by no
more than 16 MiB and 5 %. Requests that failed are counted by kind, and latencies told, but not judged: on a busy
machine (nice, chrt -i 0) they say what the scheduler gave, and a low `--rate` with a `--deadline` that allows for it
leaves only failures that mean something.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import date, datetime, timezone
from pathlib import Path
from statistics import median_low
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench" / "peers")]

import swap  # noqa: E402
from catalogue import Setup  # noqa: E402
from models import make  # noqa: E402
from processes import command_line, pss_mib  # noqa: E402
from us import Artifacts, OurServer  # noqa: E402

FIRST_SWAPS = 2
QUIET_SECONDS = 5.0
SETTLE_SECONDS = 120.0
MOST_OVERTIME = 1.5  # of the minutes, where swaps take longer than was planned
MOST_TROUBLES = 20
SPARE_MIB, SPARE_SHARE = 16.0, 0.05
SPARE_COUNTS = {"front_threads": 6}  # of pools, which grow when much is asked of them at once
HEAD = """\
| minute | swaps | requests | failed | p50 ms | p99 ms | max ms | PSS MiB: all | front | host | gateway \
| front RSS MiB | descriptors: front | host | memory files | their MiB | threads: front | host | processes |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Held:
    """What all processes of a worker hold. MiB by PSS: shared pages are divided by who shares them."""

    everything: float
    front: float
    host: float
    gateway: float
    front_rss: float
    front_descriptors: int
    host_descriptors: int
    memory_files: int
    memory_file_mib: float
    front_threads: int
    host_threads: int
    processes: int

    def cells(self) -> str:
        fields = (f"{v:.1f}" if isinstance(v, float) else str(v) for v in vars(self).values())
        return " | ".join(fields)

    def grown_since(self, first: Held) -> list[str]:
        """What should not be more than it was."""
        found = []
        for name, before in vars(first).items():
            now = getattr(self, name)
            spare = max(SPARE_MIB, SPARE_SHARE * before) if isinstance(before, float) else SPARE_COUNTS.get(name, 0)
            if now > before + spare:
                found.append(f"{name} from {before:.1f} to {now:.1f}")
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--swaps", type=int, default=200)
    parser.add_argument("--share", type=float, default=0.5, help="of the capacity")
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second, instead of a share")
    parser.add_argument("--deadline", type=float, default=5.0, help="of a request, in seconds")
    parser.add_argument("--every", type=float, default=10.0, help="minutes between two rows")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / f"soak-{date.today()}.md")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(soak(Path(folder), given))


def soak(folder: Path, given: argparse.Namespace) -> int:
    """The exit code."""
    model = make("magika", folder / "models")
    artifacts = Artifacts(folder / "artifacts")
    artifacts.get(model, 2)  # built before there is any load
    server = OurServer(artifacts, Setup(model, "binary", 2, given.deadline, folder))
    server.start()
    try:
        with (
            swap.load(server, model, given.share, folder, given.rate, given.deadline) as (port, rate),
            given.out.open("w") as out,
        ):
            command = " ".join(["python bench/soak.py", *sys.argv[1:]])
            run = Soak(server, port, given, out)
            run.say(f"# What a worker holds after many swaps under load\n\n{date.today()}, "
                    f"{len(os.sched_getaffinity(0))} cores, load average {os.getloadavg()[0]:.1f} before, Python "
                    f"{platform.python_version()}, Magika FP32, {rate:.0f} requests/s: `{command}`\n\n"
                    f"{HEAD}")  # fmt: skip
            return run.go()
    finally:
        server.stop()


class Soak:
    """What is said goes into the file at once: it is there however the run ends."""

    def __init__(self, server: OurServer, port: int, given: argparse.Namespace, out: TextIO) -> None:
        self._server, self._port, self._given, self._out = server, port, given, out
        self._rows: list[Held] = []
        self._troubles: list[str] = []
        self._swaps, self._begun, self._epoch = 0, time.monotonic(), time.time()

    def say(self, text: str) -> None:
        for place in (sys.stdout, self._out):
            print(text, file=place, flush=True)

    def go(self) -> int:
        """The exit code."""
        ending = ""
        try:
            self._swap_and_look()
        except KeyboardInterrupt:
            ending = "Told to end. "
        except (OSError, RuntimeError) as e:
            ending = f"Broken off, {type(e).__name__}: {str(e)[:500]}. "
        self._conclude(ending)
        return 1 if ending.startswith("Broken") or self._grown() else 0

    def _swap_and_look(self) -> None:
        time.sleep(QUIET_SECONDS)  # the first row has figures, too
        given, begun = self._given, self._begun
        latest = begun + MOST_OVERTIME * 60 * given.minutes
        since = self._epoch
        while True:
            last = self._swaps == given.swaps or time.monotonic() > latest
            if last or self._swaps in (0, FIRST_SWAPS) or time.time() - since >= 60 * given.every:
                since = self._row(since)
            if last:
                return
            try:
                self._server.change(1 + self._swaps % 2, 2 - self._swaps % 2, keep=False)
            except (OSError, RuntimeError) as e:  # not in time: once more
                self._troubles.append(f"{type(e).__name__}: {e}".splitlines()[0])
                if len(self._troubles) > MOST_TROUBLES:
                    raise
                continue
            self._swaps += 1
            time.sleep(max(0.0, begun + self._swaps * 60 * given.minutes / given.swaps - time.monotonic()))

    def _row(self, since: float) -> float:
        """Returns until when its requests were due: what was due before is answered by now."""
        until = time.time() - 1.0
        found = swap.summary(self._port, since, until)
        self._rows.append(settled(self._server))
        self.say(f"| {(time.monotonic() - self._begun) / 60:.1f} | {self._swaps} | {found['sent']:,} | "
                 f"{found['failed']} | {found['p50']} | {found['p99']} | {found['max']} | "
                 f"{self._rows[-1].cells()} |")  # fmt: skip
        return until

    def _grown(self) -> list[str]:
        rows = self._rows[1:]  # without the one before the first swaps
        third = max(1, len(rows) // 3)
        return middle(rows[-third:]).grown_since(middle(rows[:third])) if rows else []

    def _conclude(self, ending: str) -> None:
        grown, minutes = self._grown(), (time.monotonic() - self._begun) / 60
        try:
            total = swap.summary(self._port, self._epoch, time.time() - 1.0)
        except OSError as e:
            total = {"sent": 0, "failed": 0, "failures": {}}
            ending += f"The load generator says nothing, {e}. "
        wrong = f" {total['failures']}" if total["failed"] else ""
        swaps = f", {len(self._troubles)} more not in time ({'; '.join(self._troubles)})" if self._troubles else ""
        self.say(f"\n{datetime.now(timezone.utc):%H:%M} UTC. {ending}{minutes:.1f} minutes, {self._swaps} "
                 f"swaps{swaps}, {total['sent']:,} requests, {total['failed']} failed{wrong}. Load average "
                 f"{os.getloadavg()[0]:.1f} at the end.\n"
                 f"{'Grown: ' + '; '.join(grown) if grown else 'Nothing has grown.'}")  # fmt: skip


def middle(rows: Sequence[Held]) -> Held:
    """Medians: one row may meet a host that has just begun or is about to end."""
    return Held(*(median_low(getattr(row, field.name) for row in rows) for field in fields(Held)))


def settled(server: OurServer) -> Held:
    """When one host is there again, that is, the one before it was reaped."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline:
        pids = server.pids()
        if len(hosts(pids)) == 1 and all(map(command_line, pids)):  # who has ended and was not reaped has none
            break
        time.sleep(0.1)
    return held(server.pids())


def hosts(pids: Sequence[int]) -> list[int]:
    return [pid for pid in pids if "trtmodel_worker.host serve" in command_line(pid)]


def held(pids: Sequence[int]) -> Held:
    front, engine = pids[:1], hosts(pids)
    gateway = [pid for pid in pids if "gateway" in command_line(pid)]
    files = memory_files(pids)
    return Held(
        everything=pss_mib(pids),
        front=pss_mib(front),
        host=pss_mib(engine),
        gateway=pss_mib(gateway),
        front_rss=sum(status(pid, "VmRSS") for pid in front) / 1024,
        front_descriptors=sum(map(descriptors, front)),
        host_descriptors=sum(map(descriptors, engine)),
        memory_files=len(files),
        memory_file_mib=sum(files.values()) / (1 << 20),
        front_threads=sum(status(pid, "Threads") for pid in front),
        host_threads=sum(status(pid, "Threads") for pid in engine),
        processes=len(pids),
    )


def status(pid: int, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    return 0


def descriptors(pid: int) -> int:
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return 0


def memory_files(pids: Sequence[int]) -> dict[int, int]:
    """Bytes in use of each memory file that a process has open or mapped, by inode."""
    found: dict[int, int] = {}
    for pid in pids:
        for kind in ("fd", "map_files"):
            with contextlib.suppress(OSError):
                for path in Path(f"/proc/{pid}/{kind}").iterdir():
                    with contextlib.suppress(OSError):
                        if str(path.readlink()).startswith("/memfd:"):
                            about = path.stat()
                            found[about.st_ino] = 512 * about.st_blocks
    return found


if __name__ == "__main__":
    main()
