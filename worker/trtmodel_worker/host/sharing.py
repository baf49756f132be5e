"""Files of clients that a device reads by itself: what a processor would spend on copying them is saved.

A copy of 588 KiB took 85 us of the 600 us that a run of it takes. So the front tells a host of each file of which a
client registers a region, and the host maps it and has its pages pinned for the device. Nothing here looks at what is
mapped: a client that makes its file shorter would end a process that does. The device reads pages that are pinned,
whatever becomes of the file.

That is why a pinned file is used only while it is as it was: what a client cuts off and writes anew lies in other
pages. Each cut, hole and write sets the file's ctime (so does the first store into each page of a mapping, no later
one), and ctime moves with the kernel's clock tick. So a file is pinned some ticks after the last change; after another
one it is copied again, and pinned again later.
"""

from __future__ import annotations

import logging
import mmap
import os
import queue
import threading
import time
from dataclasses import dataclass, field

import numpy as np

from trtmodel_worker import kernel
from trtmodel_worker.engines.base import Array, PinningEngine

log = logging.getLogger(__name__)
LEAST_BYTES = 16 << 10
"""A smaller piece is copied as fast as the device is told of it."""
_MOST_BYTES = 256 << 20  # of all files together: what is pinned cannot be moved or written out
_AGE_NS = 50_000_000  # a tick is 10 ms at most (HZ=100)
_TRIES = 3
_FIRST_PAUSE_SECONDS = 1.0  # before a file that has changed is pinned again; then twice as long, each time
_PAGE = mmap.PAGESIZE

Key = tuple[int, int]
"""Device and inode."""


@dataclass
class SharedFile:
    """`shares`: how often it was shared and not forgotten. `users`: runs that it is read for now. `ctime`: in ns, when
    it was pinned or could not be. `address`: where its first byte is, 0 while it is not pinned."""

    descriptor: int
    shares: int = 0
    users: int = 0
    ctime: int = 0
    size: int = 0
    address: int = 0
    array: Array | None = None
    pause: float = _FIRST_PAUSE_SECONDS
    again: float = 0.0
    asked: bool = field(default=False)


class Shared:
    """What a host knows of such files. `share` and `forget` return at once: a thread does the work. `take` and `give`
    are the lanes'."""

    def __init__(self, engine: PinningEngine) -> None:
        self._engine = engine
        self._files: dict[Key, SharedFile] = {}
        self._lock = threading.Lock()
        self._released = threading.Condition(self._lock)
        self._work: queue.SimpleQueue[tuple[str, int | Key]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="sharing", daemon=True).start()

    def share(self, descriptor: int) -> None:
        """Takes the descriptor."""
        self._work.put(("share", descriptor))

    def forget(self, descriptor: int) -> None:
        """Takes the descriptor, which need not be the one that was shared, but of the same file."""
        self._work.put(("forget", descriptor))

    def take(self, descriptor: int, at: int, size: int) -> tuple[SharedFile, int] | None:
        """The file and the address of these bytes of it, for the device only and until it is given back; None if they
        have to be copied."""
        status = os.fstat(descriptor)
        key = (status.st_dev, status.st_ino)
        with self._lock:
            file = self._files.get(key)
            if file is None:
                return None
            if file.ctime != status.st_ctime_ns:
                if not file.asked and time.monotonic() >= file.again:
                    file.asked = True
                    self._work.put(("renew", key))
                return None
            if not file.address or at + size > file.size:
                return None
            file.users += 1
            return file, file.address + at

    def give(self, file: SharedFile) -> None:
        with self._lock:
            file.users -= 1
            if not file.users:
                self._released.notify_all()

    # -- its thread

    def _run(self) -> None:
        while True:
            what, subject = self._work.get()
            try:
                if isinstance(subject, tuple):
                    self._renew(subject)
                elif what == "share":
                    self._share(subject)
                else:
                    self._forget(subject)
            except OSError as e:
                log.warning("a client's file cannot be shared, so it is copied: %s", e)

    def _share(self, descriptor: int) -> None:
        key = _key(descriptor)
        file = self._files.get(key)
        if file is not None:
            file.shares += 1
            os.close(descriptor)
            return
        file = SharedFile(descriptor, shares=1)
        self._pin(file)
        with self._lock:
            self._files[key] = file

    def _forget(self, descriptor: int) -> None:
        key = _key(descriptor)
        os.close(descriptor)
        file = self._files.get(key)
        if file is None:
            return
        file.shares -= 1
        if not file.shares:
            with self._lock:
                del self._files[key]
            self._unpin(file)
            os.close(file.descriptor)

    def _renew(self, key: Key) -> None:
        file = self._files.get(key)
        if file is None:
            return
        with self._lock:
            file.ctime = 0  # nobody takes it meanwhile
        self._unpin(file)
        self._pin(file)
        file.again, file.pause = time.monotonic() + file.pause, 2.0 * file.pause
        file.asked = False

    def _pin(self, file: SharedFile) -> None:
        """Or find that it cannot be, as it is now."""
        for _ in range(_TRIES):
            status = os.fstat(file.descriptor)
            age = time.time_ns() - status.st_ctime_ns
            if age >= _AGE_NS:
                break
            time.sleep(min(_AGE_NS, _AGE_NS - age) / 1e9)
        else:
            return  # it changes all the time
        file.ctime = status.st_ctime_ns  # of before: a change meanwhile shows
        if not self._may_pin(status):
            return
        try:
            mapped = mmap.mmap(file.descriptor, status.st_size, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as e:  # ValueError: it became shorter since it was looked at
            log.warning("a client's file cannot be mapped, so it is copied: %s", e)
            return
        array: Array = np.frombuffer(mapped, np.uint8)
        address = int(array.ctypes.data)
        if self._engine.pin(address, -(-status.st_size // _PAGE) * _PAGE):
            file.array, file.size, file.address = array, status.st_size, address

    def _may_pin(self, status: os.stat_result) -> bool:
        """Not if there is nothing to gain, or if it would take memory that is not taken yet: pages that nobody has
        touched would be this process's to pay for."""
        held = sum(file.size for file in self._files.values() if file.address)
        taken = 512 * status.st_blocks >= status.st_size
        return LEAST_BYTES <= status.st_size <= _MOST_BYTES - held and taken

    def _unpin(self, file: SharedFile) -> None:
        if not file.address:
            return
        with self._lock:
            while file.users:
                self._released.wait()
            address, file.address = file.address, 0
        self._engine.unpin(address)
        file.array = None


def can_pin(engine: PinningEngine) -> bool:
    """Whether it pins memory that is mapped as a client's file is: tried on a page. Raises OSError."""
    file = kernel.memory_file("trtmodel-pin")
    try:
        os.ftruncate(file, _PAGE)
        page = np.frombuffer(mmap.mmap(file, _PAGE, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
    finally:
        os.close(file)
    address = int(page.ctypes.data)
    if not engine.pin(address, _PAGE):
        return False
    engine.unpin(address)
    return True


def _key(descriptor: int) -> Key:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
