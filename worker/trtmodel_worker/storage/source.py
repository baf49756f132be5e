"""A source: one .onnx file, one with the files that it names (external data), or every file below a prefix.

    s3://b/m.onnx, https://h/m.onnx, file:///m.onnx     the file, and the files beside it that its graph names
    s3://b/m/, file:///m/                               every file there; the one .onnx at the top is the model

All of it counts in the identity (`trtmodel_contract.identity.source_identity`), so that other weights are another
source. The files of one source are of one moment: what changes while it is read is read anew, and never mixed.
"""

from __future__ import annotations

import logging
import posixpath
import shutil
import time
import urllib.parse
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from trtmodel_contract.identity import Storage, source_identity
from trtmodel_contract.jobs import Reason

from trtmodel_worker.storage import cache
from trtmodel_worker.storage.backends import ObjectStore
from trtmodel_worker.storage.download import CONNECTIONS, PAUSES_SECONDS, Landed, download
from trtmodel_worker.storage.errors import Moved, NotFound, StorageError, from_exception
from trtmodel_worker.storage.external import MOST_FILES, external_files, inside
from trtmodel_worker.storage.fetch import admit, remote_of, store_of
from trtmodel_worker.storage.remote import Remote
from trtmodel_worker.storage.uris import Location, parse

LARGE_BYTES = 64 << 20  # worth all connections for itself
_SUFFIX = ".onnx"

log = logging.getLogger("trtmodel.storage")


@dataclass(frozen=True)
class Source:
    """A verified local copy. `path` is the .onnx, its external data lies where it names it. `digest` is the identity
    over all files, `size` the bytes of all. `uri` names the very same files in the cache, for whoever fetches again."""

    path: Path
    digest: str
    size: int
    uri: str


@dataclass(frozen=True)
class _File:
    """One file of a source. `path` is relative to the source; `size` is None where no listing told it."""

    path: str
    remote: Remote
    size: int | None = None


def fetch_source(
    uri: str, storage: Storage, credentials_dir: str | Path | None, cache_dir: Path, known: str = ""
) -> Source:
    """The source at `uri`. If the cache holds the source of identity `known`, that one is returned, whatever lies at
    `uri` now. Raises StorageError."""
    if known and (found := _lookup(cache_dir, known)) is not None:
        return found
    location = parse(uri)
    for pause in (*PAUSES_SECONDS, None):
        try:
            if location.folder:
                return _fetch_folder(location, store_of(location, storage, credentials_dir), cache_dir)
            return _fetch_file(location, storage, credentials_dir, cache_dir)
        except Moved as e:
            if pause is None:
                raise
            log.warning("%s: reading all of it anew in %.1f s", e.message, pause)
        except OSError as e:  # of the cache
            raise from_exception(e, uri) from e
        time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def _fetch_folder(location: Location, store: ObjectStore, cache_dir: Path) -> Source:
    listing = _listing(location, store)
    files = [_File(path, store.remote(location.key + path), size) for path, (size, _) in listing.items()]
    model = _model_of(listing, location.uri)
    if location.scheme == "file":
        _require_inside(Path("/") / location.key, model, listing, location.uri)
    landed = _download(files, cache_dir)
    try:
        for path, tensor in _external(landed[model].path, f"{location.uri}{model}").items():
            if path not in landed:
                text = f"{location.uri}: tensor {tensor!r} of {model} lies in {path!r}, which is not there"
                raise StorageError(Reason.MODEL_INVALID, f"{text}: upload that file, too")
        if _listing(location, store) != listing:
            raise Moved(location.uri)
        return _keep(landed, model, cache_dir, location.uri)
    except BaseException as e:
        _clear(landed, e)
        raise


