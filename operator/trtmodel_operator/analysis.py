"""What the figures of a canary say: Pass, Fail, Inconclusive or NoData, with a sentence. Pure.

*Attempts* are counted by the engine that they were routed to, before a retry or a fallback could hide a failure.

Errors: the bounds of the difference of two independent proportions by Newcombe's hybrid score method (Statistics in
Medicine 17, 1998, method 10), each one-sided. Pass if the upper bound at 95 % is below the limit (without an error
0.1 % takes 2,703 requests, hence 3,000 as default). Fail if the lower bound is above it, at 99.75 %: there are many
looks, and at 95 % each, 4 to 7 % of candidates that are no worse than a baseline with 1 to 3 % of errors would fail.
Else Inconclusive.

Latency: compute time per batch bucket, since a batch of 32 takes longer than one of 1. The candidate's p99 may be
`max_latency_ratio` times the baseline's; with fewer than 1,000 samples on either side it is p95. A ratio above the
limit is a Fail only if so many samples lie above limit x quantile that chance does not explain it: the exact exceedance
test, free of assumptions about the distribution (if both samples are of one distribution, the number of candidate
samples above an order statistic of the baseline is negative hypergeometric). It needs two failing looks in a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trtmodel_contract.control import AttemptCounts
from trtmodel_contract.gate import WORST_FIRST, Verdict
from trtmodel_contract.histogram import count, count_above, merge, quantile

from trtmodel_operator.model import AnalysisSpec

# One-sided normal quantiles.
Z_95 = 1.6448536
Z_FAIL = 2.8070338  # 99.75 %
# Below the least number of requests nothing is decided, but for this: a candidate that fails whatever it is given must
# not go on failing until 3,000 requests are through.
EARLY_FAILURES = 10
Z_EARLY = 3.7190165  # 99.99 %

P99_SAMPLES = 1000  # in both; the 10 slowest of them are what p99 rests on
LEAST_SAMPLES = 30  # in both, for a bucket to be judged at all
LEAST_COVERAGE = 0.8  # of the candidate's samples in buckets that can be judged
LATENCY_ERROR = 0.001  # of one look over all buckets; see the simulation in tests/unit/operator


@dataclass(frozen=True)
class Look:
    """One look at the figures. `sentence` says all of it, `error_sentence` and `latency_sentence` a part; `short` fits
    into a printed column."""

    verdict: Verdict
    errors: Verdict
    latency: Verdict
    requests: int
    sentence: str
    short: str
    error_sentence: str = ""
    latency_sentence: str = ""


def total(counts: Iterable[AttemptCounts]) -> AttemptCounts:
    """The attempts of several workers together."""
    listed = list(counts)
    failed: dict[str, int] = {}
    buckets: dict[str, list[Mapping[int, int]]] = {}
    for c in listed:
        for kind, n in c.failed.items():
            failed[kind] = failed.get(kind, 0) + n
        for bucket, histogram in c.compute.items():
            buckets.setdefault(bucket, []).append(histogram)
    return AttemptCounts(
        ok=sum(c.ok for c in listed),
        failed=failed,
        abandoned=sum(c.abandoned for c in listed),
        compute={bucket: merge(histograms) for bucket, histograms in sorted(buckets.items())},
    )


def look(candidate: AttemptCounts, baseline: AttemptCounts, limits: AnalysisSpec, against: str) -> Look:
    """`against` says in words what the baseline is."""
    requests = _attempts(candidate)
    if requests == 0:
        text = f"no request has reached the candidate: NoTraffic (it is compared with {against})"
        return Look(Verdict.NO_DATA, Verdict.NO_DATA, Verdict.NO_DATA, 0, text, "0 req")
    errors, error_text, error_short = _errors(candidate, baseline, limits)
    latency, latency_text, latency_short = _latency(candidate.compute, baseline.compute, limits.max_latency_ratio)
    if requests < limits.min_requests:
        latency = Verdict.INCONCLUSIVE
    return Look(
        verdict=_worst(errors, latency),
        errors=errors,
        latency=latency,
        requests=requests,
        sentence=f"{error_text}; {latency_text}; compared with {against}",
        short=f"{requests:,} req, {error_short}, {latency_short}",
        error_sentence=f"{error_text}; compared with {against}",
        latency_sentence=f"{latency_text}; compared with {against}",
    )


def _worst(*verdicts: Verdict) -> Verdict:
    return min(verdicts, key=WORST_FIRST.index)


def _failures(counts: AttemptCounts) -> int:
    return sum(counts.failed.values()) + counts.abandoned


def _attempts(counts: AttemptCounts) -> int:
    return counts.ok + _failures(counts)


# ---------------------------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------------------------


def _errors(candidate: AttemptCounts, baseline: AttemptCounts, limits: AnalysisSpec) -> tuple[Verdict, str, str]:
    x1, n1, x2, n2 = _failures(candidate), _attempts(candidate), _failures(baseline), _attempts(baseline)
    limit = limits.max_error_rate_increase
    what = f"{x1:,} of {n1:,} requests failed"
    if n2 == 0:
        return Verdict.INCONCLUSIVE, f"{what}, and there is nothing to compare them with", f"err {x1 / n1:.2%}"
    low, high = difference_bounds(x1, n1, x2, n2, Z_FAIL)[0], difference_bounds(x1, n1, x2, n2)[1]
    what += f" on the candidate, {x2:,} of {n2:,} on the baseline"
    short = f"err {x1 / n1 - x2 / n2:+.2%}"
    if n1 < limits.min_requests:
        if x1 >= EARLY_FAILURES and difference_bounds(x1, n1, x2, n2, Z_EARLY)[0] > limit:
            return Verdict.FAIL, f"{what}: far beyond the limit of +{limit:.2%}, which needs no more requests", short
        return Verdict.INCONCLUSIVE, f"{what}: {limits.min_requests:,} requests are the least for a verdict", short
    bounds = f"an increase of at least {low:+.2%} and at most {high:+.2%} is proved, limit +{limit:.2%}"
    verdict = Verdict.FAIL if low > limit else Verdict.PASS if high < limit else Verdict.INCONCLUSIVE
    return verdict, f"{what}: {bounds}", short


def difference_bounds(x1: int, n1: int, x2: int, n2: int, z: float = Z_95) -> tuple[float, float]:
    """Newcombe's score bounds of x1/n1 - x2/n2, each one-sided at the confidence of `z`."""
    p1, p2 = x1 / n1, x2 / n2
    (low1, high1), (low2, high2) = _wilson(x1, n1, z), _wilson(x2, n2, z)
    low = p1 - p2 - math.hypot(p1 - low1, high2 - p2)
    high = p1 - p2 + math.hypot(high1 - p1, p2 - low2)
    return low, high


