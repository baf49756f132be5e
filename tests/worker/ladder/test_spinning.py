"""When the front looks for the next message instead of sleeping."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from trtmodel_worker.front.spinning import ENOUGH, NEVER, Spin, SpinRule, spin_rule

BOUND = 0.001


class Clock:
    def __init__(self) -> None:
        self.now = 1.0

    def __call__(self) -> float:
        return self.now


def with_spin(rule: SpinRule, story: Callable[[Spin, Clock], None]) -> None:
    async def run() -> None:
        clock = Clock()
        story(Spin(rule, clock), clock)
        clock.now += 1.0  # whatever turns still, ends
        await asyncio.sleep(0)

    asyncio.run(run())


def ask(spin: Spin, clock: Clock, *, lone: bool = True, takes: float = BOUND / 4, pause: float = BOUND / 4) -> bool:
    soon = spin.sent(lone=lone)
    clock.now += takes
    spin.answered()
    clock.now += pause
    return soon


def test_the_host_is_told_that_more_comes_soon_after_lone_requests_in_a_row() -> None:
    def story(spin: Spin, clock: Clock) -> None:
        told = [ask(spin, clock) for _ in range(ENOUGH + 3)]
        assert told == [False] * ENOUGH + [True] * 3  # the first one follows nothing

    with_spin(SpinRule(BOUND, host=True), story)


@pytest.mark.parametrize("breach", [{"lone": False}, {"takes": 2 * BOUND}, {"pause": 3 * BOUND}])
def test_company_a_slow_answer_or_a_pause_ends_the_row(breach: dict[str, float]) -> None:
    def story(spin: Spin, clock: Clock) -> None:
        while not ask(spin, clock):
            pass
        ask(spin, clock, **breach)
        told = [ask(spin, clock) for _ in range(ENOUGH + 1)]
        assert told[-1]
        assert not any(told[: ENOUGH - 1])

    with_spin(SpinRule(BOUND, host=True), story)


def test_a_host_that_is_to_sleep_is_told_of_nothing() -> None:
    with_spin(SpinRule(BOUND, between=True), _never)


def test_nobody_spins_where_it_is_off() -> None:
    with_spin(NEVER, _never)


def _never(spin: Spin, clock: Clock) -> None:
    assert not any(ask(spin, clock) for _ in range(3 * ENOUGH))


@pytest.mark.parametrize(("between", "spins_after_it"), [(False, False), (True, True)])
def test_the_loop_turns_until_the_answer_and_where_cpus_are_left_until_the_next_request(
    between: bool, spins_after_it: bool
) -> None:
    async def run() -> None:
        clock = Clock()
        spin = Spin(SpinRule(BOUND, between), clock)
        for _ in range(ENOUGH):
            ask(spin, clock)
        await turned()
        assert not await turns()
        spin.sent(lone=True)
        assert await turns()
        clock.now += BOUND / 4
        spin.answered()
        await turned()
        assert await turns() is spins_after_it
        clock.now += 2 * BOUND  # a client may need that long to read an answer
        await turned()
        assert await turns() is spins_after_it
        clock.now += BOUND  # nobody asks
        await turned()
        assert not await turns()

    asyncio.run(run())


@pytest.mark.parametrize("eager", [False, True])
def test_beside_a_device_a_request_after_a_pause_is_waited_for_as_well(eager: bool) -> None:
    async def run() -> None:
        clock = Clock()
        spin = Spin(SpinRule(BOUND, between=True, eager=eager), clock)
        clock.now += 1.0
        assert spin.sent(lone=True) is False, "the host need not expect another one"
        assert await turns() is eager
        spin.answered()
        await turned()
        assert not await turns(), "one request is no reason to wait for the next"
        clock.now += 1.0
        spin.sent(lone=False)
        await turned()
        assert not await turns()

    asyncio.run(run())


def test_the_front_looks_for_the_first_request_of_a_client_that_connects() -> None:
    async def run() -> None:
        clock = Clock()
        spin = Spin(SpinRule(BOUND, between=True, eager=True), clock)
        spin.may_come()
        await turned()
        assert await turns()
        clock.now += 2 * BOUND
        await turned()
        assert not await turns()

    asyncio.run(run())


def test_a_host_is_woken_for_a_request_after_a_pause_and_not_without_end_if_none_follows() -> None:
    def story(spin: Spin, clock: Clock) -> None:
        assert spin.comes()
        spin.sent(lone=True)
        clock.now += BOUND / 4
        spin.answered()
        clock.now += BOUND / 4
        assert not spin.comes(), "it looks still, or does not sleep deeply"
        clock.now += 1.0
        assert 1 < sum(spin.comes() for _ in range(1000)) < 100
        spin.sent(lone=True)
        clock.now += 1.0
        assert spin.comes()

    with_spin(SpinRule(BOUND, between=True, eager=True), story)


async def turned() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def turns() -> bool:
    """Whether the loop would not sleep now: something is due at once, though this test is all that has work."""
    return bool(asyncio.get_running_loop()._ready)  # type: ignore[attr-defined]


def test_auto_asks_how_many_cpus_there_are() -> None:
    assert not spin_rule(None, 1.5, device=False).seconds
    assert not spin_rule(None, 1.5, device=True).seconds
    assert spin_rule(None, 2.0, device=False) == SpinRule(0.0002, between=True)
    assert spin_rule(None, 2.0, device=True) == SpinRule(0.001, between=True)
    assert spin_rule(None, 4.0, device=False) == SpinRule(0.0002, between=True, host=True)
    assert spin_rule(None, 16.0, device=False) == SpinRule(0.0002, between=True, host=True)
    assert spin_rule(None, 16.0, device=True) == SpinRule(0.001, between=True, host=True, eager=True)


def test_what_was_asked_for_holds_on_any_machine() -> None:
    assert spin_rule(0.0, 16.0, device=True).seconds == 0.0
    assert spin_rule(0.00005, 1.0, device=False) == SpinRule(0.00005, between=False)
