"""What a stopped host has is run elsewhere as soon as the kernel says that it is, unless the TRTModel says when."""

from __future__ import annotations

import asyncio

import pytest
from simulated import World, run

OVERDUE_SECONDS = 0.2


@pytest.mark.parametrize(("asked", "most"), [(0.0, 0.1), (OVERDUE_SECONDS, 2 * OVERDUE_SECONDS)])
def test_nobody_waits_until_what_a_stopped_host_runs_is_overdue(asked: float, most: float) -> None:
    async def story(w: World) -> None:
        engine = w.engine(hosts=2, lanes=2)
        await w.warm(engine)
        overdue = engine.scheduler.overdue
        overdue._asked, overdue.after = asked, lambda _: OVERDUE_SECONDS
        engine.scheduler._lanes.free[-1].host.stop()
        both = [w.send(engine)]
        await asyncio.sleep(0.001)
        both.append(w.send(engine))
        await w.settle()
        took = [request.ended_at - request.call.since for request in both]
        assert max(took) < most
        assert max(took) > asked
        assert engine.stats.hedges >= 1

    run(story)


def test_a_host_that_is_slow_but_not_stopped_has_its_time() -> None:
    async def story(w: World) -> None:
        engine = w.engine(hosts=2, lanes=1)
        await w.warm(engine)
        engine.scheduler.overdue.after = lambda _: OVERDUE_SECONDS
        engine.seconds = (OVERDUE_SECONDS / 2, OVERDUE_SECONDS / 2)
        request = w.send(engine)
        await w.settle()
        assert engine.stats.hedges == 0
        assert request.answers

    run(story)


def test_who_comes_after_a_stop_was_seen_does_not_wait_for_its_lanes_either() -> None:
    """Seen on a GPU: the two requests that a stopped host had were answered by the standby after 8 ms, and the next two
    waited up to 40 ms, until somebody looked whether its lanes were overdue."""

    async def story(w: World) -> None:
        standby = w.engine("standby", 3.0, hosts=1, lanes=2)
        engine = w.engine(hosts=1, lanes=2, helper="standby")
        await w.warm(engine)
        engine.scheduler.overdue.after = lambda _: OVERDUE_SECONDS
        engine.hosts[0].stop()
        for _ in range(2):  # two clients, who ask again when they were answered
            pair = [w.send(engine), w.send(engine)]
            await asyncio.sleep(0.03)
            assert all(request.answers for request in pair)
        assert standby.attempts >= 4

    run(story)