def _fetch_file(location: Location, storage: Storage, credentials_dir: str | Path | None, cache_dir: Path) -> Source:
    first = _File(_name(location), remote_of(location, storage, credentials_dir))
    landed = _download([first], cache_dir)
    try:
        named = _external(landed[first.path].path, location.uri, first.path)
        if named and not first.path.endswith(_SUFFIX):
            text = f"{location.uri} has external data, so its name must end in {_SUFFIX}"
            raise StorageError(Reason.MODEL_INVALID, f"{text}: rename it")
        if location.scheme == "file":
            path = Path("/") / location.key
            _require_inside(path.parent, path.name, named, location.uri)
        files = [_File(path, remote_of(_beside(location, path), storage, credentials_dir)) for path in sorted(named)]
        try:
            landed.update(_download(files, cache_dir))
        except NotFound as e:
            e.message += f" (external data of {location.uri}: upload it beside the model)"
            raise
        for file in (first, *files) if files else ():
            seen = landed[file.path].version
            now = file.remote.look()
            if (now.tag, now.size) != (seen.tag, seen.size):
                raise Moved(file.remote.what)
        return _keep(landed, first.path, cache_dir, location.uri)
    except BaseException as e:
        _clear(landed, e)
        raise


def _listing(location: Location, store: ObjectStore) -> dict[str, tuple[int, str]]:
    """Relative path -> (size, tag)."""
    found: dict[str, tuple[int, str]] = {}
    for item in store.entries(location.key):
        path = item.key.removeprefix(location.key)
        if path == "" or path.endswith("/"):
            continue  # a marker by which some tools show a folder
        if inside(path, f"{location.uri}: an object") != path:
            text = f"{location.uri}: the name {path[:300]!r} is no plain path: rename that object"
            raise StorageError(Reason.SOURCE_NOT_FOUND, text)
        found[path] = (item.size, item.tag)
        if len(found) > MOST_FILES:
            text = f"{location.uri}: more than {MOST_FILES:,} files: name a folder that holds one model only"
            raise StorageError(Reason.SOURCE_NOT_FOUND, text)
    if not found:
        raise NotFound(f"{location.uri}: there is no file below it")
    for path in found:
        for folder in _folders(path):
            if folder in found:
                text = f"{location.uri}: {folder!r} is both a file and a folder, which no disk can hold"
                raise StorageError(Reason.SOURCE_NOT_FOUND, f"{text}: rename one")
    return found


def _require_inside(folder: Path, model: str, paths: Iterable[str], what: str) -> None:
    """No link leads to a place where the model does not lie: one that somebody else made would take files with it that
    are not its own. The model itself may be a link, and then its data may lie where it does, as in the caches of model
    hubs; links within the folder are those of a mounted ConfigMap. Raises StorageError."""
    bases = (folder.resolve(), (folder / model).resolve().parent)
    for path in paths:
        target = (folder / path).resolve()
        if not any(target.is_relative_to(base) for base in bases):
            text = f"{what}: {path[:300]!r} is a link to {target}, outside of the model's folder"
            raise StorageError(Reason.MODEL_INVALID, f"{text}: copy the file there (cp -rL)")