def _wilson(x: int, n: int, z: float) -> tuple[float, float]:
    p, z2 = x / n, z * z
    centre, margin = p + z2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    scale = 1 + z2 / n
    # At the ends the exact bound is p itself; rounding must not put it on the other side.
    return min(p, max(0.0, (centre - margin) / scale)), max(p, min(1.0, (centre + margin) / scale))


# ---------------------------------------------------------------------------------------------------------------
# Latency
# ---------------------------------------------------------------------------------------------------------------

Histogram = Mapping[int, int]


def _latency(
    candidate: Mapping[str, Histogram], baseline: Mapping[str, Histogram], limit: float
) -> tuple[Verdict, str, str]:
    judged = [
        bucket
        for bucket in sorted(candidate)
        if min(count(candidate[bucket]), count(baseline.get(bucket, {}))) >= LEAST_SAMPLES
    ]
    samples = sum(count(histogram) for histogram in candidate.values())
    covered = sum(count(candidate[bucket]) for bucket in judged)
    if not judged or covered < LEAST_COVERAGE * samples:
        return Verdict.INCONCLUSIVE, "too few compute times to compare", "latency n/a"
    results = [
        (bucket, *_bucket(candidate[bucket], baseline[bucket], limit, LATENCY_ERROR / len(judged))) for bucket in judged
    ]
    verdict = _worst(*(r[1] for r in results))
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
