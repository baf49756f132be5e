"""What counts prove about a rate: one-sided confidence bounds, and how many samples would be enough.

Every bound holds for itself at `CONFIDENCE`: a rate that is exactly at a limit is taken for one below it in at most
5 % of all data sets. Quick for any counts: the operator asks in its loop.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

CONFIDENCE = 0.95
MOST_SAMPLES = 1_000_000  # nobody makes a data set beyond it in order to pass a gate

# The score interval's true error wanders about the nominal one: on a grid of 300 to 3,000 samples, limits of 0.2 to 2 %
# and up to 1 % of pairs that got better, a nominal 95 % let 5.4 % of models at the limit pass; this lets 5.0 % pass.
_SCORE_CONFIDENCE = 0.955


@functools.lru_cache(maxsize=1024)  # the operator judges the same figures in each of its passes
def binomial_bounds(successes: int, n: int) -> tuple[float, float]:
    """Clopper-Pearson bounds of a proportion. Raises ValueError unless 0 <= successes <= n and n > 0."""
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"{successes} of {n} is not a proportion")
    alpha = 1 - CONFIDENCE
    low = 0.0 if successes == 0 else _bisect(lambda p: 1 - _binomial_cdf(successes - 1, n, p) < alpha)
    high = 1.0 if successes == n else _bisect(lambda p: _binomial_cdf(successes, n, p) > alpha)
    return low, high


def paired_bounds(worse: int, better: int, n: int) -> tuple[float, float]:
    """Bounds of the share of pairs that got worse minus the share that got better.

    Score bounds (Tango, Statistics in Medicine 17, 1998), not of zero width when no pair is discordant; where all
    discordant pairs go one way the difference is one proportion, and its exact bounds hold too. Raises ValueError
    for counts that are no split of `n`.
    """
    if min(worse, better) < 0 or worse + better > n or n < 1:
        raise ValueError(f"{worse} worse and {better} better are no split of {n} pairs")
    low, high = _score_bounds(worse, better, n)
    if better == 0:
        exact = binomial_bounds(worse, n)
        low, high = min(low, exact[0]), max(high, exact[1])
    if worse == 0:
        exact = binomial_bounds(better, n)
        low, high = min(low, -exact[1]), max(high, -exact[0])
    return low, high


def samples_needed(upper: Callable[[int], float], limit: float, n: int) -> int | None:
    """The least number of samples at which `upper(samples)` is below `limit`, found by doubling from `n` and bisecting.
    None above MOST_SAMPLES."""
    high = max(n, 1)
    while upper(high) >= limit:
        high *= 2
        if high > MOST_SAMPLES:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if upper(middle) < limit else (middle, high)
    return high


def _score_bounds(worse: int, better: int, n: int) -> tuple[float, float]:
    z = _normal_quantile(_SCORE_CONFIDENCE)
    estimate = (worse - better) / n

    def score(delta: float) -> float:
        a, b = 2.0 * n, (2.0 * n - worse + better) * delta - worse - better
        c = -better * delta * (1 - delta)
        q = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)
        variance = n * (2 * q + delta * (1 - delta))
        distance = worse - better - n * delta
        if variance <= 0:
            return math.copysign(math.inf, distance) if distance else 0.0
        return distance / math.sqrt(variance)

    high = 1.0 if estimate >= 1 else _bisect(lambda d: score(d) > -z, estimate, 1.0)
    low = -1.0 if estimate <= -1 else _bisect(lambda d: score(d) > z, -1.0, estimate)
    return low, high


def _bisect(below: Callable[[float], bool], low: float = 0.0, high: float = 1.0) -> float:
    """The point where `below` turns from true to false."""
    for _ in range(45):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return (low + high) / 2


def _binomial_cdf(k: int, n: int, p: float) -> float:
    """P(X <= k) as a regularised incomplete beta function: a sum over k terms takes minutes for large counts."""
    if p <= 0 or k >= n:
        return 1.0
    if p >= 1:
        return 0.0
    a, b = n - k, k + 1
    scale = math.exp(math.lgamma(n + 1) - math.lgamma(a) - math.lgamma(b) + a * math.log1p(-p) + b * math.log(p))
    if 1 - p < (a + 1) / (a + b + 2):
        return scale * _beta_fraction(a, b, 1 - p) / a
    return 1 - scale * _beta_fraction(b, a, p) / b


def _beta_fraction(a: int, b: int, x: float) -> float:
    """Continued fraction of the incomplete beta function by Lentz's method (Numerical Recipes, 6.4); it converges in
    about sqrt(max(a, b)) steps."""
    tiny = 1e-300
    c, d = 1.0, 1 / max(tiny, 1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for step in (even, odd):
            d, c = 1 / _not_zero(1 + step * d, tiny), _not_zero(1 + step / c, tiny)
            value *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return value


def _not_zero(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny


def _normal_quantile(confidence: float) -> float:
    return _bisect(lambda x: 0.5 * (1 + math.erf(x / math.sqrt(2))) < confidence, 0.0, 10.0)
