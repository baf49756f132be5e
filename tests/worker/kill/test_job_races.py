"""Two Jobs build one engine at the same time: the second runs wholly between any two operations of the first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kill_harness import World, visible
from kill_scenarios import (
    Scenario,
    build_task,
    damaged_engine,
    engine_of_another_data_set,
    nothing_there,
    still_damaged,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
SHARES = 2


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize(
    "scenario", [nothing_there, engine_of_another_data_set, damaged_engine], ids=lambda s: s.__name__
)
def test_of_two_builds_at_once_there_is_one_engine_and_both_answer_with_it(
    world: World, scenario: Scenario, share: int, record_property: Callable[..., None]
) -> None:
    damaged = scenario(world)
    task = build_task(world)
    world.keep_as("before")
    whole = world.job("build", task)
    points = visible(whole.operations)[share::SHARES]
    for at in points:
        world.put_back("before")
        assert world.begin("build", task, at, "first"), (at, whole.operations[at])
        second = world.job("build", task, pod="second")
        world.require_ended_well(second, whole, still_damaged(world, damaged))
        first = world.finish("first")
        world.require_ended_well(first, whole, still_damaged(world, damaged))
        assert first.result is not None
        assert second.result is not None
        assert first.result.build is not None
        assert second.result.build is not None
        assert first.result.build.artifact == second.result.build.artifact
    record_property("races of two Jobs", len(points))
