"""python -m tests.chaos --seed 7 --minutes 10

Several seeds one after the other: --seeds 1-6 (or 3,7,9). Each appends a line to --results; one that fails is recorded,
the cluster is healed, and the next one begins. Exit code 1 if any was broken. --plan prints what would happen.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chaos import plan

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results" / "chaos.jsonl"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int)
    which.add_argument("--seeds", type=_seeds, help="1-6 or 3,7,9")
    parser.add_argument("--minutes", type=float, default=10.0, help="of chaos; set-up and convergence come on top")
    parser.add_argument("--results", type=Path, default=RESULTS, help="a JSON line is appended for each seed")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "trtmodel-chaos")
    parser.add_argument("--plan", action="store_true", help="only say what would happen")
    given = parser.parse_args(argv)
    seeds = given.seeds or [given.seed]
    if given.plan:
        for seed in seeds:
            for action in plan.plan(seed, given.minutes):
                lasts = f" for {action.seconds:g} s" if action.seconds else ""
                print(f"{seed:4} {action.at:7.1f} s  {action.kind} {action.model}{lasts}")
        return 0
    from chaos.run import Stage, run_seed

    stage, broken = Stage(), 0
    try:
        for seed in seeds:
            result = run_seed(stage, seed, given.minutes, given.logs)
            broken += bool(result.broken)
            given.results.parent.mkdir(parents=True, exist_ok=True)
            with given.results.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
    finally:
        stage.heal()
        stage.close()
    print(f"{len(seeds)} seeds, {broken} of them broken")
    return 1 if broken else 0


def _seeds(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the machine is healed then, too
    sys.exit(main())
