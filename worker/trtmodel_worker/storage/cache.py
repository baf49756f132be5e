"""The local cache: files named by the sha256 of their content.

    <cache>/sha256/<digest>     complete and verified
    <cache>/tmp/<random>        being written; renamed when complete

Identity is the content's digest alone: neither a length, nor a time, nor an ETag is believed (an ETag is no MD5 for
multipart or KMS objects).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trtmodel_contract.jobs import Reason

from trtmodel_worker.storage.errors import StorageError

CHUNK_BYTES = 1 << 20
STALE_SECONDS = 3600  # a temporary file that is older was left by a process that died


class Reader(Protocol):
    def read(self, amount: int, /) -> bytes: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Fetched:
    """A verified local copy."""

    path: Path
    digest: str
    size: int


def path_of(cache: Path, digest: str) -> Path:
    return cache / "sha256" / digest


def digest_of(path: Path) -> tuple[str, int]:
    """sha256 and size of a file, read in chunks."""
    found, size = hashlib.sha256(), 0
    with path.open("rb") as f:
        while chunk := f.read(CHUNK_BYTES):
            found.update(chunk)
            size += len(chunk)
    return found.hexdigest(), size


def lookup(cache: Path, digest: str) -> Fetched | None:
    """The cached copy, read and hashed again: a disk may lie. A damaged or unreadable copy is none; it is removed where
    that is possible."""
    path = path_of(cache, digest)
    try:
        found, size = digest_of(path)
    except FileNotFoundError:
        return None
    except OSError:
        found, size = "", 0
    if found == digest:
        return Fetched(path, digest, size)
    with contextlib.suppress(OSError):
        path.unlink()
    return None


def store(cache: Path, reader: Reader, what: str, expected: str = "", most: int | None = None) -> Fetched:
    """Copy `reader` into the cache while hashing it. Raises StorageError (DigestMismatch) if `expected` is given and
    the content has another digest, or as soon as it is longer than `most` bytes; then nothing is kept. OSError passes
    through."""
    (cache / "sha256").mkdir(parents=True, exist_ok=True)
    (cache / "tmp").mkdir(exist_ok=True)
    temporary = cache / "tmp" / uuid.uuid4().hex
    found, size = hashlib.sha256(), 0
    try:
        with temporary.open("xb") as f:
            while chunk := reader.read(CHUNK_BYTES):
                if most is not None and size + len(chunk) > most:
                    text = f"{what}: the content is longer than the expected {most:,} bytes: somebody changed it"
                    raise StorageError(Reason.DIGEST_MISMATCH, text)
                f.write(chunk)
                found.update(chunk)
                size += len(chunk)
            f.flush()
            os.fsync(f.fileno())
        digest = found.hexdigest()
        if expected and digest != expected:
            text = f"{what}: the content's sha256 is {digest} ({size:,} bytes), expected {expected}"
            raise StorageError(Reason.DIGEST_MISMATCH, text)
        target = path_of(cache, digest)
        temporary.replace(target)
        _sync_directory(target.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return Fetched(target, digest, size)


def prune(cache: Path, keep: Collection[str]) -> int:
    """Remove cached files that are not in `keep` (digests), and what dead processes left. Returns bytes freed."""
    freed = 0
    for path, removable in _entries(cache, keep):
        if removable:
            with contextlib.suppress(FileNotFoundError):
                freed += path.stat().st_size
                path.unlink()
    return freed


def _entries(cache: Path, keep: Collection[str]) -> Iterator[tuple[Path, bool]]:
    for path in (cache / "sha256").glob("*"):
        yield path, path.name not in keep
    for path in (cache / "tmp").glob("*"):
        with contextlib.suppress(FileNotFoundError):
            yield path, time.time() - path.stat().st_mtime > STALE_SECONDS


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
