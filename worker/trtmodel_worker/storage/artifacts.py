"""The bucket's artifacts of one namespace, by the layout of `trtmodel_contract.storelayout`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trtmodel_contract import storelayout
from trtmodel_contract.codec import DocumentError, dumps, loads, sha256_hex
from trtmodel_contract.gate import GATE_VERSION, GateFigures, Task
from trtmodel_contract.identity import LoadKey, Storage
from trtmodel_contract.jobs import Reason
from trtmodel_contract.keeping import Cause, Revocation
from trtmodel_contract.manifest import Blob, Manifest

from trtmodel_worker.storage import cache
from trtmodel_worker.storage.backends import open_store
from trtmodel_worker.storage.errors import NotFound, StorageError
from trtmodel_worker.storage.fetch import fetch, read_small

DOCUMENT_BYTES = 8 << 20  # a manifest or figures: more is not one of ours

D = TypeVar("D")
log = logging.getLogger("trtmodel.artifacts")


@dataclass(frozen=True)
class Numbered:
    """One build of (revision, load key) as the bucket lists it."""

    load_key: str
    number: int
    revoked: bool
    committed: bool = True


@dataclass(frozen=True)
class LookUp:
    """What one listing says about (revision, load key): the build to use, and the number that a new one would have.
    From two listings, a Job could miss a build and still count it: there would be two."""

    found: tuple[str, Manifest] | None
    next_number: int


class ArtifactStore:
    """Engines, figures and blobs of a namespace, `root` being the beginning of their keys in `objects`. Every method
    raises StorageError."""

    def __init__(self, storage: Storage, namespace: str, credentials_dir: str | Path | None) -> None:
        self.objects = open_store(storage, storage.bucket, credentials_dir)
        self.root = storelayout.root(storage, namespace)

    def fetch_blob(self, digest: str, size: int, cache_dir: str | Path) -> Path:
        """A local file with exactly this content. The digest decides; more than `size` bytes (0: a document's most) are
        not read, lest a changed object fills the disk that the node gives to all."""
        key = storelayout.blob_key(self.root, digest)
        return fetch(self.objects.remote(key), Path(cache_dir), digest, size or DOCUMENT_BYTES).path

    def get_manifest(self, manifest_digest: str) -> Manifest:
        """The manifest whose bytes have this digest."""
        key = storelayout.blob_key(self.root, manifest_digest)
        data = self.read(key)
        found = sha256_hex(data)
        if found != manifest_digest:
            text = f"{self.objects.where(key)}: the content's sha256 is {found}: somebody changed it"
            raise StorageError(Reason.DIGEST_MISMATCH, text)
        return self._decode(Manifest, key, data)

    def builds(self, revision: str) -> list[Numbered]:
        """Every committed build of a revision, for all load keys."""
        return [build for build in self._listed(revision) if build.committed]

    def current(self, revision: str) -> Iterator[tuple[str, Manifest]]:
        """(digest, manifest) of the highest unrevoked build per load key."""
        builds = self.builds(revision)
        for load_key in sorted({build.load_key for build in builds}):
            found = self._best(revision, [build for build in builds if build.load_key == load_key])
            if found is not None:
                yield found

    def look_up(self, revision: str, load_key: LoadKey) -> LookUp:
        builds = [build for build in self._listed(revision) if build.load_key == str(load_key)]
        found = self._best(revision, builds)
        # A marker whose manifest was collected counts: the next build must not begin as a revoked one.
        number = max((build.number for build in builds), default=0) + 1
        return LookUp(found if found is not None and found[1].load_key == load_key else None, number)

    def find(self, revision: str, load_key: LoadKey) -> tuple[str, Manifest] | None:
        """(digest, manifest) of the build that workers of `load_key` should load."""
        return self.look_up(revision, load_key).found

    def missing(self, digest: str, manifest: Manifest) -> str:
        """What is not there of the files that this manifest names, itself included, or has another size; '' if nothing.
        Contents are not read."""
        blobs = {"manifest": Blob(digest, 0), "plan": manifest.plan}
        blobs |= {f"golden sample {number}": golden.blob for number, golden in enumerate(manifest.golden)}
        for name, blob in blobs.items():
            entry = self.objects.stat(storelayout.blob_key(self.root, blob.digest))
            if entry is None:
                return f"its {name} ({blob.digest[:12]}) is gone"
            if blob.size and entry.size != blob.size:
                return f"its {name} has {entry.size:,} bytes instead of {blob.size:,}"
        return ""

    def revoke(self, revision: str, load_key: LoadKey | str, digest: str, why: Revocation) -> int:
        """Take every build of this digest out of use for new rollouts. Returns how many were in use, or only put out of
        use by the collector, which brings back what is pinned."""
        done = 0
        for build in self.builds(revision):
            if build.load_key != str(load_key):
                continue
            try:
                data = self.read(storelayout.manifest_key(self.root, revision, build.load_key, build.number))
            except NotFound:
                continue
            if sha256_hex(data) == digest:
                key = storelayout.revoked_key(self.root, revision, build.load_key, build.number)
                if self.objects.put_new(key, dumps(why)):
                    done += 1
                elif why.cause is not Cause.COLLECTED and self._is_of_collector(key):
                    self.objects.put(key, dumps(why))
                    done += 1
        return done

    def put_file(self, path: Path) -> Blob:
        """Upload a file as a blob. It is written even if it exists: a damaged blob heals."""
        digest, size = cache.digest_of(path)
        self.objects.put(storelayout.blob_key(self.root, digest), path)
        return Blob(digest, size)

    def put_bytes(self, data: bytes) -> Blob:
        digest = sha256_hex(data)
        self.objects.put(storelayout.blob_key(self.root, digest), data)
        return Blob(digest, len(data))

    def commit(self, manifest: Manifest) -> tuple[str, Manifest]:
        """Publish: the blob first, then the commit marker. If somebody committed this number first, theirs is
        returned: two builds of one key are both good, and all must agree on one."""
        data = dumps(manifest)
        self.put_bytes(data)
        key = storelayout.manifest_key(self.root, manifest.revision, manifest.load_key, manifest.number)
        if self.objects.put_new(key, data):
            return sha256_hex(data), manifest
        theirs = self.read(key)
        return sha256_hex(theirs), self._decode(Manifest, key, theirs)

    def get_figures(self, manifest_digest: str, dataset_digest: str, task: Task, samples: int) -> GateFigures | None:
        """The gate's figures for this engine and data set, None if no gate ran. Unreadable ones count as none."""
        key = storelayout.gate_key(self.root, manifest_digest, dataset_digest, task.value, samples, GATE_VERSION)
        try:
            return loads(GateFigures, self.read(key))
        except (NotFound, DocumentError):
            return None

    def put_figures(self, figures: GateFigures, samples: int) -> GateFigures:
        """The figures that all agree on: these, or those of a Job that was first. `samples`: how many were asked for;
        the figures tell how many there were."""
        task = figures.task
        key = storelayout.gate_key(
            self.root, figures.manifest_digest, figures.dataset_digest, task.value, samples, GATE_VERSION
        )
        if not self.objects.put_new(key, dumps(figures)):
            theirs = self.get_figures(figures.manifest_digest, figures.dataset_digest, task, samples)
            if theirs is not None:
                return theirs
            self.objects.put(key, dumps(figures))  # nobody can read what is there
        return figures

    def read(self, key: str) -> bytes:
        """A document. Raises NotFound."""
        return read_small(self.objects.remote(key), DOCUMENT_BYTES)

    def _is_of_collector(self, marker: str) -> bool:
        """Also if the collector has just taken it away. One that cannot be read is by hand."""
        try:
            return loads(Revocation, self.read(marker)).cause is Cause.COLLECTED
        except NotFound:
            return True
        except DocumentError:
            return False

    def _listed(self, revision: str) -> list[Numbered]:
        committed, revoked = set[tuple[str, int]](), set[tuple[str, int]]()
        for key in self.objects.list(storelayout.engine_prefix(self.root, revision)):
            build = storelayout.parse_build(self.root, key)
            if build is not None:
                (revoked if build.marker else committed).add((build.load_key, build.number))
        return [Numbered(*build, build in revoked, build in committed) for build in sorted(committed | revoked)]

    def _best(self, revision: str, builds: Iterable[Numbered]) -> tuple[str, Manifest] | None:
        """The highest of these builds of one load key that is not revoked and can be read. One that cannot is no
        reason to fail for ever: it is passed over, and a new build gets a higher number."""
        for build in sorted(builds, key=lambda b: b.number, reverse=True):
            if build.revoked or not build.committed:
                continue
            key = storelayout.manifest_key(self.root, revision, build.load_key, build.number)
            try:
                data = self.read(key)
                return sha256_hex(data), loads(Manifest, data)
            except NotFound:
                continue  # collected since it was listed
            except DocumentError as e:
                log.warning("%s is passed over: %s", self.objects.where(key), e)
        return None

    def _decode(self, cls: type[D], key: str, data: bytes) -> D:
        try:
            return loads(cls, data)
        except DocumentError as e:
            raise StorageError(Reason.INTERNAL, f"{self.objects.where(key)}: {e}") from e
