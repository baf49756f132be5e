from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from trtmodel_operator.ports import Key
from trtmodel_operator.queue import AGAIN, ASKED, BACKOFF_MOST, WorkQueue

A: Key = ("ml", "a")
B: Key = ("ml", "b")


class Time:
    """A clock that only moves when it is told to, with the event loop's call_later."""

    def __init__(self) -> None:
        self.now = 100.0
        self._timers: list[tuple[float, Callable[[], None], list[bool]]] = []

    def call_later(self, seconds: float, call: Callable[[], None]) -> Time.Handle:
        alive = [True]
        self._timers.append((self.now + seconds, call, alive))
        return Time.Handle(alive)

    def pass_(self, seconds: float) -> None:
        self.now += seconds
        due = [t for t in self._timers if t[0] <= self.now]
        self._timers = [t for t in self._timers if t[0] > self.now]
        for _, call, alive in due:
            if alive[0]:
                call()

    class Handle:
        def __init__(self, alive: list[bool]) -> None:
            self._alive = alive

        def cancel(self) -> None:
            self._alive[0] = False


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def queue(time: Time) -> WorkQueue:
    return WorkQueue(now=lambda: time.now, call_later=time.call_later, jitter=lambda: 1.0)


def take(queue: WorkQueue) -> Key:
    return asyncio.run(asyncio.wait_for(queue.get(), 1))


def test_a_key_that_is_added_often_is_given_out_once(queue: WorkQueue) -> None:
    for _ in range(3):
        queue.add(A)
    queue.add(B)
    assert [take(queue), take(queue)] == [A, B]
    assert queue.depth() == 0


def test_a_key_that_is_added_while_it_is_worked_on_runs_again_afterwards_and_not_before(queue: WorkQueue) -> None:
    queue.add(A)
    assert take(queue) == A
    queue.add(A)
    queue.add(A)
    assert queue.depth() == 0
    queue.done(A)
    assert queue.depth() == 1
    assert take(queue) == A
    queue.done(A)
    assert queue.depth() == 0


def test_a_waiting_worker_is_woken_by_an_added_key(queue: WorkQueue) -> None:
    async def go() -> Key:
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.add(A)
        return await asyncio.wait_for(waiting, 1)

    assert asyncio.run(go()) == A


def test_no_two_workers_get_one_key_and_each_key_finds_a_worker(queue: WorkQueue) -> None:
    async def go() -> set[Key]:
        waiting = [asyncio.create_task(queue.get()) for _ in range(3)]
        await asyncio.sleep(0)
        queue.add(A)
        queue.add(B)
        done, pending = await asyncio.wait(waiting, timeout=0.2)
        for task in pending:
            task.cancel()
        assert len(pending) == 1
        return {task.result() for task in done}

    assert asyncio.run(go()) == {A, B}


def test_of_several_delays_the_earliest_counts(queue: WorkQueue, time: Time) -> None:
    queue.add_after(A, 60)
    queue.add_after(A, 5)
    queue.add_after(A, 30)
    time.pass_(4.9)
    assert queue.depth() == 0
    time.pass_(0.1)
    assert take(queue) == A
    queue.done(A)
    time.pass_(100)
    assert queue.depth() == 0


def test_a_pass_that_begins_drops_the_timer_of_the_pass_before(queue: WorkQueue, time: Time) -> None:
    queue.add_after(A, 10)
    queue.add(A)
    assert take(queue) == A
    queue.done(A)
    time.pass_(11)
    assert queue.depth() == 0


def test_failures_are_tried_again_after_ever_longer_delays_up_to_five_minutes(queue: WorkQueue) -> None:
    delays = [queue.add_after_failure(A) for _ in range(12)]
    assert delays[:4] == [1, 2, 4, 8]
    assert delays[-1] == BACKOFF_MOST == 300
    queue.forget(A)
    assert queue.add_after_failure(A) == 1


def test_the_delay_after_a_failure_has_jitter_also_at_its_longest(time: Time) -> None:
    calm = WorkQueue(now=lambda: time.now, call_later=time.call_later, jitter=lambda: 0.0)
    delays = [calm.add_after_failure(A) for _ in range(12)]
    assert delays[0] == 0.75
    assert delays[-1] == 225


def test_what_the_server_asks_for_is_waited_at_least(queue: WorkQueue, time: Time) -> None:
    assert queue.add_after_failure(A, at_least=17) == 17
    time.pass_(16)
    assert queue.depth() == 0
    time.pass_(1)
    assert queue.depth() == 1


def test_the_oldest_key_tells_how_long_it_has_waited(queue: WorkQueue, time: Time) -> None:
    assert queue.oldest() == 0
    queue.add(A)
    time.pass_(3)
    queue.add(B)
    assert queue.oldest() == 3


