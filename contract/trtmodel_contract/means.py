"""What a mean of positive errors proves: bounds of it, and how many samples would be enough.

Squared errors and distances are skewed: few are large. Their means are nearly symmetric on a scale of logarithms, so
that is where the interval is: estimate / factor to estimate * factor, with Student's distribution for the unknown
spread. Few samples of a skewed quantity show too little of its spread, so that the interval is wider than nominal, the
more so the fewer there are. By simulation (errors from normal to double exponential, 5 to 600 samples) a mean at the
limit passes in at most 4.6 % of all data sets; at a nominal 95 % without that, 6 to 21 % passed.
"""

from __future__ import annotations

import math

from trtmodel_contract.proportions import MOST_SAMPLES

_Z = 1.959964  # one-sided 97.5 % of the normal distribution
_FEWER = 2.0  # the interval is wider by 1 + _FEWER / sqrt(vectors)
_FEW = {1: 12.7062, 2: 4.3027}  # Student's quantiles where the expansion is too far off


def factor(error: float, vectors: int) -> float:
    """What the estimate is divided and multiplied by. `error` is the relative standard error of an estimate from
    `vectors` independent ones. Infinite for a single one: it tells nothing of the others."""
    if vectors < 2:
        return math.inf
    return math.exp(min(700.0, max(0.0, _width(vectors) * error)))


def samples_needed(estimate: float, limit: float, error: float, vectors: int, samples: int) -> int | None:
    """How many samples would decide between `estimate` and `limit` if the spread stays as it is; None above
    MOST_SAMPLES, or if no number does."""
    if vectors < 2:
        return max(2, 2 * samples)
    if not (estimate > 0 and limit > 0):
        return None
    distance = abs(math.log(limit) - math.log(estimate))
    if distance == 0 or not math.isfinite(distance):
        return None
    ratio = _width(vectors) * error / distance
    return math.ceil(samples * ratio**2) if abs(ratio) <= math.sqrt(MOST_SAMPLES / max(1, samples)) else None


def _width(vectors: int) -> float:
    """In standard errors."""
    return _student(vectors - 1) * (1 + _FEWER / math.sqrt(vectors))


def _student(freedom: int) -> float:
    """Quantile of Student's distribution by its expansion about the normal one (Abramowitz and Stegun, 26.7.5)."""
    if freedom in _FEW:
        return _FEW[freedom]
    z, n = _Z, float(freedom)
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )
