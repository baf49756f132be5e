from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trtmodel_contract.control import AttemptCounts
from trtmodel_contract.gate import Verdict
from trtmodel_contract.histogram import LAST_INDEX, bucket_index
from trtmodel_operator.analysis import (
    Look,
    difference_bounds,
    exceedance,
    least_proved,
    least_requests,
    look,
    total,
)
from trtmodel_operator.model import AnalysisSpec, NoData

DEMO = AnalysisSpec(interval=5.0, min_requests=150, max_error_rate_increase=0.02, max_latency_ratio=1.2)
DEFAULT = AnalysisSpec(interval=10.0, min_requests=3000, max_error_rate_increase=0.001, max_latency_ratio=1.2)
AGAINST = "the stable workers in the same time"


def counts(
    requests: int, failed: int = 0, seconds: float = 0.008, kind: str = "Error", abandoned: int = 0, bucket: str = "1"
) -> AttemptCounts:
    """Compute times within 5 % of `seconds`."""
    histogram: dict[int, int] = {}
    for i in range(requests - failed - abandoned):
        index = bucket_index(seconds * (0.95 + 0.01 * (i % 11)))
        histogram[index] = histogram.get(index, 0) + 1
    return AttemptCounts(
        ok=requests - failed - abandoned,
        failed={kind: failed} if failed else {},
        abandoned=abandoned,
        compute={bucket: histogram},
    )


def judged(candidate: AttemptCounts, baseline: AttemptCounts, limits: AnalysisSpec = DEMO) -> Look:
    return look(candidate, baseline, limits, AGAINST)


# ---------------------------------------------------------------------------------------------------------------
# errors
# ---------------------------------------------------------------------------------------------------------------


def test_without_an_error_the_default_limit_of_a_thousandth_is_proved_by_three_thousand_requests() -> None:
    assert judged(counts(3000), counts(6000), DEFAULT).errors is Verdict.PASS
    assert difference_bounds(0, 2702, 0, 6000)[1] > 0.001
    assert difference_bounds(0, 2703, 0, 6000)[1] < 0.001


@pytest.mark.parametrize("limit", [1.0, 0.5, 0.1, 0.027, 0.02, 0.001, 0.0001])
def test_the_least_number_of_requests_for_a_limit_passes_and_one_less_does_not(limit: float) -> None:
    needed = least_requests(limit)
    asked = replace(DEFAULT, min_requests=1, max_error_rate_increase=limit)
    assert judged(counts(needed), counts(needed), asked).errors is Verdict.PASS
    assert least_proved(needed) < limit
    if needed > 1:
        assert judged(counts(needed - 1), counts(needed), asked).errors is Verdict.INCONCLUSIVE


def test_the_demos_limit_of_two_percent_is_proved_by_a_hundred_and_fifty() -> None:
    assert judged(counts(150), counts(300)).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("failed", "verdict"), [(0, Verdict.PASS), (4, Verdict.INCONCLUSIVE), (40, Verdict.FAIL), (400, Verdict.FAIL)]
)
def test_more_errors_go_from_pass_by_inconclusive_to_fail(failed: int, verdict: Verdict) -> None:
    assert judged(counts(3000, failed), counts(6000), DEFAULT).errors is verdict


def test_errors_that_stable_has_too_are_not_the_candidates() -> None:
    assert judged(counts(3000, 90), counts(6000, 180), DEFAULT).errors is not Verdict.FAIL


def test_abandoned_attempts_are_failures() -> None:
    assert judged(counts(400, abandoned=60), counts(800)).errors is Verdict.FAIL


def test_below_the_least_number_of_requests_a_few_errors_decide_nothing() -> None:
    for candidate in (counts(1, 1), counts(20, 1), counts(149, 3), counts(9, 9)):
        found = judged(candidate, counts(300))
        assert found.errors is Verdict.INCONCLUSIVE
        assert "150 requests are the least for a verdict" in found.error_sentence


