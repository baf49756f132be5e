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
    WAKE,
    Answer,
    FailureClass,
    MessageError,
    file_message,
    has_reads,
    is_followed_soon,
    is_probe,
    parse_answer,
    parse_file,
    parse_generation,
    parse_reads,
    probe_message,
    reads_part,
    run_message,
)


def test_what_is_to_be_read_is_told_as_it_was_meant() -> None:
    choice = random.Random(7)
    for count in (1, 2, 200):
        reads = [(choice.randrange(5), *(choice.randrange(2**62) for _ in range(3))) for _ in range(count)]
        assert parse_reads(reads_part(reads)) == reads


@pytest.mark.parametrize("read", [(-1, 0, 0, 1), (0, -1, 0, 1), (0, 0, -1, 1), (0, 0, 0, -1)])
def test_what_cannot_be_meant_is_no_message(read: tuple[int, int, int, int]) -> None:
    with pytest.raises(MessageError):
        parse_reads(reads_part([read]))
    with pytest.raises(MessageError):
        parse_reads(reads_part([(0, 0, 0, 1)]) + bytes(8))


@pytest.mark.parametrize(("number", "forget"), [(1, False), (2**40, True)])
def test_a_file_is_told_and_forgotten_by_its_number(number: int, forget: bool) -> None:
    data = file_message(number, forget=forget)
    assert parse_file(data) == (number, forget)
    assert [each(data) for each in (has_reads, is_followed_soon, is_probe)] == [False] * 3
    for other in (probe_message(number), WAKE, run_message(number, 0, 0, [], [], soon=True, reads=True)):
        assert parse_file(other) is None


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


def tell(lane: Served, number: int, path: Path) -> None:
    lane.front.send(file_message(number))
    with path.open("rb") as file:
        socket.send_fds(lane.front, [b"f"], [file.fileno()])


def say(lane: Served, reads: list[tuple[int, int, int, int]]) -> None:
    lane.generation += 1
    at, out = lane.layout.input_region(0), lane.layout.output_region(0)
    run = run_message(lane.generation, out, lane.layout.output_bytes, [at], [(2, 1)], reads=True)
    lane.front.send(run + reads_part(reads))


def ask(lane: Served, path: Path, reads: list[tuple[int, int, int, int]]) -> Answer:
    """Of file 0, which is told before and forgotten after."""
    tell(lane, 0, path)
    say(lane, reads)
    lane.front.send(file_message(0, forget=True))
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


@pytest.mark.parametrize("read", [[(0, 0, 1 << 40, 32)], [(1, 0, 0, 4)]], ids=["outside the arena", "unknown file"])
def test_a_read_to_nowhere_or_from_nowhere_ends_the_host(
    read: list[tuple[int, int, int, int]], lane: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []

    def end(code: int) -> None:
        ended.append(code)
        raise OSError("the process would be gone")

    monkeypatch.setattr(os, "_exit", end)
    (tmp_path / "file").write_bytes(bytes(64))
    tell(lane, 0, tmp_path / "file")
    say(lane, read)
    lane.thread.join(30)
    assert ended == [HostExit.CANNOT_LOAD]


def test_a_file_that_is_known_is_read_until_it_is_forgotten_and_its_descriptor_closed(
    lane: Served, tmp_path: Path
) -> None:
    path, at = tmp_path / "file", lane.layout.input_region(0)
    path.write_bytes(np.array([3, 4], np.float32).tobytes())
    tell(lane, 7, path)
    for _ in range(3):
        say(lane, [(7, 0, at, 8)])
        answer = parse_answer(lane.front.recv(MAX_MESSAGE_BYTES), 1)
        ((offset, shape),) = answer.outputs
        assert lane.arena.array(offset, np.dtype(np.float32), shape).tolist() == [[9], [16]]
    assert opened(path) == 1
    lane.front.send(file_message(7, forget=True))
    lane.result(np.ones((1, 1), np.float32))
    assert opened(path) == 0


def opened(path: Path) -> int:
    return sum(str(fd.readlink()) == str(path) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink())
