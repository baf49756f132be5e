"""A host as its front meets it: what it says when it is ready, probes, and lanes that are made anew."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_harness import HostProcess
from trtmodel_contract.control import DEVICE_LOST
from trtmodel_contract.exitcodes import HostExit
from trtmodel_worker.host.wire import FailureClass, run_message
from worker_harness import REVISION_1, Bucket

BAD = 666.0


def rows(*values: float) -> dict[str, Any]:
    return {"x": [[value] * 4 for value in values]}


def host(bucket: Bucket, behaviour: dict[str, Any] | None = None, fault: str = "", **more: Any) -> HostProcess:
    """An engine that doubles its input, and does `fault` at BAD."""
    plan = {"factor": 2.0, **({"fault": {"when": BAD, "do": fault}} if fault else {}), **(behaviour or {})}
    golden = more.pop("golden", None)
    return HostProcess(bucket, bucket.publish(REVISION_1, plan, golden=golden)[1], **more)


def answers_well(process: HostProcess, lane: int = 0) -> None:
    generation = process.send(rows(1, 5), lane)
    answer = process.receive(lane)
    assert answer.generation == generation
    assert process.arrays(answer)[0].tolist() == [[2.0] * 4, [10.0] * 4]


def test_a_host_that_is_ready_says_how_long_each_batch_size_takes_and_how_much_memory_it_had(bucket: Bucket) -> None:
    with host(bucket, {"work": 0.01}, lanes=2, buckets=(1, 2, 8, 64)) as process:
        ready = process.ready()
        assert set(ready.bucket_seconds) == {"1", "2", "8"}
        assert all(0.01 <= seconds <= ready.slowest_seconds for seconds in ready.bucket_seconds.values())
        assert (ready.batchable, ready.why) == (True, "")
        for lane in (0, 1):
            answers_well(process, lane)


def test_a_host_whose_engine_lets_rows_see_each_other_says_so_and_serves(bucket: Bucket) -> None:
    behaviour = {"mode": "centred"}
    with host(bucket, behaviour, golden=lambda x: x - x.mean(axis=0, keepdims=True)) as process:
        ready = process.ready()
        assert not ready.batchable
        assert ready.why == "what output 'y' is for a row depends on the other rows of its batch"
        process.send(rows(1, 5))
        assert process.arrays(process.receive())[0].tolist() == [[-2.0] * 4, [2.0] * 4]


def test_a_host_that_serves_holds_no_file_with_the_plan(bucket: Bucket) -> None:
    """It lies in memory, and is as large as the engine."""
    with host(bucket) as process:
        process.ready()
        folder = Path(f"/proc/{process.process.pid}")
        held = [str(entry.readlink()) for entry in (folder / "fd").iterdir()]
        assert not [name for name in held if "test-blob" in name]
        assert "test-blob" not in (folder / "maps").read_text()


def test_a_warm_up_beside_traffic_computes_a_share_of_the_time_only(bucket: Bucket) -> None:
    """CPU time would say it too, but the test's engine sleeps: its rests are seen in how long it takes to be ready."""
    with host(bucket, {"work": 0.02}, buckets=(1, 8), duty=0.1) as process:
        started = time.monotonic()
        process.ready()
        assert time.monotonic() - started >= 7 * 0.02 / 0.1  # 4 runs of the warm-up, 1 of the self-test, 3 of rows


def test_a_host_that_is_stopped_most_of_the_time_measures_what_its_runs_take_of_a_processor(bucket: Bucket) -> None:
    """Its clock goes on while it is stopped; here, while its engine sleeps."""
    with host(bucket, {"work": 0.05}, buckets=(1, 8), pulsed=True) as process:
        assert max(process.ready().bucket_seconds.values()) < 0.05


def test_a_probe_is_answered_without_outputs_and_requests_go_on(bucket: Bucket) -> None:
    with host(bucket, lanes=2) as process:
        process.ready()
        for lane in (0, 1):
            generation = process.probe(lane)
            answer = process.receive(lane, outputs=0)
            assert (answer.generation, answer.failure, answer.outputs) == (generation, None, ())
            assert answer.nanoseconds > 0
            answers_well(process, lane)


def test_a_probe_finds_an_engine_that_answers_something_else_than_when_it_was_built(bucket: Bucket) -> None:
    with host(bucket, fault="drift") as process:
        process.ready()
        process.send(rows(BAD))
        assert process.receive().failure is None  # a wrong answer that nobody sees
        generation = process.probe()
        answer = process.receive(outputs=0)
        assert (answer.generation, answer.failure) == (generation, FailureClass.WRONG_OUTPUT)
        assert "output 'y' at [0, 0] is 3.0, it was 2.0 when built" in answer.text


def test_a_probe_writes_nowhere_in_the_shared_memory(bucket: Bucket) -> None:
    with host(bucket) as process:
        process.ready()
        answers_well(process)
        before = bytes(process.arena.view)
        process.probe()
        assert process.receive(outputs=0).failure is None
        assert bytes(process.arena.view) == before


