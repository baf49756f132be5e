"""Fetch a source or a data set by URI into the local cache, whatever it is stored in."""

from __future__ import annotations

import contextlib
import http.client
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from trtmodel_contract.identity import Storage

from trtmodel_worker.storage import cache
from trtmodel_worker.storage.backends import READ_TIMEOUT_SECONDS, DirectoryStore, open_store
from trtmodel_worker.storage.cache import Fetched, Reader
from trtmodel_worker.storage.errors import StorageError, from_exception, unavailable
from trtmodel_worker.storage.uris import parse

ATTEMPTS = 3
PAUSES_SECONDS = (0.5, 2.0)


def fetch_uri(
    uri: str, storage: Storage, credentials_dir: str | Path | None, cache_dir: Path, expected: str = ""
) -> Fetched:
    """A verified local copy of `uri`. `storage` gives endpoint and region for s3:// URIs. With `expected` (sha256) a
    cached copy is used, and other content is refused. Raises StorageError."""
    location = parse(uri)
    if location.scheme == "s3":
        store = open_store(storage, location.bucket, credentials_dir)
        return fetch(lambda: store.open(location.key), uri, cache_dir, expected)
    if location.scheme == "file":
        root = DirectoryStore(Path("/"))
        return fetch(lambda: root.open(location.key.lstrip("/")), uri, cache_dir, expected)
    return fetch(lambda: _open_url(location.uri), uri, cache_dir, expected)


def fetch(
    opener: Callable[[], AbstractContextManager[Reader]],
    what: str,
    cache_dir: Path,
    expected: str = "",
    most: int | None = None,
) -> Fetched:
    """Copy into the cache what `opener` opens, from the start again if the connection breaks in the middle. More than
    `most` bytes cannot be what is expected."""
    if expected and (found := cache.lookup(cache_dir, expected)) is not None:
        return found
    for pause in (*PAUSES_SECONDS, None):
        try:
            with opener() as reader:
                return cache.store(cache_dir, reader, what, expected, most)
        except Exception as e:
            error = from_exception(e, what)
            if not error.transient or pause is None:
                raise error from e
        time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


class _WholeBody:
    """http.client gives a short body without a word when the connection ends early; a stated length is only used to
    notice that."""

    def __init__(self, response: http.client.HTTPResponse, what: str) -> None:
        self._response, self._what = response, what
        stated = response.headers.get("Content-Length", "")
        self._missing = int(stated) if stated.isdigit() else None

    def read(self, amount: int, /) -> bytes:
        data = self._response.read(amount)
        if self._missing is not None:
            self._missing -= len(data)
            if not data and self._missing > 0:
                raise unavailable(f"{self._what}: the connection ended {self._missing:,} bytes early")
        return data

    def close(self) -> None:
        self._response.close()


@contextlib.contextmanager
def _open_url(url: str) -> Iterator[Reader]:
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "trtmodel"})  # noqa: S310 - parse() allows http(s)
        response = urllib.request.urlopen(request, timeout=READ_TIMEOUT_SECONDS)  # noqa: S310
    except (OSError, http.client.HTTPException, ValueError) as e:
        raise from_exception(e, url) from e
    with contextlib.closing(_WholeBody(response, url)) as body:
        yield body


__all__ = ["Fetched", "StorageError", "fetch", "fetch_uri"]
