"""Has the newest spec of a TRTModel come to an end, and which? Pure: what waits and CI ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtmodel_operator import reasons

Json = Mapping[str, Any]

EXIT_DONE = 0
EXIT_ENDED = 3  # rolled back, gate failed, rejected, a Job failed for good
EXIT_PERSON = 4  # it waits for a person: paused, or the promotion is Manual
EXIT_LATE = 124  # as timeout(1) has it
EXIT_INTERRUPTED = 130

FOR_A_PERSON = frozenset({reasons.PAUSED, reasons.STEP_PAUSED, reasons.AWAITING_PROMOTION})


@dataclass(frozen=True)
class Outcome:
    code: int
    sentence: str


def outcome(model: Json) -> Outcome | None:
    """None while it moves, or while the operator has not looked at the newest spec yet."""
    ready, stalled, progressing = (condition(model, kind) for kind in ("Ready", "Stalled", "Progressing"))
    if ready.get("status") == "True":
        return Outcome(EXIT_DONE, f"{revision(model, 'stable')} serves")
    if stalled.get("status") == "True":
        return Outcome(EXIT_ENDED, f"{stalled.get('reason')}: {stalled.get('message')}")
    if progressing.get("status") == "False" and progressing.get("reason") in FOR_A_PERSON:
        return Outcome(EXIT_PERSON, f"{progressing.get('reason')}: {progressing.get('message')}")
    return None


def condition(model: Json, kind: str) -> Json:
    """The condition if it is about the newest generation, else an empty one."""
    meta, status = _mapping(model.get("metadata")), _mapping(model.get("status"))
    for found in listed(status.get("conditions")):
        if found.get("type") == kind:
            return found if found.get("observedGeneration") == meta.get("generation") else {}
    return {}


def memory(model: Json) -> Json:
    """.status.rollout."""
    return _mapping(_mapping(model.get("status")).get("rollout"))


def revision(model: Json, role: str) -> str:
    """Of stable, candidate or standby; '' if there is none."""
    return str(_mapping(memory(model).get(role)).get("revision") or "")


def wanted(model: Json) -> str:
    """The revision that today's spec means, as far as status tells; '' while it is not known."""
    return str(_mapping(memory(model).get("resolved")).get("revision") or "")


def listed(value: object) -> list[Json]:
    return [v for v in value if isinstance(v, Mapping)] if isinstance(value, list) else []


def _mapping(value: object) -> Json:
    return value if isinstance(value, Mapping) else {}
