"""Whose word counts: pure rules over (uid of the TRTModel, sequence).

A pointer counts if its sequence is higher than the held one. A request with a lower sequence is refused; with the
held one it is a renewal if it asks for the same, accepted if a pointer brought that sequence (the operator writes the
pointer first, and the request says more), and refused otherwise. Another uid is another model.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from trtmodel_contract.codec import DocumentError
from trtmodel_contract.control import DesiredModel, DesiredRequest, DesiredState, Fence

_MOST_SEQUENCE = 1 << 53  # JSON's numbers are exact so far
_MOST_TTL_SECONDS = 86_400
_MOST_WINDOW_CHARACTERS = 256
_MOST_ENGINES = 16


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


def check(request: DesiredRequest, model: DesiredModel) -> None:
    """Raises DocumentError for what makes no sense, or would be held and shown in every report without bound."""
    bounds = (
        ("fence.sequence", request.desired.fence.sequence, 0, _MOST_SEQUENCE),
        ("candidateTtlSeconds", request.candidate_ttl_seconds, 1, _MOST_TTL_SECONDS),
        ("length of window", len(model.window), 0, _MOST_WINDOW_CHARACTERS),
        ("length of baseline", len(model.baseline), 0, _MOST_WINDOW_CHARACTERS),
        ("number of engines", len(model.engines), 1, _MOST_ENGINES),
    )
    for what, value, low, high in bounds:
        if not low <= value <= high:
            raise DocumentError(f"{what} must be between {low} and {high}")
    listed = {engine.artifact.manifest_digest for engine in model.engines}
    routes = model.routes
    if routes.stable not in listed or (routes.candidate and routes.candidate not in listed):
        raise DocumentError("routes name an engine that is not listed")
    for what, share in (("weight", routes.weight), ("shadow", routes.shadow)):
        if not 0 <= share <= 100:
            raise DocumentError(f"{what} is a percentage, not {share}")
