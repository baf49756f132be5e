"""What keeps an artifact in the bucket, and what takes it out of use.

A pin says that a live TRTModel needs some manifests. It is written once under a name of its own and never changed: who
removes an old one cannot hit one that was just renewed. A revocation lies beside a manifest: from then on no Job uses
that build for a new rollout. Workers that run it go on: they load by digest.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from trtmodel_contract.identity import ModelRef, require_sha256


@dataclass(frozen=True)
class Pin:
    """`digests` are those of manifests. Of `revisions` every engine is kept: the model asked for them, and another
    one's Job may be what builds them."""

    SCHEMA: ClassVar[str] = "trtmodel.io/pin/v1"

    model: ModelRef
    digests: tuple[str, ...]
    revisions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for digest in self.digests:
            require_sha256("a pinned digest", digest)


class Cause(str, enum.Enum):
    """Who revoked a build."""

    DAMAGED = "Damaged"  # a Job: its bytes are gone or are not what the manifest says
    COLLECTED = "Collected"  # the collector: nothing pins it
    BY_HAND = "ByHand"


@dataclass(frozen=True)
class Revocation:
    """The content of the marker. That the marker exists is what counts."""

    SCHEMA: ClassVar[str] = "trtmodel.io/revocation/v1"

    cause: Cause
    message: str
