"""Files of clients that a device reads by itself: only while they are as they were when their pages were pinned."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from trtmodel_worker.host import sharing
from trtmodel_worker.host.sharing import LEAST_BYTES, Shared, can_pin
from worker_harness import eventually

SIZE = 3 * mmap.PAGESIZE + 5 + LEAST_BYTES


class Device:
    """Pins what it is asked to, unless it is `unwilling`."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.unwilling = False
        self.asked = 0

    def pin(self, address: int, size: int) -> bool:
        self.asked += 1
        assert address % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
        if not self.unwilling:
            self.pinned[address] = size
        return not self.unwilling

    def unpin(self, address: int) -> None:
        del self.pinned[address]


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def shared(device: Device, monkeypatch: pytest.MonkeyPatch) -> Shared:
    monkeypatch.setattr(sharing, "_FIRST_PAUSE_SECONDS", 0.0)
    return Shared(device)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = Path("/dev/shm", f"trtmodel-sharing-{os.getpid()}-{tmp_path.name}")
    path.write_bytes(os.urandom(SIZE))
    yield path
    path.unlink()


def opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY)


def read(shared: Shared, path: Path, at: int = 0, size: int = SIZE) -> bytes | None:
    """What a device would read; None if it has to be copied."""
    descriptor = opened(path)
    try:
        taken = shared.take(descriptor, at, size)
        if taken is None:
            return None
        found = ctypes.string_at(taken[1], size)
        shared.give(taken[0])
        return found
    finally:
        os.close(descriptor)


def eventually_read(shared: Shared, path: Path) -> None:
    eventually(lambda: read(shared, path) == path.read_bytes(), "the device reads what is in the file")


def done(shared: Shared) -> None:
    """All that it was told so far has been done."""
    seen = threading.Event()
    inner = shared._forget
    shared._forget = lambda descriptor: seen.set() if descriptor == -1 else inner(descriptor)  # type: ignore[method-assign]
    shared.forget(-1)
    assert seen.wait(30)
    del shared._forget


def test_a_file_that_was_shared_is_read_where_it_lies(shared: Shared, device: Device, file: Path) -> None:
    assert read(shared, file) is None
    shared.share(opened(file))
    eventually_read(shared, file)
    assert read(shared, file, 5, 100) == file.read_bytes()[5:105]
    assert read(shared, file, 6, SIZE) is None, "its end is not within the file"
    assert list(device.pinned.values()) == [-(-SIZE // mmap.PAGESIZE) * mmap.PAGESIZE]


def test_what_is_stored_into_a_mapping_is_read_at_once(shared: Shared, device: Device, file: Path) -> None:
    with file.open("rb+") as f, mmap.mmap(f.fileno(), SIZE) as mapped:
        mapped[:] = os.urandom(SIZE)  # touches each page, as a client does that has filled its input once
        shared.share(opened(file))
        eventually_read(shared, file)
        for _ in range(3):
            mapped[:] = os.urandom(SIZE)
            assert read(shared, file) == bytes(mapped)
    assert device.asked == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(os.urandom(SIZE)),  # which cuts it off first: other pages
        lambda path: (os.truncate(path, 100), os.truncate(path, SIZE)),
        lambda path: os.truncate(path, SIZE - 1),
    ],
    ids=["written anew", "cut off and lengthened", "shorter"],
)
def test_after_a_change_it_is_copied_until_it_is_pinned_anew(
    change: Callable[[Path], object], shared: Shared, device: Device, file: Path
) -> None:
    shared.share(opened(file))
    eventually_read(shared, file)
    change(file)
    assert read(shared, file, 0, 100) is None
    if file.stat().st_blocks * 512 >= file.stat().st_size:
        eventually(lambda: read(shared, file, 0, 100) == file.read_bytes()[:100], "it is pinned anew")
    assert len(device.pinned) <= 1


