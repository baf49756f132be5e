"""Two operators at once: preconditions stop the memory of the one that is late, fences its signals, names its Jobs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from machines import KEY
from ports import Hooks, Ports
from scenarios import ALL, LOOP, SOME, Ends, Run, begun, check_always, essence
from test_cluster_faults import READS, TALK, passes_of
from test_crash import ends_as
from trtmodel_operator.ports import ClusterError, Conflict
from trtmodel_operator.reconcile import Reconciler
from world import World

pytestmark = pytest.mark.long

WHILE_PAUSED = (1, 3, 12)  # passes of the new leader
TAKING_TURNS = ("first rollout", "good update", "slow update", "a to b to a", "shares, good update", "manual promotion")


class Paused(Ports):
    """The process stands still before one of its calls, or after it, until `go` is done."""

    def __init__(self, world: World, at: int, after: bool) -> None:
        super().__init__(world)
        self.at, self.late, self.calls = at, after, 0
        self.stands, self.go = LOOP.create_future(), LOOP.create_future()

    async def before(self, call: str) -> None:
        self.calls += 1
        if self.calls == self.at + 1 and not self.late:
            await self._stand()

    async def after(self, call: str) -> None:
        if self.calls == self.at + 1 and self.late:
            await self._stand()

    async def _stand(self) -> None:
        self.calls += 1
        self.stands.set_result(None)
        await self.go


class Yielding(Ports):
    """Lets the other operator go first, a random number of times."""

    def __init__(self, world: World, chance: random.Random) -> None:
        super().__init__(world)
        self.chance = chance

    async def before(self, call: str) -> None:
        for _ in range(self.chance.randrange(4)):
            await asyncio.sleep(0)

    after = before


async def a_pass(ports: Ports) -> float | None:
    try:
        hooks = Hooks(ports.world)
        return await Reconciler(ports, ports, ports, ports, ports, "worker:1", inquiries=hooks).reconcile(KEY)
    except (Conflict, ClusterError):
        return 1.0


def paused_meanwhile(run: Run, at: int, after: bool, passes: int) -> bool:
    """The old leader stands still in the middle of a pass; a new one works; then the old one ends its pass."""
    ports = Paused(run.world, at, after)
    old = LOOP.create_task(a_pass(ports))
    LOOP.run_until_complete(asyncio.wait([old, ports.stands], return_when=asyncio.FIRST_COMPLETED))
    stood = ports.stands.done()
    for _ in range(passes):
        run.step()
    ports.go.set_result(None)
    LOOP.run_until_complete(old)
    run.idle = 0
    return stood


@pytest.mark.parametrize("name", SOME)
def test_an_old_leader_that_wakes_up_in_mid_pass_changes_nothing_about_the_end(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    whole, passes = passes_of(name)
    ends, expected, n, stood, seen = Ends(essence), essence(whole.world), 0, 0, ALL.index(name)
    for i, (before, calls) in enumerate(passes):
        for at, call in enumerate(calls):
            seen += 1
            if call in READS or seen % (6 if call in TALK else 2):
                continue
            run = before.fork()
            run.idle, run.passes = 0, 0
            run.world.alone, run.world.misled = False, True
            n += 1
            stood += paused_meanwhile(run, at, bool(n % 2), WHILE_PAUSED[n % 3])
            ends_as(name, ends, run, expected, f"paused at {call} of pass {i}")
    record_property("simulated rollouts", ends.runs)
    print(f"{name}: {ends.runs} runs, {ends.passes} passes, stood still in {stood}")
    assert stood == n > 0


@pytest.mark.parametrize("name", TAKING_TURNS)
@pytest.mark.parametrize("seed", range(4))
def test_two_operators_that_take_turns_at_every_call_end_as_one_alone_would(name: str, seed: int) -> None:
    alone, both = begun(name), begun(name)
    while not alone.over():
        alone.step()
    world, chance = both.world, random.Random(seed)
    world.alone, world.misled = False, True

    async def passes() -> list[float | None]:
        return list(await asyncio.gather(*(a_pass(Yielding(world, chance)) for _ in range(2))))

    while not both.over():
        both.people()
        both.passes += 1
        assert both.passes < 400
        wanted = [w for w in LOOP.run_until_complete(passes()) if w is not None]
        both.rest(min(wanted) if wanted else None)
    check_always(world)
    assert world.conflicts > 3, "they did not meet"
    assert essence(world) == essence(alone.world)