def test_after_a_recoverable_error_the_lane_is_made_anew_and_says_when(bucket: Bucket) -> None:
    with host(bucket, fault="break", lanes=2) as process:  # such a lane never works again
        process.ready()
        for _ in range(3):
            generation = process.send(rows(BAD))
            answer = process.receive()
            assert (answer.generation, answer.failure) == (generation, FailureClass.RECOVERABLE)
            rested = process.receive(outputs=0)
            assert (rested.generation, rested.failure, rested.outputs) == (0, None, ())
            assert rested.nanoseconds > 0
            answers_well(process, 0)
            answers_well(process, 1)


def test_a_request_that_comes_while_the_lane_is_made_anew_is_answered_afterwards(bucket: Bucket) -> None:
    with host(bucket, {"first": 0.2}, fault="break") as process:
        process.ready()
        process.send(rows(BAD))
        generation = process.send(rows(3), slot=1)
        assert process.receive().failure is FailureClass.RECOVERABLE
        assert process.receive(outputs=0).generation == 0
        answer = process.receive()
        assert answer.generation == generation
        assert process.arrays(answer)[0].tolist() == [[6.0] * 4]


@pytest.mark.parametrize(
    ("fault", "failure"),
    [
        ("invalid", FailureClass.INVALID_INPUT),
        ("memory", FailureClass.OUT_OF_MEMORY),
        ("too-large", FailureClass.OUTPUT_TOO_LARGE),
        ("crash", FailureClass.INTERNAL),
    ],
)
def test_other_errors_leave_the_lane_as_it_is(bucket: Bucket, fault: str, failure: FailureClass) -> None:
    with host(bucket, {"lanes": 1}, fault=fault) as process:  # no second lane can be made
        process.ready()
        process.send(rows(BAD))
        assert process.receive().failure is failure
        answers_well(process)


def test_a_lane_that_cannot_be_made_anew_ends_the_process_after_the_failure_was_sent(bucket: Bucket) -> None:
    with host(bucket, {"lanes": 2}, fault="break") as process:
        process.ready()
        process.send(rows(BAD))
        assert process.receive().failure is FailureClass.RECOVERABLE
        assert process.receive(outputs=0).generation == 0  # the second lane
        process.send(rows(BAD))
        assert process.receive().failure is FailureClass.RECOVERABLE
        assert process.exit_code() == HostExit.LANE_LOST


@pytest.mark.parametrize(("fault", "code"), [("sticky", HostExit.STICKY_ERROR), ("lost", HostExit.DEVICE_LOST)])
def test_a_poisoned_or_lost_device_ends_the_process(bucket: Bucket, fault: str, code: HostExit) -> None:
    with host(bucket, fault=fault) as process:
        process.ready()
        process.send(rows(BAD))
        assert process.exit_code() == code


@pytest.mark.parametrize("step", ["load", "proof"])
def test_a_device_that_is_lost_before_the_engine_serves_is_the_reason_and_not_the_engine(
    bucket: Bucket, tmp_path: Path, step: str
) -> None:
    with host(bucket, behaviour={"sick": {"path": str(tmp_path), step: "mismatch"}}) as process:
        refused = process.refused()
        assert refused.reason == DEVICE_LOST
        assert "driver/library version mismatch" in refused.message
        assert process.exit_code() == HostExit.DEVICE_LOST


def test_a_front_that_names_places_outside_of_the_arena_ends_the_process(bucket: Bucket) -> None:
    for message in (
        run_message(1, 0, 64, [1 << 40], [(1, 4)]),
        run_message(1, 0, 64, [-64], [(1, 4)]),
        run_message(1, 1 << 40, 64, [0], [(1, 4)]),
        run_message(1, 0, 1 << 40, [0], [(1, 4)]),
        run_message(1, 0, 64, [0], [(-1, 4)]),
        b"\0" * 23,
        b"\0" * 32,
    ):
        with host(bucket) as process:
            process.ready()
            process.lanes[0].send(message)
            assert process.exit_code() == HostExit.CANNOT_LOAD


def test_a_host_ends_when_its_front_hangs_up(bucket: Bucket) -> None:
    with host(bucket) as process:
        process.ready()
        process.control.close()
        assert process.exit_code() == HostExit.DONE


def test_lanes_that_are_made_anew_leak_no_descriptor(bucket: Bucket) -> None:
    with host(bucket, fault="break") as process:
        process.ready()
        figures = []
        for _ in range(20):
            process.send(rows(BAD))
            process.receive()
            process.receive(outputs=0)
            figures.append(len(list(Path(f"/proc/{process.process.pid}/fd").iterdir())))
        assert figures[0] == figures[-1]


def test_answers_are_in_the_region_that_was_named(bucket: Bucket) -> None:
    with host(bucket) as process:
        process.ready()
        for slot in range(4):
            process.send(rows(slot), slot=slot)
            answer = process.receive()
            ((offset, _),) = answer.outputs
            assert offset == process.layout.output_region(slot)
        kept = [process.arena.array(process.layout.output_region(s), np.dtype(np.float32), (4,)) for s in range(4)]
        assert [array.tolist() for array in kept] == [[2.0 * s] * 4 for s in range(4)]
        del kept
