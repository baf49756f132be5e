"""Whose word counts: pure rules over (uid of the TRTModel, sequence).

A pointer counts if its sequence is higher than the held one. A request with a lower sequence is refused; with the
held one it is a renewal if it asks for the same, accepted if a pointer brought that sequence (the operator writes the
pointer first, and the request says more), and refused otherwise. Another uid is another model.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from trtmodel_contract.control import DesiredState, Fence


@dataclass(frozen=True)
class Held:
    """What was applied last. `content` is the content hash of a request, '' for a pointer."""

    fence: Fence
    content: str = ""


class Ruling(enum.Enum):
    APPLY = "apply"
    RENEW = "renew"


class Conflict(Exception):
    """A request that must not be applied. The held fence goes back to the operator."""


def judge_request(held: Held | None, uid: str, desired: DesiredState) -> Ruling:
    """Raises Conflict."""
    fence = desired.fence
    if fence.uid != uid:
        raise Conflict(f"this worker belongs to the TRTModel with uid {uid}, the request is for uid {fence.uid}")
    if held is None or fence.sequence > held.fence.sequence:
        return Ruling.APPLY
    if fence.sequence < held.fence.sequence:
        raise Conflict(f"sequence {fence.sequence} is older than the held one, {held.fence.sequence}")
    if not held.content:
        return Ruling.APPLY
    if held.content != desired.content_hash():
        raise Conflict(f"sequence {fence.sequence} was used before for other content")
    return Ruling.RENEW


def pointer_counts(held: Held | None, sequence: int) -> bool:
    return held is None or sequence > held.fence.sequence