def test_a_candidate_that_fails_whatever_it_is_given_does_not_go_on_to_three_thousand() -> None:
    found = judged(counts(40, 40), counts(80), DEFAULT)
    assert found.errors is Verdict.FAIL
    assert "needs no more requests" in found.error_sentence
    assert judged(counts(12, 10), counts(120), DEFAULT).errors is Verdict.FAIL
    assert judged(counts(12, 9), counts(120), DEFAULT).errors is Verdict.INCONCLUSIVE


def test_no_request_is_no_data_and_neither_pass_nor_fail() -> None:
    found = judged(AttemptCounts(), counts(6000))
    assert (found.verdict, found.errors, found.latency) == (Verdict.NO_DATA,) * 3
    assert "NoTraffic" in found.sentence


def test_nothing_to_compare_with_is_inconclusive() -> None:
    found = judged(counts(3000), AttemptCounts(), DEFAULT)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "nothing to compare" in found.sentence


def test_nothing_to_compare_with_passes_only_where_no_data_may_be_promoted() -> None:
    promote = replace(DEFAULT, no_data=NoData.PROMOTE)
    assert judged(counts(3000), AttemptCounts(), promote).verdict is Verdict.PASS
    assert judged(counts(3000, 1), AttemptCounts(), promote).verdict is Verdict.INCONCLUSIVE
    assert judged(counts(3000), AttemptCounts(), replace(DEFAULT, no_data=NoData.SYNTHETIC)).too_few


def test_the_sentence_has_the_figures_the_limit_and_what_it_is_compared_with() -> None:
    found = judged(counts(3000, 40), counts(6000, 6), DEFAULT)
    assert "40 of 3,000 requests failed on the candidate, 6 of 6,000 on the baseline" in found.error_sentence
    assert "limit +0.10%" in found.error_sentence
    assert found.error_sentence.endswith("compared with the stable workers in the same time")
    assert found.short.startswith("3,000 req, err +1.23%")


@given(st.integers(1, 400), st.integers(1, 400), st.data())
def test_the_bounds_hold_the_difference_between_them_and_turn_with_the_sides(
    n1: int, n2: int, data: st.DataObject
) -> None:
    x1, x2 = data.draw(st.integers(0, n1)), data.draw(st.integers(0, n2))
    low, high = difference_bounds(x1, n1, x2, n2)
    assert -1.0 <= low <= x1 / n1 - x2 / n2 <= high <= 1.0
    back = difference_bounds(x2, n2, x1, n1)
    assert (low, high) == (pytest.approx(-back[1]), pytest.approx(-back[0]))
    wide = difference_bounds(x1, n1, x2, n2, 3.0)
    assert wide[0] <= low
    assert high <= wide[1]


def test_the_bounds_are_newcombes() -> None:
    """Example of method 10 in the paper: 56/70 and 48/80, 95 % two-sided: 0.0524 to 0.3339."""
    low, high = difference_bounds(56, 70, 48, 80, 1.959964)
    assert (low, high) == (pytest.approx(0.0524, abs=5e-5), pytest.approx(0.3339, abs=5e-5))


# ---------------------------------------------------------------------------------------------------------------
# latency
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requests", "ratio", "verdict", "quantile"),
    [
        (200, 1.0, Verdict.PASS, "p95"),
        (200, 1.1, Verdict.PASS, "p95"),
        (200, 1.5, Verdict.FAIL, "p95"),
        (200, 4.0, Verdict.FAIL, "p95"),
        (200, 0.4, Verdict.PASS, "p95"),
        (3000, 1.0, Verdict.PASS, "p99"),
        (3000, 1.1, Verdict.PASS, "p99"),
        (3000, 1.5, Verdict.FAIL, "p99"),
    ],
)
def test_a_slower_candidate_fails_and_an_equal_one_passes(
    requests: int, ratio: float, verdict: Verdict, quantile: str
) -> None:
    found = judged(counts(requests, seconds=0.008 * ratio), counts(2 * requests))
    assert found.latency is verdict
    assert quantile in found.short
    assert f"the {quantile} compute time" in found.latency_sentence


