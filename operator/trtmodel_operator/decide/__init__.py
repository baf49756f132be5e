"""decide(Observed) -> Decision: the whole product in one pure function.

The rules stand in the order in which they are asked. The first that has an answer ends the pass, so that one pass makes
one kind of change; what a later rule wants waits for the next pass, which is a moment away. Every rule is total: it
never assumes that an earlier pass left things in order.

    out of the way    deleting; adopt what runs (status was lost); take the command
    safety            a candidate that workers cannot hold; an analysis that says no; a deadline
    what is wanted    spec unreadable; platform pinned; going back; paused; resolve; superseded; platform superseded;
                      change platform; rejected; build; gate; extend
    the way there     scaled to zero; first rollout; target failed; steps edited; prepare; wait for a person; advance;
                      watch; confirm; promote
    nothing to do     platform taken back; settle

Repair is no rule: whatever was decided, `workers.settle_plan` ends each pass by comparing what the memory says that
pointers, Deployments and workers should be with what they are, and adds what is missing. The memory is written before
any of it, so a crash at any line is followed by a pass that does the same again.

        candidate ──prepare──► routed ──hold, Pass──► next step ... last preparation ──► stable
                               (a share, or mirrored)  a person: pause, skip-step; promote
           ▲  │                   │                         │
      gate │  └── Fail, cannot be held, deadline, abort ────┴──► rejected: workers return to stable at once
"""

from __future__ import annotations

from collections.abc import Callable

from trtmodel_operator.decide.builds import gate, rejected, resolve, superseded
from trtmodel_operator.decide.commands import take_command
from trtmodel_operator.decide.entry import adopt_what_runs, paused, spec_unreadable
from trtmodel_operator.decide.farewell import deleting
from trtmodel_operator.decide.gates import confirm_promotion
from trtmodel_operator.decide.goback import going_back
from trtmodel_operator.decide.making import build, extend
from trtmodel_operator.decide.platforms import (
    change_platform,
    platform_pinned,
    platform_superseded,
    platform_taken_back,
)
from trtmodel_operator.decide.safety import analysis_says_no, cannot_be_held, deadline_passed
from trtmodel_operator.decide.steps import (
    advance,
    first_rollout,
    prepare,
    promote,
    scaled_to_zero,
    settle,
    steps_edited,
    target_failed,
    wait_for_person,
    watch,
)
from trtmodel_operator.decide.turn import Outcome, Turn
from trtmodel_operator.decide.workers import settle_plan
from trtmodel_operator.model import Decision, Observed

RULES: tuple[Callable[[Turn], Outcome | None], ...] = (
    deleting,
    adopt_what_runs,
    take_command,
    cannot_be_held,
    analysis_says_no,
    deadline_passed,
    spec_unreadable,
    platform_pinned,
    going_back,
    paused,
    resolve,
    superseded,
    platform_superseded,
    change_platform,
    rejected,
    build,
    gate,
    extend,
    scaled_to_zero,
    first_rollout,
    target_failed,
    steps_edited,
    prepare,
    wait_for_person,
    advance,
    watch,
    confirm_promotion,
    promote,
    platform_taken_back,
)


def decide(seen: Observed) -> Decision:
    """What to remember, what to do then, and where the model stands. Deterministic; raises nothing."""
    turn = Turn(seen, seen.memory)
    for rule in RULES:
        outcome = rule(turn)
        if outcome is not None:
            return settle_plan(turn, rule.__name__, outcome)
    return settle_plan(turn, settle.__name__, settle(turn))


__all__ = ["RULES", "decide"]
