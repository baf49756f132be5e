"""The boot pointer as it lies in the cluster, and the public keys beside it."""

from __future__ import annotations

from trtmodel_contract.codec import DocumentError, canonical, encode, loads, sha256_hex
from trtmodel_contract.control import (
    KEYS_FILE,
    POINTER_FILE,
    POINTER_SIGNATURE_FILE,
    BootPointer,
    PointerEntry,
    SignedArtifact,
)
from trtmodel_contract.identity import ModelRef, Storage
from trtmodel_contract.signing import Signature

from trtmodel_operator.manifests.names import LABEL_MODEL, LABEL_TARGET, keys_name, metadata
from trtmodel_operator.manifests.pods import Manifest
from trtmodel_operator.model import ApplyPointer, Artifact, Deployed, Observed, ObservedPointer

_UNSIGNED = Signature("", "")


def pointer_content(pointer: BootPointer) -> str:
    """Hash of what a worker would boot: everything but the sequence and the signatures."""

    def entry(e: PointerEntry | None) -> object:
        return e and [e.revision, {key: a.manifest_digest for key, a in e.artifacts.items()}]

    what = [encode(pointer.model), encode(pointer.storage), entry(pointer.stable), entry(pointer.standby)]
    return sha256_hex(canonical(what))


def wanted_content(model: ModelRef, storage: Storage, apply: ApplyPointer) -> str:
    """`pointer_content` of what `apply` comes to."""

    def entry(deployed: Deployed) -> PointerEntry:
        mine = [a for a in deployed.artifacts if a.target == apply.target]
        signed = {a.load_key: SignedArtifact(deployed.revision, a.manifest_digest, _UNSIGNED) for a in mine}
        return PointerEntry(deployed.revision, signed)

    standby = entry(apply.standby) if apply.standby else None
    return pointer_content(BootPointer(model, storage, apply.sequence, entry(apply.stable), standby))


def read_pointer(name: str, target: str, text: str) -> ObservedPointer:
    """Total: a pointer that another hand has damaged has no content, so that it is written anew."""
    try:
        pointer = loads(BootPointer, text)
    except DocumentError:
        return ObservedPointer(name, 0, "")

    def deployed(entry: PointerEntry | None) -> Deployed | None:
        if entry is None or not entry.artifacts:
            return None
        found = sorted(entry.artifacts.items())
        return Deployed(entry.revision, tuple(Artifact(target, key, a.manifest_digest) for key, a in found))

    entries = [e for e in (pointer.stable, pointer.standby) if e is not None]
    key_ids = {a.signature.key_id for e in entries for a in e.artifacts.values()}
    return ObservedPointer(
        name=name,
        sequence=pointer.sequence,
        content=pointer_content(pointer),
        stable=deployed(pointer.stable),
        standby=deployed(pointer.standby),
        key_ids=tuple(sorted(key_ids)),
    )


def pointer(seen: Observed, apply: ApplyPointer, text: str, signature: str) -> Manifest:
    """`text` is the pointer's exact text, `signature` the JSON of the Signature over it."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(seen.model, apply.workload, {LABEL_MODEL: seen.model.name, LABEL_TARGET: apply.target}),
        "data": {POINTER_FILE: text, POINTER_SIGNATURE_FILE: signature},
    }


def keys(seen: Observed, text: str) -> Manifest:
    """The public keys that the workers of this model trust: `text` is the KeySet document."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(seen.model, keys_name(seen.model), {LABEL_MODEL: seen.model.name}),
        "data": {KEYS_FILE: text},
    }
