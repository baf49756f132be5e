"""Fetch what a URI or a key names into the local cache, whatever it is stored in."""

from __future__ import annotations

import time
from pathlib import Path

from trtmodel_contract.identity import Storage
from trtmodel_contract.jobs import Reason

from trtmodel_worker.storage import cache
from trtmodel_worker.storage.backends import DirectoryStore, ObjectStore, open_store
from trtmodel_worker.storage.cache import Fetched
from trtmodel_worker.storage.download import CHUNK_BYTES, PAUSES_SECONDS, Landed, download
from trtmodel_worker.storage.errors import StorageError, from_exception
from trtmodel_worker.storage.remote import Remote
from trtmodel_worker.storage.uris import Location, parse
from trtmodel_worker.storage.web import UrlRemote


def fetch_uri(
    uri: str, storage: Storage, credentials_dir: str | Path | None, cache_dir: Path, expected: str = ""
) -> Fetched:
    """A verified local copy of the file `uri`. `storage` gives endpoint and region for s3:// URIs, and the CA. With
    `expected` (sha256) a cached copy is used, and other content is refused. Raises StorageError."""
    location = parse(uri)
    if location.folder:
        raise StorageError(Reason.SOURCE_NOT_FOUND, f"{uri}: it names a folder: name one file")
    return fetch(remote_of(location, storage, credentials_dir), cache_dir, expected)


def fetch(remote: Remote, cache_dir: Path, expected: str = "", most: int | None = None) -> Fetched:
    """The object in the cache, under its sha256. More than `most` bytes cannot be what is expected. Raises
    StorageError."""
    if expected and (found := cache.lookup(cache_dir, expected)) is not None:
        return found
    return admit(download(remote, cache_dir, expected, most), cache_dir, remote.what)


def admit(landed: Landed, cache_dir: Path, what: str) -> Fetched:
    """Move a downloaded file to its place."""
    target = cache.path_of(cache_dir, landed.digest)
    try:
        landed.move(target)
        cache.used(target)
        cache.sync_directory(target.parent)
    except OSError as e:
        raise from_exception(e, what) from e
    return Fetched(target, landed.digest, landed.size)


def read_small(remote: Remote, most: int) -> bytes:
    """A small object in memory. Raises StorageError."""
    for pause in (*PAUSES_SECONDS, None):
        try:
            return _read(remote, most)
        except Exception as e:
            error = from_exception(e, remote.what)
            if not error.transient or pause is None:
                raise error from e
        time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def _read(remote: Remote, most: int) -> bytes:
    data = bytearray()
    with remote.open() as (version, reader):
        while chunk := reader.read(CHUNK_BYTES):
            data += chunk
            if len(data) > most:
                raise StorageError(Reason.INTERNAL, f"{remote.what}: too large for a document")
    if version.size is not None and len(data) != version.size:
        text = f"{remote.what}: the connection ended {version.size - len(data):,} bytes early"
        raise StorageError(Reason.STORAGE_UNAVAILABLE, text, transient=True)
    return bytes(data)


def store_of(location: Location, storage: Storage, credentials_dir: str | Path | None) -> ObjectStore:
    """The store of an s3:// or file:// URI, in which `location.key` is the key."""
    if location.scheme == "file":
        return DirectoryStore(Path("/"))
    return open_store(storage, location.bucket, credentials_dir)


def remote_of(location: Location, storage: Storage, credentials_dir: str | Path | None) -> Remote:
    if location.scheme in ("http", "https"):
        return UrlRemote(location.uri, storage.ca_bundle)
    return store_of(location, storage, credentials_dir).remote(location.key)
