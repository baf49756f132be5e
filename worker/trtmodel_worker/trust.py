"""Who is believed: Ed25519 signatures of the operator, by the public keys that are mounted into this pod."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from trtmodel_contract.codec import DocumentError, loads
from trtmodel_contract.signing import KeySet, Signature, key_id


class Untrusted(Exception):
    """A signature is missing, is by an unknown key, or is not over these bytes."""


class Keyring:
    """The public keys that may be trusted now."""

    def __init__(self, keys: Mapping[str, Ed25519PublicKey]) -> None:
        self._keys = dict(keys)

    @classmethod
    def read(cls, document: bytes) -> Keyring:
        """From the text of ``keys.json``. Raises DocumentError."""
        keys = {}
        for name, text in loads(KeySet, document).keys.items():
            try:
                raw = base64.b64decode(text, validate=True)
                key = Ed25519PublicKey.from_public_bytes(raw)
            except (ValueError, binascii.Error) as e:
                raise DocumentError(f"key {name} is no Ed25519 public key: {e}") from e
            if key_id(raw) != name:
                raise DocumentError(f"key {name} is filed under the wrong id: it is {key_id(raw)}")
            keys[name] = key
        return cls(keys)

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(sorted(self._keys))

    def verify(self, signature: Signature, payload: bytes) -> None:
        """Raises Untrusted."""
        key = self._keys.get(signature.key_id)
        if key is None:
            known = ", ".join(self.ids) or "none"
            raise Untrusted(f"signed with key {signature.key_id[:64]!r}, this worker trusts {known}")
        try:
            key.verify(base64.b64decode(signature.value, validate=True), payload)
        except (InvalidSignature, binascii.Error, ValueError) as e:
            raise Untrusted(f"the signature by key {signature.key_id} does not fit these bytes") from e
