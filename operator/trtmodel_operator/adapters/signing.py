"""Ed25519 at the operator's edge: its keys, and the signed documents that workers accept.

The operator alone holds a private key. It lies in a Secret of its own namespace, made at the first start: of two
replicas that start together, one creates it and the other reads it. While a key is exchanged (`rotation`), a second one
lies beside it: the next, or the public half of the previous.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from trtmodel_contract.control import (
    DesiredEngine,
    DesiredModel,
    DesiredRequest,
    DesiredState,
    Fence,
    Routes,
    SignedArtifact,
)
from trtmodel_contract.identity import ModelRef
from trtmodel_contract.signing import Signature, artifact_payload, key_id, pointer_payload

from trtmodel_operator import manifests
from trtmodel_operator.model import ApplyPointer, Signal
from trtmodel_operator.ports import ClusterError, Conflict, Json, Signer

SECRET_FIELD = "ed25519"  # the private key that signs: raw 32 bytes
NEXT_FIELD = "ed25519-next"  # the private key that workers are told of and that signs nothing yet
PREVIOUS_FIELD = "ed25519-previous-public"  # the public key that signed before


class SigningKeyError(Exception):
    """The Secret is there but holds no key that can be used. The text names it and the way out."""


class SecretStore(Protocol):
    async def get_secret(self, namespace: str, name: str) -> Json | None: ...

    async def create_secret(self, secret: Json) -> Json:
        """Raises Conflict if it exists."""
        ...

    async def replace_secret(self, secret: Json) -> Json:
        """Raises Conflict if it changed since it was read."""
        ...


@dataclass(frozen=True)
class Keys:
    """Raw bytes, as they lie in the Secret. `signing` and `next` are private keys, `previous` is a public one; b'' for
    none. The fields of a key that is exchanged: next, then signing, then previous, then none."""

    signing: bytes
    next: bytes = b""
    previous: bytes = b""

    @classmethod
    def made(cls) -> Keys:
        return cls(Ed25519PrivateKey.generate().private_bytes_raw())

    def data(self) -> dict[str, str]:
        """The fields of the Secret."""
        fields = {SECRET_FIELD: self.signing, NEXT_FIELD: self.next, PREVIOUS_FIELD: self.previous}
        return {name: base64.b64encode(raw).decode() for name, raw in fields.items() if raw}

    def public(self) -> dict[str, str]:
        """Key id -> base64 of the public key; the one that signs first."""
        halves = [public_half(raw) for raw in (self.signing, self.next) if raw] + [self.previous or b""]
        return {key_id(raw): base64.b64encode(raw).decode() for raw in halves if raw}


class Ed25519Signer:
    """Implements `ports.Signer`. Signatures are deterministic: what did not change is signed the same."""

    def __init__(self, keys: Keys) -> None:
        self.hold(keys)

    def hold(self, keys: Keys) -> None:
        """Sign with these from now on. Raises ValueError for what is no key."""
        public = keys.public()
        self._key, self._id, self._public = (
            Ed25519PrivateKey.from_private_bytes(keys.signing),
            next(iter(public)),
            public,
        )
        self.keys = keys

    def sign(self, payload: bytes) -> Signature:
        return Signature(self._id, base64.b64encode(self._key.sign(payload)).decode())

    def public_keys(self) -> Mapping[str, str]:
        return self._public


async def load_or_create(store: SecretStore, namespace: str, name: str) -> Ed25519Signer:
    """The operator's keys. Raises SigningKeyError, or ClusterError."""
    secret = await store.get_secret(namespace, name)
    if secret is None:
        try:
            secret = await store.create_secret(secret_manifest(namespace, name, Keys.made()))
        except Conflict:  # another replica was faster: its key is the one
            secret = await store.get_secret(namespace, name)
    if secret is None:
        raise ClusterError("GET", f"secret {namespace}/{name}", "it was deleted while it was read")
    return Ed25519Signer(read_keys(secret, namespace, name))


async def installation_id(store: SecretStore, namespace: str, name: str) -> str:
    """What names this operator in buckets that several clusters use: the uid of its Secret, which lives as long as what
    it signed. '' if it is gone at that moment: then nothing is pinned until the next start. Raises ClusterError."""
    secret = await store.get_secret(namespace, name)
    return str(secret["metadata"].get("uid") or "") if secret is not None else ""


def secret_manifest(namespace: str, name: str, keys: Keys) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {"namespace": namespace, "name": name, "labels": {"app.kubernetes.io/part-of": "trtmodel"}},
        "data": keys.data(),
    }


def read_keys(secret: Json, namespace: str, name: str) -> Keys:
    """Raises SigningKeyError."""
    data = secret.get("data") or {}
    try:
        signing, following, previous = (
            base64.b64decode(data.get(field, ""), validate=True) for field in (SECRET_FIELD, NEXT_FIELD, PREVIOUS_FIELD)
        )
        keys = Keys(signing, following, previous)
        Ed25519Signer(keys)
        if previous:
            Ed25519PublicKey.from_public_bytes(previous)
    except (ValueError, binascii.Error) as e:
        raise SigningKeyError(
            f"the Secret {namespace}/{name} has no usable key in its field {SECRET_FIELD!r} ({e}): restore it, or "
            "delete it and restart the operator, which then makes another pair and signs everything anew"
        ) from e
    return keys


def public_half(private: bytes) -> bytes:
    """Raises ValueError for what is no private key."""
    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def desired_request(signer: Signer, model: ModelRef, sequence: int, signal: Signal) -> DesiredRequest:
    """What one worker is asked, with every engine signed for this model."""
    engines = tuple(
        DesiredEngine(e.role, _signed(signer, model, e.revision, e.manifest_digest)) for e in signal.engines
    )
    routes = Routes(signal.stable, signal.candidate, signal.weight, signal.shadow)
    desired = DesiredModel(engines, routes, signal.window, signal.may_drain, signal.baseline, signal.synthetic)
    return DesiredRequest(DesiredState(Fence(model.uid, sequence), {model.name: desired}))


def pointer_config_map(signer: Signer, model: ModelRef, action: ApplyPointer) -> Json:
    """What the workers of one target boot from, signed as it is stored."""
    pointer = manifests.boot_pointer(model, action, lambda digest: signer.sign(artifact_payload(model, digest)))
    text = pointer.text()
    return manifests.pointer_config_map(model, action, text, signer.sign(pointer_payload(text)))


def _signed(signer: Signer, model: ModelRef, revision: str, digest: str) -> SignedArtifact:
    return SignedArtifact(revision, digest, signer.sign(artifact_payload(model, digest)))
