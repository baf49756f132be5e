"""``python -m trtmodel_worker serve | resolve | build | collect``."""

from __future__ import annotations

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="trtmodel_worker", description=__doc__)
    parser.add_argument("command", choices=("serve", "resolve", "build", "collect"))
    command = parser.parse_args(arguments).command
    if command == "serve":
        from trtmodel_worker.front.main import main as serve

        serve()  # which ends the process
    from trtmodel_worker.builder.main import main as job

    return job(command)


if __name__ == "__main__":
    sys.exit(main())
