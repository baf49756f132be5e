"""Controllers and workers until SIGTERM: python -m hollow KUBECONFIG [--first 127.64.0.1]."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import resource
import signal
from pathlib import Path

from hollow.client import Kube
from hollow.controllers import Controllers
from hollow.workers import Fleet


async def run(kubeconfig: Path, first: str, job_seconds: float, load_seconds: float) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    fleet = Fleet()
    async with Kube(kubeconfig) as kube:
        controllers = Controllers(kube, fleet, first=first, job_seconds=job_seconds, load_seconds=load_seconds)
        await controllers.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kubeconfig", type=Path)
    parser.add_argument("--first", default="127.64.0.1", help="address of the first worker")
    parser.add_argument("--job-seconds", type=float, default=0.1)
    parser.add_argument("--load-seconds", type=float, default=0.1)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    gc.set_threshold(100_000, 50, 50)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one listening socket a worker
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(run(given.kubeconfig, given.first, given.job_seconds, given.load_seconds))


if __name__ == "__main__":
    main()
