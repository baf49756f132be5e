"""What the front leaves to a host to read: told as it was meant, read whole, and within the arena."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_models as models
import pytest
from test_prepared_runs import Served, of_rows
from trtmodel_contract.exitcodes import HostExit
from trtmodel_worker.host import reading
from trtmodel_worker.host.wire import (
    MAX_MESSAGE_BYTES,
    Answer,
    FailureClass,
    MessageError,
    has_reads,
    parse_answer,
    parse_generation,
    parse_reads,
    reads_message,
    run_message,
)


def test_what_is_to_be_read_is_told_as_it_was_meant() -> None:
    choice = random.Random(7)
    for count in (1, 2, 200):
        reads = [(choice.randrange(5), *(choice.randrange(2**62) for _ in range(3))) for _ in range(count)]
        assert parse_reads(reads_message(reads), 5) == reads


@pytest.mark.parametrize("reads", [[(1, 0, 0, 1)], [(-1, 0, 0, 1)], [(0, -1, 0, 1)], [(0, 0, -1, 1)], [(0, 0, 0, -1)]])
def test_what_cannot_be_meant_is_no_message(reads: list[tuple[int, int, int, int]]) -> None:
    with pytest.raises(MessageError):
        parse_reads(reads_message(reads), 1)
    with pytest.raises(MessageError):
        parse_reads(reads_message([(0, 0, 0, 1)]) + bytes(8), 1)


@pytest.mark.parametrize("soon", [True, False])
def test_a_run_tells_whether_something_is_to_be_read(soon: bool) -> None:
    for reads in (True, False):
        data = run_message(2**60, 1, 2, [3], [(4,)], soon, reads)
        assert (has_reads(data), parse_generation(data)) == (reads, 2**60)


@pytest.mark.parametrize("size", [1, (4 << 20) + 3, 9 << 20])
def test_a_file_is_read_whole_in_however_many_parts(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    data = (os.urandom(1 << 20) * (size // (1 << 20) + 1))[:size]
    (tmp_path / "file").write_bytes(b"ahead" + data)
    with (tmp_path / "file").open("rb") as file:
        place = bytearray(size)
        reading.read_into(memoryview(place), file.fileno(), 5)
        assert place == data
        with pytest.raises(reading.Unread, match="shorter"):
            reading.read_into(memoryview(place), file.fileno(), 6)


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[Served]:
    """x:FP32[1..8, 1] -> x * x."""
    served = Served(models.square(tmp_path / "m"), of_rows(1))
    yield served
    served.close()


def ask(lane: Served, path: Path, reads: list[tuple[int, int, int, int]]) -> Answer:
    lane.generation += 1
    at, out = lane.layout.input_region(0), lane.layout.output_region(0)
    lane.front.send(run_message(lane.generation, out, lane.layout.output_bytes, [at], [(2, 1)], reads=True))
    with path.open("rb") as file:
        socket.send_fds(lane.front, [reads_message(reads)], [file.fileno()])
    return parse_answer(lane.front.recv(MAX_MESSAGE_BYTES), 1)


def test_a_run_reads_its_input_first_each_time(lane: Served, tmp_path: Path) -> None:
    path, at = tmp_path / "file", lane.layout.input_region(0)
    for turn in range(3):
        x = np.array([[turn], [turn + 7]], np.float32)
        path.write_bytes(x[1].tobytes() + x[0].tobytes())  # its rows are not side by side
        answer = ask(lane, path, [(0, 4, at, 4), (0, 0, at + 4, 4)])
        assert answer.failure is None, answer.text
        ((offset, shape),) = answer.outputs
        assert np.array_equal(lane.arena.array(offset, np.dtype(np.float32), shape), x * x)


def test_a_file_that_is_too_short_is_the_requests_fault_and_the_lane_goes_on(lane: Served, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(7))
    answer = ask(lane, tmp_path / "file", [(0, 0, lane.layout.input_region(0), 8)])
    assert answer.failure is FailureClass.INVALID_INPUT
    assert "shorter" in answer.text
    x = np.ones((1, 1), np.float32)
    assert np.array_equal(lane.result(x), x)


def test_a_read_to_a_place_outside_of_the_arena_ends_the_host(
    lane: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []

    def end(code: int) -> None:
        ended.append(code)
        raise OSError("the process would be gone")

    monkeypatch.setattr(os, "_exit", end)
    (tmp_path / "file").write_bytes(bytes(64))
    lane.front.settimeout(30)
    lane.generation += 1
    at, out = lane.layout.input_region(0), lane.layout.output_region(0)
    lane.front.send(run_message(lane.generation, out, lane.layout.output_bytes, [at], [(2, 1)], reads=True))
    with (tmp_path / "file").open("rb") as file:
        socket.send_fds(lane.front, [reads_message([(0, 0, lane.arena.size - 16, 32)])], [file.fileno()])
    lane.thread.join(30)
    assert ended == [HostExit.CANNOT_LOAD]
