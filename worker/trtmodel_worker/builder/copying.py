"""Copy an engine with its gate figures to another namespace, bucket or cluster. Its digest stays the same.

    blobs, each verified while it streams -> figures -> manifest among the blobs -> commit marker, written only if new

Killed anywhere and started again, it goes on: what is there and right is not sent again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtmodel_contract import storelayout as layout
from trtmodel_contract.codec import DocumentError, decode, loads, sha256_hex
from trtmodel_contract.jobs import Reason
from trtmodel_contract.manifest import Blob, Manifest

from trtmodel_worker.engines.building import Rejected
from trtmodel_worker.storage import ArtifactStore, NotFound, StorageError
from trtmodel_worker.storage.cache import CHUNK_BYTES

_ATTEMPTS = 10  # to get a number that nobody else takes at the same moment


@dataclass(frozen=True)
class Copied:
    """`number` is that of the destination. `sent` blobs of `sent_bytes` were not there."""

    manifest: Manifest
    number: int
    sent: int
    sent_bytes: int
    figures: int


def copy(
    source: ArtifactStore, destination: ArtifactStore, digest: str, cache: Path, say: Callable[[str], None]
) -> Copied:
    """Raises StorageError (NotFound, DigestMismatch where bytes are not what they should be), Rejected for an engine
    that either side has revoked."""
    document = _verified(source, digest)
    try:
        manifest = loads(Manifest, document)
    except DocumentError as e:
        raise StorageError(Reason.INTERNAL, f"engine {digest[:12]}: {e}") from e
    _require_unrevoked(source, manifest, digest)
    _require_unrevoked(destination, manifest, digest)
    prefix = layout.gates_prefix(source.root, digest)
    names = [key.removeprefix(prefix) for key in source.objects.list(prefix) if key.endswith(".json")]
    # One that leads elsewhere ("../") is not of ours, and could leave a destination that is a directory.
    figures = {name: source.read(f"{prefix}{name}") for name in names if "/" not in name}
    named = {blob for data in (document, *figures.values()) for blob in _blobs(_parsed(data))}
    sent = _send(source, destination, named, cache, say)
    for name, data in figures.items():
        destination.objects.put(f"{layout.gates_prefix(destination.root, digest)}{name}", data)
    destination.put_bytes(document)
    number = _commit(destination, manifest, document)
    if destination.missing(digest, manifest):  # a collector removed what was old there until now
        sent += _send(source, destination, named, cache, say)
        destination.put_bytes(document)
    return Copied(manifest, number, len(sent), sum(blob.size for blob in sent), len(figures))


def _send(
    source: ArtifactStore, destination: ArtifactStore, blobs: Iterable[Blob], cache: Path, say: Callable[[str], None]
) -> list[Blob]:
    """What was not there."""
    sent = []
    for blob in sorted(blobs, key=lambda blob: blob.digest):
        if _is_there(destination, blob):
            continue
        say(f"{blob.digest[:12]}: {blob.size:,} bytes")
        path = source.fetch_blob(blob.digest, blob.size, cache)
        destination.objects.put(layout.blob_key(destination.root, blob.digest), path)
        path.unlink(missing_ok=True)  # one at a time: the disk need not hold them all
        sent.append(blob)
    return sent


def _verified(store: ArtifactStore, digest: str) -> bytes:
    key = layout.blob_key(store.root, digest)
    data = store.read(key)
    if sha256_hex(data) != digest:
        text = f"{store.objects.where(key)}: the content has another sha256: somebody changed it"
        raise StorageError(Reason.DIGEST_MISMATCH, text)
    return data


def _commit(store: ArtifactStore, manifest: Manifest, document: bytes) -> int:
    """The number under which it is there. It is the highest, so that it is the one that Jobs find."""
    for _ in range(_ATTEMPTS):
        builds = [b for b in store.builds(manifest.revision) if b.load_key == str(manifest.load_key) and not b.revoked]
        best = max((build.number for build in builds), default=0)
        if best and _is(store, manifest, best, document):
            return best
        number = store.look_up(manifest.revision, manifest.load_key).next_number
        key = layout.manifest_key(store.root, manifest.revision, manifest.load_key, number)
        if store.objects.put_new(key, document):
            return number
    text = f"revision {manifest.revision}: others publish at the same time, {_ATTEMPTS} numbers were taken: try again"
    raise StorageError(Reason.STORAGE_UNAVAILABLE, text, transient=True)


def _require_unrevoked(store: ArtifactStore, manifest: Manifest, digest: str) -> None:
    for build in store.builds(manifest.revision):
        if build.revoked and build.load_key == str(manifest.load_key):
            key = layout.manifest_key(store.root, manifest.revision, manifest.load_key, build.number)
            try:
                revoked = sha256_hex(store.read(key)) == digest
            except NotFound:
                continue
            if revoked:
                text = f"{store.objects.where(key)} is revoked: it may not be used any more. Build it anew"
                raise Rejected(Reason.GATE_FAILED, text)


def _is(store: ArtifactStore, manifest: Manifest, number: int, document: bytes) -> bool:
    try:
        return store.read(layout.manifest_key(store.root, manifest.revision, manifest.load_key, number)) == document
    except NotFound:
        return False


def _is_there(store: ArtifactStore, blob: Blob) -> bool:
    """Read and hashed: what is there may have been damaged."""
    key = layout.blob_key(store.root, blob.digest)
    entry = store.objects.stat(key)
    if entry is None or entry.size != blob.size:
        return False
    found = hashlib.sha256()
    with store.objects.open(key) as reader:
        while chunk := reader.read(CHUNK_BYTES):
            found.update(chunk)
    return found.hexdigest() == blob.digest


def _parsed(data: bytes) -> Any:
    """None for figures that are no JSON: they count for nothing, and are copied as they are."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _blobs(document: Any) -> Iterator[Blob]:
    """Every blob that a document names, in whatever field."""
    if isinstance(document, dict):
        if document.keys() == {"digest", "size"}:
            with contextlib.suppress(DocumentError):  # figures of another version or of a stranger: no blob of ours
                yield decode(Blob, document)
        for value in document.values():
            yield from _blobs(value)
    elif isinstance(document, list):
        for value in document:
            yield from _blobs(value)