def test_a_change_within_a_clock_tick_of_the_pinning_is_seen(shared: Shared, device: Device, file: Path) -> None:
    changed = []
    pin = device.pin

    def pin_late(address: int, size: int) -> bool:
        if not changed:
            changed.append(file.write_bytes(os.urandom(SIZE)))
        return pin(address, size)

    device.pin = pin_late  # type: ignore[method-assign]
    shared.share(opened(file))
    eventually_read(shared, file)
    assert len(device.pinned) == 1


def test_memory_that_nobody_has_touched_is_not_taken_for_a_client(shared: Shared, device: Device, file: Path) -> None:
    os.truncate(file, 0)
    os.truncate(file, 64 << 20)
    shared.share(opened(file))
    done(shared)
    assert read(shared, file) is None
    assert device.asked == 0


def test_what_is_pinned_together_is_bounded(
    shared: Shared, device: Device, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "_MOST_BYTES", SIZE - 1)
    shared.share(opened(file))
    done(shared)
    assert read(shared, file) is None
    assert device.asked == 0


def test_a_device_that_cannot_is_asked_once_and_its_file_is_copied(shared: Shared, device: Device, file: Path) -> None:
    device.unwilling = True
    shared.share(opened(file))
    done(shared)
    assert [read(shared, file) for _ in range(3)] == [None] * 3
    done(shared)
    assert device.asked == 1


def test_a_file_is_let_go_of_when_it_is_forgotten_as_often_as_it_was_shared(
    shared: Shared, device: Device, file: Path
) -> None:
    for _ in range(2):
        shared.share(opened(file))
    shared.forget(opened(file))
    eventually_read(shared, file)
    shared.forget(opened(file))
    done(shared)
    assert read(shared, file) is None
    assert not device.pinned
    maps = Path("/proc/self/maps").read_text()
    assert file.name not in maps
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink() and file.name in str(fd.readlink())]


@pytest.mark.parametrize("why", ["it may not be read", "it becomes shorter while it is looked at"])
def test_a_file_that_cannot_be_mapped_is_copied_and_costs_no_other_its_place(
    shared: Shared, device: Device, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    bad = tmp_path / "bad"
    bad.write_bytes(os.urandom(SIZE))
    with monkeypatch.context() as patch:
        if why == "it may not be read":
            shared.share(os.open(bad, os.O_WRONLY))
        else:
            patch.setattr(Shared, "_may_pin", lambda *_: os.truncate(bad, 1) is None)
            shared.share(opened(bad))
        done(shared)
        assert read(shared, bad) is None
    shared.share(opened(file))
    eventually_read(shared, file)
    shared.forget(opened(bad))
    done(shared)
    assert len(device.pinned) == 1
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink() and str(bad) == str(fd.readlink())]


def test_a_file_that_a_run_reads_stays_pinned_until_the_run_has_ended(
    shared: Shared, device: Device, file: Path
) -> None:
    shared.share(opened(file))
    eventually_read(shared, file)
    descriptor = opened(file)
    taken = shared.take(descriptor, 0, SIZE)
    os.close(descriptor)
    assert taken is not None
    shared.forget(opened(file))
    eventually(lambda: read(shared, file) is None, "nobody takes it any more")
    eventually(lambda: shared._released._waiters, "it waits for the run")  # type: ignore[attr-defined]
    assert device.pinned
    shared.give(taken[0])
    eventually(lambda: not device.pinned, "it is let go of")


@pytest.mark.parametrize("unwilling", [False, True])
def test_whether_a_device_can_at_all_is_tried(unwilling: bool, device: Device) -> None:
    device.unwilling = unwilling
    assert can_pin(device) is not unwilling
    assert device.asked == 1
    assert not device.pinned


def test_contents_are_never_looked_at_so_a_file_that_became_shorter_ends_nobody(shared: Shared, file: Path) -> None:
    shared.share(opened(file))
    eventually_read(shared, file)
    os.truncate(file, 1)
    assert read(shared, file, 0, 1) is None
    done(shared)
    assert np.frombuffer(file.read_bytes(), np.uint8).size == 1
