"""A host that is prepared beside traffic runs in short slices, and freely as soon as it serves."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from trtmodel_worker.front.pulse import MOST_SLICES_LATE, Pulse, takes_time
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

        pulse = Pulse(send, lambda: False, 0.5)
        await asyncio.wait_for(enough.wait(), 30)
        pulse.end()
        sent.append(0)
        await asyncio.sleep(0.05)  # many slices: nothing may come any more

    asyncio.run(pulse_for_a_while())
    assert sent == [signal.SIGSTOP, signal.SIGCONT] * 3 + [signal.SIGSTOP, signal.SIGCONT, 0]


def test_while_requests_wait_a_process_stays_stopped_but_not_for_ever() -> None:
    sent: list[int] = []
    asked: list[int] = []  # how many signals had been sent by then

    async def pulse_in_a_crowd() -> None:
        enough = asyncio.Event()

        def send(number: int) -> None:
            sent.append(number)
            if len(sent) == 4:
                enough.set()

        def crowded() -> bool:
            asked.append(len(sent))
            return True

        pulse = Pulse(send, crowded, 0.5)
        await asyncio.wait_for(enough.wait(), 30)
        pulse.end()

    asyncio.run(pulse_in_a_crowd())
    assert sent[:4] == [signal.SIGSTOP, signal.SIGCONT] * 2
    assert [asked.count(1), asked.count(3)] == [MOST_SLICES_LATE] * 2


@pytest.mark.parametrize(
    ("running", "waiting", "lanes", "cpus", "takes"),
    [
        (0, 0, 2, 2.0, False),
        (1, 0, 2, 2.0, True),  # the other processor is the front's
        (1, 0, 4, 4.0, False),
        (3, 0, 4, 4.0, True),
        (1, 0, 2, 16.0, False),
        (2, 0, 2, 16.0, True),  # a lane computes with eight of them
        (0, 1, 4, 16.0, True),
    ],
)
def test_a_slice_takes_time_where_no_processor_is_left_for_it(
    running: int, waiting: int, lanes: int, cpus: float, takes: bool
) -> None:
    assert takes_time(running, waiting, lanes, cpus) is takes


def test_a_slice_ends_at_once_when_a_request_comes_that_it_would_delay() -> None:
    sent: list[int] = []

    async def crowd_in_a_slice() -> None:
        pulse = Pulse(sent.append, lambda: False, 0.001)  # after the first slice it would rest for seconds
        pulse.crowd()
        pulse.crowd()
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
