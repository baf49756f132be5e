"""Commands to the operator: which revision one is for, how it is written, and what became of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtmodel_operator import reasons
from trtmodel_operator.cli.outcome import memory, revision, wanted

Json = Mapping[str, Any]

ANNOTATION = "trtmodel.io/command"


@dataclass(frozen=True)
class Order:
    """`of` says which revision guards it: the roles to look for, in their order."""

    verb: str
    of: tuple[str, ...]


ORDERS = (
    Order("promote", ("candidate",)),
    Order("abort", ("candidate", "wanted")),
    Order("rollback", ()),
    Order("retry", ("wanted",)),
    Order("skip-step", ("candidate",)),
    Order("pause", ("candidate",)),
    Order("resume", ("candidate",)),
    Order("refresh", ()),
)


def guard(order: Order, model: Json) -> str:
    """The revision that the command is for, so that one that comes too late does nothing; '' if there is none."""
    if order.verb == "rollback":
        return revision(model, "stable" if revision(model, "candidate") else "standby")
    for role in order.of:
        if found := wanted(model) if role == "wanted" else revision(model, role):
            return found
    return ""


def written(verb: str, guarded: str, nonce: str) -> str:
    return f"{verb}@{guarded}#{nonce}" if guarded else f"{verb}#{nonce}"


def untaken(model: Json) -> str:
    """A command that stands there and that nobody has taken; '' if there is none."""
    annotations = (model.get("metadata") or {}).get("annotations") or {}
    text = str(annotations.get(ANNOTATION) or "").strip()
    return text if text and text != memory(model).get("command") else ""


@dataclass(frozen=True)
class Answer:
    """What the operator said to a command."""

    taken: bool
    sentence: str


def answer(events: Sequence[Json], text: str) -> Answer | None:
    """From the events of the TRTModel; None while there is no word of it."""
    for event in reversed(events):
        reason, note = event.get("reason"), str(event.get("note") or "")
        if reason in (reasons.COMMAND_TAKEN, reasons.COMMAND_IGNORED) and note.startswith(f"command {text}"):
            return Answer(reason == reasons.COMMAND_TAKEN, note.removeprefix(f"command {text}").lstrip(": "))
    return None
