"""The boot pointer as it lies in the cluster, and the public keys beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from trtmodel_contract.codec import DocumentError, canonical, decode, dumps, encode, loads, sha256_hex
from trtmodel_contract.control import (
    KEYS_FILE,
    POINTER_FILE,
    POINTER_SIGNATURE_FILE,
    BootPointer,
    PointerEntry,
    SignedArtifact,
)
from trtmodel_contract.identity import ModelRef
from trtmodel_contract.signing import KeySet, Signature

from trtmodel_operator.manifests.names import LABEL_MODEL, LABEL_TARGET, keys_name, metadata
from trtmodel_operator.manifests.pods import Manifest
from trtmodel_operator.model import SEQUENCE_MOST, ApplyPointer, Artifact, Deployed, ObservedPointer

_UNSIGNED = Signature("", "")


def boot_pointer(model: ModelRef, apply: ApplyPointer, sign: Callable[[str], Signature]) -> BootPointer:
    """What the workers of one target boot from: only that target's engines are named. `sign` gives the
    signature over an artifact of this model by its manifest digest."""

    def entry(deployed: Deployed) -> PointerEntry:
        mine = [a for a in deployed.artifacts if a.target == apply.target]
        signed = {
            a.load_key: SignedArtifact(deployed.revision, a.manifest_digest, sign(a.manifest_digest)) for a in mine
        }
        return PointerEntry(deployed.revision, signed)

    standby = entry(apply.standby) if apply.standby else None
    return BootPointer(model, apply.storage, apply.sequence, entry(apply.stable), standby)


def pointer_content(pointer: BootPointer) -> str:
    """Hash of what a worker would boot: everything but the sequence and the signatures."""

    def entry(e: PointerEntry | None) -> object:
        return e and [e.revision, {key: a.manifest_digest for key, a in e.artifacts.items()}]

    what = [encode(pointer.model), encode(pointer.storage), entry(pointer.stable), entry(pointer.standby)]
    return sha256_hex(canonical(what))


def wanted_content(model: ModelRef, apply: ApplyPointer) -> str:
    """`pointer_content` of what `apply` comes to."""
    return pointer_content(boot_pointer(model, apply, lambda _: _UNSIGNED))


def read_pointer(name: str, target: str, text: str, signature: str) -> ObservedPointer:
    """Total: a pointer that another hand has damaged has no content, so that it is written anew. `signature` is the
    text beside the pointer's."""
    try:
        pointer = loads(BootPointer, text)
    except DocumentError:
        return ObservedPointer(name, 0, "")
    if not 0 <= pointer.sequence <= SEQUENCE_MOST:
        return ObservedPointer(name, 0, "")

    def deployed(entry: PointerEntry | None) -> Deployed | None:
        if entry is None or not entry.artifacts:
            return None
        found = sorted(entry.artifacts.items())
        return Deployed(entry.revision, tuple(Artifact(target, key, a.manifest_digest) for key, a in found))

    entries = [e for e in (pointer.stable, pointer.standby) if e is not None]
    key_ids = {_signed_by(signature), *(a.signature.key_id for e in entries for a in e.artifacts.values())}
    return ObservedPointer(
        name=name,
        sequence=pointer.sequence,
        content=pointer_content(pointer),
        stable=deployed(pointer.stable),
        standby=deployed(pointer.standby),
        key_ids=tuple(sorted(key_ids)),
        storage=pointer.storage,
    )


def _signed_by(signature: str) -> str:
    """The id of the key; '' for what is no signature."""
    try:
        return decode(Signature, json.loads(signature), "signature").key_id
    except (ValueError, RecursionError):
        return ""


def pointer_config_map(model: ModelRef, apply: ApplyPointer, text: bytes, signature: Signature) -> Manifest:
    """`text` is the pointer's exact bytes, `signature` the one over `signing.pointer_payload(text)`."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(model, apply.workload, {LABEL_MODEL: model.name, LABEL_TARGET: apply.target}),
        "data": {POINTER_FILE: text.decode(), POINTER_SIGNATURE_FILE: canonical(encode(signature)).decode()},
    }


def keys_config_map(model: ModelRef, keys: Mapping[str, str]) -> Manifest:
    """The public keys (key id -> base64) that the workers of this model trust."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(model, keys_name(model), {LABEL_MODEL: model.name}),
        "data": {KEYS_FILE: dumps(KeySet(keys)).decode()},
    }
