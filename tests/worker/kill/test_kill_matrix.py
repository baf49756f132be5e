"""SIGKILL at every operation of a Job, whatever it found in the bucket; then the retried Job must end well.

How many there were is printed at the end of the run.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kill_harness import Ran, World
from kill_scenarios import (
    CLUSTER,
    SCENARIOS,
    Scenario,
    build_task,
    engine_there,
    engine_without_its_plan,
    nothing_there,
    resolved,
    still_damaged,
)
from trtmodel_contract.jobs import Reason
from trtmodel_contract.storelayout import pins_prefix

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
SHARES = 2  # tests of a scenario, so that two processes can have one each


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_a_build_that_is_killed_anywhere_leaves_nothing_wrong_and_its_retry_ends_well(
    world: World, scenario: Scenario, share: int, record_property: Callable[..., None]
) -> None:
    damaged = scenario(world)
    task = build_task(world)
    world.keep_as("before")
    whole = world.job("build", task)
    world.require_ended_well(whole, whole, still_damaged(world, damaged))
    points = range(share, len(whole.operations), SHARES)
    shown = set[str]()
    for at in points:
        world.put_back("before")
        killed = world.job("build", task, at)
        assert killed == Ran(-9, (), None), (at, whole.operations[at])
        state = world.state()
        if state not in shown:
            world.require_sound(still_damaged(world, damaged))
            world.require_ended_well(world.job("build", task), whole, still_damaged(world, damaged))
            shown.add(state)
    record_property("killed Jobs", len(points))
    record_property("states of a bucket and a cache that killed Jobs left", len(shown))


@pytest.mark.parametrize("scenario", [nothing_there, engine_there, engine_without_its_plan], ids=lambda s: s.__name__)
def test_a_resolve_job_that_is_killed_anywhere_changes_no_engine_and_its_retry_ends_well(
    world: World, scenario: Scenario, record_property: Callable[..., None]
) -> None:
    damaged = scenario(world)
    task, expected = resolved(world, keep=("a" * 64,))
    assert len(expected.found) == (1 if scenario is engine_there else 0)
    world.keep_as("before")
    whole = world.job("resolve", task)
    shown = set[str]()
    for at in range(len(whole.operations)):
        world.put_back("before")
        before = list(world.committed())
        assert world.job("resolve", task, at) == Ran(-9, (), None), (at, whole.operations[at])
        assert list(world.committed()) == before
        state = world.state()
        if state in shown:
            continue
        shown.add(state)
        ran = world.job("resolve", task)
        assert (ran.status, ran.result) == (0, whole.result)
        world.require_sound(damaged)
        assert ran.result is not None
        assert ran.result.reason is Reason.DONE
        assert list(world.store.objects.list(pins_prefix(world.store.root, CLUSTER, "uid-1")))
    record_property("killed Jobs", len(whole.operations))
