"""Failed attempts: the bounds of the difference of two independent proportions by Newcombe's hybrid score method
(Statistics in Medicine 17, 1998, method 10), each one-sided.

Pass if the upper bound at 95 % is below the limit (without an error 0.1 % takes 2,703 requests, hence the default).
Fail if the lower bound is above it, at 99.95 %: a step is looked at up to 192 times (every 10 s for half an hour), and
at 95 % each, 4 to 7 % of candidates that are no worse than a baseline with 1 to 3 % of errors would fail in 24 looks
already. Else Inconclusive.
"""

from __future__ import annotations

import math

from trtmodel_contract.control import AttemptCounts
from trtmodel_contract.gate import Verdict

from trtmodel_operator.model import AnalysisSpec

# One-sided normal quantiles.
Z_95 = 1.6448536
Z_FAIL = 3.2905267  # 99.95 %
# Below the least number of requests nothing is decided, but for this: a candidate that fails whatever it is given must
# not go on failing until 3,000 requests are through.
EARLY_FAILURES = 10
Z_EARLY = 3.7190165  # 99.99 %


def failures(counts: AttemptCounts) -> int:
    return sum(counts.failed.values()) + counts.abandoned


def attempts(counts: AttemptCounts) -> int:
    return counts.ok + failures(counts)


def judge_errors(candidate: AttemptCounts, baseline: AttemptCounts, limits: AnalysisSpec) -> tuple[Verdict, str, str]:
    x1, n1, x2, n2 = failures(candidate), attempts(candidate), failures(baseline), attempts(baseline)
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
    (low1, high1), (low2, high2) = wilson_bounds(x1, n1, z), wilson_bounds(x2, n2, z)
    low = p1 - p2 - math.hypot(p1 - low1, high2 - p2)
    high = p1 - p2 + math.hypot(high1 - p1, p2 - low2)
    return low, high


def least_requests(limit: float) -> int:
    """How many requests of the candidate prove that errors rose by less than `limit`, if none failed on either side."""
    return math.floor(Z_95**2 * (1 / limit - 1)) + 1


def least_proved(requests: int) -> float:
    """The increase below which errors stayed, as `requests` of the candidate prove if none failed on either side."""
    return Z_95**2 / (requests + Z_95**2)


def wilson_bounds(x: float, n: int, z: float) -> tuple[float, float]:
    """Of a share: `x` of `n`, each bound one-sided at the confidence of `z`."""
    p, z2 = x / n, z * z
    centre, margin = p + z2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    scale = 1 + z2 / n
    # At the ends the exact bound is p itself; rounding must not put it on the other side.
    return min(p, max(0.0, (centre - margin) / scale)), max(p, min(1.0, (centre + margin) / scale))
