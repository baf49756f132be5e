"""Every server and ours, in one interleaved run, with the same client, models and ONNX Runtime.

    python bench/peers/run.py --quick              chosen cells, 2 rounds of 3 s: below 8 minutes
    python bench/peers/run.py                      every cell, 3 rounds of 5 s, then the scenarios
    python bench/peers/run.py --servers us,mosec --cells null/binary/16 --scenarios kill

The result goes to bench/results/peers-DATE.{md,json}, or where --out says. Run it on a quiet machine: the load before
the run is written down, and above 1 the result says of itself that it does not count.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from http.client import HTTPException
from pathlib import Path

import models
import onnxruntime
import processes
import scenarios
import venvs
from catalogue import PEERS, US, Peer, Setup
from load import LoadError, wrk_version
from measure import Cell, ServerError, visit
from report import Result
from us import ROOT, Artifacts

MODELS, BODIES, CLIENTS = ("null", "magika"), ("binary", "json"), (1, 16, 64)
QUICK = ("null/binary/1", "null/binary/16", "null/binary/64", "null/json/16", "magika/binary/1")
# The package that decides how a peer serves; ONNX Runtime is the same in all.
PACKAGES = {
    "kserve": "kserve", "pytriton": "nvidia-pytriton", "mlserver": "mlserver", "litserve": "litserve",
    "bentoml": "bentoml", "ray": "ray", "mosec": "mosec", "asgi": "uvicorn",
}  # fmt: skip


def main() -> None:
    given = arguments()
    peers = [p for p in PEERS if p.name in given.servers]
    cells = [parse_cell(text) for text in given.cells]
    processes.become_reaper()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as folder:
        result = run(peers, cells, given, Path(folder))
    result.write(given.out)
    print(result.markdown())
    print(f"written: {given.out}.md, .json", file=sys.stderr)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="chosen cells, 2 rounds of 3 s, no scenarios")
    parser.add_argument("--servers", type=_list, default=[p.name for p in PEERS], help="names, by comma")
    parser.add_argument("--cells", type=_list, help="MODEL/BODY/CLIENTS, by comma")
    parser.add_argument("--scenarios", type=_list, help=f"by comma, of {', '.join(scenarios.ALL)}; 'none' for none")
    parser.add_argument("--seconds", type=int, help="per cell")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--minutes", type=float, help="after which rounds other than the first go no further")
    parser.add_argument("--parallel", type=int, default=1, help="inferences at the same time, in every server")
    parser.add_argument("--deadline", type=float, default=5.0, help="s; servers with such a setting get it")
    parser.add_argument("--out", type=Path, help="file without suffix")
    given = parser.parse_args()
    given.cells = given.cells or list(QUICK if given.quick else every_cell())
    given.seconds = given.seconds or (3 if given.quick else 5)
    given.minutes = given.minutes or (7.0 if given.quick else 240.0)
    given.rounds = given.rounds or (2 if given.quick else 3)
    if given.scenarios is None:
        given.scenarios = [] if given.quick else list(scenarios.ALL)
    given.scenarios = [s for s in given.scenarios if s != "none"]
    known = {p.name for p in PEERS}
    for name in given.servers:
        if name not in known:
            parser.error(f"no server {name!r}: one of {', '.join(sorted(known))}")
    for name in given.scenarios:
        if name not in scenarios.ALL:
            parser.error(f"no scenario {name!r}: one of {', '.join(scenarios.ALL)}")
    if given.out is None:
        mark = "-quick" if given.quick else ""
        given.out = ROOT / "bench" / "results" / f"peers-{datetime.now(timezone.utc):%Y-%m-%d}{mark}"
    return given


def _list(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def every_cell() -> list[str]:
    return [f"{model}/{body}/{clients}" for model in MODELS for body in BODIES for clients in CLIENTS]


def parse_cell(text: str) -> Cell:
    try:
        model, body, clients = text.split("/")
        cell = Cell(model, body, int(clients))
    except ValueError:
        sys.exit(f"no cell {text!r}: MODEL/BODY/CLIENTS, as null/binary/16")
    if cell.model not in MODELS or cell.body not in BODIES or cell.clients < 1:
        sys.exit(f"no cell {text!r}: models {', '.join(MODELS)}, bodies {', '.join(BODIES)}")
    return cell


def run(peers: Sequence[Peer], cells: Sequence[Cell], given: argparse.Namespace, folder: Path) -> Result:
    problems: list[str] = []
    peers = [p for p in peers if installed(p, problems)]
    load_before = os.getloadavg()[0]
    names = dict.fromkeys([*(c.model for c in cells), *(["magika"] if given.scenarios else [])])
    made = {name: models.make(name, folder / "models") for name in names}
    artifacts = Artifacts(folder / "artifacts")
    if US in peers:
        for model in made.values():
            artifacts.get(model, 1)
    result = Result(about(peers, given, load_before, made), peers, cells, problems=problems)
    number = 0
    for turn in range(given.rounds):
        for peer in peers:
            for group in groups(peer, cells):
                if turn and time.monotonic() - STARTED > 60 * given.minutes:
                    problems.append(f"{peer.title}, {group[0].model}: no round {turn + 1}, the time was over")
                    continue
                number += 1
                setup = Setup(
                    made[group[0].model], group[0].body, given.parallel, given.deadline, folder / f"visit-{number}"
                )
                say(f"round {turn + 1}: {peer.name}, {group[0].model}")
                try:
                    result.add(peer, visit(peer, setup, group, given.seconds, artifacts))
                except (ServerError, LoadError, RuntimeError, AssertionError, OSError, HTTPException) as e:
                    problems.append(f"{peer.title}, {group[0].model}, round {turn + 1}: {short(str(e))}")
                    say(problems[-1])
    for name in given.scenarios:
        for peer in peers:
            number += 1
            say(f"{name}: {peer.name}")
            body = "binary" if "binary" in peer.formats else "json"
            setup = Setup(made["magika"], body, given.parallel, given.deadline, folder / f"visit-{number}")
            try:
                found = scenarios.ALL[name](peer, setup, artifacts)
            except (ServerError, LoadError, RuntimeError, AssertionError, OSError, HTTPException) as e:
                problems.append(f"{peer.title}, {name}: {short(str(e))}")
                say(problems[-1])
            else:
                result.scenarios.setdefault(name, {})[peer.name] = found
    result.about["load_after"] = round(os.getloadavg()[0], 2)
    result.about["minutes"] = round((time.monotonic() - STARTED) / 60, 1)
    return result


def groups(peer: Peer, cells: Sequence[Cell]) -> list[list[Cell]]:
    """What one start of the server measures: a model, and one body where the server has a stage for one only."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if cell.body in peer.formats:
            found.setdefault((cell.model, cell.body if peer.per_format else ""), []).append(cell)
    return list(found.values())