@pytest.mark.parametrize(("before", "after"), [(0.002, 0.004), (20.0, 40.0), (0.00002, 0.00004)])
def test_G10_a_model_of_any_speed_that_doubles_is_caught(before: float, after: float) -> None:
    assert judged(counts(300, seconds=after), counts(600, seconds=before)).latency is Verdict.FAIL


def test_G10_a_quantile_beyond_the_last_bucket_is_inconclusive_and_not_equal() -> None:
    beyond = AttemptCounts(ok=300, compute={"1": {LAST_INDEX: 300}})
    found = judged(beyond, beyond)
    assert found.latency is Verdict.INCONCLUSIVE
    assert "last bucket" in found.latency_sentence


def test_a_candidate_beyond_the_last_bucket_is_too_slow_all_the_same() -> None:
    beyond = AttemptCounts(ok=300, compute={"1": {LAST_INDEX: 300}})
    assert judged(beyond, counts(600)).latency is Verdict.FAIL


def test_a_batch_is_compared_with_batches_of_its_size() -> None:
    small, large = counts(300, seconds=0.008), counts(300, seconds=0.08, bucket="32")
    mostly_large = total([counts(60, seconds=0.008), counts(300, seconds=0.08, bucket="32")])
    assert judged(mostly_large, total([small, large])).latency is Verdict.PASS
    slow_batches = total([counts(60, seconds=0.008), counts(300, seconds=0.16, bucket="32")])
    found = judged(slow_batches, total([small, large]))
    assert found.latency is Verdict.FAIL
    assert "in the bucket of 32" in found.latency_sentence


def test_too_few_compute_times_or_sizes_that_stable_never_saw_are_inconclusive() -> None:
    assert judged(counts(29), counts(600)).latency is Verdict.INCONCLUSIVE
    assert judged(counts(300, bucket="8"), counts(600)).latency is Verdict.INCONCLUSIVE
    assert judged(total([counts(100), counts(200, bucket="8")]), counts(600)).latency is Verdict.INCONCLUSIVE


def test_below_the_least_number_of_requests_no_latency_is_judged() -> None:
    assert judged(counts(149, seconds=0.08), counts(600)).latency is Verdict.INCONCLUSIVE


def test_the_verdict_is_the_worst_of_both() -> None:
    assert judged(counts(300, seconds=0.03), counts(600)).verdict is Verdict.FAIL
    assert judged(counts(300, 100), counts(600)).verdict is Verdict.FAIL
    assert judged(counts(300, 4), counts(600)).verdict is Verdict.INCONCLUSIVE
    assert judged(counts(300), counts(600)).verdict is Verdict.PASS


def test_attempts_of_several_workers_are_added_up() -> None:
    added = total([counts(100, 3), counts(50, 2, kind="Timeout"), AttemptCounts()])
    assert (added.ok, dict(added.failed)) == (145, {"Error": 3, "Timeout": 2})
    assert sum(added.compute["1"].values()) == 145


@given(st.integers(1, 60), st.integers(1, 60), st.data())
def test_the_exceedance_test_is_the_exact_distribution(n: int, m: int, data: st.DataObject) -> None:
    """Against counting all orders in which both samples can lie."""
    above = data.draw(st.integers(0, m - 1))
    k = data.draw(st.integers(0, n))
    below = m - above

    def probability(i: int) -> float:
        return math.comb(i + above, i) * math.comb(n - i + below - 1, n - i) / math.comb(m + n, n)

    expected = sum(probability(i) for i in range(k, n + 1))
    assert sum(probability(i) for i in range(n + 1)) == pytest.approx(1.0)
    found = exceedance(n, k, m, above)
    assert found == pytest.approx(expected, rel=1e-6) or (found == 1.0 and k <= n * (above + 1) / (m + 1))


def test_the_exceedance_test_is_quick_for_any_counts() -> None:
    assert exceedance(10**7, 600_000, 10**7, 500_000) == pytest.approx(0.0, abs=1e-12)
    assert exceedance(10**6, 50_100, 10**6, 50_000) > 0.2


