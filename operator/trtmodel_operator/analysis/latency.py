"""Compute time per batch bucket, since a batch of 32 takes longer than one of 1. The candidate's p99 may be
`max_latency_ratio` times the baseline's; with fewer than 1,000 samples on either side it is p95.

A ratio above the limit is a Fail only if so many samples lie above limit x quantile that chance does not explain it:
the exact exceedance test, free of assumptions about the distribution (if both samples are of one distribution, the
number of candidate samples above an order statistic of the baseline is negative hypergeometric). It needs two failing
looks in a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from trtmodel_contract.gate import WORST_FIRST, Verdict
from trtmodel_contract.histogram import count, count_above, quantile

P99_SAMPLES = 1000  # in both; the 10 slowest of them are what p99 rests on
LEAST_SAMPLES = 30  # in both, for a bucket to be judged at all
LEAST_COVERAGE = 0.8  # of the candidate's samples in buckets that can be judged
LATENCY_ERROR = 0.001  # of one look over all buckets; see the simulation in tests/unit/operator

Histogram = Mapping[int, int]


def judge_latency(
    candidate: Mapping[str, Histogram], baseline: Mapping[str, Histogram], limit: float, least: int = LEAST_SAMPLES
) -> tuple[Verdict, str, str]:
    """The verdict, and what was seen in words, long and short. `least`: samples on either side that a bucket takes."""
    judged = [
        bucket
        for bucket in sorted(candidate)
        if min(count(candidate[bucket]), count(baseline.get(bucket, {}))) >= least
    ]
    samples = sum(count(histogram) for histogram in candidate.values())
    covered = sum(count(candidate[bucket]) for bucket in judged)
    if not judged or covered < LEAST_COVERAGE * samples:
        return Verdict.INCONCLUSIVE, "too few compute times to compare", "latency n/a"
    results = [
        (bucket, *_bucket(candidate[bucket], baseline[bucket], limit, LATENCY_ERROR / len(judged))) for bucket in judged
    ]
    verdict = min((r[1] for r in results), key=WORST_FIRST.index)
    bucket, _, ratio, name = max(results, key=lambda r: (r[1] is verdict, r[2]))
    where = f" in the bucket of {bucket}" if len(candidate) > 1 else ""
    if math.isnan(ratio):
        text = f"the {name} compute time{where} lies in the last bucket: nothing is measured beyond it"
        return verdict, text, "latency n/a"
    text = f"the {name} compute time{where} is {ratio:.2f} times the baseline's, limit {limit:g}"
    return verdict, text, f"{name} x{ratio:.2f}"


def _bucket(candidate: Histogram, baseline: Histogram, limit: float, error: float) -> tuple[Verdict, float, str]:
    n, m = count(candidate), count(baseline)
    q, name = (0.99, "p99") if min(n, m) >= P99_SAMPLES else (0.95, "p95")
    slow, usual = quantile(candidate, q), quantile(baseline, q)
    if usual is None:
        return Verdict.INCONCLUSIVE, math.nan, name
    above = count_above(candidate, usual * limit)
    beyond_chance = exceedance(n, above, m, count_above(baseline, usual)) < error
    if slow is None:
        return (Verdict.FAIL if beyond_chance else Verdict.INCONCLUSIVE), math.nan, name
    ratio = slow / usual
    if ratio <= limit:
        return Verdict.PASS, ratio, name
    return (Verdict.FAIL if beyond_chance else Verdict.INCONCLUSIVE), ratio, name


def exceedance(n: int, above: int, m: int, baseline_above: int) -> float:
    """P(at least `above` of `n` samples lie above the order statistic that `baseline_above` of the baseline's `m` lie
    above), if both are samples of one distribution. 1.0 where `above` is no more than is to be expected."""
    if above <= n * (baseline_above + 1) / (m + 1):
        return 1.0
    below = m - baseline_above  # rank of the order statistic
    log_term = _log_choose(above + baseline_above, above) + _log_choose(n - above + below - 1, n - above)
    term = math.exp(log_term - _log_choose(m + n, n))
    tail, i = 0.0, above
    while term > tail * 1e-12 and i <= n:
        tail += term
        term *= (i + 1 + baseline_above) / (i + 1) * (n - i) / (n - i + below - 1) if i < n else 0.0
        i += 1
    return min(1.0, tail)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
