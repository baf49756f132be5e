"""The signing key is exchanged while everything serves: no pod restarts, and no worker meets a signature that it cannot
verify.

    asked for, or too old ─► the next key is published ─► every worker lists it ─► it signs, and all is signed anew
    ─► every pointer and worker has that, and some minutes passed ─► the old key is dropped

The stage is what lies in the Secret, written with a precondition before it is acted on: an operator that ends at any
line, or another one that takes over, goes on there. What workers list is observed again after a start; until every
TRTModel was looked at under today's keys, nothing moves. A worker that cannot be asked is unknown and is waited for; a
container that does not run is not: when it starts, it finds the keys of that time.

Ask with ``kubectl annotate --overwrite secret <name> trtmodel.io/rotate=<anything new>``.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from trtmodel_operator.adapters.signing import (
    Ed25519Signer,
    Keys,
    SecretStore,
    SigningKeyError,
    public_half,
    read_keys,
    secret_manifest,
)
from trtmodel_operator.model import Observed, ObservedPointer, ObservedWorker
from trtmodel_operator.ports import ClusterError, Conflict, Json, Key
from trtmodel_operator.text import timestamp

ASKED = "trtmodel.io/rotate"
TAKEN = "trtmodel.io/rotated"  # the last value of ASKED that was taken
SINCE = "trtmodel.io/signing-since"
EVERY = 15.0  # seconds between two looks
# What a kubelet may still show a pod that starts: two of its sync periods, and as much again. In seconds.
GRACE = 300.0
DAY = 86400.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Witnessed:
    """What one pass saw of a model: under which keys of the operator, which of them all its workers trust, and whether
    all that it boots from is signed by the first. `lacking` names a worker or a pointer for the log."""

    key_ids: tuple[str, ...]
    trusted: frozenset[str]
    signed: bool
    lacking: str = ""


class Rotation:
    """`everyone` lists the TRTModels, `again` has one looked at soon, `now` is seconds since the epoch. `max_age` in
    seconds, 0: keys are exchanged only when it is asked for."""

    def __init__(
        self,
        store: SecretStore,
        namespace: str,
        name: str,
        signer: Ed25519Signer,
        *,
        everyone: Callable[[], Awaitable[Iterable[Key]]],
        again: Callable[[Key], None],
        now: Callable[[], float],
        max_age: float = 0.0,
    ) -> None:
        self._store, self._namespace, self._name, self._signer = store, namespace, name, signer
        self._everyone, self._again, self._now, self._max_age = everyone, again, now, max_age
        self._seen: dict[Key, Witnessed] = {}
        self._told = ""

    def saw(self, key: Key, observed: Observed) -> None:
        """What a pass observed of a model."""
        self._seen[key] = witnessed(observed)

    def forget(self, key: Key) -> None:
        """The TRTModel is gone."""
        self._seen.pop(key, None)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                await self.look()
            except Conflict:
                log.info("the signing keys were changed by somebody else: looking again")
            except (ClusterError, SigningKeyError) as e:
                log.warning("signing keys: %s", e)
            await asyncio.sleep(EVERY)

    async def look(self) -> None:
        """One step at most. Raises Conflict, ClusterError, SigningKeyError."""
        secret = await self._store.get_secret(self._namespace, self._name)
        if secret is None:
            log.warning("the Secret %s/%s is gone: it is written again", self._namespace, self._name)
            await self._store.create_secret(secret_manifest(self._namespace, self._name, self._signer.keys))
            return
        keys = read_keys(secret, self._namespace, self._name)
        if keys != self._signer.keys:
            await self._hold(keys)
        elif keys.next:
            if await self._everywhere(lambda seen: next_id(keys) in seen.trusted, "the next key is not listed by"):
                since = {SINCE: timestamp(self._now())}
                await self._write(
                    secret, Keys(keys.next, previous=public_half(keys.signing)), "the next key signs", since
                )
        elif keys.previous:
            if self._age(secret) >= GRACE and await self._everywhere(
                lambda seen: seen.signed, "not signed anew yet is"
            ):
                await self._write(secret, Keys(keys.signing), "the former key is dropped", {})
        elif self._due(secret):
            following = Keys(keys.signing, next=Keys.made().signing)
            taken = {TAKEN: _annotations(secret).get(ASKED, "")}
            await self._write(secret, following, "the next key is published", taken)

    def _due(self, secret: Json) -> bool:
        annotations = _annotations(secret)
        asked = annotations.get(ASKED, "")
        if asked and asked != annotations.get(TAKEN, ""):
            return True
        return 0 < self._max_age <= self._age(secret)

    def _age(self, secret: Json) -> float:
        """Seconds for which the key has signed."""
        since = _annotations(secret).get(SINCE) or secret["metadata"].get("creationTimestamp")
        try:
            return self._now() - datetime.datetime.fromisoformat(str(since)).timestamp()
        except ValueError:  # another hand wrote it: count from now on, which the next exchange writes
            return 0.0

    async def _everywhere(self, holds: Callable[[Witnessed], bool], what: str) -> bool:
        ids = tuple(self._signer.public_keys())
        waits = ""
        for key in await self._everyone():
            seen = self._seen.get(key)
            if seen is None or seen.key_ids != ids or not holds(seen):
                self._again(key)
                waits = waits or f"{'/'.join(key)}{': ' + seen.lacking if seen and seen.lacking else ''}"
        if waits != self._told:
            self._told = waits
            if waits:
                log.info("exchange of the signing key: %s %s", what, waits)
        return not waits

    async def _write(self, secret: Json, keys: Keys, what: str, annotations: dict[str, str]) -> None:
        meta = secret["metadata"]
        kept = {name: value for name, value in _annotations(secret).items() if name not in annotations}
        data = {name: value for name, value in (secret.get("data") or {}).items() if not name.startswith("ed25519")}
        await self._store.replace_secret(
            secret | {"metadata": meta | {"annotations": kept | annotations}, "data": data | keys.data()}
        )
        log.info("exchange of the signing key: %s", what)
        await self._hold(keys)

    async def _hold(self, keys: Keys) -> None:
        self._signer.hold(keys)
        for key in await self._everyone():
            self._again(key)


def next_id(keys: Keys) -> str:
    """The id of the key that is published and does not sign yet."""
    return tuple(keys.public())[1]


def witnessed(observed: Observed) -> Witnessed:
    """What a pass saw, as the exchange needs it."""
    ids = observed.key_ids
    workers = [w for w in observed.workers if w.running and not w.terminating]
    published = set(ids) if observed.published_key_ids is None else set(observed.published_key_ids)
    trusted = published if observed.pointers or workers else set(ids)
    lacking = ""
    for worker in workers:
        listed = set(worker.report.key_ids) if worker.report is not None else set()
        if not set(ids) <= listed:
            lacking = lacking or f"worker {worker.pod}{': ' + worker.silence if worker.silence else ''}"
        trusted &= listed
    unsigned = [p.name for p in observed.pointers if set(p.key_ids) != set(ids[:1])]
    behind = [w.pod for w in workers if not _has_read(w, observed.pointers)]
    lacking = lacking or next((f"pointer {name}" for name in unsigned), "") or next((f"worker {p}" for p in behind), "")
    return Witnessed(ids, frozenset(trusted), not unsigned and not behind, lacking)


def _has_read(worker: ObservedWorker, pointers: tuple[ObservedPointer, ...]) -> bool:
    mine = [p.sequence for p in pointers if worker.pod.startswith(f"{p.name}-")]
    return worker.report is not None and worker.report.pointer_sequence >= max(mine, default=0)


def _annotations(secret: Json) -> dict[str, str]:
    return dict(secret["metadata"].get("annotations") or {})
