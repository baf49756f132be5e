"""From a signed digest to bytes that may be loaded. Everything here blocks: call it in a thread."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
from pathlib import Path

from trtmodel_contract.codec import DocumentError, loads
from trtmodel_contract.control import SignedArtifact
from trtmodel_contract.identity import LoadKey, ModelRef
from trtmodel_contract.manifest import Blob, Manifest
from trtmodel_contract.signing import artifact_payload

from trtmodel_worker.front.hostproc import Payload
from trtmodel_worker.host.arena import sealed_copy
from trtmodel_worker.storage import ArtifactStore, StorageError, prune
from trtmodel_worker.trust import Keyring, Untrusted


class Refused(Exception):
    """This artifact must not be loaded, or cannot be had. `transient`: trying again may help."""

    def __init__(self, reason: str, message: str, *, transient: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.transient = transient


def authorize(artifact: SignedArtifact, model: ModelRef, keyring: Keyring) -> None:
    """The operator vouches for this engine of this model. Raises Refused: nothing was fetched yet."""
    try:
        keyring.verify(artifact.signature, artifact_payload(model, artifact.manifest_digest))
    except Untrusted as e:
        text = f"engine {artifact.manifest_digest[:12]} is not signed for {model.namespace}/{model.name}: {e}"
        raise Refused("SignatureInvalid", text, transient=True) from e  # the keys may be on their way


class Artifacts:
    """The artifacts of one bucket, through the local cache."""

    def __init__(self, store: ArtifactStore, cache_dir: Path) -> None:
        self._store = store
        self._cache = cache_dir

    def reach(self) -> None:
        """The first request to a store takes longest: a library to load, credentials to find, a connection to make."""
        with contextlib.suppress(StorageError):
            self._store.objects.now()

    def manifest(self, artifact: SignedArtifact, load_key: LoadKey) -> Manifest:
        """The manifest, if it is for this machine. Raises Refused before any large file is touched."""
        digest = artifact.manifest_digest
        data = self._fetch(Blob(digest, 0)).read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise Refused("DigestMismatch", f"the manifest's sha256 is not {digest}", transient=True)
        try:
            manifest = loads(Manifest, data)
        except DocumentError as e:
            raise Refused("ManifestInvalid", f"manifest {digest[:12]}: {e}") from e
        if manifest.load_key != load_key:
            text = f"engine {digest[:12]} was built for {manifest.load_key}, this worker is {load_key}"
            raise Refused("LoadKeyMismatch", text)
        if manifest.revision != artifact.revision:
            text = f"manifest {digest[:12]} is of revision {manifest.revision}, asked for was {artifact.revision}"
            raise Refused("RevisionMismatch", text)
        return manifest

    def fetch(self, manifest: Manifest) -> None:
        """The files into the cache. Nothing is in memory yet."""
        for blob in (manifest.plan, *(golden.blob for golden in manifest.golden)):
            if blob.size > 0:
                self._fetch(blob)

    def payload(self, manifest: Manifest) -> Payload:
        """Plan and golden samples in sealed memory, hashed there: what was verified is what will be loaded."""
        taken: list[tuple[int, int]] = []
        try:
            for name, blob in (("plan", manifest.plan), *(("golden", g.blob) for g in manifest.golden)):
                taken.append(self._sealed(name, blob))
        except BaseException:
            if taken:
                Payload(taken[0], tuple(taken[1:])).close()
            raise
        return Payload(taken[0], tuple(taken[1:]))

    def goldens(self, manifest: Manifest) -> list[bytes]:
        """The golden samples alone. Raises Refused."""
        found = []
        for golden in manifest.golden:
            data = self._fetch(golden.blob).read_bytes()
            if hashlib.sha256(data).hexdigest() != golden.blob.digest:
                raise Refused("DigestMismatch", f"golden sample {golden.blob.digest[:12]} was damaged", transient=True)
            found.append(data)
        return found

    def prune(self, keep: set[str]) -> None:
        """Drop cached files that no wanted engine needs."""
        prune(self._cache, keep)

    def _sealed(self, name: str, blob: Blob) -> tuple[int, int]:
        if blob.size < 1:
            raise Refused("ManifestInvalid", f"the manifest says that the {name} has {blob.size} bytes")
        path = self._fetch(blob)
        try:
            with path.open("rb") as f:
                fd = sealed_copy(f"trtmodel-{name}", f.fileno(), blob.size)
        except EOFError as e:
            raise Refused("DigestMismatch", str(e), transient=True) from e
        except OSError as e:
            raise Refused("NoMemory", f"the {name} of {blob.size:,} bytes: {e}", transient=True) from e
        with mmap.mmap(fd, blob.size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as view:
            found = hashlib.sha256(view).hexdigest()
        if found != blob.digest:
            Payload((fd, blob.size), ()).close()
            raise Refused("DigestMismatch", f"the {name}'s sha256 is {found}, the manifest says {blob.digest}")
        return fd, blob.size

    def _fetch(self, blob: Blob) -> Path:
        try:
            return self._store.fetch_blob(blob.digest, blob.size, self._cache)
        except StorageError as e:
            raise Refused(e.reason.value, e.message, transient=True) from e