def test_what_people_ask_for_goes_first_and_of_five_turns_each_other_lane_has_one(queue: WorkQueue) -> None:
    async def scene() -> None:
        for n in range(3):
            queue.add(("ml", f"again-{n}"), AGAIN)
        for n in range(3):
            queue.add(("ml", f"changed-{n}"))
        for n in range(7):
            queue.add(("ml", f"asked-{n}"), ASKED)
        order = [(await queue.get())[1] for _ in range(13)]
        assert order[:5] == ["changed-0", "again-0", "asked-0", "asked-1", "asked-2"]
        assert order[5:10] == ["changed-1", "again-1", "asked-3", "asked-4", "asked-5"]
        assert order[10:] == ["changed-2", "again-2", "asked-6"]

    asyncio.run(scene())


def test_without_anything_else_to_do_changes_go_before_what_is_looked_at_again(queue: WorkQueue) -> None:
    async def scene() -> None:
        queue.add(("ml", "again"), AGAIN)
        for n in range(2):
            queue.add(("ml", f"changed-{n}"))
        assert await queue.get() == ("ml", "changed-0")
        assert await queue.get() == ("ml", "again")  # its turn
        queue.add(("ml", "again-2"), AGAIN)
        assert await queue.get() == ("ml", "changed-1")

    asyncio.run(scene())


def test_what_people_ask_for_overtakes_what_the_model_waited_for_already(queue: WorkQueue) -> None:
    async def scene() -> None:
        queue.add(B)
        queue.add(A)
        queue.add(A, ASKED)
        queue.add(A, AGAIN)
        assert queue.depth() == 2
        assert [await queue.get(), await queue.get()] == [B, A]  # the first turn is the changes'
        queue.add(B, ASKED)  # while it is worked on
        queue.add(B)
        queue.add(("ml", "c"))
        queue.done(B)
        assert await queue.get() == B

    asyncio.run(scene())


def test_a_change_of_a_model_that_waits_to_be_looked_at_again_makes_one_pass_in_the_first_lane(
    queue: WorkQueue,
) -> None:
    async def scene() -> None:
        queue.add(("ml", "a"), AGAIN)
        queue.add(("ml", "a"))
        queue.add(("ml", "a"), AGAIN)
        assert queue.depth() == 1
        assert await queue.get() == ("ml", "a")
        queue.add(("ml", "a"), AGAIN)  # the pass that runs looks at it
        assert queue.depth() == 0

    asyncio.run(scene())


def test_who_takes_only_what_people_ask_for_leaves_the_rest(queue: WorkQueue) -> None:
    async def scene() -> None:
        queue.add(A)
        queue.add(("ml", "again"), AGAIN)
        asked = asyncio.create_task(queue.get(asked_only=True))
        await asyncio.sleep(0)
        assert not asked.done()
        queue.add(B, ASKED)
        assert await asyncio.wait_for(asked, 5) == B
        assert [await queue.get(), await queue.get()] == [A, ("ml", "again")]

    asyncio.run(scene())


def test_a_key_whose_waiter_took_another_one_finds_the_next(queue: WorkQueue) -> None:
    async def scene() -> None:
        for _ in range(3):  # until the next turn is that of what people ask for
            queue.add(A)
            await queue.get()
            queue.done(A)
        one, two = (asyncio.create_task(queue.get()) for _ in range(2))
        asked = asyncio.create_task(queue.get(asked_only=True))
        await asyncio.sleep(0)
        queue.add(A)  # wakes the first
        queue.add(B, ASKED)  # wakes the third, but the first, which comes before it, takes this one
        async with asyncio.timeout(5):
            assert [await one, await two] == [B, A]
        asked.cancel()

    asyncio.run(scene())


def test_two_who_wait_get_the_two_keys_in_whatever_order_they_wake_up(queue: WorkQueue) -> None:
    async def scene() -> None:
        waiting = [asyncio.create_task(queue.get()) for _ in range(2)]
        waiting.append(asyncio.create_task(queue.get(asked_only=True)))
        await asyncio.sleep(0)
        queue.add(A)
        queue.add(B, ASKED)
        queue.add(("ml", "c"), ASKED)
        async with asyncio.timeout(5):
            assert {await w for w in waiting} == {A, B, ("ml", "c")}

    asyncio.run(scene())


def test_one_that_is_woken_and_cancelled_before_it_comes_leaves_its_key_to_another(queue: WorkQueue) -> None:
    async def scene() -> None:
        first, second = (asyncio.create_task(queue.get()) for _ in range(2))
        await asyncio.sleep(0)
        queue.add(A)
        first.cancel()
        async with asyncio.timeout(5):
            assert await second == A
        assert first.cancelled()

    asyncio.run(scene())
