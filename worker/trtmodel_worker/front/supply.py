"""The files of engines: from the bucket into the cache, and from there into memory, none of it on the loop.

Preparing an engine, starting a host of one again and the first touch of the storage have threads of their own: what a
storage hangs is one of these, and the others have all of theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading

from trtmodel_contract.control import SignedArtifact
from trtmodel_contract.identity import LoadKey, Storage
from trtmodel_contract.manifest import Manifest

from trtmodel_worker.front.artifacts import Artifacts, Refused
from trtmodel_worker.front.hostproc import Payload
from trtmodel_worker.front.reading import Reading
from trtmodel_worker.settings import Settings
from trtmodel_worker.storage import ArtifactStore, StorageError


class Supply:
    """Each read takes `prepare_seconds` of the settings at most, and raises Refused."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._artifacts: tuple[Storage, Artifacts] | None = None
        self._opening = threading.Lock()
        self._kept: set[str] = set()
        self._reaching = Reading("reach", 1)
        self._preparing = Reading("prepare")
        self._restarting = Reading("restart")

    async def reach(self, storage: Storage) -> None:
        """Engines will be fetched from there. Whatever goes wrong, the fetch will tell."""
        with contextlib.suppress(Exception):  # a store may answer nonsense: no reason to end a worker
            reach = functools.partial(self._reach, storage)
            await self._reaching.run(self._settings.prepare_seconds, "the storage", reach, lambda _: None)
        self._reaching.close()  # it is done once

    async def fetched(
        self, storage: Storage, artifact: SignedArtifact, load_key: LoadKey
    ) -> tuple[Artifacts, Manifest]:
        """When all files of the engine are in the cache."""
        fetch = functools.partial(self._fetch, storage, artifact, load_key)
        return await self._preparing.run(self._settings.prepare_seconds, "the artifact", fetch, lambda _: None)

    async def payload(self, artifacts: Artifacts, manifest: Manifest, *, again: bool = False) -> Payload:
        """Verified bytes; `again` for an engine that was started before."""
        threads = self._restarting if again else self._preparing
        read = functools.partial(artifacts.payload, manifest)
        return await threads.run(self._settings.prepare_seconds, "the artifact", read, Payload.close)

    async def goldens(self, manifest: Manifest) -> list[bytes]:
        """The golden samples of an engine that was loaded."""
        if self._artifacts is None:
            raise Refused("NotStarted", "no engine was loaded yet", transient=True)
        read = functools.partial(self._artifacts[1].goldens, manifest)
        return await self._restarting.run(self._settings.prepare_seconds, "the golden samples", read, lambda _: None)

    async def keep(self, digests: set[str]) -> None:
        """Drop cached files beside these. Not while anything is being fetched."""
        if digests != self._kept and self._artifacts is not None:
            self._kept = digests
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self._artifacts[1].prune, digests)

    def close(self) -> None:
        self._reaching.close()
        self._preparing.close()
        self._restarting.close()

    def _reach(self, storage: Storage) -> None:
        self._open(storage).reach()

    def _fetch(self, storage: Storage, artifact: SignedArtifact, load_key: LoadKey) -> tuple[Artifacts, Manifest]:
        """Blocks, as long as the storage likes."""
        artifacts = self._open(storage)
        manifest = artifacts.manifest(artifact, load_key)
        artifacts.fetch(manifest)
        return artifacts, manifest

    def _open(self, storage: Storage) -> Artifacts:
        with self._opening:
            if self._artifacts is None or self._artifacts[0] != storage:
                try:
                    store = ArtifactStore(storage, self._settings.namespace, self._settings.credentials_dir)
                except StorageError as e:
                    raise Refused(e.reason.value, e.message, transient=True) from e
                self._artifacts = (storage, Artifacts(store, self._settings.cache_dir))
            return self._artifacts[1]
