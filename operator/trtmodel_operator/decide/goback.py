"""A person's way back to a revision that was promoted before.

The standby is held by every worker, and an earlier revision by none. So the first is a flip of pointers; for the other
each worker loads it beside what serves, and then all are switched at once. If they cannot, nothing has changed. Neither
takes a build, a gate or a step: it was proved when it was promoted, and who asks for it is in a hurry.
"""

from __future__ import annotations

from trtmodel_operator import facts, reasons
from trtmodel_operator.decide import builds
from trtmodel_operator.decide.members import holders, leaves, unprepared
from trtmodel_operator.decide.steps import why_unprepared
from trtmodel_operator.decide.turn import LATER, SOON, Outcome, Turn, overdue, patience, record, reject, steps_key
from trtmodel_operator.model import Deployed, Situation, Stage, StepMemory

WHY = "a person asked to go back"


def going_back(turn: Turn) -> Outcome | None:
    """Every worker loads what a person asked to go back to; when all have it, they are switched. What the spec says by
    now matters when that is done."""
    memory, candidate, step = turn.memory, turn.memory.candidate, turn.memory.step
    if memory.stable is None or candidate is None or step is None or not step.back:
        return None
    missing, short = unprepared(turn.seen, memory)
    if not missing and not short and holders(turn.seen, memory):
        return switched(turn, memory.stable, candidate)
    where = facts.names(missing) or "workers to come"
    why = why_unprepared(turn, candidate, missing, short)
    message = (
        f"going back to {candidate.revision}, which is being loaded on {where}{why}. {memory.stable.revision} serves"
    )
    if memory.waited >= turn.spec.rollout.progress_deadline:
        # The rule `deadline_passed` left it: it is the environment's fault.
        return overdue(turn, message, f"back to {candidate.revision}", "it goes on when it can, or use abort")
    if turn.spec.serving.replicas:  # scaled to zero, nobody loads anything and no clock runs
        message += patience(turn, f"{memory.stable.revision} stays")
    soon = SOON if turn.spec.serving.replicas else LATER
    return Outcome(Situation(Stage.PREPARING, reasons.GOING_BACK, message, f"back to {candidate.revision}"), soon)


def switched(turn: Turn, left: Deployed, goal: Deployed) -> Outcome:
    """From `left` to `goal`, which the workers have. `left` is not tried again unless a person or the spec asks for
    it."""
    record(turn, left.revision, reasons.ROLLED_BACK, reasons.ROLLED_BACK_BY_COMMAND, WHY, left)
    reject(turn, left.revision, reasons.ROLLED_BACK_BY_COMMAND, WHY)
    turn.remember(
        stable=goal,
        standby=left,
        candidate=None,
        step=None,
        stable_resolved=None,
        rejected=tuple(r for r in turn.memory.rejected if r.revision != goal.revision),
        waiting="",
        waited=0.0,
        waited_at=0.0,
    )
    message = f"going back from {left.revision} to {goal.revision}: {WHY}"
    return Outcome(Situation(Stage.PROMOTING, reasons.ROLLED_BACK_BY_COMMAND, message), SOON)


def begin(turn: Turn, goal: Deployed) -> Outcome:
    """The workers are told to load it."""
    deaths = builds.deaths(turn, goal)  # where it is resident: it was stable once
    step = StepMemory(0, steps_key(turn.spec), turn.seen.now, deaths=deaths, weight=0, back=True)
    turn.remember(candidate=goal, step=step, waiting="", waited=0.0, waited_at=0.0)
    message = f"going back to {goal.revision}: every worker loads it first"
    return Outcome(Situation(Stage.PREPARING, reasons.GOING_BACK, message, f"back to {goal.revision}"), SOON)


def known(turn: Turn, revision: str) -> Deployed | None:
    """A revision that was promoted once, with its engines; None if status does not know them any more."""
    standby = turn.memory.standby
    if standby is not None and standby.revision == revision:
        return standby
    entries = (h for h in turn.memory.history if h.revision == revision and h.engines)
    return next((Deployed(revision, h.engines) for h in entries), None)


def lacking(turn: Turn, goal: Deployed, served: Deployed | None = None) -> str:
    """The first worker that there is no engine of it for; '' if there is one for each. A worker that has not told its
    load key is waited for where its target has any. With `served` only those count that this has an engine for: the
    others answer nobody now, so that they lose nothing."""
    for worker in facts.present(turn.seen):
        if leaves(turn.memory, worker) or facts.digest_for(worker, goal):
            continue
        if served is not None and not facts.digest_for(worker, served):
            continue
        key = facts.load_key(worker)
        if key or all(a.target != worker.target for a in goal.artifacts):
            return f"{worker.pod} with the load key {key}" if key else worker.pod
    return ""
