"""Who waits for a lane, and what runs together: nobody is lost, nobody comes twice, nobody starves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from trtmodel_worker.front.batching import SMALLER_SECONDS, Buckets, Waiting
from trtmodel_worker.front.calls import Call

patient = settings(max_examples=60, deadline=None, derandomize=True)
MOST = 8


def call(rows: int = 1, shape: int | None = 4, deadline: float = 100.0) -> Call:
    made = Call([(rows, shape or 0)], [memoryview(b"")], deadline, lambda *_: None, lambda *_: None)
    made.rows = rows
    made.key = None if shape is None else ((shape,),)
    return made


class Queue(RuleBasedStateMachine):
    """Against a list of those who wait, in the order in which they came."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = Waiting()
        self.there: list[Call] = []
        self.taken: list[Call] = []
        self.now = 0.0

    @rule(rows=st.sampled_from([1, 1, 2, 3, 9]), shape=st.sampled_from([3, 3, 4, None]), seconds=st.integers(1, 20))
    def push(self, rows: int, shape: int | None, seconds: int) -> None:
        made = call(rows, shape, self.now + seconds)
        self.waiting.push(made)
        self.there.append(made)

    @rule(most=st.integers(0, MOST), full=st.booleans())
    def take(self, most: int, full: bool) -> None:
        if full and self.waiting.full_first(most):
            oldest = self.waiting.oldest()
            assert oldest is not None
            assert sum(c.rows for c in self.there if _group(c) == _group(oldest)) >= most
        expected, rows = self.waiting.oldest(), self.waiting.rows(most)
        found = self.waiting.take(most)
        assert bool(found) == bool(self.there)
        if not found:
            return
        assert found[0] is expected
        assert rows >= min(most, sum(c.rows for c in found))
        assert len({c.key for c in found}) == 1
        assert len(found) == 1 or (sum(c.rows for c in found) <= most and not any(c.alone for c in found))
        assert len(found) == 1 or found[0].key is not None
        same = [c for c in self.there if _group(c) == _group(found[0])]
        assert found == same[: len(found)]  # in the order in which they came
        rest = same[len(found) :]
        full = rest and found[0].key is not None and not found[0].alone and rows + 0 <= most
        if full:
            assert sum(c.rows for c in found) + rest[0].rows > most or most < found[0].rows
        for each in found:
            self.there.remove(each)
            assert each.queue is None
            assert each not in self.taken or each.tries
        self.taken = found

    @precondition(lambda self: self.taken)
    @rule(alone=st.booleans())
    def come_back(self, alone: bool) -> None:
        for each in self.taken:
            each.alone = each.alone or alone
            each.tries += 1
        group = [c for c in self.there if _group(c) == _group(self.taken[0])]
        at = self.there.index(group[0]) if group else len(self.there)
        self.there[at:at] = self.taken
        self.waiting.push_front(self.taken)
        assert self.waiting.oldest() is self.taken[0]
        self.taken = []

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(self.there))
        gone.cancel()
        gone.cancel()
        self.there.remove(gone)

    @rule(seconds=st.integers(0, 10))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        late = self.waiting.expired(self.now)
        assert sorted(map(id, late)) == sorted(id(c) for c in self.there if c.deadline <= self.now)
        assert all(c.queue is None for c in late)
        self.there = [c for c in self.there if c.deadline > self.now]

    @rule()
    def drain(self) -> None:
        assert sorted(map(id, self.waiting.drain())) == sorted(map(id, self.there))
        assert all(c.queue is None for c in self.there)
        self.there = []

    @invariant()
    def counted(self) -> None:
        assert len(self.waiting) == len(self.there)
        assert (self.waiting.oldest() is None) == (not self.there)


def _group(call: Call) -> object:
    return () if call.alone or call.key is None else call.key


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)


def test_no_shape_starves_while_another_one_never_ends() -> None:
    waiting = Waiting()
    rare = call(1, 3)
    for _ in range(50):
        waiting.push(call(1, 4))
    waiting.push(rare)
    taken = []
    for _ in range(3):
        for _ in range(20):
            waiting.push(call(1, 4))
        taken += waiting.take(MOST)
    assert rare in taken


