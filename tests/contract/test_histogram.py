"""Latency histograms: 5 % is seen from a microsecond to a quarter of an hour."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trtmodel_contract.histogram import LAST_INDEX, bucket_index, count, count_above, merge, quantile, upper_bound

SECONDS = st.floats(1e-6, 900)
HISTOGRAMS = st.dictionaries(st.integers(0, LAST_INDEX - 1), st.integers(1, 1_000), min_size=1)


@given(SECONDS)
def test_a_bucket_is_at_most_five_per_cent_wide(seconds: float) -> None:
    upper = upper_bound(bucket_index(seconds))
    assert seconds <= upper * (1 + 1e-9)
    assert upper <= seconds * 1.05 * (1 + 1e-9)


def test_neighbouring_buckets_are_at_most_five_per_cent_apart_over_the_whole_range() -> None:
    bounds = [upper_bound(index) for index in range(LAST_INDEX + 1)]
    assert bounds[0] == 1e-6
    assert bounds[-1] > 900
    assert all(above <= below * 1.05 * (1 + 1e-9) for below, above in itertools.pairwise(bounds))


@given(SECONDS, SECONDS)
def test_longer_never_lands_in_a_lower_bucket(one: float, other: float) -> None:
    assert (bucket_index(min(one, other))) <= bucket_index(max(one, other))


@given(st.integers(0, LAST_INDEX))
def test_an_upper_bound_belongs_to_its_own_bucket(index: int) -> None:
    assert bucket_index(upper_bound(index)) == index


@given(SECONDS)
def test_eleven_per_cent_more_is_another_bucket(seconds: float) -> None:
    assert bucket_index(seconds * 1.11) > bucket_index(seconds)


@pytest.mark.parametrize(
    ("seconds", "index"),
    [(0.0, 0), (-1.0, 0), (-math.inf, 0), (2e3, LAST_INDEX), (math.inf, LAST_INDEX), (math.nan, LAST_INDEX)],
)
def test_every_number_has_a_bucket(seconds: float, index: int) -> None:
    assert bucket_index(seconds) == index


@pytest.mark.parametrize(("before", "after"), [(0.002, 0.004), (20.0, 40.0), (0.002, 0.0025)])
def test_a_slower_model_shows_whatever_its_speed(before: float, after: float) -> None:
    old, new = (quantile({bucket_index(seconds): 500}, 0.99) for seconds in (before, after))
    assert old
    assert new
    assert new / old == pytest.approx(after / before, rel=0.05)


def test_a_quantile_in_the_last_bucket_is_unknown_and_not_its_bound() -> None:
    assert quantile({3: 98, LAST_INDEX: 2}, 0.99) is None
    assert quantile({3: 99, LAST_INDEX: 1}, 0.99) == upper_bound(3)


def test_no_samples_have_no_quantile() -> None:
    assert quantile({}, 0.5) is None
    assert quantile({4: 0}, 0.5) is None


@given(st.lists(SECONDS, min_size=1, max_size=60), st.sampled_from([0.0, 0.07, 0.5, 0.95, 0.99, 1.0]))
def test_a_quantile_is_the_bucket_of_the_sample_at_its_rank(samples: list[float], q: float) -> None:
    histogram = merge({bucket_index(s): 1} for s in samples)
    rank = max(1, math.ceil(round(q * len(samples), 6)))
    assert quantile(histogram, q) == upper_bound(bucket_index(sorted(samples)[rank - 1]))


@given(st.lists(HISTOGRAMS, max_size=4))
def test_merging_loses_no_sample(histograms: list[dict[int, int]]) -> None:
    assert count(merge(histograms)) == sum(count(h) for h in histograms)
    assert merge(histograms) == merge(reversed(histograms))


@given(HISTOGRAMS, SECONDS)
def test_what_is_above_and_what_is_not_make_the_whole(histogram: dict[int, int], seconds: float) -> None:
    index = bucket_index(seconds)
    assert count_above(histogram, seconds) + sum(n for i, n in histogram.items() if i <= index) == count(histogram)
