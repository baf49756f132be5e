"""The system shared memory extension: tensors of clients on this machine, in files of /dev/shm.

A client registers a region, a part of such a file, under a name, and names it in requests. The file is read and
written with system calls and never mapped here: a client that makes it shorter meanwhile would kill a process that
looks at what it has mapped. Hosts of a device are told of it (see ``host/sharing.py``).
Only files whose names begin with the prefix of the settings are opened, nothing else than regular files, and no link is
followed.
"""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtmodel_worker.front.calls import Unreadable
from trtmodel_worker.front.jsoncodec import short
from trtmodel_worker.front.models import Invalid
from trtmodel_worker.front.sharing import ClientFile, Sharing
from trtmodel_worker.host.reading import Unread, read_into

DIRECTORY = "/dev/shm"  # noqa: S108 - POSIX shared memory: where shm_open has its files on Linux
MAX_REGIONS = 256
_FILES = 2  # that each of them opens, and
_PART_OF_FILES = 4  # of those that this process may open: connections have the half, the rest is for everything else
_MOST_OFFSET = 1 << 62
_MOST_NAME = 256


@dataclass(frozen=True)
class MemoryRef:
    """Bytes that a request names: within the region `name`, from `offset` on."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class _Region:
    key: str
    offset: int
    size: int
    file: ClientFile


class RegionBytes:
    """An Elsewhere: bytes of a region. The client leaves them as they are until it has its answer."""

    __slots__ = ("_name", "_size", "at", "file")

    def __init__(self, name: str, file: ClientFile, at: int, size: int) -> None:
        self._name = name
        self.file = file
        self._size = size
        self.at = at

    def __len__(self) -> int:
        return self._size

    def read_into(self, place: memoryview) -> None:
        try:
            read_into(place, self.file.reader, self.at)
        except Unread as e:
            raise Unreadable(f"the region {self._name!r}: {e}") from e

    def copy(self) -> memoryview:
        found = memoryview(bytearray(self._size))
        self.read_into(found)
        return found


class Regions:
    """What is registered. `prefix` '': the extension is off. `sharing`: who is told of files."""

    def __init__(self, prefix: str, sharing: Sharing | None = None) -> None:
        self._prefix = prefix
        self._sharing = sharing or Sharing()
        self._regions: dict[str, _Region] = {}

    @property
    def most(self) -> int:
        """How many there may be."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return MAX_REGIONS if files == resource.RLIM_INFINITY else min(MAX_REGIONS, files // _PART_OF_FILES // _FILES)

    @property
    def enabled(self) -> bool:
        return bool(self._prefix)

    def register(self, name: str, document: Mapping[str, Any]) -> None:
        """`document`: {"key": name of the file, with or without a leading slash, "offset": 0, "byte_size": ...}.
        Raises Invalid."""
        key = document.get("key")
        offset = _number(document, "offset", 0, low=0)
        size = _number(document, "byte_size", None, low=1)
        if not isinstance(key, str):
            raise Invalid(f"key must be the name of a shared memory file, not {short(key)}")
        if len(name) > _MOST_NAME:
            raise Invalid(f"a region's name may have {_MOST_NAME} characters")
        if name in self._regions:
            raise Invalid(f"the region {name!r} is registered already: unregister it first")
        if len(self._regions) >= self.most:
            raise Invalid(f"{self.most} regions are registered already: unregister those that are not used")
        try:
            file = ClientFile(self._open(key.removeprefix("/")))
        except OSError as e:
            raise Invalid(f"the shared memory {short(key)} cannot be opened: {e.strerror}") from e
        _check_within(file.fd, offset + size, key)
        self._regions[name] = _Region(key, offset, size, file)
        self._sharing.add(file)

    def unregister(self, name: str | None) -> None:
        """All of them, if no name is given. One that is not registered is none to complain of."""
        for each in [name] if name is not None else list(self._regions):
            region = self._regions.pop(each, None)
            if region is not None:
                self._sharing.remove(region.file)

    def status(self, name: str | None) -> list[dict[str, Any]]:
        """As the protocol lists them. Raises Invalid if the one that is named is not registered."""
        if name is not None:
            self._region(name)
        return [
            {"name": each, "key": region.key, "offset": region.offset, "byte_size": region.size}
            for each, region in self._regions.items()
            if name in (None, each)
        ]

    def at(self, ref: MemoryRef) -> RegionBytes:
        """What the region holds there. Raises Invalid."""
        region = self._within(ref)
        found = RegionBytes(ref.name, region.file, region.offset + ref.offset, ref.size)
        if os.fstat(region.file.fd).st_size < region.offset + ref.offset + ref.size:
            raise Invalid(f"the file of the region {ref.name!r} is shorter than it was when it was registered")
        return found

    def read(self, ref: MemoryRef) -> memoryview:
        """A copy of what the region holds there now. Raises Invalid."""
        try:
            return self.at(ref).copy()
        except Unreadable as e:
            raise Invalid(str(e)) from e

    def write(self, ref: MemoryRef, view: memoryview) -> None:
        """Put an output there. Raises Invalid."""
        region = self._within(ref)
        if len(view) > ref.size:
            raise Invalid(f"it is {len(view):,} bytes, shared_memory_byte_size leaves it {ref.size:,}")
        at = region.offset + ref.offset
        try:
            _check_within(region.file.fd, at + len(view), region.key)
            written = os.pwrite(region.file.fd, view, at)
        except OSError as e:
            raise Invalid(f"the region {ref.name!r} cannot be written: {e.strerror}") from e
        if written != len(view):
            raise Invalid(f"the region {ref.name!r} has no memory left: {written:,} of {len(view):,} bytes went in")

    def _within(self, ref: MemoryRef) -> _Region:
        region = self._region(ref.name)
        if ref.offset + ref.size > region.size:
            raise Invalid(f"the region {ref.name!r} has {region.size:,} bytes: {ref.size:,} from {ref.offset:,} on "
                          "are not within it")  # fmt: skip
        return region

    def _region(self, name: str) -> _Region:
        region = self._regions.get(name)
        if region is None:
            way = "register it" if self.enabled else "system shared memory is not enabled for this worker"
            raise Invalid(f"no shared memory region {short(name)} is registered: {way}")
        return region

    def _open(self, key: str) -> int:
        if not key.startswith(self._prefix) or "/" in key or "\0" in key or key in ("", ".", ".."):
            raise Invalid(f"key must be a name without slashes that begins with {self._prefix!r}, not {short(key)}")
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        try:
            fd = os.open(f"{DIRECTORY}/{key}", flags)
        except OSError as e:
            raise Invalid(f"the shared memory {short(key)} cannot be opened: {e.strerror}") from e
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise Invalid(f"{short(key)} is no shared memory file")
        return fd


def _number(document: Mapping[str, Any], what: str, default: int | None, low: int) -> int:
    value = document.get(what, default)
    if type(value) is not int or not low <= value <= _MOST_OFFSET:
        raise Invalid(f"{what} must be a number of bytes, not {short(value)}")
    return value


def memory_ref(parameters: Mapping[str, Any]) -> MemoryRef | None:
    """The part of a region that a tensor's parameters name; None if they name none. Raises Invalid."""
    name = parameters.get("shared_memory_region")
    if name is None:
        return None
    if not isinstance(name, str):
        raise Invalid(f"shared_memory_region must be a name, not {short(name)}")
    offset = _number(parameters, "shared_memory_offset", 0, low=0)
    return MemoryRef(name, offset, _number(parameters, "shared_memory_byte_size", None, low=0))


def _check_within(fd: int, end: int, key: str) -> None:
    size = os.fstat(fd).st_size
    if end > size:
        raise Invalid(f"the shared memory {short(key)} has {size:,} bytes, so nothing can end at {end:,}")
