"""Who comes late finds the story of a rollout: its events in their order, and in history how it ended and why."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from ports import Ports
from scenarios import begun
from trtmodel_operator.ports import Json
from world import World

Told = list[tuple[str, str, bool]]  # reason, message, warning


class Listening(Ports):
    def __init__(self, world: World, told: Told) -> None:
        super().__init__(world)
        self.told = told

    async def post_event(self, regarding: Json, reason: str, message: str, *, warning: bool) -> None:
        self.told.append((reason, message, warning))


def story(name: str) -> tuple[Told, dict[str, Any]]:
    """All events, and status at the end."""
    run, told = begun(name), Told()
    while not run.over():
        run.step(Listening(run.world, told))
    assert run.world.model is not None
    return told, run.world.model["status"]


def reasons(told: Told) -> list[str]:
    return [reason for reason, _, _ in told]


def in_order(told: Told, *wanted: str) -> bool:
    """As a part of it: others may stand between."""
    found = iter(reasons(told))
    return all(reason in found for reason in wanted)


STORIES: dict[str, tuple[str, ...]] = {
    "good update": (
        "Resolved", "Built", "GatePassed", "Promoted", "Resolved", "Built", "GatePassed", "Preparing", "Routing",
        "StepPassed", "Preparing", "Routing", "StepPassed", "Preparing", "Promoted", "Serving",
    ),
    "failing update": ("GatePassed", "Promoted", "GatePassed", "Preparing", "Routing", "ErrorRateTooHigh"),
    "slow update": ("Routing", "TooSlow"),
    "update that fails its gate": ("Promoted", "Resolved", "GateFailed"),
    "update whose host dies": ("Preparing", "Routing", "EngineDied"),
    "member's container dies": ("Routing", "WorkerDied"),
    "update without traffic": ("Routing", "NoTraffic", "ProgressDeadlineExceeded"),
    "storage away for too long, then tried again": ("StorageUnavailable", "CommandTaken", "Built", "Promoted"),
    "a to b to a": ("Routing", "Superseded", "Serving"),
    "steps edited in mid-step": ("StepPassed", "StepsChanged", "Routing", "Promoted"),
    "aborted in mid-canary": ("Routing", "CommandTaken", "Aborted"),
    "rolled back by command after its promotion": ("Promoted", "Promoted", "CommandTaken", "RolledBackByCommand"),
    "paused in mid-step and resumed": ("Routing", "Paused", "StepPassed", "Promoted"),
    "manual promotion": ("StepPassed", "AwaitingPromotion", "CommandTaken", "Promoted"),
    "status lost in mid-canary": ("Routing", "Adopted", "Routing", "Promoted"),
    "image change": ("Promoted", "PlatformChanges", "StepPassed", "Promoted", "WorkersLeave", "Serving"),
    "commands that make no sense": ("CommandIgnored", "CommandIgnored", "CommandIgnored", "StepPassed", "Promoted"),
}  # fmt: skip
BAD = {"ErrorRateTooHigh", "TooSlow", "GateFailed", "EngineDied", "WorkerDied", "ProgressDeadlineExceeded", "Aborted"}
BAD |= {"StorageUnavailable", "RolledBackByCommand", "CommandIgnored", "WorkersMissing", "Adopted"}
FIGURES = re.compile(r"\d+ of [\d,]+ requests failed|p9\d compute time|differs in \d+ of|no request has reached")


@pytest.mark.parametrize("name", STORIES)
def test_events_tell_what_happened_in_its_order_and_warn_of_what_is_bad(name: str) -> None:
    told, status = story(name)
    assert in_order(told, *STORIES[name]), reasons(told)
    assert {reason for reason, _, warning in told if warning} <= BAD
    assert {reason for reason in reasons(told) if reason in BAD} == {reason for reason, _, warning in told if warning}
    assert all(message and len(message) <= 1024 for _, message, _ in told)
    for one, other in itertools.pairwise(told):
        assert one != other, "the same is told twice in a row"
    ended = [h for h in status["history"] if h["outcome"] != "Promoted"]
    for entry in ended:
        assert any(entry["revision"] in message for _, message, _ in told), entry


@pytest.mark.parametrize(
    "name",
    ["good update", "failing update", "slow update", "update without traffic", "image change", "no traffic, promoted"],
)
def test_history_says_by_which_figures_each_rollout_ended(name: str) -> None:
    newest, first = story(name)[1]["history"][:2]
    assert FIGURES.search(newest["reason"]), newest
    assert newest["endedAt"] > first["endedAt"]
    assert first["reason"] == "the first revision"


@pytest.mark.parametrize("name", ["failing update", "slow update", "update that no worker can load", "a to b to a"])
def test_what_did_not_become_stable_is_in_the_history_with_its_reason_in_words(name: str) -> None:
    newest = story(name)[1]["history"][0]
    assert newest["outcome"] in ("RolledBack", "Superseded")
    assert len(newest["reason"].split()) >= 5, newest
    assert "promotedAt" not in newest


def test_a_condition_says_what_stands_and_what_to_do_when_all_is_over() -> None:
    status = story("failing update")[1]
    said = {c["type"]: c["message"] for c in status["conditions"]}["Stalled"]
    assert re.search(r"was taken back: .* requests failed .* serves; .* retry", said), said
