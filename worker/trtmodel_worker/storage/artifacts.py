"""The bucket's artifacts of one namespace, by the layout of `trtmodel_contract.storelayout`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trtmodel_contract import storelayout
from trtmodel_contract.codec import DocumentError, dumps, loads, sha256_hex
from trtmodel_contract.gate import GATE_VERSION, GateFigures, Task
from trtmodel_contract.identity import LoadKey, Storage
from trtmodel_contract.jobs import Reason
from trtmodel_contract.manifest import Blob, Manifest

from trtmodel_worker.storage import cache
from trtmodel_worker.storage.backends import open_store
from trtmodel_worker.storage.errors import NotFound, StorageError
from trtmodel_worker.storage.fetch import fetch

DOCUMENT_BYTES = 8 << 20  # a manifest or figures: more is not one of ours
_NUMBERED = re.compile(r"(?P<load_key>[^/]+)/(?P<number>[0-9]+)/(?P<file>manifest\.json|revoked)")

D = TypeVar("D")


@dataclass(frozen=True)
class Numbered:
    """One build of (revision, load key) as the bucket lists it."""

    load_key: str
    number: int
    revoked: bool


class ArtifactStore:
    """Engines, figures and blobs of a namespace. Every method raises StorageError."""

    def __init__(self, storage: Storage, namespace: str, credentials_dir: str | Path | None) -> None:
        self._store = open_store(storage, storage.bucket, credentials_dir)
        self._root = storelayout.root(storage, namespace)

    def fetch_blob(self, digest: str, size: int, cache_dir: str | Path) -> Path:
        """A local file with exactly this content. The digest decides; more than `size` bytes (0: a document's most) are
        not read, lest a changed object fills the disk that the node gives to all."""
        key = storelayout.blob_key(self._root, digest)
        what = f"{self._store.where(key)} ({size:,} bytes)"
        return fetch(lambda: self._store.open(key), what, Path(cache_dir), digest, size or DOCUMENT_BYTES).path

    def get_manifest(self, manifest_digest: str) -> Manifest:
        """The manifest whose bytes have this digest."""
        key = storelayout.blob_key(self._root, manifest_digest)
        data = self._read(key)
        found = sha256_hex(data)
        if found != manifest_digest:
            text = f"{self._store.where(key)}: the content's sha256 is {found}: somebody changed it"
            raise StorageError(Reason.DIGEST_MISMATCH, text)
        return self._decode(Manifest, key, data)

    def builds(self, revision: str) -> list[Numbered]:
        """Every committed build of a revision, for all load keys."""
        prefix = storelayout.engine_prefix(self._root, revision)
        committed, revoked = set[tuple[str, int]](), set[tuple[str, int]]()
        for key in self._store.list(prefix):
            match = _NUMBERED.fullmatch(key.removeprefix(prefix))
            if match is not None:
                build = (match["load_key"], int(match["number"]))
                (revoked if match["file"] == "revoked" else committed).add(build)
        return [Numbered(*build, build in revoked) for build in sorted(committed)]

    def current(self, revision: str) -> Iterator[tuple[str, Manifest]]:
        """(digest, manifest) of the highest unrevoked build per load key."""
        best: dict[str, int] = {}
        for build in self.builds(revision):
            if not build.revoked:
                best[build.load_key] = max(best.get(build.load_key, 0), build.number)
        for load_key, number in best.items():
            key = storelayout.manifest_key(self._root, revision, load_key, number)
            data = self._read(key)
            yield sha256_hex(data), self._decode(Manifest, key, data)

    def find(self, revision: str, load_key: LoadKey) -> tuple[str, Manifest] | None:
        """(digest, manifest) of the build that workers of `load_key` should load."""
        return next((found for found in self.current(revision) if found[1].load_key == load_key), None)

    def next_number(self, revision: str, load_key: LoadKey) -> int:
        return max((b.number for b in self.builds(revision) if b.load_key == str(load_key)), default=0) + 1

    def put_file(self, path: Path) -> Blob:
        """Upload a file as a blob. It is written even if it exists: a damaged blob heals."""
        digest, size = cache.digest_of(path)
        self._store.put(storelayout.blob_key(self._root, digest), path)
        return Blob(digest, size)

    def put_bytes(self, data: bytes) -> Blob:
        digest = sha256_hex(data)
        self._store.put(storelayout.blob_key(self._root, digest), data)
        return Blob(digest, len(data))

    def commit(self, manifest: Manifest) -> tuple[str, Manifest]:
        """Publish: the blob first, then the commit marker. If somebody committed this number first, theirs is
        returned: two builds of one key are both good, and all must agree on one."""
        data = dumps(manifest)
        self.put_bytes(data)
        key = storelayout.manifest_key(self._root, manifest.revision, manifest.load_key, manifest.number)
        if self._store.put_new(key, data):
            return sha256_hex(data), manifest
        theirs = self._read(key)
        return sha256_hex(theirs), self._decode(Manifest, key, theirs)

    def get_figures(self, manifest_digest: str, dataset_digest: str, task: Task, samples: int) -> GateFigures | None:
        """The gate's figures for this engine and data set, None if no gate ran. Unreadable ones count as none."""
        key = storelayout.gate_key(self._root, manifest_digest, dataset_digest, task.value, samples, GATE_VERSION)
        try:
            return loads(GateFigures, self._read(key))
        except (NotFound, DocumentError):
            return None

    def put_figures(self, figures: GateFigures, samples: int) -> None:
        """`samples`: how many were asked for; the figures tell how many there were."""
        key = storelayout.gate_key(
            self._root, figures.manifest_digest, figures.dataset_digest, figures.task.value, samples, GATE_VERSION
        )
        self._store.put(key, dumps(figures))

    def _read(self, key: str) -> bytes:
        chunks, size = [], 0
        with self._store.open(key) as reader:
            while chunk := reader.read(cache.CHUNK_BYTES):
                chunks.append(chunk)
                size += len(chunk)
                if size > DOCUMENT_BYTES:
                    raise StorageError(Reason.INTERNAL, f"{self._store.where(key)}: too large for a document")
        return b"".join(chunks)

    def _decode(self, cls: type[D], key: str, data: bytes) -> D:
        try:
            return loads(cls, data)
        except DocumentError as e:
            raise StorageError(Reason.INTERNAL, f"{self._store.where(key)}: {e}") from e
