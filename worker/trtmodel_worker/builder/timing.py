"""Timing caches in the bucket: what builders measured on one kind of device, shared by all builds of a namespace.

    fetch      what is there -> <work>/timing/<digest>.cache, for the runtime's builder to merge
    publish    <work>/timing/built.cache, all of those and what was measured anew -> the bucket; those it holds go

Builders that run at once lose nothing of each other: each writes a file of its own, named by its content, and removes
only what it has read, which is in its own. The next build merges what is left. So there are few, killed or not.

Best effort: without a cache a build is slower, not wrong.
"""

from __future__ import annotations

import logging
from pathlib import Path

from trtmodel_contract.identity import LoadKey
from trtmodel_contract.jobs import Reason
from trtmodel_contract.storelayout import timing_prefix

from trtmodel_worker.storage import ArtifactStore, StorageError
from trtmodel_worker.storage.cache import digest_of
from trtmodel_worker.storage.fetch import fetch as fetch_object

FOLDER = "timing"
BUILT = "built.cache"
MOST_FILES = 8  # that a build reads: the newest
MOST_BYTES = 256 << 20

log = logging.getLogger("trtmodel.job")


def fetch(store: ArtifactStore, load_key: LoadKey, driver: str, work: Path) -> tuple[str, ...]:
    """Keys of what was read, to be given to `publish`."""
    try:
        entries = sorted(store.objects.entries(_prefix(store, load_key, driver)), key=lambda e: e.modified)
        read = tuple(entry.key for entry in entries[-MOST_FILES:] if _read(store, entry.key, work / FOLDER))
    except (StorageError, OSError) as e:
        log.warning("no timing cache is used: %s", e)
        return ()
    if read:
        log.info("%d timing caches of %s", len(read), load_key)
    return read


def publish(store: ArtifactStore, load_key: LoadKey, driver: str, work: Path, read: tuple[str, ...]) -> None:
    """Nothing where the runtime's builder wrote none."""
    built = work / FOLDER / BUILT
    try:
        if not built.is_file() or built.stat().st_size > MOST_BYTES:
            return
        key = f"{_prefix(store, load_key, driver)}{digest_of(built)[0]}"
        if key not in read:
            store.objects.put(key, built)
        for merged in read:
            if merged != key:
                store.objects.delete(merged)
    except (StorageError, OSError) as e:
        log.warning("the timing cache of this build is not kept: %s", e)


def _prefix(store: ArtifactStore, load_key: LoadKey, driver: str) -> str:
    device = "-".join(part for part in (load_key.device, load_key.capability, load_key.mig, driver) if part)
    return timing_prefix(store.root, load_key.runtime, load_key.version, device)


def _read(store: ArtifactStore, key: str, folder: Path) -> bool:
    """False if it could not be read. One whose bytes are not those of its name counts as read, so that it goes."""
    digest = key.rpartition("/")[2]
    try:
        fetched = fetch_object(store.objects.remote(key), folder / "fetched", digest, MOST_BYTES)
    except StorageError as e:
        log.warning("timing cache %s is left out: %s", key, e.message)
        return e.reason is Reason.DIGEST_MISMATCH
    fetched.path.replace(folder / f"{digest}.cache")
    return True