def installed(peer: Peer, problems: list[str]) -> bool:
    try:
        if peer is not US:
            venvs.ensure(peer.venv)
    except venvs.PeerUnavailable as e:
        problems.append(f"{peer.title}: {e}")
        say(problems[-1])
        return False
    return True


def about(
    peers: Sequence[Peer], given: argparse.Namespace, load_before: float, made: dict[str, models.BenchModel]
) -> dict[str, object]:
    used = dict.fromkeys(p.venv for p in peers if p is not US)
    versions = {venv: venvs.versions(venv)[PACKAGES[venv]] for venv in used}
    for venv in used:
        pinned = venvs.versions(venv)["onnxruntime"]
        if pinned != onnxruntime.__version__:
            sys.exit(f"{venv} is pinned to ONNX Runtime {pinned}, we run {onnxruntime.__version__}: pin them alike")
    return {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        "command": shlex.join(["python", "bench/peers/run.py", *sys.argv[1:]]),
        "machine": f"{cpu()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "load_before": round(load_before, 2),
        "seconds": given.seconds,
        "rounds": given.rounds,
        "parallel": given.parallel,
        "versions": {
            "Python": platform.python_version(), "ONNX Runtime": onnxruntime.__version__, "client": wrk_version(),
            **versions,
        },
        "bare_p50_ms": {name: round(models.bare_p50_ms(model, 1.0), 4) for name, model in made.items()},
    }  # fmt: skip


def cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def short(text: str) -> str:
    """Beginning and end, on one line, without this machine's paths."""
    line = " ".join(text.replace(str(ROOT), ".").replace(str(Path.home()), "~").split())
    return line if len(line) < 400 else f"{line[:120]} ... {line[-260:]}"


def say(text: str) -> None:
    print(f"{datetime.now(timezone.utc):%H:%M:%S} {text}", file=sys.stderr, flush=True)


STARTED = time.monotonic()

if __name__ == "__main__":
    main()