def test_who_comes_back_is_next_and_in_the_same_order() -> None:
    waiting = Waiting()
    first, others = [call() for _ in range(4)], [call(shape=5), call()]
    for each in (*first, *others):
        waiting.push(each)
    assert waiting.take(4) == first
    waiting.push_front(first)
    assert waiting.take(2) == first[:2]
    assert waiting.take(8) == others[:1]  # the turn is of another shape
    assert waiting.take(8) == [*first[2:], others[1]]


def test_many_cancelled_calls_take_no_memory() -> None:
    waiting = Waiting()
    for _ in range(10_000):
        gone = call()
        waiting.push(gone)
        gone.cancel()
    assert len(waiting) == 0
    assert sum(len(group) for group in waiting._groups.values()) < 200


@pytest.mark.parametrize(
    ("asked", "largest", "sizes", "padded", "rows", "names"),
    [
        ((), 8, [1, 2, 4, 8], [1, 3, 5, 8, 9], [1, 3, 5, 8, 9], ["1", "4", "8", "8", "9"]),
        ((), 1, [1], [1], [1], ["1"]),
        ((), 12, [1, 2, 4, 8], [9, 12], [9, 12], ["9", "12"]),
        ((4, 8), 8, [4, 8], [1, 4, 5, 8], [4, 4, 8, 8], ["4", "4", "8", "8"]),
        ((4, 8), 6, [4], [1, 4, 5, 6], [4, 4, 5, 6], ["4", "4", "5", "6"]),
        ((16,), 8, [1, 2, 4, 8], [3], [3], ["4"]),  # none of them fits: as if none was asked for
    ],
)
def test_batch_sizes(
    asked: Sequence[int], largest: int, sizes: list[int], padded: list[int], rows: list[int], names: list[str]
) -> None:
    buckets = Buckets(asked, largest)
    assert buckets.sizes == sizes
    assert buckets.most == sizes[-1]
    assert [buckets.pad(n) for n in padded] == rows
    assert [buckets.name(n) for n in rows] == names


@patient
@given(st.sets(st.integers(1, 64)), st.integers(1, 64), st.integers(1, 64))
def test_a_batch_is_padded_to_the_next_size_that_fits_and_never_beyond_the_profiles(
    asked: set[int], largest: int, rows: int
) -> None:
    buckets = Buckets(sorted(asked), largest)
    found = buckets.pad(min(rows, largest))
    assert min(rows, largest) <= found <= largest
    assert found == min(rows, largest) or found in asked


@pytest.mark.parametrize(
    ("asked", "seconds", "most"),
    [
        ((), {"1": 0.002, "2": 0.002, "4": 0.002, "8": 0.002}, 8),  # a batch costs what a row costs
        ((), {"1": 0.010, "2": 0.020, "4": 0.040, "8": 0.080}, 1),  # rows one by one
        ((), {"1": 0.010, "2": 0.011, "4": 0.020, "8": 0.040}, 2),  # worth it up to two
        ((), {"1": 0.00001, "2": 0.00002, "4": 0.00004, "8": 0.00008}, 8),  # what a batch costs in front and host
        ((), {"1": 0.010}, 8),  # nothing to compare with
        ((), {}, 8),
        ((2, 8), {"2": 0.010, "8": 0.040}, 8),  # who asks for sizes gets them
    ],
)
def test_batches_are_as_large_as_was_measured_to_be_worth_it(
    asked: Sequence[int], seconds: Mapping[str, float], most: int
) -> None:
    buckets = Buckets(asked, 8)
    buckets.measured(seconds)
    assert buckets.most == most


def test_after_a_batch_without_memory_they_are_smaller_for_a_minute() -> None:
    buckets = Buckets((), 8)
    for rows, most in ((8, 4), (4, 2), (3, 1), (2, 1), (2, 1)):
        buckets.shrink(rows, 1000.0)
        assert buckets.most == most
    buckets.measured({"1": 0.1, "8": 0.1})  # a host was started meanwhile
    buckets.grow(1000.0 + SMALLER_SECONDS - 1)
    assert buckets.most == 1
    buckets.grow(1000.0 + SMALLER_SECONDS)
    assert buckets.most == 8


def test_sizes_that_were_asked_for_shrink_to_another_one_of_them() -> None:
    buckets = Buckets((2, 4, 8), 8)
    buckets.shrink(8, 0.0)
    assert buckets.most == 4
    buckets.shrink(3, 0.0)
    assert buckets.most == 1
