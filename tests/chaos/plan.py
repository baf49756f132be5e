"""What a seed means: which things happen when. Pure: the same seed and length give the same plan.

Kinds are dealt from a shuffled deck, so a run that is long enough has all of them, and rare ones are not left to luck.
An action names no pod and no process: which one it hits is decided by `pick` among those that are there.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MODELS = ("one", "two")

GOOD, BAD_GATE, BAD_FILE = "good", "bad-gate", "bad-file"
EDIT, ABORT, ROLLBACK, SCALE = "edit-in-canary", "abort", "rollback", "scale"
OPERATOR_KILL, OPERATOR_POD, OPERATOR_FREEZE = "operator-kill", "operator-pod", "operator-freeze"
JOB_KILL = "job-kill"
WORKER_KILL, WORKER_POD, WORKER_FREEZE, HOST_KILL = "worker-kill", "worker-pod", "worker-freeze", "host-kill"
KUBELET, API_SERVER = "kubelet-down", "api-server-down"
S3_POD, S3_CUT, WORKER_CUT = "s3-pod", "s3-cut", "worker-cut"

# How many cards of the deck: what people do often, and what breaks often.
DECK: Mapping[str, int] = {
    GOOD: 8, BAD_GATE: 2, BAD_FILE: 1, EDIT: 3, ABORT: 2, ROLLBACK: 1, SCALE: 3,
    OPERATOR_KILL: 3, OPERATOR_POD: 1, OPERATOR_FREEZE: 1,
    JOB_KILL: 4,
    WORKER_KILL: 3, WORKER_POD: 3, WORKER_FREEZE: 1, HOST_KILL: 4,
    KUBELET: 2, API_SERVER: 2,
    S3_POD: 1, S3_CUT: 2, WORKER_CUT: 3,
}  # fmt: skip

# From and to, in seconds; what is not here is over at once.
LASTS: Mapping[str, tuple[float, float]] = {
    OPERATOR_FREEZE: (20.0, 80.0),
    WORKER_FREEZE: (2.0, 12.0),
    KUBELET: (3.0, 20.0),
    API_SERVER: (2.0, 25.0),
    S3_CUT: (5.0, 30.0),
    WORKER_CUT: (5.0, 45.0),
}
OF_A_MODEL = frozenset(
    {GOOD, BAD_GATE, BAD_FILE, EDIT, ABORT, ROLLBACK, SCALE, JOB_KILL}
    | {WORKER_KILL, WORKER_POD, WORKER_FREEZE, HOST_KILL, WORKER_CUT}
)
# One part of the machine at a time: with a single node, kubelet and API server gone together are a power cut.
ALONE = frozenset({KUBELET, API_SERVER})
FIRST_AT = 3.0
GAP = (2.5, 9.0)  # seconds from one action to the next


@dataclass(frozen=True)
class Action:
    """`at` in seconds from the begin, `seconds` how long it lasts, `model` "" where it is about none, 0 <= `pick`
    < 1."""

    at: float
    kind: str
    model: str = ""
    seconds: float = 0.0
    pick: float = 0.0

    @property
    def end(self) -> float:
        return round(self.at + self.seconds, 1)


def plan(seed: int, minutes: float) -> tuple[Action, ...]:
    """In the order of their times; all are over when the time is."""
    chance = random.Random(seed)
    length, at, free = minutes * 60.0, FIRST_AT, 0.0
    cards: list[str] = []
    actions: list[Action] = []
    while at <= length:
        cards = cards or _shuffled(chance)
        kind = cards.pop()
        model = chance.choice(MODELS) if kind in OF_A_MODEL else ""
        seconds = round(chance.uniform(*LASTS[kind]), 1) if kind in LASTS else 0.0
        if kind in ALONE:
            at = max(at, free)
            free = round(at + seconds + GAP[0], 1)
        action = Action(at, kind, model, seconds, min(round(chance.random(), 3), 0.999))
        if action.end <= length:
            actions.append(action)
        at = round(at + chance.uniform(*GAP), 1)
    return tuple(actions)


def counts(actions: Sequence[Action]) -> dict[str, int]:
    """How many of each kind, in the order of the deck."""
    return {kind: n for kind in DECK if (n := sum(a.kind == kind for a in actions))}


def _shuffled(chance: random.Random) -> list[str]:
    cards = [kind for kind, n in DECK.items() for _ in range(n)]
    chance.shuffle(cards)
    return cards
