"""A host that is prepared beside traffic runs in short slices, and freely as soon as it serves."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from jumping_clock import simulate
from trtmodel_worker.front.pulse import Crowd, Pulse, crowd
from worker_harness import REVISION_1, REVISION_2, Bucket, Load, Operator, WorkerProcess, eventually

STOPPED = "T"


def test_a_pulsed_process_is_stopped_and_continued_in_turn_and_left_running() -> None:
    sent: list[int] = []

    async def pulse_for_a_while() -> None:
        enough = asyncio.Event()

        def send(number: int) -> None:
            sent.append(number)
            if len(sent) == 7:
                enough.set()

        pulse = Pulse(send, lambda: Crowd.NONE)
        await asyncio.wait_for(enough.wait(), 30)
        pulse.end()
        sent.append(0)
        await asyncio.sleep(0.05)  # many slices: nothing may come any more

    asyncio.run(pulse_for_a_while())
    assert sent == [signal.SIGSTOP, signal.SIGCONT] * 3 + [signal.SIGSTOP, signal.SIGCONT, 0]


def signals(crowd: Crowd, seconds: float) -> list[tuple[float, int]]:
    """What a process is sent, and when, in a crowd that stays as it is."""
    sent: list[tuple[float, int]] = []

    async def for_a_while() -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        pulse = Pulse(lambda number: sent.append((loop.time() - begun, number)), lambda: crowd)
        await asyncio.sleep(seconds)
        pulse.end()

    simulate(for_a_while())
    return sent


def share(crowd: Crowd, begin: float, end: float) -> float:
    """Of the time from `begin` to `end` in which the process runs."""
    ran, since = 0.0, begin
    for at, number in signals(crowd, end):
        if at > begin and number == signal.SIGSTOP:
            ran += at - since
        since = at
    return ran / (end - begin)


def test_a_process_gets_half_of_a_free_processor_less_of_one_that_the_front_needs_and_little_in_a_full_crowd() -> None:
    shares = {crowd: share(crowd, 0.0, 2.0) for crowd in Crowd}
    assert shares[Crowd.NONE] == pytest.approx(0.5, abs=0.05)
    assert shares[Crowd.SOME] == pytest.approx(0.13, abs=0.03)
    assert shares[Crowd.FULL] == pytest.approx(0.017, abs=0.005)


def test_preparing_ends_however_full_the_crowd_stays() -> None:
    assert share(Crowd.FULL, 60.0, 64.0) > 3 * share(Crowd.FULL, 0.0, 4.0)
    assert share(Crowd.FULL, 200.0, 204.0) > 0.12


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


def test_a_slice_ends_at_once_when_a_request_comes_that_it_would_delay() -> None:
    sent: list[int] = []

    async def crowd_in_a_slice() -> None:
        pulse = Pulse(sent.append, lambda: Crowd.NONE, 0.001)  # after the first slice it would rest for seconds
        pulse.make_way()
        pulse.make_way()
        assert sent == [signal.SIGSTOP]
        pulse.end()

    asyncio.run(crowd_in_a_slice())
    assert sent == [signal.SIGSTOP, signal.SIGCONT]


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
