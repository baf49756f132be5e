"""The local cache: files named by the sha256 of their content.

    <cache>/sha256/<digest>         a file, complete and verified
    <cache>/sources/<identity>/     a source of several files under their own names, complete and verified
    <cache>/partial/...             being downloaded in parts; a later process goes on there
    <cache>/tmp/<random>            being written; renamed when complete

Identity is the content's digest alone: neither a length, nor a time, nor an ETag is believed (an ETag is no MD5 for
multipart or KMS objects). The cache belongs to one pod, or to the pods of one namespace on a volume of the user's.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trtmodel_contract.jobs import Reason

from trtmodel_worker.storage.errors import StorageError

CHUNK_BYTES = 1 << 20
LIMIT_ENV = "TRTMODEL_CACHE_BYTES"
STALE_SECONDS = 3600  # what nobody has written to for so long was left by a process that died
_MOVES = 10
FILES, SOURCES, PARTIAL, TMP = "sha256", "sources", "partial", "tmp"


@dataclass(frozen=True)
class Fetched:
    """A verified local copy."""

    path: Path
    digest: str
    size: int


def prepare(cache: Path) -> None:
    """The folders are there and can be written to. Raises StorageError."""
    try:
        for name in (FILES, SOURCES, PARTIAL, TMP):
            (cache / name).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        text = f"the cache directory {cache} cannot be written to: {e.strerror}"
        way = "mount a volume there that this user may write to, with space left"
        raise StorageError(Reason.NO_SPACE, f"{text}: {way}", transient=True) from e


def require_room(cache: Path, size: int, what: str) -> None:
    """Raises StorageError (NoSpace) now, where the disk would be full in the middle."""
    disk = os.statvfs(cache)
    free = disk.f_bavail * disk.f_frsize
    if size > free:
        text = f"{what}: {size:,} bytes do not fit on the local disk, which has {free:,} left"
        raise StorageError(Reason.NO_SPACE, f"{text}: give the pod more ephemeral storage", transient=True)


def path_of(cache: Path, digest: str) -> Path:
    return cache / FILES / digest


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
        used(path)
        return Fetched(path, digest, size)
    with contextlib.suppress(OSError):
        path.unlink()
    return None


def install(cache: Path, staging: Path, target: Path, good: Callable[[], bool]) -> None:
    """The folder `staging` becomes `target`. What lies there is kept if it is `good`: another process may have put it
    there just now, and read from it. Otherwise it is moved out of the way. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(_MOVES):
        try:
            staging.rename(target)
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            sync_directory(target.parent)
            return
        if good():
            shutil.rmtree(staging, ignore_errors=True)
            return
        with contextlib.suppress(FileNotFoundError):
            target.rename(cache / TMP / uuid.uuid4().hex)
    raise OSError(errno.EBUSY, "others put it there and damage it again and again", str(target))


def used(path: Path) -> None:
    """Note for `shrink` that somebody wanted it."""
    with contextlib.suppress(OSError):
        os.utime(path)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune(cache: Path, keep: Collection[str]) -> int:
    """Remove what is cached and not in `keep` (digests), and what dead processes left. Returns bytes freed."""
    freed = 0
    for path in _children(cache / FILES, cache / SOURCES):
        if path.name not in keep:
            freed += _remove(path)
    return freed + _remove_stale(cache)


def shrink(cache: Path, limit: int) -> int:
    """Remove the entries that nobody has used for longest until what is cached has at most `limit` bytes. What was used
    in the last STALE_SECONDS stays: somebody may be reading it. Returns bytes freed."""
    freed = _remove_stale(cache)
    entries = [
        (used_at, size, path) for path in _children(cache / FILES, cache / SOURCES) for used_at, size in _measure(path)
    ]
    total = sum(size for _, size, _ in entries)
    for used_at, size, path in sorted(entries):
        if total <= limit or time.time() - used_at <= STALE_SECONDS:
            break
        freed += _remove(path)
        total -= size
    return freed


def stated_limit(environ: Mapping[str, str]) -> int | None:
    """How many bytes a cache may grow to, as LIMIT_ENV says; None if it says nothing. Raises ValueError."""
    text = environ.get(LIMIT_ENV, "")
    if text and not text.isdecimal():
        raise ValueError(f"{LIMIT_ENV} is {text[:40]!r}: give a whole number of bytes")
    return int(text) if text else None


def _remove_stale(cache: Path) -> int:
    freed = 0
    for path in _children(cache / TMP, cache / PARTIAL):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                freed += _remove(path)
    return freed


def _children(*folders: Path) -> Iterator[Path]:
    for folder in folders:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            yield from list(folder.iterdir())


def _measure(path: Path) -> Iterator[tuple[float, int]]:
    """(last use, bytes), nothing if it is gone."""
    with contextlib.suppress(OSError):
        inside = path.rglob("*") if path.is_dir() else (path,)
        size = sum(p.lstat().st_size for p in inside if not p.is_dir())
        yield path.stat().st_mtime, size


def _remove(path: Path) -> int:
    size = sum(size for _, size in _measure(path))
    try:
        path.unlink()
    except FileNotFoundError:
        return 0
    except OSError as e:
        if e.errno not in (errno.EISDIR, errno.EPERM):
            raise
        shutil.rmtree(path, ignore_errors=True)
    return size
