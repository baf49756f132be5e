"""``python -m trtmodel_worker serve | resolve | build | collect``."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from trtmodel_worker.environment import without_blas_threads

_TOLD_TO_END = 128 + signal.SIGTERM


def main(arguments: list[str] | None = None) -> int:
    # In a container this is process 1, which the kernel ends by no signal that has no handler: a pod that was deleted
    # while its modules were read lasted until its grace period was over. What is started below sets its own handler.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(_TOLD_TO_END))
    parser = argparse.ArgumentParser(prog="trtmodel_worker", description=__doc__)
    parser.add_argument("command", choices=("serve", "resolve", "build", "collect"))
    command = parser.parse_args(arguments).command
    without_blas_threads()
    if command == "serve":
        from trtmodel_worker.front.main import main as serve

        serve()  # which ends the process
    from trtmodel_worker.builder.main import main as job

    return job(command)


if __name__ == "__main__":
    sys.exit(main())
