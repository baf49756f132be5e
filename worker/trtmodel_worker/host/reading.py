"""Large inputs that lie in a client's file are read where they are run: the front's one loop would spend more time on
copying them than on everything else (4 rows of 588 KiB: 0.5 of the 0.6 ms that it took for a request).

What is to be read is told with the run; the front has sent the files' descriptors before (see wire.py).
"""

from __future__ import annotations

import functools
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from trtmodel_worker.host.wire import MessageError, parse_reads

WORTH_BYTES = 64 << 10
"""From here on a read is left to the host: smaller ones take no longer than to tell of them."""
ALONE_BYTES = 1 << 20
"""The same while nobody else wants anything of the front's loop: then telling only takes time."""
MOST_READS = 200
"""Of a batch."""
_PART_BYTES = 2 << 20  # that much takes a thread some 400 us (5 GB/s was seen), several times what waking another takes
_MOST_READERS = 4


class Unread(Exception):
    """The bytes are not there. The text says why."""


class Read(NamedTuple):
    """`size` bytes of a file from `at` on, and where in the arena they go."""

    descriptor: int
    at: int
    place: int
    size: int


class Files:
    """Those that have a number on a lane: to send a descriptor with each run took as long as to read 100 KiB."""

    def __init__(self) -> None:
        self._descriptors: dict[int, int] = {}

    def told(self, number: int, forget: bool, channel: socket.socket) -> None:
        """Raises MessageError, OSError."""
        if forget:
            descriptor = self._descriptors.pop(number, -1)
            if descriptor >= 0:
                os.close(descriptor)
            return
        _, descriptors, _, _ = socket.recv_fds(channel, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if len(descriptors) != 1 or number in self._descriptors:
            raise MessageError(f"file {number} came with {len(descriptors)} descriptors, or a second time")
        self._descriptors[number] = descriptors[0]

    def reads(self, data: bytes) -> list[Read]:
        """Raises MessageError."""
        try:
            return [Read(self._descriptors[number], at, place, size) for number, at, place, size in parse_reads(data)]
        except KeyError as e:
            raise MessageError(f"what is to be read lies in file {e}, which has no such number") from e


def read_into(place: memoryview, descriptor: int, at: int) -> None:
    """A lot is shared with other threads that have nothing to do. Raises Unread."""
    size = len(place)
    parts = min(_MOST_READERS, len(os.sched_getaffinity(0)), size // _PART_BYTES)
    if parts < 2:
        _read(place, descriptor, at)
        return
    step = -(-size // parts)
    others = [
        (_readers().submit(_read, place[start : start + step], descriptor, at + start), start)
        for start in range(step, size, step)
    ]
    failure: Unread | None = None
    for future, start in [(None, 0), *reversed(others)]:
        try:
            if future is None or future.cancel():  # nobody has begun with it
                _read(place[start : start + step], descriptor, at + start)
            else:
                future.result()
        except Unread as e:
            failure = e  # but the others still write
    if failure is not None:
        raise failure


def _read(place: memoryview, descriptor: int, at: int) -> None:
    try:
        read = os.preadv(descriptor, [place], at)
    except OSError as e:
        raise Unread(f"it cannot be read: {e.strerror}") from e
    if read != len(place):
        raise Unread("its file is shorter than it was when it was registered")


@functools.cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MOST_READERS - 1, thread_name_prefix="reader")
