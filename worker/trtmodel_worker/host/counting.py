"""`contexts: Auto`: the fewest lanes within 5 % of the best throughput, found by running them side by side."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

WITHIN = 0.95
_LEAST_SECONDS = 0.1  # of a measurement, and
_LEAST_RUNS = 4  # of the slowest engine so many runs
_MOST_SECONDS = 2.0

Run = Callable[[], object]


def fewest_lanes(runs: Sequence[Run], seconds: float) -> tuple[int, dict[int, float]]:
    """How many of `runs` (one per lane, each runs a batch once; `seconds` is what that takes alone) are worth it, and
    the runs per second of each number that was tried: 1, 2, 4 ... until more gain nothing. Raises what a run raises."""
    window = min(_MOST_SECONDS, max(_LEAST_SECONDS, _LEAST_RUNS * seconds))
    rates: dict[int, float] = {}
    lanes = 1
    while lanes <= len(runs):
        rates[lanes] = throughput(runs[:lanes], window)
        if rates[lanes] * WITHIN <= max((rate for n, rate in rates.items() if n < lanes), default=0.0):
            break
        lanes *= 2
    best = max(rates.values())
    return min(n for n, rate in rates.items() if rate >= WITHIN * best), rates


def throughput(runs: Sequence[Run], seconds: float) -> float:
    """Runs per second of all lanes together. Raises what a run raises."""
    counts, failed = [0] * len(runs), list[BaseException]()
    start = threading.Barrier(len(runs) + 1)
    end = 0.0

    def work(index: int) -> None:
        start.wait()
        try:
            while True:
                runs[index]()
                counts[index] += 1
                if time.perf_counter() >= end:
                    return
        except BaseException as e:  # noqa: BLE001 - it is raised where the lanes are waited for
            failed.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(runs))]
    for thread in threads:
        thread.start()
    began = time.perf_counter()
    end = began + seconds
    start.wait()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return sum(counts) / (time.perf_counter() - began)
