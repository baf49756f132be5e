"""Which files of clients a lane knows: told once, by number, and forgotten with their registration."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from trtmodel_worker.front import lanes
from trtmodel_worker.front.ladder import Overdue
from trtmodel_worker.front.lanes import LanePort, Lanes
from trtmodel_worker.front.sharedmemory import RegionBytes
from trtmodel_worker.front.sharing import ClientFile
from trtmodel_worker.host.wire import parse_file, parse_reads, run_message

RUN = run_message(1, 0, 0, [], [], reads=True)


class Lane:
    """A lane, and what its host has been told."""

    def __init__(self) -> None:
        front, self.end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for each in (front, self.end):
            each.setblocking(False)
        self.host = mock.Mock()
        self.port = LanePort(self.host, front)
        self.lanes = Lanes(Overdue(1.0))
        self.lanes.add([self.port])

    def run(self, *reads: RegionBytes) -> list[object]:
        """What comes of a run that reads these: (number, inode) of a file that is told, ("forget", number), and what is
        read, each as (number, place in the file)."""
        assert self.lanes.send(self.port, RUN, [(body, 0, 0, len(body)) for body in reads])
        self.lanes.give(self.port)
        return self.heard()

    def heard(self) -> list[object]:
        found: list[object] = []
        while True:
            try:
                data = self.end.recv(65536)
            except BlockingIOError:
                return found
            file = parse_file(data)
            if file is None:
                assert data[: len(RUN)] == RUN
                found += [(number, at) for number, at, *_ in parse_reads(data[len(RUN) :])]
            elif file[1]:
                found.append(("forget", file[0]))
            else:
                _, (descriptor,), _, _ = socket.recv_fds(self.end, 1, 1)
                found.append((file[0], os.fstat(descriptor).st_ino))
                os.close(descriptor)


@pytest.fixture
def lane() -> Iterator[Lane]:
    made = Lane()
    yield made
    made.port.channel.close()
    made.end.close()


def file_of(tmp_path: Path, name: str = "file") -> tuple[ClientFile, int]:
    path = tmp_path / name
    path.write_bytes(bytes(100))
    return ClientFile(os.open(path, os.O_RDWR)), path.stat().st_ino


def test_a_file_is_told_to_a_lane_with_the_first_run_that_reads_it(lane: Lane, tmp_path: Path) -> None:
    (one, inode), (other, another) = file_of(tmp_path), file_of(tmp_path, "other")
    (number, told), *read = lane.run(RegionBytes("r", one, 5, 10), RegionBytes("r", one, 50, 10))  # type: ignore[misc]
    assert (told, read) == (inode, [(number, 5), (number, 50)])
    assert lane.run(RegionBytes("r", one, 6, 10)) == [(number, 6)]
    (second, told), *read = lane.run(RegionBytes("r", other, 7, 1), RegionBytes("r", one, 8, 1))  # type: ignore[misc]
    assert (told, read) == (another, [(second, 7), (number, 8)])
    assert second != number


def test_a_file_that_is_registered_no_more_is_forgotten_and_closed(lane: Lane, tmp_path: Path) -> None:
    file, _ = file_of(tmp_path)
    (number, _), *_ = lane.run(RegionBytes("r", file, 0, 10))  # type: ignore[misc]
    waits = RegionBytes("r", file, 0, 10)
    file.leave()
    assert lane.heard() == [("forget", number)]
    (again, _), read, forgotten = lane.run(waits)  # type: ignore[misc]
    assert (read, forgotten) == ((again, 0), ("forget", again)), "a request that waited has it once more"
    reader = file.reader
    del file, waits
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(reader)


def test_a_lane_knows_few_files_at_once(lane: Lane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_MOST_FILES", 3)
    files = [file_of(tmp_path, str(i))[0] for i in range(9)]
    known = set()
    for file in files * 2:
        for what, number in lane.run(RegionBytes("r", file, 0, 10))[:-1]:  # type: ignore[misc]
            known.discard(number) if what == "forget" else known.add(what)
        assert len(known) <= 4
    assert sum(lane.port in file.lanes for file in files) == len(known)


def test_a_host_that_is_gone_is_known_by_no_file(lane: Lane, tmp_path: Path) -> None:
    file, _ = file_of(tmp_path)
    lane.run(RegionBytes("r", file, 0, 10))
    lane.end.close()
    lane.lanes.remove(lane.host)
    assert not file.lanes
    assert not lane.port.files
