"""The big run: ``python tests/worker/fuzz/run.py --requests 1000000 --seed 7``. Ends with 1 if anything was wrong."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path += map(str, Path(__file__).parents[1:3])

from byte_fuzz import Violation
from fuzz_harness import fuzzed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        try:
            print(fuzzed(Path(directory), asked.seed, asked.requests, say=lambda text: print(text, flush=True)))
        except Violation as e:
            print(f"seed {asked.seed}: {e}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
