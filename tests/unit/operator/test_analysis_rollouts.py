"""Whole rollouts, simulated: how often an engine that is no worse is taken back, and how often one that is worse is
caught. Both are counts of many rollouts with the product's own looks, steps and rules of two looks in a row.

A rollout: two steps, a look each interval, a step passes when it was held for its time and the last look said Pass,
and the candidate goes back at the deadline. Compute times are log-normal; counts of a look are drawn from the
multinomial of the histogram's buckets, which is the same as drawing each time and putting it into its bucket.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from trtmodel_contract.control import AttemptCounts
from trtmodel_contract.gate import Verdict
from trtmodel_contract.histogram import LAST_INDEX, upper_bound
from trtmodel_contract.proportions import binomial_bounds
from trtmodel_operator.analysis import look
from trtmodel_operator.model import AnalysisSpec

DEFAULT = AnalysisSpec(interval=10.0, min_requests=3000, max_error_rate_increase=0.001, max_latency_ratio=1.2)
DEMO = AnalysisSpec(interval=5.0, min_requests=150, max_error_rate_increase=0.02, max_latency_ratio=1.2)
MEDIAN = 0.008  # seconds
FAILING_LOOKS = 2
SEED = 20_261_130


@dataclass(frozen=True)
class Engine:
    """`sigma` is the spread of the logarithm of its compute times."""

    slower: float = 1.0
    errors: float = 0.0
    sigma: float = 0.3


@dataclass(frozen=True)
class Traffic:
    """Requests that the candidate and the baseline get between two looks; looks of a hold, and until the deadline."""

    candidate: int
    baseline: int
    hold: int = 12
    deadline: int = 180


BUSY = Traffic(2000, 4000)  # the defaults: a look each 10 s, 2 m a step, 30 m until the deadline
SLOW = Traffic(300, 600)
SPARSE = Traffic(65, 130, hold=4, deadline=36)  # the demo's


def shares(engine: Engine) -> np.ndarray:
    """Of the engine's compute times, by bucket of the histogram."""
    tops = np.array([upper_bound(i) for i in range(LAST_INDEX)])
    z = (np.log(tops) - math.log(MEDIAN * engine.slower)) / engine.sigma
    below = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in z])
    return np.diff(np.concatenate([[0.0], below, [1.0]]))


class Counting:
    """What workers count of one engine in one window."""

    def __init__(self, rng: np.random.Generator, engine: Engine) -> None:
        self._rng, self._errors, self._shares = rng, engine.errors, shares(engine)
        self.begin()

    def begin(self) -> None:
        self._failed, self._times = 0, np.zeros(len(self._shares), dtype=np.int64)

    def serve(self, requests: int) -> AttemptCounts:
        failed = int(self._rng.binomial(requests, self._errors))
        self._failed += failed
        self._times += self._rng.multinomial(requests - failed, self._shares)
        seen = np.flatnonzero(self._times)
        histogram = {int(i): int(self._times[i]) for i in seen}
        return AttemptCounts(int(self._times.sum()), {"E": self._failed} if self._failed else {}, 0, {"1": histogram})


def rollout(rng: np.random.Generator, limits: AnalysisSpec, traffic: Traffic, candidate: Engine, stable: Engine) -> str:
    """Promoted, ErrorRate, TooSlow or Deadline."""
    tried, usual = Counting(rng, candidate), Counting(rng, stable)
    for _ in range(2):
        tried.begin()
        usual.begin()
        fails = 0
        for number in range(1, traffic.hold + traffic.deadline + 1):
            found = look(tried.serve(traffic.candidate), usual.serve(traffic.baseline), limits, "the others")
            if found.errors is Verdict.FAIL:
                return "ErrorRate"
            fails = fails + 1 if found.latency is Verdict.FAIL else 0
            if fails >= FAILING_LOOKS:
                return "TooSlow"
            if number >= traffic.hold and found.verdict is Verdict.PASS:
                break
        else:
            return "Deadline"
    return "Promoted"


def ends(n: int, limits: AnalysisSpec, traffic: Traffic, candidate: Engine, stable: Engine) -> Counter[str]:
    rng = np.random.default_rng(SEED)
    found = Counter(rollout(rng, limits, traffic, candidate, stable) for _ in range(n))
    print(f"{limits.min_requests} requests, {candidate} against {stable}, {traffic}: {dict(found)}")
    return found


def at_most(failed: int, n: int) -> float:
    """Upper 95 % bound of the rate, of `failed` in `n`."""
    return binomial_bounds(failed, n)[1]


@pytest.mark.parametrize(
    ("limits", "traffic", "engine"),
    [
        (DEFAULT, BUSY, Engine()),
        (DEFAULT, SLOW, Engine(sigma=0.6)),
        # Whose traffic has errors of its own: it is looked at until the deadline.
        pytest.param(DEFAULT, SLOW, Engine(errors=0.01), marks=pytest.mark.long),
        (DEMO, SPARSE, Engine(sigma=0.05)),
        (DEMO, SPARSE, Engine(sigma=0.5)),
        pytest.param(DEMO, SPARSE, Engine(errors=0.03), marks=pytest.mark.long),
    ],
)
def test_an_equal_engine_is_taken_back_for_its_figures_in_at_most_one_rollout_of_a_hundred(
    limits: AnalysisSpec, traffic: Traffic, engine: Engine
) -> None:
    n = 1000 if engine.errors else 400
    found = ends(n, limits, traffic, engine, engine)
    assert at_most(found["ErrorRate"] + found["TooSlow"], n) < 0.01 + 1e-9, found


@pytest.mark.parametrize(
    ("limits", "traffic", "slower", "sigma"),
    [(DEFAULT, BUSY, 1.5, 0.3), (DEFAULT, SLOW, 1.5, 0.6), (DEMO, SPARSE, 1.5, 0.2), (DEMO, SPARSE, 2.0, 0.4)],
)
def test_an_engine_half_as_slow_again_is_caught_in_at_least_ninety_five_rollouts_of_a_hundred(
    limits: AnalysisSpec, traffic: Traffic, slower: float, sigma: float
) -> None:
    n = 100
    found = ends(n, limits, traffic, Engine(slower=slower, sigma=sigma), Engine(sigma=sigma))
    assert at_most(n - found["TooSlow"], n) < 0.05, found


@pytest.mark.parametrize("base", [0.0, 0.001])
@pytest.mark.parametrize("traffic", [BUSY, SLOW])
def test_an_engine_with_one_percent_of_errors_is_caught_in_at_least_ninety_five_rollouts_of_a_hundred(
    traffic: Traffic, base: float
) -> None:
    n = 100
    found = ends(n, DEFAULT, traffic, Engine(errors=base + 0.01), Engine(errors=base))
    assert at_most(n - found["ErrorRate"], n) < 0.05, found


def test_at_the_demos_few_requests_widely_scattered_times_prove_nothing_and_nothing_is_promoted_by_that() -> None:
    """150 requests do not tell 1.5 times slower at a spread of 0.6: it waits, and goes back at the deadline or as too
    slow."""
    n = 60
    found = ends(n, DEMO, SPARSE, Engine(slower=1.5, sigma=0.6), Engine(sigma=0.6))
    assert at_most(found["Promoted"], n) < 0.05, found
