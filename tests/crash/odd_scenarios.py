"""Scenarios of people who do what nobody meant them to: commands that make no sense or come in the wrong phase, edits
in the middle of something else, a status that a hand wrote.
"""

from __future__ import annotations

from typing import Any

from acts import (
    SPEC,
    A,
    Act,
    B,
    Condition,
    Script,
    applies,
    at_once,
    commands,
    deletes,
    edits,
    goes_back_to,
    heals,
    in_step,
    job,
    kills,
    on_canary,
    phase,
    serving,
    sets,
    stalled,
    waited,
)
from world import World

_UP = serving(A)
_C, _FAILING, _SCARCE = "s3://m/c", "s3://m/failing", "s3://m/scarce"
_TWO = {
    **SPEC,
    "targets": [{"name": "one", "gpu": "NVIDIA-A10"}, {"name": "two", "gpu": "NVIDIA-L4"}],
    "serving": {"replicas": 2},
}


def both(*acts: Act) -> Act:
    """All of them before the operator looks again."""

    def act(world: World) -> None:
        for one in acts:
            one(world)

    return act


def taken(command: str) -> Condition:
    """The operator has seen it. (Of two that are written while it is away only the last is there to be seen.)"""
    return lambda world: world.rollout["command"] == command


def writes_nonsense(world: World) -> None:
    """A hand edits the memory in status, and what it writes is none that a pass ever wrote."""
    world.lose_status({**world.rollout, "sequence": -5})


ODD: dict[str, tuple[dict[str, Any], Script]] = {
    "command of 200 KiB": (SPEC, ((_UP, applies(B)), (on_canary, commands("promote@" + "x" * 200_000)))),
    "commands that make no sense": (
        SPEC,
        (
            (_UP, applies(B)),
            (on_canary, commands("launch it!")),
            (at_once, commands("promote")),
            (at_once, commands("promote@ffffffffff#1")),
            (at_once, commands("rollback@ffffffffff#2")),
            (at_once, commands("abort@\u0000#3")),
        ),
    ),
    "promoted by command while it is built": (SPEC, ((_UP, applies(B)), (job("build"), commands("promote#1")))),
    "paused by command, then deleted": (
        SPEC,
        ((_UP, applies(B)), (in_step(0), commands("pause#1")), (phase("Paused"), deletes(True))),
    ),
    "aborted, and promoted a moment later": (
        SPEC,
        ((_UP, applies(B)), (in_step(0), commands("abort#1")), (taken("abort#1"), commands("promote#2"))),
    ),
    "rolled back by command and edited at once": (
        SPEC,
        ((_UP, applies(B)), (in_step(0), both(commands("rollback#1"), applies(_C)))),
    ),
    "edited on the way back to an older revision": (
        SPEC,
        (
            (_UP, applies(B)),
            (serving(B), applies(_C)),
            (serving(_C), sets(storage_down=True)),
            (at_once, goes_back_to(A)),
            (phase("Preparing"), applies(_FAILING)),
            (waited(30), sets(storage_down=False)),
        ),
    ),
    "rejected, back to stable, and asked for again": (
        SPEC,
        ((_UP, applies(_FAILING)), (stalled("ErrorRateTooHigh"), applies(A)), (_UP, applies(_FAILING))),
    ),
    "limits tightened in mid-canary, under which it fails": (
        SPEC,
        ((_UP, applies(_SCARCE)), (in_step(0), edits(verify__thresholds={"top1Delta": 0.0001}))),
    ),
    "deadline shortened below what was waited": (
        SPEC,
        ((_UP, sets(traffic=0)), (at_once, applies(B)), (waited(60), edits(rollout__progressDeadline="30s"))),
    ),
    "tried again and again": (
        SPEC,
        (
            (_UP, applies("s3://m/broken")),
            (stalled("BuildFailed"), commands("retry#1")),
            (at_once, commands("retry#2")),
            (at_once, both(heals("s3://m/broken"), commands("retry#3"))),
        ),
    ),
    "two targets, one of them fails": (_TWO, ((_UP, applies("s3://m/half")),)),
    "status edited to nonsense in mid-canary": (SPEC, ((_UP, applies(B)), (on_canary, writes_nonsense))),
    "worker on another kind of node joins in mid-canary": (
        SPEC,
        ((_UP, applies(B)), (on_canary, both(sets(node="other"), kills(False)))),
    ),
    "target added in mid-canary": (
        {**SPEC, "serving": {"replicas": 2}},
        ((_UP, applies(B)), (on_canary, edits(targets=[{"name": "default"}, {"name": "other"}]))),
    ),
    "target renamed together with the model, then the model set back for a while": (
        {**SPEC, "serving": {"replicas": 2}},
        (
            (_UP, edits(targets=[{"name": "other"}], source__uri=B)),
            (stalled("NoEngineForLoadKey"), applies(A)),
            (_UP, applies(B)),
        ),
    ),
}

ENDS: dict[str, str] = {
    "command of 200 KiB": "b Serving: Promoted, Promoted",
    "commands that make no sense": "b Serving: Promoted, Promoted",
    "promoted by command while it is built": "b Serving: Promoted, Promoted",
    "paused by command, then deleted": "gone",
    "aborted, and promoted a moment later": "a Aborted: Aborted, Promoted",
    "rolled back by command and edited at once": "c Serving: Promoted, RolledBack, Promoted",
    "edited on the way back to an older revision": (
        "a ErrorRateTooHigh: RolledBack, RolledBack, Promoted, Promoted, Promoted"
    ),
    "rejected, back to stable, and asked for again": "a ErrorRateTooHigh: RolledBack, Promoted",
    "limits tightened in mid-canary, under which it fails": "a GateFailed: RolledBack, Promoted",
    "deadline shortened below what was waited": "a ProgressDeadlineExceeded: RolledBack, Promoted",
    "tried again and again": "broken Serving: Promoted, Promoted",
    "two targets, one of them fails": "a ErrorRateTooHigh: RolledBack, Promoted",
    "status edited to nonsense in mid-canary": "b Serving: Promoted",
    "worker on another kind of node joins in mid-canary": "b Serving: Promoted, Promoted",
    "target added in mid-canary": "b Serving: Promoted, Promoted",
    "target renamed together with the model, then the model set back for a while": (
        "b Serving: Promoted, Superseded, Promoted"
    ),
}
