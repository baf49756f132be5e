"""A folder of data files as one: a data set that is too large for a file, or that comes from many writers.

s3://b/data/, file:///data/     every file below it whose name ends so, in the order of the names
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

from trtmodel_contract.identity import Storage, source_identity
from trtmodel_contract.jobs import Reason

from trtmodel_worker.storage import cache
from trtmodel_worker.storage.cache import Fetched
from trtmodel_worker.storage.errors import NotFound, StorageError, from_exception
from trtmodel_worker.storage.external import MOST_FILES, inside
from trtmodel_worker.storage.fetch import fetch, store_of
from trtmodel_worker.storage.uris import parse

_LINKS = 10


def fetch_folder(
    uri: str, storage: Storage, credentials_dir: str | Path | None, cache_dir: Path, suffix: str
) -> Fetched:
    """A folder in the cache with a verified copy of each file. Its digest is over names and contents: a file that is
    added, renamed or changed makes other data. Raises StorageError."""
    location = parse(uri)
    store = store_of(location, storage, credentials_dir)
    names = []
    for item in store.entries(location.key):
        name = item.key.removeprefix(location.key)
        if not name.endswith(suffix):
            continue
        if inside(name, f"{uri}: an object") != name:
            text = f"{uri}: the name {name[:300]!r} is no plain path: rename that object"
            raise StorageError(Reason.SOURCE_NOT_FOUND, text)
        names.append(name)
        if len(names) > MOST_FILES:
            text = f"{uri}: more than {MOST_FILES:,} files: join some, or name a smaller folder"
            raise StorageError(Reason.SOURCE_NOT_FOUND, text)
    if not names:
        raise NotFound(f"{uri}: there is no {suffix} file below it")
    files = {name: fetch(store.remote(location.key + name), cache_dir) for name in sorted(names)}
    digest = source_identity((name, file.digest) for name, file in files.items())
    # One file has its own digest, as it would have without a folder: the folder must not be taken for it.
    folder = cache_dir / cache.SOURCES / f"{digest}-data"
    try:
        _link(files, digest, cache_dir, folder)
    except OSError as e:
        raise from_exception(e, uri) from e
    return Fetched(folder, digest, sum(file.size for file in files.values()))


def _link(files: dict[str, Fetched], digest: str, cache_dir: Path, folder: Path) -> None:
    """Links of files that were read just now: what an earlier folder of this name holds may be damaged."""
    staging = cache_dir / cache.TMP / uuid.uuid4().hex
    for name, file in files.items():
        target = staging / name
        target.parent.mkdir(parents=True, exist_ok=True)
        _link_one(file.path, target)
    cache.install(cache_dir, staging, folder, lambda: _holds(folder, digest))
    cache.used(folder)


def _link_one(path: Path, target: Path) -> None:
    """Linux says that there is no such file where another process replaces it in this very moment."""
    for _ in range(_LINKS - 1):
        with contextlib.suppress(FileNotFoundError):
            os.link(path, target)
            return
    os.link(path, target)


def _holds(folder: Path, digest: str) -> bool:
    """Read and hashed, as every cached copy is."""
    try:
        found = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if not p.is_dir()}
        return bool(found) and source_identity((name, cache.digest_of(p)[0]) for name, p in found.items()) == digest
    except OSError:
        return False
