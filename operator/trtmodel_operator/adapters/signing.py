"""Ed25519 at the operator's edge: its key pair, and the signed documents that workers accept.

The operator alone holds a private key. It lies in a Secret of its own namespace, made at the first start: of two
replicas that start together, one creates it and the other reads it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
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

SECRET_FIELD = "ed25519"  # base64 of the raw 32 bytes of the private key


class SigningKeyError(Exception):
    """The Secret is there but holds no key that can be used. The text names it and the way out."""


class SecretStore(Protocol):
    async def get_secret(self, namespace: str, name: str) -> Json | None: ...

    async def create_secret(self, secret: Json) -> Json:
        """Raises Conflict if it exists."""
        ...


class Ed25519Signer:
    """Implements `ports.Signer`. Signatures are deterministic: what did not change is signed the same."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self._key = private_key
        public = private_key.public_key().public_bytes_raw()
        self._id = key_id(public)
        self._public = {self._id: base64.b64encode(public).decode()}

    def sign(self, payload: bytes) -> Signature:
        return Signature(self._id, base64.b64encode(self._key.sign(payload)).decode())

    def public_keys(self) -> Mapping[str, str]:
        return self._public


async def load_or_create(store: SecretStore, namespace: str, name: str) -> Ed25519Signer:
    """The operator's key pair. Raises SigningKeyError, or ClusterError."""
    secret = await store.get_secret(namespace, name)
    if secret is None:
        seed = Ed25519PrivateKey.generate().private_bytes_raw()
        manifest = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "metadata": {"namespace": namespace, "name": name, "labels": {"app.kubernetes.io/part-of": "trtmodel"}},
            "data": {SECRET_FIELD: base64.b64encode(seed).decode()},
        }
        try:
            secret = await store.create_secret(manifest)
        except Conflict:  # another replica was faster: its key is the one
            secret = await store.get_secret(namespace, name)
    if secret is None:
        raise ClusterError("GET", f"secret {namespace}/{name}", "it was deleted while it was read")
    try:
        seed = base64.b64decode((secret.get("data") or {}).get(SECRET_FIELD, ""), validate=True)
        return Ed25519Signer(Ed25519PrivateKey.from_private_bytes(seed))
    except (ValueError, binascii.Error) as e:
        raise SigningKeyError(
            f"the Secret {namespace}/{name} has no usable key in its field {SECRET_FIELD!r} ({e}): restore it, or "
            "delete it and restart the operator, which then makes another pair and signs everything anew"
        ) from e


def desired_request(signer: Signer, model: ModelRef, sequence: int, signal: Signal) -> DesiredRequest:
    """What one worker is asked, with every engine signed for this model."""
    engines = tuple(
        DesiredEngine(e.role, _signed(signer, model, e.revision, e.manifest_digest)) for e in signal.engines
    )
    routes = Routes(signal.stable, signal.candidate, signal.weight)
    desired = DesiredModel(engines, routes, signal.window, signal.may_drain)
    return DesiredRequest(DesiredState(Fence(model.uid, sequence), {model.name: desired}))


def pointer_config_map(signer: Signer, model: ModelRef, action: ApplyPointer) -> Json:
    """What the workers of one target boot from, signed as it is stored."""
    pointer = manifests.boot_pointer(model, action, lambda digest: signer.sign(artifact_payload(model, digest)))
    text = pointer.text()
    return manifests.pointer_config_map(model, action, text, signer.sign(pointer_payload(text)))


def _signed(signer: Signer, model: ModelRef, revision: str, digest: str) -> SignedArtifact:
    return SignedArtifact(revision, digest, signer.sign(artifact_payload(model, digest)))
