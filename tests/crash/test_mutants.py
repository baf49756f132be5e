"""Mutants of `decide`: without one of its rules, or with two neighbours in the other order. A scenario notices each of
them, but for those that rightly make no difference, which are listed with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from scenarios import Run, begun, check_always, outcome
from trtmodel_operator import decide as package
from trtmodel_operator.decide import RULES

Rules = tuple[Callable[..., Any], ...]
MUTANTS: dict[str, Rules] = {f"without {rule.__name__}": RULES[:i] + RULES[i + 1 :] for i, rule in enumerate(RULES)} | {
    f"{RULES[i + 1].__name__} before {RULES[i].__name__}": (*RULES[:i], RULES[i + 1], RULES[i], *RULES[i + 2 :])
    for i in range(len(RULES) - 1)
}

NOTICED: dict[str, str] = {
    "without deleting": "deleted while it is built",
    "without adopt_what_runs": "status lost at rest",
    "without take_command": "aborted in mid-canary",
    "without cannot_be_held": "update that no worker can load",
    "without analysis_says_no": "failing update",
    "without deadline_passed": "update without traffic",
    "without spec_unreadable": "spec unreadable in mid-step, then put right",
    "without platform_pinned": "workers that do not start, and then another image",
    "without going_back": "paused, and rolled back by command to an older revision",
    "without paused": "paused and edited, then resumed",
    "without resolve": "first rollout",
    "without superseded": "a to b to a",
    "without platform_superseded": "image change taken back by the spec",
    "without change_platform": "settings change",
    "without rejected": "failing update",
    "without build": "first rollout",
    "without gate": "first rollout",
    "without extend": "worker on another kind of node",
    "without scaled_to_zero": "first rollout without workers",
    "without first_rollout": "first rollout",
    "without target_failed": "two targets, one fails and the other is held, steps edited, then aborted",
    "without steps_edited": "steps edited in mid-step",
    "without prepare": "good update",
    "without wait_for_person": "manual promotion",
    "without advance": "good update",
    "without watch": "good update",
    "without promote": "good update",
    "without platform_taken_back": "image change aborted while engines are built",
    "rejected before change_platform": "image change after a revision that failed",
    "paused before going_back": "paused, and rolled back by command to an older revision",
    "resolve before paused": "paused and edited, then resumed",
    "superseded before resolve": "source changed for good in mid-canary",
    "gate before build": "first rollout",
    "first_rollout before scaled_to_zero": "first rollout without workers",
    "steps_edited before target_failed": "two targets, one fails and the other is held, steps edited, then aborted",
    "prepare before steps_edited": "steps edited to fewer in mid-step",
    "wait_for_person before prepare": "step that pauses, scaled out meanwhile, then resumed",
    "advance before wait_for_person": "step that pauses, then resumed",
    "watch before advance": "good update",
    "without confirm_promotion": "promotion that a webhook confirms late",
    "confirm_promotion before watch": "promotion that a webhook confirms late",
    "promote before confirm_promotion": "promotion that a webhook confirms late",
}
NO_DIFFERENCE: dict[str, str] = {
    "adopt_what_runs before deleting": "what is being deleted is adopted first, which is a memory and no effect",
    "take_command before adopt_what_runs": "without a memory there is nothing that a command could take back or retry",
    "cannot_be_held before take_command": "both take the same candidate back: only the reason that is told differs",
    "analysis_says_no before cannot_be_held": "both take the same candidate back: only the reason that is told differs",
    "deadline_passed before analysis_says_no": "both take the same candidate back, one of them a look later",
    "spec_unreadable before deadline_passed": "the deadline is in the spec: without one it says nothing",
    "platform_pinned before spec_unreadable": "what is remembered of the first workers needs no spec after that",
    "going_back before platform_pinned": "the one changes what workers are made of where nothing was ever promoted",
    "platform_superseded before superseded": "the one is for a platform on trial, the other for an engine",
    "change_platform before platform_superseded": "the one needs that nothing is on trial, the other a platform",
    "platform_taken_back before promote": "the one needs that nothing is on trial, the other a candidate",
    "build before rejected": "nothing is built for a revision that was rejected: both ask the same list",
    "extend before gate": "the one is for a revision in the making, the other for one that was made",
    "scaled_to_zero before extend": "without workers nobody reports a load key that would lack an engine",
    "target_failed before first_rollout": "the one needs a stable revision, the other that there is none",
}


def played(run: Run, most: int) -> dict[str, Any]:
    """How it ends, and the stages on its way; '' for an end if there is none within so many passes."""
    stages: list[tuple[str, str]] = []
    while not run.over():
        if run.passes > most:
            return {}
        run.step()
        now = run.world.condition("Progressing")
        if stages[-1:] != [now]:
            stages.append(now)
    check_always(run.world)
    return {**outcome(run.world), "stages": stages}


@pytest.mark.parametrize("mutant", NOTICED)
def test_a_mutant_of_decide_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = begun(NOTICED[mutant])
    expected = played(usual, 300)
    monkeypatch.setattr(package, "RULES", MUTANTS[mutant])
    try:
        found = played(begun(NOTICED[mutant]), 2 * usual.passes)
    except Exception as e:  # by what must hold at each moment, or since a rule needs the one before it
        found = {"raises": e}
    assert found != expected


def test_every_mutant_is_noticed_or_has_a_reason_why_not() -> None:
    assert NOTICED.keys() | NO_DIFFERENCE.keys() == MUTANTS.keys()
    assert not NOTICED.keys() & NO_DIFFERENCE.keys()
