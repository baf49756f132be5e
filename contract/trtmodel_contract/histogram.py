"""Latency histograms that workers count and the operator compares.

Buckets are geometric, 5 % apart from 1 microsecond to about 1,000 seconds, so that a model of 2 ms that becomes
2.5 ms is seen, and so is one of 20 s. Sparse: bucket index -> count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

GROWTH = 1.05
FIRST_SECONDS = 1e-6
LAST_INDEX = 425  # FIRST_SECONDS * GROWTH ** 425 is about 1,000 s; anything longer lands here
_LOG_GROWTH = math.log(GROWTH)


def bucket_index(seconds: float) -> int:
    """Index of the bucket that holds `seconds`: the bucket i spans (upper(i - 1), upper(i)]."""
    if seconds <= FIRST_SECONDS:
        return 0
    if not math.isfinite(seconds):
        return LAST_INDEX
    return min(LAST_INDEX, math.ceil(math.log(seconds / FIRST_SECONDS) / _LOG_GROWTH - 1e-9))


def upper_bound(index: int) -> float:
    """Upper bound of a bucket in seconds."""
    return FIRST_SECONDS * GROWTH**index


def merge(histograms: Iterable[Mapping[int, int]]) -> dict[int, int]:
    total: dict[int, int] = {}
    for histogram in histograms:
        for index, count in histogram.items():
            total[index] = total.get(index, 0) + count
    return total


def count(histogram: Mapping[int, int]) -> int:
    return sum(histogram.values())


def quantile(histogram: Mapping[int, int], q: float) -> float | None:
    """Upper bound, in seconds, of the bucket in which the quantile lies. None without samples, and None when it lies
    in the last bucket, whose upper bound means nothing."""
    total = count(histogram)
    if not total:
        return None
    rank, seen = max(1, math.ceil(q * total - 1e-9)), 0
    for index in sorted(histogram):
        seen += histogram[index]
        if seen >= rank:
            return None if index >= LAST_INDEX else upper_bound(index)
    return None


def count_above(histogram: Mapping[int, int], seconds: float) -> int:
    """Samples in buckets that lie wholly above the bucket of `seconds`."""
    limit = bucket_index(seconds)
    return sum(n for index, n in histogram.items() if index > limit)
