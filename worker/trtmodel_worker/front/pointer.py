"""The mounted ConfigMaps: the boot pointer, with which a worker serves although no operator is there, and the keys.

The kubelet replaces a mounted ConfigMap by moving a symbolic link: two files may be read from two versions. Then the
signature does not fit, and the next look a second later does.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trtmodel_contract.codec import DocumentError, decode, loads
from trtmodel_contract.control import (
    KEYS_FILE,
    POINTER_FILE,
    POINTER_SIGNATURE_FILE,
    BootPointer,
    DesiredEngine,
    DesiredModel,
    Role,
    Routes,
)
from trtmodel_contract.identity import LoadKey, ModelRef
from trtmodel_contract.signing import Signature, pointer_payload

from trtmodel_worker.trust import Keyring, Untrusted

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Mounted:
    """The files as they were at one look. None: not there."""

    pointer: bytes | None
    signature: bytes | None
    keys: bytes | None


def read(pointer_dir: Path, keys_dir: Path) -> Mounted:
    return Mounted(
        _read(pointer_dir / POINTER_FILE), _read(pointer_dir / POINTER_SIGNATURE_FILE), _read(keys_dir / KEYS_FILE)
    )


def verified(mounted: Mounted, keyring: Keyring, model: ModelRef) -> BootPointer:
    """The pointer, if the operator signed it for this model. Raises Untrusted or DocumentError."""
    if mounted.pointer is None or mounted.signature is None:
        raise DocumentError(f"{POINTER_FILE} or {POINTER_SIGNATURE_FILE} is not mounted: the operator writes both")
    try:
        signature = decode(Signature, json.loads(mounted.signature))
    except (ValueError, RecursionError) as e:
        raise DocumentError(f"{POINTER_SIGNATURE_FILE}: {e}") from e
    keyring.verify(signature, pointer_payload(mounted.pointer))
    pointer = loads(BootPointer, mounted.pointer)
    if pointer.model != model:
        raise Untrusted(f"the pointer is for {pointer.model}, this worker belongs to {model}")
    return pointer


def desired(pointer: BootPointer, load_key: LoadKey, window: str) -> DesiredModel | None:
    """What the pointer asks of a worker with this load key, None if it names no engine for it."""
    stable = pointer.stable.artifacts.get(str(load_key))
    if stable is None:
        return None
    engines = [DesiredEngine(Role.STABLE, stable)]
    standby = pointer.standby.artifacts.get(str(load_key)) if pointer.standby else None
    if standby is not None and standby.manifest_digest != stable.manifest_digest:
        engines.append(DesiredEngine(Role.STANDBY, standby))
    return DesiredModel(tuple(engines), Routes(stable.manifest_digest), window)


class MountWatch:
    """Looks at the mounted files every second and tells of a change. Content is compared, not times: they are the
    link's, the directory's or the file's, depending on who mounted it."""

    def __init__(self, pointer_dir: Path, keys_dir: Path, changed: Callable[[Mounted], None]) -> None:
        self._dirs = (pointer_dir, keys_dir)
        self._changed = changed
        self._seen: Mounted | None = None
        self._trouble = ""

    async def look(self) -> None:
        try:
            mounted = await asyncio.to_thread(read, *self._dirs)
            if mounted != self._seen:
                self._changed(mounted)
                self._seen = mounted
            self._trouble = ""
        except Exception as e:
            if str(e) != self._trouble:  # every second the same would fill the log
                self._trouble = str(e)
                log.exception("the mounted files could not be taken over, this is tried on")

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(POLL_SECONDS)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
