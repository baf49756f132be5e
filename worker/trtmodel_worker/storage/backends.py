"""Where objects are: S3, or a directory (a volume; for one machine without S3). One small protocol for both."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from trtmodel_contract.identity import Storage
from trtmodel_contract.jobs import Reason

from trtmodel_worker.storage.errors import Moved, StorageError, Unranged, from_exception
from trtmodel_worker.storage.remote import Reader, Remote, Version


@dataclass(frozen=True)
class Entry:
    """An object as the store lists it. `modified`: when it was last written, in seconds since 1970 by the store's own
    clock, to be compared with `ObjectStore.now` only. `tag` is another one after it was written again."""

    key: str
    size: int
    modified: float
    tag: str = ""


class ObjectStore(Protocol):
    """Objects by key in one bucket. Everything raises StorageError."""

    def where(self, key: str) -> str:
        """How a message names the object."""
        ...

    def remote(self, key: str) -> Remote:
        """The object, to be read whole or in parts."""
        ...

    def open(self, key: str) -> contextlib.AbstractContextManager[Reader]:
        """The object, to be read once from the start. An early end is not noticed: see `fetch.read_small`."""
        ...

    def list(self, prefix: str) -> Iterator[str]: ...

    def entries(self, prefix: str) -> Iterator[Entry]: ...

    def stat(self, key: str) -> Entry | None:
        """None: there is no such object."""
        ...

    def now(self) -> float:
        """The store's clock: that of this machine may be off by hours (field case D-12)."""
        ...

    def delete(self, key: str) -> None:
        """Remove one object; that it is gone already is no error. There is no way to remove many at once: stores
        demand different checksums for it (field case D-03)."""
        ...

    def copy(self, key: str, to: str) -> None:
        """Within the bucket, by the store itself."""
        ...

    def drop_unfinished(self, prefix: str, before: float, /) -> int:
        """Abort uploads in pieces that began before that time: nobody sees their parts, and they are billed (field case
        D-15). Returns how many."""
        ...

    def put(self, key: str, content: Path | bytes) -> None:
        """Write a file or bytes; what was there is replaced in one step."""
        ...

    def put_new(self, key: str, data: bytes) -> bool:
        """Write if nothing is there. False: somebody was first."""
        ...


class DirectoryStore:
    """A directory as a bucket."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def where(self, key: str) -> str:
        return f"file://{self._root / key}"

    def remote(self, key: str) -> Remote:
        return FileRemote(self._root / key)

    @contextlib.contextmanager
    def open(self, key: str) -> Iterator[Reader]:
        with self.remote(key).open() as (_, reader):
            yield reader

    def list(self, prefix: str) -> Iterator[str]:
        base = self._root / prefix
        try:
            yield from sorted(str(p.relative_to(self._root)) for p in base.rglob("*") if p.is_file())
        except OSError as e:
            raise from_exception(e, self.where(prefix)) from e

    def entries(self, prefix: str) -> Iterator[Entry]:
        for key in self.list(prefix):
            entry = self.stat(key)
            if entry is not None:  # removed since it was listed
                yield entry

    def stat(self, key: str) -> Entry | None:
        try:
            found = (self._root / key).stat()
        except FileNotFoundError:
            return None
        except OSError as e:
            raise from_exception(e, self.where(key)) from e
        return Entry(key, found.st_size, found.st_mtime, _tag(found))

    def now(self) -> float:
        return time.time()

    def delete(self, key: str) -> None:
        try:
            (self._root / key).unlink(missing_ok=True)
        except OSError as e:
            raise from_exception(e, self.where(key)) from e

    def copy(self, key: str, to: str) -> None:
        self.put(to, self._root / key)

    def drop_unfinished(self, _prefix: str, _before: float, /) -> int:
        return 0  # what a killed writer leaves here is a file like others

    def put(self, key: str, content: Path | bytes) -> None:
        with self._written(key, content) as temporary:
            temporary.replace(self._root / key)

    def put_new(self, key: str, data: bytes) -> bool:
        with self._written(key, data) as temporary:
            try:
                os.link(temporary, self._root / key)
            except FileExistsError:
                return False
        return True

    @contextlib.contextmanager
    def _written(self, key: str, content: Path | bytes) -> Iterator[Path]:
        target = self._root / key
        temporary = target.parent / f".{uuid.uuid4().hex}"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                temporary.write_bytes(content)
            else:
                shutil.copyfile(content, temporary)
            yield temporary
        except OSError as e:
            raise from_exception(e, self.where(key)) from e
        finally:
            temporary.unlink(missing_ok=True)


class FileRemote:
    """A file of a volume. It is read whole: several readers make no disk faster."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.what = f"file://{path}"

    @contextlib.contextmanager
    def open(self) -> Iterator[tuple[Version, Reader]]:
        try:
            f = open(self._path, "rb", opener=_unblocked)  # noqa: SIM115 - Path.open() takes no opener
        except OSError as e:
            raise from_exception(e, self.what) from e
        with f:
            if not stat.S_ISREG(os.fstat(f.fileno()).st_mode):
                text = f"{self.what}: it is a pipe, a socket or a device, which may never end: name a file"
                raise StorageError(Reason.SOURCE_NOT_FOUND, text)
            body = _Steady(f, self.what)
            yield body.version, body

    def open_part(self, _version: Version, _start: int, _end: int, /) -> contextlib.AbstractContextManager[Reader]:
        raise Unranged(self.what)

    def look(self) -> Version:
        with self.open() as (version, _):
            return version


class _Steady:
    """A file that nobody writes to between the first byte and the last."""

    def __init__(self, f: BinaryIO, what: str) -> None:
        self._file, self._what = f, what
        found = os.fstat(f.fileno())
        self.version = Version(found.st_size, _tag(found))

    def read(self, amount: int, /) -> bytes:
        data = self._file.read(amount)
        if not data and _tag(os.fstat(self._file.fileno())) != self.version.tag:
            raise Moved(self._what)
        return data


def _unblocked(path: str, flags: int) -> int:
    """A pipe would hold its reader until somebody writes."""
    return os.open(path, flags | os.O_NONBLOCK)


def _tag(found: os.stat_result) -> str:
    return f"{found.st_ino} {found.st_size} {found.st_mtime_ns}"


def open_store(storage: Storage, bucket: str, credentials_dir: str | Path | None) -> ObjectStore:
    """The store of `bucket` at `storage.endpoint`. An endpoint ``file:///dir`` is a directory with buckets in it."""
    if storage.endpoint.startswith("file://"):
        root = Path(storage.endpoint.removeprefix("file://")) / bucket
        if not root.is_dir():
            text = f"{storage.endpoint}: there is no directory {bucket!r}: create it or correct spec.storage.bucket"
            raise StorageError(Reason.BUCKET_NOT_FOUND, text)
        return DirectoryStore(root)
    from trtmodel_worker.storage.s3 import S3Client, S3Store

    return S3Store(S3Client(storage, credentials_dir), bucket)
