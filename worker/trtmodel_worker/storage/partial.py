"""A file that is downloaded in parts, any of them first, and goes on where a killed process stopped.

    <cache>/partial/<name>          as long as the object from the start, with holes
    <cache>/partial/<name>.parts    a line per part that is there: its number and its sha256

The name stands for one version of one object, so parts of two versions never meet in a file. What the journal says is
believed after the bytes were hashed again: a machine that lost its power may have kept the one without the other.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

PART_BYTES = 8 << 20
_READ_BYTES = 1 << 20


class Partial:
    """Raises OSError. Nobody else writes to it while it is open. Methods may be called from several threads."""

    def __init__(self, folder: Path, name: str, size: int) -> None:
        self.size = size
        self.count = -(-size // PART_BYTES)
        self.path, self._file = _claim(folder, name)
        self._journal_path = self.path.with_name(f"{self.path.name}.parts")
        self._journal = -1
        self._lock = threading.Lock()
        try:
            os.ftruncate(self._file, size)
            self._journal = os.open(self._journal_path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            self.there = frozenset(self._verified())
        except BaseException:
            self.close()
            raise

    def span(self, part: int) -> tuple[int, int]:
        return part * PART_BYTES, min((part + 1) * PART_BYTES, self.size)

    def write(self, data: bytes, at: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._file, view, at)
            view, at = view[written:], at + written

    def done(self, part: int, digest: str) -> None:
        """All bytes of `part` are written and have this sha256."""
        with self._lock:
            os.write(self._journal, f"{part} {digest}\n".encode())

    def read(self, part: int) -> Iterator[bytes]:
        at, end = self.span(part)
        while at < end:
            chunk = os.pread(self._file, min(_READ_BYTES, end - at), at)
            if not chunk:
                raise OSError(f"{self.path} was cut off by somebody else")
            yield chunk
            at += len(chunk)

    def close(self) -> None:
        """What is there stays for the next one."""
        for descriptor in (self._file, self._journal):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._journal = -1

    def finish(self) -> Path:
        """The whole file, safe on the disk. It stays here, with its journal, until somebody moves it (`moved_away`)."""
        os.fsync(self._file)
        self.close()
        return self.path

    def discard(self) -> None:
        self.close()
        for path in (self.path, self._journal_path):
            with contextlib.suppress(OSError):
                path.unlink()

    def _verified(self) -> Iterator[int]:
        lines = os.pread(self._journal, os.fstat(self._journal).st_size, 0).decode("ascii", "replace").splitlines()
        for line in lines:
            number, _, digest = line.partition(" ")
            if number.isdigit() and int(number) < self.count:
                found = hashlib.sha256()
                for chunk in self.read(int(number)):
                    found.update(chunk)
                if found.hexdigest() == digest:
                    yield int(number)


def drop_journal(path: Path) -> None:
    """After the file of a Partial was moved to where it belongs."""
    with contextlib.suppress(OSError):
        path.with_name(f"{path.name}.parts").unlink()


def _claim(folder: Path, name: str) -> tuple[Path, int]:
    """The file, locked; another one of our own if somebody writes to it already, or locks are not to be had here."""
    path = folder / name
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The one before may have moved it to its place between our two calls: those bytes are nobody's to write to.
        if os.path.samestat(os.fstat(file), path.stat()):
            return path, file
    except OSError:
        pass
    os.close(file)
    path = folder / uuid.uuid4().hex
    return path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
