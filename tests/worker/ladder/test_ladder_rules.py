"""The ladder's decisions and the counters that bound them, as tables and for whatever comes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trtmodel_contract.histogram import GROWTH
from trtmodel_worker.front.ladder import Next, Overdue, Refused, RetryBudget, after_failure
from trtmodel_worker.host.wire import FailureClass

patient = settings(max_examples=60, deadline=None, derandomize=True)
ALONE, TOGETHER, FAIL = (Next.ALONE, True), (Next.TOGETHER, True), (Next.FAIL, False)
SPLIT = (Next.ALONE, False)
C = FailureClass


@pytest.mark.parametrize(
    ("failure", "calls", "tries", "attempts", "then"),
    [
        (C.INVALID_INPUT, 1, 1, 3, FAIL),
        (C.INVALID_INPUT, 2, 1, 3, SPLIT),
        (C.INVALID_INPUT, 8, 3, 3, SPLIT),
        (C.OUTPUT_TOO_LARGE, 1, 1, 3, FAIL),
        (C.OUTPUT_TOO_LARGE, 2, 1, 3, SPLIT),
        (C.RECOVERABLE, 1, 1, 3, TOGETHER),
        (C.RECOVERABLE, 8, 1, 3, TOGETHER),
        (C.RECOVERABLE, 8, 2, 3, ALONE),
        (C.RECOVERABLE, 1, 2, 3, ALONE),
        (C.RECOVERABLE, 1, 3, 3, FAIL),
        (C.RECOVERABLE, 1, 1, 1, FAIL),
        (C.INTERNAL, 4, 1, 3, TOGETHER),
        (C.INTERNAL, 4, 2, 3, ALONE),
        (C.INTERNAL, 1, 3, 3, FAIL),
        (C.OUT_OF_MEMORY, 8, 1, 3, SPLIT),
        (C.OUT_OF_MEMORY, 8, 3, 3, SPLIT),
        (C.OUT_OF_MEMORY, 1, 1, 3, TOGETHER),
        (C.OUT_OF_MEMORY, 1, 3, 3, FAIL),
    ],
)
def test_what_follows_a_failure(failure: C, calls: int, tries: int, attempts: int, then: tuple[Next, bool]) -> None:
    assert after_failure(failure, calls, tries, attempts) == then


@patient
@given(st.sampled_from(list(C)), st.integers(1, 64), st.integers(1, 10), st.integers(1, 10))
def test_nothing_is_tried_without_end_and_what_is_free_makes_batches_smaller(
    failure: C, calls: int, tries: int, attempts: int
) -> None:
    step, costs = after_failure(failure, calls, tries, attempts)
    assert not costs or tries < attempts
    assert costs or step is Next.FAIL or (step is Next.ALONE and calls > 1)


@patient
@given(st.floats(0.0, 100.0), st.lists(st.integers(0, 64), max_size=300))
def test_retries_are_a_share_of_the_requests_and_what_was_saved(percent: float, batches: list[int]) -> None:
    """`batches`: a request comes, then so many retries are asked for."""
    budget, taken = RetryBudget(percent), 0
    for wanted in batches:
        budget.earn()
        if wanted and budget.take(wanted):
            taken += wanted
    assert taken <= (100 + 64 + len(batches) * percent / 100 if percent else 0)


def test_a_batch_that_is_larger_than_what_was_saved_is_tried_again_and_the_rest_is_owed() -> None:
    budget = RetryBudget(10)
    assert budget.take(500)
    assert not budget.take(1)
    for _ in range(4000):
        budget.earn()
    assert not budget.take(1)
    for _ in range(11):
        budget.earn()
    assert budget.take(1)
    assert not budget.take(1)


def test_what_is_saved_up_has_an_end() -> None:
    budget = RetryBudget(100)
    for _ in range(100_000):
        budget.earn()
    assert sum(budget.take(1) for _ in range(1000)) == 100


def test_a_refused_request_is_allowed_again_after_ten_minutes() -> None:
    refused = Refused()
    assert not refused
    refused.add(b"a", 1000.0)
    refused.add(b"b", 1300.0)
    assert refused
    assert [refused.holds(d, 1599.0) for d in (b"a", b"b", b"c")] == [True, True, False]
    assert [refused.holds(d, 1601.0) for d in (b"a", b"b")] == [False, True]
    refused.add(b"b", 1700.0)
    assert refused.holds(b"b", 2299.0)
    assert not refused.holds(b"b", 2301.0)
    assert not refused


def test_so_many_are_refused_at_most_and_the_oldest_is_forgotten_first() -> None:
    refused = Refused()
    for number in range(1500):
        refused.add(str(number).encode(), 1000.0 + number / 1000)
    assert [refused.holds(str(n).encode(), 1002.0) for n in (0, 499, 500, 1499)] == [False, False, True, True]


def test_a_limit_that_was_asked_for_is_the_limit() -> None:
    overdue = Overdue(0.25)
    overdue.expect(9.0)
    for _ in range(100):
        overdue.observe("4", 3.0)
    assert overdue.after("4") == overdue.after("8") == 0.25


@pytest.mark.parametrize(("slowest", "after"), [(0.0, 0.010), (0.001, 0.010), (0.1, 0.5)])
def test_before_anything_ran_the_warm_up_says_what_is_overdue(slowest: float, after: float) -> None:
    overdue = Overdue(0.0)
    overdue.expect(slowest)
    assert overdue.after("1") == pytest.approx(after)


@patient
@given(st.floats(1e-5, 10.0), st.integers(50, 5000))
def test_five_times_the_99th_percentile_is_overdue_and_never_less_than_ten_milliseconds(
    seconds: float, count: int
) -> None:
    overdue = Overdue(0.0)
    overdue.expect(7.0)
    for _ in range(count):
        overdue.observe("4", seconds)
    assert max(0.010, 5 * seconds / GROWTH) <= overdue.after("4") <= max(0.010, 5 * seconds * GROWTH)
    assert overdue.after("8") == 35.0  # of other buckets nothing is known


def test_what_was_long_ago_is_forgotten() -> None:
    overdue = Overdue(0.0)
    for seconds in (1.0, 0.1):
        for _ in range(20_000):
            overdue.observe("1", seconds)
    assert overdue.after("1") < 0.6
