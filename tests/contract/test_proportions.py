"""Confidence bounds: exact where they can be, and wrong as rarely as they say."""

from __future__ import annotations

import functools
import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trtmodel_contract.proportions import binomial_bounds, paired_bounds, samples_needed

SAMPLES = 3_000  # simulated data sets per case
COUNTS = st.integers(1, 3_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [  # R: binom.test(k, n, alternative = "greater" and "less")$conf.int
        (0, 10, 0.0, 0.2588656),
        (1, 10, 0.0051162, 0.3941633),
        (5, 10, 0.2224411, 0.7775589),
        (10, 10, 0.7411344, 1.0),
        (4, 2_000, 0.0006833, 0.0045709),
    ],
)
def test_exact_bounds_of_a_proportion(successes: int, n: int, low: float, high: float) -> None:
    assert binomial_bounds(successes, n) == pytest.approx((low, high), abs=1e-6)


@given(COUNTS)
def test_the_tail_beyond_a_bound_is_five_per_cent(counts: tuple[int, int]) -> None:
    k, n = counts

    def tail(p: float, at_most: int) -> float:
        log = [
            math.lgamma(n + 1)
            - math.lgamma(i + 1)
            - math.lgamma(n - i + 1)
            + i * math.log(p)
            + (n - i) * math.log1p(-p)
            for i in range(at_most + 1)
        ]
        return math.fsum(map(math.exp, log))

    low, high = binomial_bounds(k, n)
    if k < n:
        assert tail(high, k) == pytest.approx(0.05, rel=1e-6)
    if k > 0:
        assert 1 - tail(low, k - 1) == pytest.approx(0.05, rel=1e-6)


@given(COUNTS, st.data())
def test_bounds_hold_the_estimate_between_them(counts: tuple[int, int], data: st.DataObject) -> None:
    worse, n = counts
    better = data.draw(st.integers(0, n - worse))
    low, high = binomial_bounds(worse, n)
    assert 0 <= low <= worse / n <= high <= 1
    low, high = paired_bounds(worse, better, n)
    assert -1 <= low <= (worse - better) / n <= high <= 1


@given(COUNTS, st.data())
def test_trading_the_engines_turns_the_bounds_round(counts: tuple[int, int], data: st.DataObject) -> None:
    worse, n = counts
    better = data.draw(st.integers(0, n - worse))
    low, high = paired_bounds(worse, better, n)
    assert paired_bounds(better, worse, n) == pytest.approx((-high, -low), abs=1e-9)


def test_no_discordant_pair_still_leaves_doubt() -> None:
    low, high = paired_bounds(0, 0, 1_000)
    assert low == -high
    assert high == pytest.approx(binomial_bounds(0, 1_000)[1])


@pytest.mark.parametrize("counts", [(-1, 0, 5), (3, 3, 5), (0, 0, 0)])
def test_counts_that_are_no_split_are_refused(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="no split"):
        paired_bounds(*counts)


@pytest.mark.parametrize("counts", [(-1, 5), (6, 5), (0, 0)])
def test_counts_that_are_no_proportion_are_refused(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="not a proportion"):
        binomial_bounds(*counts)


def test_the_samples_needed_are_the_least() -> None:
    def upper(n: int) -> float:
        return 1 / n

    assert samples_needed(upper, 0.01, 10) == 101
    assert samples_needed(upper, 1e-9, 10) is None


def _poisson(random_: random.Random, mean: float) -> int:
    limit, product = math.exp(-mean), random_.random()
    return next(k for k in itertools.count() if (product := product if k == 0 else product * random_.random()) <= limit)


@pytest.mark.parametrize("limit", [0.005, 0.02])
@pytest.mark.parametrize("n", [600, 1_000, 2_000])
@pytest.mark.parametrize("gain", [None, 0.0, 0.0005, 0.005])
def test_a_model_at_the_limit_passes_wrongly_in_at_most_five_per_cent(n: int, limit: float, gain: float | None) -> None:
    """By simulation. `gain` is the share that got better in a paired comparison; None: disagreements."""
    random_ = random.Random(f"{n} {limit} {gain}")
    binomial = functools.cache(lambda k: binomial_bounds(k, n))
    paired = functools.cache(lambda worse, better: paired_bounds(worse, better, n))
    passed = failed = 0
    for _ in range(SAMPLES):
        if gain is None:
            low, high = binomial(_poisson(random_, limit * n))
        else:
            low, high = paired(_poisson(random_, (limit + gain) * n), _poisson(random_, gain * n))
        passed += high < limit
        failed += low > limit
    # Three standard errors of the simulation itself above 5 %.
    most = 0.05 + 3 * math.sqrt(0.05 * 0.95 / SAMPLES)
    assert passed / SAMPLES <= most
    assert failed / SAMPLES <= most


@pytest.mark.parametrize("limit", [0.002, 0.005, 0.01, 0.02])
@pytest.mark.parametrize("n", [300, 540, 750, 1_000, 1_500])
@pytest.mark.parametrize("gain", [0.0, 0.0003, 0.003, 0.01])
def test_the_exact_share_of_wrong_passes_is_at_most_five_per_cent(n: int, limit: float, gain: float) -> None:
    """Summed over all outcomes. The plain score interval lets 6.7 % pass at n=540 without gains."""

    def chance(k: int, mean: float) -> float:
        return math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) if mean else float(k == 0)

    wrong = 0.0
    for better in range(int(gain * n * 3) + 12):
        weight = chance(better, gain * n)
        for worse in itertools.count():
            if weight < 1e-7 or paired_bounds(worse, better, n)[1] >= limit:
                break
            wrong += weight * chance(worse, (limit + gain) * n)
    assert wrong <= 0.0505
