"""The bytes that are signed, and the headers that carry signatures. The Ed25519 itself is at the edges.

The operator alone holds a private key. Every payload starts with its purpose, so that a signature made for one
purpose can never be shown for another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from trtmodel_contract.codec import canonical, sha256_hex
from trtmodel_contract.identity import ModelRef

HEADER_KEY_ID = "x-trtmodel-key-id"
HEADER_SIGNATURE = "x-trtmodel-signature"  # base64
HEADER_EXPIRES = "x-trtmodel-expires"  # seconds since the epoch, decimal
REQUEST_LIFETIME_SECONDS = 60


@dataclass(frozen=True)
class Signature:
    """`value` is base64 of the 64 bytes of an Ed25519 signature; `key_id` is the first 16 hex digits of the
    sha256 of the raw public key."""

    key_id: str
    value: str


@dataclass(frozen=True)
class KeySet:
    """The public keys that a worker may trust now: key id -> base64 of the raw 32 bytes. Mounted as ``keys.json``."""

    SCHEMA: ClassVar[str] = "trtmodel.io/keys/v1"

    keys: Mapping[str, str]


def key_id(public_key: bytes) -> str:
    return sha256_hex(public_key)[:16]


def artifact_payload(model: ModelRef, manifest_digest: str) -> bytes:
    """'This engine passed the gate of this model.'"""
    return b"trtmodel.io/artifact/v1\n" + canonical([model.namespace, model.name, model.uid, manifest_digest])


def pointer_payload(pointer: bytes) -> bytes:
    """'A worker of this model may boot from this.' `pointer` is the exact text in the ConfigMap."""
    return b"trtmodel.io/pointer/v1\n" + pointer


def webhook_payload(url: str, body: bytes, expires: int) -> bytes:
    """'The operator asks or tells this address this, until then.' `url` is as the TRTModel has it."""
    return b"trtmodel.io/webhook/v1\n" + canonical([url, sha256_hex(body), expires])


def request_payload(method: str, path: str, worker_uid: str, body: bytes, expires: int) -> bytes:
    """'The operator asks this worker for this, until then.' `path` includes the query."""
    return b"trtmodel.io/request/v1\n" + canonical([method, path, worker_uid, sha256_hex(body), expires])