# ---------------------------------------------------------------------------------------------------------------
# whole rollouts
# ---------------------------------------------------------------------------------------------------------------


def rollout(rng: random.Random, limits: AnalysisSpec, ratio: float, sigma: float, looks: int, rate: int) -> str:
    """How the looks of one step end, with two failing ones for the latency. Compute times are log-normal."""
    histograms: tuple[dict[int, int], dict[int, int]] = ({}, {})
    fails, found = 0, ""
    for i in range(1, looks + 1):
        for histogram, n, factor in ((histograms[0], rate, ratio), (histograms[1], 2 * rate, 1.0)):
            for _ in range(n):
                index = bucket_index(0.008 * factor * math.exp(rng.gauss(0.0, sigma)))
                histogram[index] = histogram.get(index, 0) + 1
        candidate, baseline = (_counted(h, n) for h, n in zip(histograms, (i * rate, 2 * i * rate), strict=True))
        one = look(candidate, baseline, limits, AGAINST)
        fails = fails + 1 if one.latency is Verdict.FAIL else 0
        if fails >= 2:
            return "Fail"
        found = one.verdict.value
    return found


def _counted(histogram: Mapping[int, int], n: int) -> AttemptCounts:
    return AttemptCounts(ok=n, compute={"1": dict(histogram)})


@pytest.mark.parametrize("sigma", [0.05, 0.2, 0.5])
def test_an_equal_candidate_fails_in_at_most_one_rollout_of_a_hundred(sigma: float) -> None:
    """Simulation at the demo's rates: 65 and 130 requests between two looks, 20 looks. 1,000 rollouts gave none."""
    rng = random.Random(7)
    ends = [rollout(rng, DEMO, 1.0, sigma, looks=20, rate=65) for _ in range(100)]
    assert ends.count("Fail") == 0
    assert ends.count("Pass") >= 97


@pytest.mark.parametrize(("ratio", "sigma"), [(1.5, 0.05), (1.5, 0.2), (2.0, 0.4), (4.0, 0.6)])
def test_a_slow_candidate_is_caught_at_the_demos_sizes(ratio: float, sigma: float) -> None:
    """Four looks, 260 requests. 1,000 rollouts: 100 % each."""
    rng = random.Random(8)
    ends = [rollout(rng, DEMO, ratio, sigma, looks=4, rate=65) for _ in range(100)]
    assert ends.count("Fail") >= 98


def test_a_candidate_half_as_slow_again_is_never_passed_even_where_times_scatter_widely() -> None:
    rng = random.Random(9)
    ends = [rollout(rng, DEMO, 1.5, 0.4, looks=4, rate=65) for _ in range(60)]
    assert ends.count("Pass") == 0


@pytest.mark.parametrize(("ratio", "end"), [(1.0, "Pass"), (1.5, "Fail")])
def test_three_thousand_requests_tell_a_slow_candidate_from_an_equal_one(ratio: float, end: str) -> None:
    rng = random.Random(10)
    ends = [rollout(rng, DEFAULT, ratio, 0.5, looks=12, rate=300) for _ in range(10)]
    assert ends == [end] * 10


def test_with_many_looks_errors_that_both_have_fail_in_at_most_one_rollout_of_a_hundred() -> None:
    """24 looks at 300 and 600 requests with 1 % of errors on both sides. 3,000 rollouts gave 0.2 % (4.4 % if each look
    took 95 % for proof)."""
    rng, failed = random.Random(11), 0
    for _ in range(150):
        x1 = x2 = 0
        for i in range(1, 25):
            x1 += _binomial(rng, 300, 0.01)
            x2 += _binomial(rng, 600, 0.01)
            found = look(
                AttemptCounts(300 * i - x1, {"E": x1}), AttemptCounts(600 * i - x2, {"E": x2}), DEFAULT, AGAINST
            )
            if found.errors is Verdict.FAIL:
                failed += 1
                break
    assert failed <= 1


def _binomial(rng: random.Random, n: int, p: float) -> int:
    return sum(rng.random() < p for _ in range(n))
