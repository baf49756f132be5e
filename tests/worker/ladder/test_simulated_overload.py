"""More requests than can be answered, on a clock that jumps: who is let in, who is turned away, and what lanes do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from jumping_clock import simulate
from simulated import PretendedEngine, Request, World, world
from trtmodel_worker.front.windows import Counters

LIMIT = 1.0  # seconds of a request
RUN = 0.01


def run(story: Callable[[World, PretendedEngine], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        with world() as w:
            engine = w.engine(lanes=1)
            engine.seconds = (RUN, RUN)
            engine.scheduler.batchable = False
            await story(w, engine)
            await w.settle()
            w.check()

    simulate(whole())


async def offer(w: World, engine: PretendedEngine, seconds: float, each: float) -> int:
    """A request every `each` seconds. The most that waited."""
    most = 0
    for _ in range(round(seconds / each)):
        w.send(engine, seconds=LIMIT)
        most = max(most, engine.scheduler.waiting)
        await asyncio.sleep(each)
    return most


def test_of_four_times_what_can_be_answered_a_lane_answers_as_many_as_ever_and_all_in_half_of_their_time() -> None:
    async def story(w: World, engine: PretendedEngine) -> None:
        await offer(w, engine, 1.0, 2 * RUN)  # it knows how long a run takes
        before = len(w.requests)
        most = await offer(w, engine, 5.0, RUN / 4)
        await w.settle()
        offered = w.requests[before:]
        answered = [r for r in offered if r.answers]
        assert len(answered) * RUN > 4.9
        assert max(r.ended_at - r.call.since for r in answered) < 0.6 * LIMIT
        assert max(r.ended_at - r.call.since for r in offered if r.failures) == 0
        assert most < 60
        assert engine.stats.timeouts == 0

    run(story)


def test_a_lane_that_becomes_ten_times_slower_runs_few_that_come_too_late() -> None:
    async def story(w: World, engine: PretendedEngine) -> None:
        await offer(w, engine, 2.0, RUN / 4)
        engine.seconds = (10 * RUN, 10 * RUN)
        await offer(w, engine, 10.0, RUN / 4)
        await w.settle()
        answered = sum(1 for r in w.requests if r.answers)
        assert engine.attempts - answered <= 15
        assert engine.stats.timeouts > 0

    run(story)


def test_some_wait_however_slow_the_lane_seems() -> None:
    async def story(w: World, engine: PretendedEngine) -> None:
        engine.seconds = (0.3 * LIMIT, 0.3 * LIMIT)
        for _ in range(30):  # it knows how slow it is
            w.send(engine, seconds=60.0)
        await w.settle(3000.0)
        before = len(w.requests)
        for _ in range(10):
            w.send(engine, seconds=LIMIT)
        await w.settle()
        assert sum(1 for r in w.requests[before:] if r.answers) == 3
        assert engine.stats.refused == 7

    run(story)


def test_what_an_engine_rehearses_says_nothing_of_how_long_its_runs_take() -> None:
    async def story(w: World, engine: PretendedEngine) -> None:
        engine.seconds = (0.5, 0.5)  # beside traffic it makes way
        rehearsed = Request(16, 1, 3, 60.0)
        rehearsed.call.mirror, rehearsed.call.rehearsed = Counters(), True
        w.requests.append(rehearsed)
        engine.scheduler.submit(rehearsed.call)
        await w.settle()
        engine.seconds = (RUN, RUN)
        w.send(engine)
        await w.settle()
        assert engine.scheduler._outcomes.pace == pytest.approx(RUN, rel=0.01)

    run(story)


def test_a_first_run_that_is_slow_turns_nobody_away() -> None:
    """Seen in chaos: the first request of a candidate met a machine that was busy for most of a second, and one that
    came next was refused, though those that waited were answered in a few milliseconds."""

    async def story(w: World, engine: PretendedEngine) -> None:
        engine.scheduler.expect({"1": RUN, "8": 4 * RUN}, 4 * RUN)
        engine.seconds = (0.4 * LIMIT, 0.4 * LIMIT)
        w.send(engine, seconds=LIMIT)
        await asyncio.sleep(0.5 * LIMIT)
        engine.seconds = (RUN, RUN)
        for _ in range(10):
            w.send(engine, seconds=LIMIT)
        await w.settle()
        assert [len(r.answers) for r in w.requests] == [1] * 11
        assert engine.stats.refused == engine.stats.timeouts == 0

    run(story)
