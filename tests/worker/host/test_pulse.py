"""A host that is prepared beside traffic runs while nobody asks, in short slices otherwise, freely when it serves."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from jumping_clock import simulate
from trtmodel_worker.front.pulse import Crowd, Pulse, crowd
from worker_harness import REVISION_1, REVISION_2, Bucket, Load, Operator, WorkerProcess, eventually

STOPPED = "T"


class World:
    """What a process is sent, and when, in a crowd that a test changes."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.begun = self.loop.time()
        self.crowd = Crowd.NONE
        self.sent: list[tuple[float, int]] = []
        self.pulse = Pulse(self.send, lambda: self.crowd)

    def send(self, number: int) -> None:
        self.sent.append((self.loop.time() - self.begun, number))

    def change(self, crowd: Crowd) -> None:
        self.crowd = crowd
        self.pulse.look(crowd)

    def ran(self, begin: float, end: float) -> float:
        """Of the seconds from `begin` to `end`, those in which it was not stopped."""
        ran, runs, since = 0.0, True, 0.0
        for at, number in [*self.sent, (end, signal.SIGSTOP)]:
            if runs:
                ran += max(0.0, min(at, end) - max(since, begin))
            runs, since = number == signal.SIGCONT, at
        return ran


def told(play: Callable[[World], Awaitable[None]]) -> World:
    """The world after `play`, in which time passes at once."""
    worlds: list[World] = []

    async def whole() -> None:
        worlds.append(World())
        await play(worlds[0])

    simulate(whole())
    return worlds[0]


def share(crowd: Crowd, begin: float, end: float) -> float:
    """Of the time from `begin` to `end` in which the process runs, in a crowd that stays as it is."""

    async def play(world: World) -> None:
        world.change(crowd)
        await asyncio.sleep(end)

    return told(play).ran(begin, end) / (end - begin)


def test_a_process_gets_a_processor_that_nobody_needs_some_of_one_that_the_front_needs_and_little_in_a_crowd() -> None:
    shares = {crowd: share(crowd, 0.0, 2.0) for crowd in Crowd}
    assert shares[Crowd.NONE] == 1.0
    assert shares[Crowd.SOME] == pytest.approx(0.15, abs=0.03)
    assert shares[Crowd.FULL] == pytest.approx(0.011, abs=0.003)


def test_preparing_ends_however_full_the_crowd_stays() -> None:
    assert share(Crowd.FULL, 60.0, 64.0) > 3 * share(Crowd.FULL, 0.0, 4.0)
    assert share(Crowd.FULL, 200.0, 204.0) > 0.12


def test_a_process_runs_from_a_moment_after_the_last_answer_until_the_next_request() -> None:
    async def play(world: World) -> None:
        for _ in range(100):  # 8 ms for a request, and 12 until the next one
            world.change(Crowd.FULL)
            await asyncio.sleep(0.008)
            world.change(Crowd.NONE)
            await asyncio.sleep(0.012)

    world = told(play)
    assert world.ran(0.0, 2.0) == pytest.approx(100 * 0.011, abs=0.03)
    assert len(world.sent) == pytest.approx(200, abs=3)


def test_one_client_that_asks_again_at_once_is_not_disturbed_after_each_answer() -> None:
    async def play(world: World) -> None:
        for _ in range(5000):
            world.change(Crowd.FULL)
            await asyncio.sleep(0.0003)
            world.change(Crowd.NONE)
            await asyncio.sleep(0.0001)

    world = told(play)
    assert 0.0 < world.ran(0.0, 2.0) < 0.05
    assert len(world.sent) < 100


def test_a_slice_beside_a_request_ends_when_another_comes_and_one_that_had_to_be_does_not() -> None:
    async def play(world: World) -> None:
        await asyncio.sleep(0.1)
        for wanted in (Crowd.SOME, Crowd.FULL):
            world.change(wanted)
            while world.sent[-1][1] != signal.SIGCONT:  # noqa: ASYNC110 - on the clock that jumps
                await asyncio.sleep(0.0001)
            world.change(Crowd.FULL)
            await asyncio.sleep(0.01)

    world = told(play)
    (some, full), stops = (
        [at for at, number in world.sent if number == kind] for kind in (signal.SIGCONT, signal.SIGSTOP)
    )
    ends = {begin: min(at for at in stops if at >= begin) - begin for begin in (some, full)}
    assert ends == {some: pytest.approx(0.0, abs=0.0002), full: pytest.approx(0.001, abs=0.0002)}


def test_a_process_is_left_running_at_the_end_and_sent_nothing_more() -> None:
    async def play(world: World) -> None:
        world.change(Crowd.FULL)
        world.pulse.end()
        await asyncio.sleep(10.0)

    assert [number for _, number in told(play).sent] == [signal.SIGSTOP, signal.SIGCONT]


@pytest.mark.parametrize(
    ("running", "waiting", "lanes", "cpus", "left"),
    [
        (0, 0, 2, 2.0, Crowd.NONE),
        (1, 0, 2, 2.0, Crowd.SOME),  # the other processor is the front's
        (2, 0, 2, 2.0, Crowd.FULL),
        (1, 0, 1, 1.0, Crowd.FULL),
        (1, 0, 4, 4.0, Crowd.NONE),
        (3, 0, 4, 4.0, Crowd.SOME),
        (4, 0, 4, 4.0, Crowd.FULL),
        (1, 0, 2, 16.0, Crowd.NONE),
        (2, 0, 2, 16.0, Crowd.FULL),  # a lane computes with eight of them
        (0, 1, 4, 16.0, Crowd.FULL),
    ],
)
def test_a_process_is_in_a_crowd_where_requests_need_the_processors(
    running: int, waiting: int, lanes: int, cpus: float, left: Crowd
) -> None:
    assert crowd(running, waiting, lanes, cpus) is left


def test_without_a_device_a_host_beside_traffic_is_prepared_in_slices_and_serves_freely(tmp_path: Path) -> None:
    operator, bucket = Operator(), Bucket(tmp_path / "bucket")
    first, second = (bucket.publish(r, {"factor": f})[0] for r, f in ((REVISION_1, 2.0), (REVISION_2, 3.0)))
    stable, candidate = operator.artifact(REVISION_1, first), operator.artifact(REVISION_2, second)
    worker = WorkerProcess(tmp_path / "worker", operator, bucket, TRTMODEL_RUNTIME="TestOnProcessor")
    worker.point(stable)
    worker.start()
    try:
        worker.wait_ready()
        before = set(worker.host_pids())
        with Load(worker.port, {REVISION_1: 2.0, REVISION_2: 3.0}, clients=2) as load:
            load.wait_for(50)
            worker.desire(stable, candidate)
            eventually(lambda: STOPPED in map(state, set(worker.host_pids()) - before), "it is stopped now and then")
            worker.wait_engine(second)
            assert STOPPED not in map(state, worker.host_pids())
            worker.desire(candidate)
            worker.wait_routed(second)
            load.wait_for(50)
        assert load.failures == []
    finally:
        assert worker.stop() == 0


def state(pid: int) -> str:
    """Of a process, as the kernel names it; '' if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""
