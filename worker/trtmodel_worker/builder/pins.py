"""Pins: what a Job tells the collector to leave alone.

A Job pins an engine as soon as it has found it, before it looks at anything else: the collector takes an engine out of
use first, and removes it only after every Job that may have found it before has written its pin.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from trtmodel_contract.codec import dumps
from trtmodel_contract.identity import ModelRef
from trtmodel_contract.keeping import Pin
from trtmodel_contract.storelayout import pin_key, pins_prefix

from trtmodel_worker.storage import ArtifactStore

OLD_SECONDS = 7 * 86400  # by then the operator knows what every Job found, and says so in `keep`


def pin(
    store: ArtifactStore, cluster: str, model: ModelRef, digests: Iterable[str], revisions: tuple[str, ...] = ()
) -> str:
    """Keep these manifests, all of these revisions, and their blobs. Returns the pin's key, '' without a cluster, whose
    pins nobody would read. Raises StorageError."""
    wanted = Pin(model, tuple(sorted(set(digests))), revisions)
    if not cluster or not (wanted.digests or wanted.revisions):
        return ""
    key = pin_key(store.root, cluster, model.uid, uuid.uuid4().hex)
    store.objects.put(key, dumps(wanted))
    return key


def renew(
    store: ArtifactStore, cluster: str, model: ModelRef, keep: Iterable[str] | None, found: Iterable[str], revision: str
) -> None:
    """Pin the revision that was resolved, what was found of it, and what the operator keeps. If it says what that is,
    the model's old pins go: they name nothing else that lives. Raises StorageError."""
    mine = pin(store, cluster, model, [*found, *(keep or ())], (revision,))
    if not cluster or keep is None:
        return
    before = store.objects.now() - OLD_SECONDS
    for entry in store.objects.entries(pins_prefix(store.root, cluster, model.uid)):
        if entry.key != mine and entry.modified < before:
            store.objects.delete(entry.key)
