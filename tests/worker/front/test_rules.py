"""The pure rules of the front: whose word counts, which window counts, which engine answers."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trtmodel_contract.control import DesiredModel, DesiredState, Fence, Routes
from trtmodel_contract.histogram import bucket_index
from trtmodel_contract.identity import Profile, ShapeRange
from trtmodel_contract.manifest import TensorSpec
from trtmodel_worker.front.fence import Conflict, Held, Ruling, judge_request, pointer_counts
from trtmodel_worker.front.models import InputRule, Invalid
from trtmodel_worker.front.stats import BOUNDS, Histogram
from trtmodel_worker.front.windows import KEPT_WINDOWS, Windows


def state(sequence: int, window: str = "w", uid: str = "u") -> DesiredState:
    return DesiredState(Fence(uid, sequence), {"m": DesiredModel((), Routes("d"), window)})


SAID = state(7).content_hash()


@pytest.mark.parametrize(
    ("held", "asked", "ruling"),
    [
        (None, state(1), Ruling.APPLY),
        (None, state(1, uid="v"), None),
        (Held(Fence("u", 7), SAID), state(8), Ruling.APPLY),
        (Held(Fence("u", 7), SAID), state(7), Ruling.RENEW),
        (Held(Fence("u", 7), SAID), state(7, "other"), None),
        (Held(Fence("u", 7), SAID), state(6), None),
        (Held(Fence("u", 7)), state(7, "other"), Ruling.APPLY),
        (Held(Fence("u", 7)), state(6), None),
        (Held(Fence("u", 7)), state(9, uid="v"), None),
    ],
)
def test_a_request_is_applied_renewed_or_refused(held: Held | None, asked: DesiredState, ruling: Ruling | None) -> None:
    if ruling is None:
        with pytest.raises(Conflict):
            judge_request(held, "u", asked)
    else:
        assert judge_request(held, "u", asked) is ruling


def test_a_pointer_counts_if_it_is_newer_whatever_brought_the_held_word() -> None:
    assert pointer_counts(None, 0)
    for held in (Held(Fence("u", 7)), Held(Fence("u", 7), SAID)):
        assert [pointer_counts(held, s) for s in (6, 7, 8)] == [False, False, True]


def test_the_window_to_compare_with_is_kept_however_many_follow_it() -> None:
    windows = Windows()
    windows.roll("before")
    windows.counters("a").count_ok("1", 0.001)
    for i in range(10):
        windows.roll(f"w{i}", "before")
    assert set(windows.snapshot()) == {"before", "w6", "w7", "w8", "w9"}
    assert windows.snapshot()["before"]["a"].ok == 1
    windows.roll("w10")
    assert set(windows.snapshot()) == {"w7", "w8", "w9", "w10"}, "after the rollout it is a window like others"


def test_windows_count_apart_and_the_newest_are_kept() -> None:
    windows = Windows()
    for i in range(KEPT_WINDOWS + 2):
        windows.roll(f"w{i}")
        windows.counters("a").count_ok("1", 0.001)
    windows.roll("w3")
    windows.counters("a").count_failed("HostDeath")
    windows.counters("a").count_failed("HostDeath")
    assert set(windows.snapshot()) == {"w2", "w3", "w4", "w5"}
    counts = windows.snapshot()["w3"]["a"]
    assert (counts.ok, dict(counts.failed)) == (1, {"HostDeath": 2})
    assert counts.compute == {"1": {bucket_index(0.001): 1}}


def test_what_was_snapshot_does_not_change_afterwards() -> None:
    windows = Windows()
    windows.counters("a").count_ok("1", 1.0)
    before = windows.snapshot()
    windows.counters("a").count_ok("1", 1.0)
    assert before[""]["a"].compute["1"] == {bucket_index(1.0): 1}


def test_G10_a_model_that_doubles_its_time_lands_in_another_bucket_fast_or_slow() -> None:
    for seconds in (0.002, 0.2, 20.0):
        once, twice = Histogram(), Histogram()
        once.observe(seconds)
        twice.observe(2 * seconds)
        assert once.counts != twice.counts
        assert once.counts[-1] == twice.counts[-1] == 0
    assert once.cumulative()[-1] == ("+Inf", 1.0)
    assert len(once.cumulative()) == len(BOUNDS) + 1


RULE = InputRule(0, TensorSpec("x", "INT32", (-1, 3)), (Profile({"x": ShapeRange((1, 3), (2, 3), (4, 3))}),))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)


@given(json_values, json_values)
def test_no_json_value_makes_admission_fail_in_another_way(shape: object, data: object) -> None:
    for attempt in (lambda: RULE.check("INT32", shape), lambda: RULE.from_json((2, 3), data)):
        with contextlib.suppress(Invalid):
            attempt()


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=6, max_size=6))
def test_numbers_that_fit_arrive_as_they_are(values: list[int]) -> None:
    assert np.frombuffer(RULE.from_json((2, 3), values), np.int32).tolist() == values
    nested = [values[:3], values[3:]]
    assert np.frombuffer(RULE.from_json((2, 3), nested), np.int32).tolist() == values
