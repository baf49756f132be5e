"""The first request of a new worker against those that follow.

    python bench/first.py [--times 20] [--model magika]

A worker is started anew each time, from its local cache. When it says that it is ready a client connects and asks at
once, then again and again. Compared is the first answer's time with the median of the rest, each from the request's
first byte on a connection that stands; what connecting takes is told apart. Printed is a table in Markdown.
"""

from __future__ import annotations

import argparse
import http.client
import os
import platform
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench" / "peers")]

import protocols  # noqa: E402
from catalogue import US, Setup  # noqa: E402
from ending import sigterm_ends  # noqa: E402
from models import make  # noqa: E402
from us import Artifacts, OurServer  # noqa: E402

FOLLOWING = 200
PLACES = (1, 2, 3, 5, 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--model", choices=("magika", "null"), default="magika")
    parser.add_argument("--parallel", type=int, default=1, help="lanes")
    given = parser.parse_args()
    sigterm_ends()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        setup = Setup(make(given.model, folder / "models"), "binary", given.parallel, 5.0, folder)
        server = OurServer(Artifacts(folder / "artifacts"), setup)
        found = [one(server, setup) for _ in range(given.times + 1)][1:]  # the first start fetches
    print(f"{date.today()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, {given.model}, "
          f"{given.times} starts: `{' '.join(['python bench/first.py', *sys.argv[1:]])}`\n")  # fmt: skip
    print("| request | p50 ms | worst ms | against the steady p50: median | worst |\n|---|---|---|---|---|")
    steady = [median(times[FOLLOWING // 2 :]) for _, times in found]
    for place in PLACES:
        times = [times[place - 1] for _, times in found]
        ratios = [a / b for a, b in zip(times, steady, strict=True)]
        print(f"| {place} | {1e3 * median(times):.2f} | {1e3 * max(times):.2f} | {median(ratios):.2f} "
              f"| {max(ratios):.2f} |")  # fmt: skip
    print(f"\nSteady: p50 {1e3 * median(steady):.2f} ms. Connecting took {1e3 * median(c for c, _ in found):.2f} ms.")


def one(server: OurServer, setup: Setup) -> tuple[float, list[float]]:
    """Seconds of connecting, and of each request."""
    kind, path = US.formats["binary"]
    request = protocols.build(kind, path, setup.model)
    server.start()
    try:
        server.wait_ready()
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        begun = time.perf_counter()
        connection.connect()
        connected = time.perf_counter() - begun
        times = []
        for _ in range(FOLLOWING):
            begun = time.perf_counter()
            connection.request("POST", request.path, request.body, dict(request.headers))
            response = connection.getresponse()
            body = response.read()
            times.append(time.perf_counter() - begun)
            headers = {key.lower(): value for key, value in response.getheaders()}
            if response.status != 200 or setup.model.version_of(protocols.read(kind, setup.model, headers, body)) != 1:
                sys.exit(f"status {response.status}, or a wrong answer")
        connection.close()
        return connected, times
    finally:
        server.stop()


if __name__ == "__main__":
    main()