def _folders(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


def _model_of(paths: Sequence[str] | dict[str, tuple[int, str]], uri: str) -> str:
    models = [path for path in sorted(paths) if "/" not in path and path.lower().endswith(_SUFFIX)]
    if len(models) == 1:
        return models[0]
    if models:
        text = f"{uri} holds several models: {', '.join(models[:5])}"
        raise StorageError(Reason.MODEL_INVALID, f"{text}: name one of them, or a folder for each")
    text = f"{uri} holds no {_SUFFIX} file at its top, but {', '.join(sorted(paths)[:5])}"
    raise StorageError(Reason.SOURCE_NOT_FOUND, f"{text}: name the folder in which the model lies")


def _external(model: Path, what: str, name: str = "") -> dict[str, str]:
    try:
        named = external_files(model, what)
    except ValueError:
        return {}  # no ONNX: the check says what it is instead
    named.pop(name, None)
    return named


def _name(location: Location) -> str:
    web = location.scheme in ("http", "https")
    path = urllib.parse.unquote(urllib.parse.urlsplit(location.uri).path) if web else location.key
    return posixpath.basename(path) or "model"


def _beside(location: Location, path: str) -> Location:
    """The file at the relative `path`, seen from the model's folder."""
    if location.scheme in ("http", "https"):
        parts = urllib.parse.urlsplit(location.uri)
        there = posixpath.join(posixpath.dirname(parts.path), urllib.parse.quote(path))
        uri = urllib.parse.urlunsplit((parts.scheme, parts.netloc, there, "", ""))
        return replace(location, uri=uri, key=uri)
    key = posixpath.join(posixpath.dirname(location.key), path)
    return replace(location, key=key)


def _download(files: Sequence[_File], cache_dir: Path) -> dict[str, Landed]:
    """Large ones after each other with all connections, small ones side by side with one each."""
    large = [f for f in files if len(files) <= CONNECTIONS or (f.size or 0) >= LARGE_BYTES]
    small = [f for f in files if f not in large]
    landed: dict[str, Landed] = {}
    try:
        for file in large:
            landed[file.path] = download(file.remote, cache_dir)
        if small:
            with ThreadPoolExecutor(CONNECTIONS, "source") as pool:
                coming = [(f.path, pool.submit(download, f.remote, cache_dir, connections=1)) for f in small]
                try:
                    for path, future in coming:
                        landed[path] = future.result()
                except BaseException:
                    pool.shutdown(wait=True, cancel_futures=True)
                    for path, future in coming:
                        if not future.cancelled() and future.exception() is None:
                            landed[path] = future.result()
                    raise
    except BaseException as e:
        _clear(landed, e)
        raise
    return landed


def _clear(landed: dict[str, Landed], error: BaseException) -> None:
    """After a failure. A file that came in parts stays for the next attempt, unless it takes the room of others."""
    full = isinstance(error, StorageError) and error.reason is Reason.NO_SPACE
    for file in landed.values():
        if full or file.path.parent.name != cache.PARTIAL:
            file.discard()


def _keep(landed: dict[str, Landed], model: str, cache_dir: Path, what: str) -> Source:
    size = sum(file.size for file in landed.values())
    if len(landed) == 1:
        fetched = admit(landed[model], cache_dir, what)
        return Source(fetched.path, fetched.digest, size, f"file://{fetched.path}")
    identity = source_identity((path, file.digest) for path, file in landed.items())
    found = _lookup(cache_dir, identity)
    if found is not None:
        for file in landed.values():
            file.discard()
        return found
    # Moved, not linked: onnx refuses external data that is a link, lest it read what lies elsewhere.
    staging = cache_dir / cache.TMP / uuid.uuid4().hex
    for path, file in landed.items():
        (staging / path).parent.mkdir(parents=True, exist_ok=True)
        file.move(staging / path)
    target = _place_of(cache_dir, identity)
    cache.install(cache_dir, staging, target, lambda: _lookup(cache_dir, identity) is not None)
    return Source(target / model, identity, size, f"file://{target}/")


def _place_of(cache_dir: Path, identity: str) -> Path:
    return cache_dir / cache.SOURCES / identity


def _lookup(cache_dir: Path, identity: str) -> Source | None:
    """The cached copy, read and hashed again. A damaged one is none, and is removed."""
    single = cache.lookup(cache_dir, identity)
    if single is not None:
        return Source(single.path, identity, single.size, f"file://{single.path}")
    folder = _place_of(cache_dir, identity)
    try:
        found = {str(p.relative_to(folder)): cache.digest_of(p) for p in folder.rglob("*") if not p.is_dir()}
        if not found:
            return None
        if source_identity((path, digest) for path, (digest, _) in found.items()) == identity:
            cache.used(folder)
            size = sum(size for _, size in found.values())
            return Source(folder / _model_of(list(found), str(folder)), identity, size, f"file://{folder}/")
    except OSError:
        pass
    shutil.rmtree(folder, ignore_errors=True)
    return None
