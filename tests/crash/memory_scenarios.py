"""Scenarios of workers whose memory holds one engine: to change it they leave service, one after the other."""

from __future__ import annotations

from typing import Any

from acts import SPEC, A, Act, B, Condition, Script, applies, commands, in_step, kills, serving
from world import World

_ONE = {**SPEC, "rollout": {**SPEC["rollout"], "memoryPolicy": "Resource"}}
_TWO = {**_ONE, "serving": {"replicas": 2}}


def narrow(promised: int) -> Act:
    """From now on workers hold one engine, and so many serve at each moment."""

    def act(world: World) -> None:
        world.narrow, world.promised = True, promised
        world.changes += 1

    return act


def holding(workers: int) -> Condition:
    """So many answer with the candidate."""
    return lambda world: world.on_candidate() >= workers


def _then(promised: int, *script: Any, after: str = B) -> Script:
    def begin(world: World) -> None:
        narrow(promised)(world)
        applies(after)(world)

    return ((serving(A), begin), *script)


MEMORY: dict[str, tuple[dict[str, Any], Script]] = {
    "one engine, good update": (_ONE, _then(3)),
    "one engine, two workers, good update": (_TWO, _then(1)),
    "one engine, failing update": (_ONE, _then(3, after="s3://m/failing")),
    "one engine, update that no worker can load": (_ONE, _then(3, after="s3://m/unloadable")),
    # Back to stable they go together, as long as one serves it.
    "one engine, aborted when most hold it": (_ONE, _then(1, (holding(3), commands("abort#1")))),
    "one engine, stable worker lost": (_ONE, _then(2, (in_step(0), kills(False)))),
    "one engine, member lost": (_ONE, _then(2, (in_step(0), kills(True)))),
}

ENDS: dict[str, str] = {
    "one engine, good update": "b Serving: Promoted, Promoted",
    "one engine, two workers, good update": "b Serving: Promoted, Promoted",
    "one engine, failing update": "a ErrorRateTooHigh: RolledBack, Promoted",
    "one engine, update that no worker can load": "a EngineFailed: RolledBack, Promoted",
    "one engine, aborted when most hold it": "a Aborted: Aborted, Promoted",
    "one engine, stable worker lost": "b Serving: Promoted, Promoted",
    "one engine, member lost": "b Serving: Promoted, Promoted",
}
