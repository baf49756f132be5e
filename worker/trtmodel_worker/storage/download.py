"""One object into one local file: in parts over several connections where the store can do that, else in one go.

    open -> version, size
      large, with ranges    parts side by side, each tied to that version; hashed in their order from the page cache;
                            what is there survives a kill (see partial.py)
      else                  streamed and hashed on the way; from the start again after a fault

Memory: a chunk for each connection. Nothing is returned that is not complete and, where its digest is known, right.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from trtmodel_contract.jobs import Reason

from trtmodel_worker.storage.cache import PARTIAL, TMP, prepare, require_room
from trtmodel_worker.storage.errors import Moved, StorageError, Unranged, from_exception, unavailable
from trtmodel_worker.storage.partial import PART_BYTES, Partial, drop_journal
from trtmodel_worker.storage.remote import Reader, Remote, Version

ATTEMPTS = 3
PAUSES_SECONDS = (0.5, 2.0)
CONNECTIONS = 4
CHUNK_BYTES = 256 << 10
PROGRESS_BYTES = 1 << 20  # a connection that brought so much was a good one: its fault is not added to those before
UNSTATED_MOST_BYTES = 16 << 30  # of a server that does not say how much it sends: it may never end
SLOW_SECONDS, SLOW_BYTES = 30.0, 64 << 10  # less than that in such a time is a connection that does not work
TELL_SECONDS = 10.0

log = logging.getLogger("trtmodel.storage")


@dataclass(frozen=True)
class Landed:
    """A complete file of `<cache>/partial` or `<cache>/tmp`, for the caller to move to its place."""

    path: Path
    digest: str
    size: int
    version: Version

    def move(self, target: Path) -> None:
        self.path.replace(target)
        drop_journal(self.path)

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()
        drop_journal(self.path)


def download(
    remote: Remote, cache: Path, expected: str = "", most: int | None = None, connections: int = CONNECTIONS
) -> Landed:
    """`expected`: the sha256. More than `most` bytes cannot be what is wanted and are not read. Raises StorageError."""
    wrong = ""
    for pause in (*PAUSES_SECONDS, None):
        try:
            landed = _once(remote, cache, most, connections)
            if not expected or landed.digest == expected:
                return landed
            landed.discard()
            text = (
                f"{remote.what}: the content's sha256 is {landed.digest} ({landed.size:,} bytes), expected {expected}"
            )
            # The same wrong bytes twice are what lies there; otherwise they were damaged on their way.
            error = StorageError(Reason.DIGEST_MISMATCH, text, transient=landed.digest != wrong)
            wrong = landed.digest
            raise error
        except Exception as e:
            error = from_exception(e, remote.what)
            if not error.transient or error.reason is Reason.NO_SPACE or pause is None:
                raise error from e
        log.warning("%s: trying again in %.1f s", error.message, pause)
        time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def _once(remote: Remote, cache: Path, most: int | None, connections: int) -> Landed:
    prepare(cache)
    with remote.open() as (version, reader):
        if version.size is not None and most is not None and version.size > most:
            raise _too_long(remote.what, most)
        if not version.ranges or version.size is None or version.size <= PART_BYTES:
            return _whole(remote.what, version, reader, cache, most)
    try:
        return _in_parts(remote, version, cache, connections)
    except Unranged:
        log.info("%s: the server ignores ranges: reading it in one go", remote.what)
    with remote.open() as (version, reader):
        return _whole(remote.what, version, reader, cache, most)


def _whole(what: str, version: Version, reader: Reader, cache: Path, most: int | None) -> Landed:
    require_room(cache, version.size or 0, what)
    path = cache / TMP / uuid.uuid4().hex
    found, size = hashlib.sha256(), 0
    pace, told = _Pace(what), _Told(what, version.size)
    try:
        with path.open("xb") as f:
            while chunk := reader.read(CHUNK_BYTES):
                size += len(chunk)
                if most is not None and size > most:
                    raise _too_long(what, most)
                if version.size is None and size > UNSTATED_MOST_BYTES:
                    text = (
                        f"{what}: the server does not say how long it is, and sends more than {UNSTATED_MOST_BYTES:,}"
                    )
                    raise StorageError(Reason.SOURCE_NOT_FOUND, f"{text} bytes: have it send a Content-Length")
                f.write(chunk)
                found.update(chunk)
                pace.add(len(chunk))
                told.add(len(chunk))
            if version.size is not None and size != version.size:
                raise unavailable(f"{what}: the connection ended {version.size - size:,} bytes early")
            f.flush()
            os.fsync(f.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return Landed(path, found.hexdigest(), size, version)


def _in_parts(remote: Remote, version: Version, cache: Path, connections: int) -> Landed:
    assert version.size is not None
    name = hashlib.sha256(json.dumps([remote.what, version.tag, version.id, version.size, PART_BYTES]).encode())
    partial = Partial(cache / PARTIAL, name.hexdigest()[:32], version.size)
    try:
        require_room(cache, version.size - len(partial.there) * PART_BYTES, remote.what)
        if partial.there:
            log.info("%s: %d of %d parts are here already", remote.what, len(partial.there), partial.count)
        digest = _Parts(remote, version, partial).fetch(connections)
        return Landed(partial.finish(), digest, version.size, version)
    except BaseException as e:
        # What an ended process or a lost connection leaves is worth keeping; a full disk is not helped by it, and
        # what was replaced at its source is never asked for again.
        if isinstance(e, Exception) and not _worth_keeping(from_exception(e, remote.what)):
            partial.discard()
        else:
            partial.close()
        raise


def _worth_keeping(error: StorageError) -> bool:
    return error.transient and error.reason is not Reason.NO_SPACE and not isinstance(error, Moved)


class _Parts:
    """The parts that are not there yet, over several connections."""

    def __init__(self, remote: Remote, version: Version, partial: Partial) -> None:
        self._remote, self._version, self._partial = remote, version, partial
        self._stop = threading.Event()
        self._told = _Told(remote.what, version.size)

    def fetch(self, connections: int) -> str:
        """The sha256 of the whole."""
        found = hashlib.sha256()
        partial = self._partial
        with ThreadPoolExecutor(connections, "download") as pool:
            wanted = (part for part in range(partial.count) if part not in partial.there)
            coming: dict[int, Future[None]] = {part: pool.submit(self._part, part) for part in wanted}
            try:
                for part in range(partial.count):
                    if part in coming:
                        coming.pop(part).result()
                    for chunk in partial.read(part):
                        found.update(chunk)
            except BaseException:
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return found.hexdigest()

    def _part(self, part: int) -> None:
        at, end = self._partial.span(part)
        found = hashlib.sha256()
        faults = 0
        while at < end:
            begun = at
            try:
                with self._remote.open_part(self._version, at, end) as reader:
                    pace = _Pace(self._remote.what)
                    while at < end:
                        chunk = reader.read(min(CHUNK_BYTES, end - at))
                        if self._stop.is_set():
                            return
                        if not chunk:
                            raise unavailable(f"{self._remote.what}: the connection ended {end - at:,} bytes early")
                        self._partial.write(chunk, at)
                        found.update(chunk)
                        at += len(chunk)
                        pace.add(len(chunk))
                        self._told.add(len(chunk))
            except Exception as e:
                error = from_exception(e, self._remote.what)
                faults = 1 if at - begun >= PROGRESS_BYTES else faults + 1
                if not _worth_keeping(error) or faults >= ATTEMPTS or self._stop.wait(PAUSES_SECONDS[faults - 1]):
                    raise error from e
                log.warning("%s: going on at byte %d", error.message, at)
        self._partial.done(part, found.hexdigest())


class _Pace:
    """Notices a connection that trickles: each read ends in time, and the whole never does."""

    def __init__(self, what: str) -> None:
        self._what, self._since, self._bytes = what, time.monotonic(), 0

    def add(self, count: int) -> None:
        self._bytes += count
        seconds = time.monotonic() - self._since
        if seconds < SLOW_SECONDS:
            return
        if self._bytes < SLOW_BYTES:
            text = f"the connection brought {self._bytes:,} bytes in {seconds:.0f} s: check the network to the storage"
            raise unavailable(f"{self._what}: {text}")
        self._since, self._bytes = time.monotonic(), 0


class _Told:
    """Says in the log how far a long download is."""

    def __init__(self, what: str, size: int | None) -> None:
        self._what, self._size, self._bytes, self._said = what, size, 0, time.monotonic()
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._bytes += count
            if time.monotonic() - self._said < TELL_SECONDS:
                return
            self._said = time.monotonic()
            whole = f" of {self._size:,}" if self._size is not None else ""
            log.info("%s: %s%s bytes", self._what, f"{self._bytes:,}", whole)


def _too_long(what: str, most: int) -> StorageError:
    text = f"{what}: the content is longer than the expected {most:,} bytes: somebody changed it"
    return StorageError(Reason.DIGEST_MISMATCH, text)
