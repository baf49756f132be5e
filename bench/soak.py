"""What a worker holds after hours of load and many changes of engines: memory, descriptors, shared memory, threads.

    python bench/soak.py [--minutes 60] [--swaps 200] [--share 0.5] [--every 10]

The load is the demo's: open loop, every answer checked, nothing retried. The swaps are spread evenly over the time, and
each loads an engine, since the old one is not kept. A row is taken when no swap runs and the old host is gone. The
first one counts after two swaps: what they make once (arena, caches, modules) stays. Printed is a table in Markdown;
the exit code is 1 if a request failed, or if anything has grown that should not: descriptors, memory files, threads
and processes not at all, memory by no more than 16 MiB and 5 %.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench" / "peers")]

import swap  # noqa: E402
from catalogue import Setup  # noqa: E402
from models import make  # noqa: E402
from processes import command_line, pss_mib  # noqa: E402
from us import Artifacts, OurServer  # noqa: E402

FIRST_SWAPS = 2
QUIET_SECONDS = 5.0
SETTLE_SECONDS = 30.0
SPARE_MIB, SPARE_SHARE = 16.0, 0.05
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
            spare = max(SPARE_MIB, SPARE_SHARE * before) if isinstance(before, float) else 0
            if now > before + spare:
                found.append(f"{name} from {before:.1f} to {now:.1f}")
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--swaps", type=int, default=200)
    parser.add_argument("--share", type=float, default=0.5, help="of the capacity")
    parser.add_argument("--every", type=float, default=10.0, help="minutes between two rows")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(soak(Path(folder), given))


def soak(folder: Path, given: argparse.Namespace) -> int:
    """The exit code."""
    model = make("magika", folder / "models")
    artifacts = Artifacts(folder / "artifacts")
    artifacts.get(model, 2)  # built before there is any load
    server = OurServer(artifacts, Setup(model, "binary", 2, 5.0, folder))
    server.start()
    try:
        with swap.load(server, model, given.share, folder) as (port, rate):
            command = " ".join(["python bench/soak.py", *sys.argv[1:]])
            print(f"{date.today()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, Magika "
                  f"FP32, {rate:.0f} requests/s, {given.share:.0%} of the capacity: `{command}`\n\n{HEAD}",
                  flush=True)  # fmt: skip
            return run(server, port, given)
    finally:
        server.stop()


def run(server: OurServer, port: int, given: argparse.Namespace) -> int:
    time.sleep(QUIET_SECONDS)  # the first row has figures, too
    begun, epoch = time.monotonic(), time.time() - QUIET_SECONDS
    rows: list[Held] = []
    since, failed = epoch, 0
    for number in range(given.swaps + 1):
        if number in (0, FIRST_SWAPS, given.swaps) or time.time() - since >= 60 * given.every:
            until = time.time() - 1.0  # what was due before is answered by now
            found = swap.summary(port, since, until)
            since, failed = until, failed + found["failed"]
            rows.append(settled(server))
            print(f"| {(time.monotonic() - begun) / 60:.1f} | {number} | {found['sent']:,} | {found['failed']} | "
                  f"{found['p50']} | {found['p99']} | {found['max']} | {rows[-1].cells()} |", flush=True)  # fmt: skip
        if number < given.swaps:
            server.change(1 + number % 2, 2 - number % 2, keep=False)
            time.sleep(max(0.0, begun + (number + 1) * 60 * given.minutes / given.swaps - time.monotonic()))
    took = time.monotonic() - begun
    total = swap.summary(port, epoch, time.time() - 1.0)
    grown = rows[-1].grown_since(rows[min(1, len(rows) - 1)])
    print(f"\n{datetime.now(timezone.utc):%H:%M} UTC, after {took / 60:.1f} minutes and {given.swaps} swaps: "
          f"{total['sent']:,} requests, {total['failed']} failed {total['failures'] or ''}\n"
          f"{'Grown: ' + '; '.join(grown) if grown else 'Nothing has grown.'}")  # fmt: skip
    return 1 if grown or total["failed"] else 0


def settled(server: OurServer) -> Held:
    """When one host is there again, that is, the one before it was reaped."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while len(hosts(server.pids())) != 1 and time.monotonic() < deadline:
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
