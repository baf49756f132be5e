"""Every kind of fault in a random order, on a clock that jumps. Whatever happens: each request ends exactly once, an
answer is what its rows demand, all regions come back, no lane is lost, and the counters add up."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jumping_clock import simulate
from simulated import WIDTHS, Behave, PretendedHost, Request, World, world
from trtmodel_worker.front.lanes import LanePort
from trtmodel_worker.host.wire import FailureClass

EVERYTHING = (
    "crash", "killed", "stop", "lie", FailureClass.RECOVERABLE, FailureClass.INTERNAL, FailureClass.OUT_OF_MEMORY,
    FailureClass.OUTPUT_TOO_LARGE, FailureClass.INVALID_INPUT,
)  # fmt: skip
SEEDS = st.integers(0, 1 << 32)
many = settings(  # a seed cannot be made smaller
    max_examples=25, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)


def sometimes(world: World, share: float, faults: tuple[object, ...]) -> Behave:
    def behave(host: PretendedHost, lane: LanePort, x: np.ndarray) -> object:
        return world.choice.choice(faults) if world.choice.random() < share else "ok"

    return behave  # type: ignore[return-value]


def up(world: World, topology: str, behave: Behave, lanes: int = 2, buckets: tuple[int, ...] = ()) -> None:
    """`topology`: hosts of stable, and what helps."""
    helper = "standby" if topology.endswith("standby") else ""
    if helper:
        world.engine("standby", 3.0, hosts=1, lanes=lanes, buckets=buckets, behave=behave)
    world.engine("stable", 2.0, hosts=int(topology[0]), lanes=lanes, buckets=buckets, behave=behave, helper=helper)


async def traffic(
    world: World, count: int, *, cancels: float = 0.0, short: float = 0.0, probes: float = 0.0, flips: float = 0.0
) -> None:
    stable, choice = world.engines["stable"], world.choice
    for _ in range(count):
        seconds = choice.uniform(0.01, 1.0) if choice.random() < short else 60.0
        request = world.send(stable, choice.randint(1, 4), choice.choice(WIDTHS), seconds)
        if choice.random() < cancels:
            asyncio.get_running_loop().call_later(choice.uniform(0.0, 0.01), _gone, world, request)
        for engine in world.engines.values():
            for host in engine.hosts:
                if host.stopped is not None and choice.random() < 0.05:
                    host.wake()
            if choice.random() < probes:
                engine.scheduler.probe()
            if choice.random() < flips:  # another host has found out something else
                engine.scheduler.batchable = not engine.scheduler.batchable
        if choice.random() < 0.5:
            await asyncio.sleep(choice.expovariate(1 / 0.004))
    for engine in world.engines.values():
        engine.behave = lambda *_: "ok"
        for host in engine.hosts:
            host.wake()


def _gone(world: World, request: Request) -> None:
    if not request.ends:
        world.cancel(request)


@pytest.mark.parametrize("topology", ["1", "2", "1 and standby", "2 and standby"])
@many
@given(SEEDS)
def test_whatever_fails_each_request_ends_once_and_no_answer_is_wrong(topology: str, seed: int) -> None:
    async def run() -> None:
        with world(seed) as w:
            up(w, topology, sometimes(w, 0.15, EVERYTHING))
            await traffic(w, 150, cancels=0.1, short=0.2)
            await w.settle()
            w.check()

    simulate(run())


@pytest.mark.parametrize("topology", ["1", "3", "1 and standby", "2 and standby"])
@many
@given(SEEDS, st.sampled_from([0.0, 0.01]), st.sampled_from([(), (4, 8), (2, 3)]), st.sampled_from([5, 1000]))
def test_the_same_holds_with_delays_probes_sizes_that_are_padded_to_short_queues_and_rows_that_turn_out_dependent(
    topology: str, seed: int, delay: float, buckets: tuple[int, ...], limit: int
) -> None:
    async def run() -> None:
        with world(seed, delay=delay, queue_limit=limit) as w:
            up(w, topology, sometimes(w, 0.1, EVERYTHING), w.choice.randint(1, 2), buckets)
            await traffic(w, 150, cancels=0.1, short=0.1, probes=0.05, flips=0.02)
            await w.settle()
            w.check()

    simulate(run())


@pytest.mark.parametrize("topology", ["1", "2", "1 and standby", "2 and standby"])
@many
@given(SEEDS)
def test_every_attempt_is_counted_once(topology: str, seed: int) -> None:
    async def run() -> None:
        with world(seed) as w:
            up(w, topology, sometimes(w, 0.15, EVERYTHING))
            await traffic(w, 150)
            await w.settle()
            for engine in w.engines.values():
                found = dict(w.counted(engine))
                found.pop("Down", 0)
                assert sum(found.values()) - engine.idle_deaths + engine.uncounted == engine.attempts

    simulate(run())


HARMLESS = ("killed", "stop", FailureClass.RECOVERABLE, FailureClass.INTERNAL, FailureClass.OUT_OF_MEMORY)


@pytest.mark.parametrize("topology", ["2", "1 and standby", "2 and standby"])
@many
@given(SEEDS)
def test_what_is_no_fault_of_a_request_fails_none(topology: str, seed: int) -> None:
    """Two in a hundred batches meet a fault, which is more than the one in a hundred that is promised."""

    async def run() -> None:
        with world(seed) as w:
            up(w, topology, sometimes(w, 0.02, HARMLESS))
            await traffic(w, 400)
            await w.settle()
            assert [r.failures[0].message for r in w.requests if r.failures] == []
            w.check()

    simulate(run())
