"""What a person asks for by the annotation trtmodel.io/command: ``<verb>[@<revision>]#<nonce>``.

Each text is taken once; a repeated one does nothing. The revision, where given, guards against a command that comes too
late: abort, promote, skip-step, pause and resume name the revision on trial, retry the one in trouble, rollback the one
to go back to. What a person may skip is time and figures: never the gate, nor that each worker has the engine ready.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from trtmodel_contract.control import EngineState

from trtmodel_operator import facts, reasons
from trtmodel_operator.decide import builds, goback, platforms
from trtmodel_operator.decide.members import RESUMPTION, awaited, trial
from trtmodel_operator.decide.steps import go_on
from trtmodel_operator.decide.turn import Outcome, Turn, drop_candidate, record, reject, roll_back
from trtmodel_operator.decide.workers import new_window
from trtmodel_operator.model import Command, Deployed, Notice, StepMemory


def take_command(turn: Turn) -> Outcome | None:
    command = turn.seen.command
    if command is None or command.text == turn.memory.command:
        return None
    turn.remember(command=command.text)
    handler = _HANDLERS.get(command.verb)
    if handler is None:
        known = ", ".join(COMMANDS)
        return _ignored(turn, command, f"known are {known}, in the form verb@revision#nonce, such as retry#1")
    return handler(turn, command)


def _abort(turn: Turn, command: Command) -> Outcome | None:
    """The revision on trial, or the one that is being built, is not wanted any more."""
    why = "a person aborted the rollout"
    on_trial = _under_way(turn)
    if not on_trial:
        return _ignored(turn, command, "no rollout is under way")
    if not _means(turn, command, on_trial):
        return _ignored(turn, command, f"the revision on trial is {on_trial}")
    _taken(turn, command, f"{on_trial} is taken back")
    if turn.memory.candidate is not None:
        return roll_back(turn, reasons.ABORTED, why, outcome=reasons.ABORTED)
    record(turn, on_trial, reasons.ABORTED, reasons.ABORTED, why)
    reject(turn, on_trial, reasons.ABORTED, why)
    return None  # the rule `rejected` says the rest


def _rollback(turn: Turn, command: Command) -> Outcome | None:
    """To stable if a candidate is on trial, else to the standby: workers hold it, so it is a pointer flip. With its
    name to any other revision in the history, which the workers load first."""
    memory = turn.memory
    nearest = memory.stable if memory.candidate else memory.standby
    if nearest is None or memory.stable is None:
        return _ignored(turn, command, "there is nothing to go back to")
    if command.revision not in ("", nearest.revision):
        return _far_back(turn, command, nearest)
    if memory.candidate is None and (lost := _lost(turn, nearest)):
        why = f"no worker can serve {nearest.revision} any more ({lost}): apply its spec instead"
        return _ignored(turn, command, why)
    if memory.candidate is None and (lacking := goback.lacking(turn, nearest, memory.stable)):
        why = f"there is no engine of {nearest.revision} for {lacking}: apply its spec instead"
        return _ignored(turn, command, why)
    _taken(turn, command, f"going back to {nearest.revision}")
    if memory.candidate is not None:
        return roll_back(turn, reasons.ROLLED_BACK_BY_COMMAND, goback.WHY)
    return goback.switched(turn, memory.stable, nearest)


def _far_back(turn: Turn, command: Command, nearest: Deployed) -> Outcome | None:
    """A candidate on trial goes at once; stable serves until every worker has the other one."""
    memory, goal = turn.memory, goback.known(turn, command.revision)
    if memory.stable is not None and command.revision == memory.stable.revision:
        return _ignored(turn, command, f"{command.revision} serves already")
    if goal is None or turn.seen.spec is None:
        others = sorted({h.revision for h in memory.history if h.engines} - {nearest.revision})
        more = f", or with its name {' or '.join(others)} of the history" if others else ""
        return _ignored(turn, command, f"the revision to go back to is {nearest.revision}{more}")
    if lacking := goback.lacking(turn, goal):
        return _ignored(turn, command, f"there is no engine of {goal.revision} for {lacking}: apply its spec instead")
    _taken(turn, command, f"going back to {goal.revision}")
    if memory.candidate is not None:
        on_trial = memory.candidate.revision
        drop_candidate(turn, reasons.ROLLED_BACK, reasons.ROLLED_BACK_BY_COMMAND, goback.WHY)
        reject(turn, on_trial, reasons.ROLLED_BACK_BY_COMMAND, goback.WHY)
    return goback.begin(turn, goal)


def _promote(turn: Turn, command: Command) -> Outcome | None:
    """The steps that are left are skipped, and a manual promotion is given: as soon as every worker has it ready, the
    candidate is stable."""
    step = _step_on_trial(turn, command)
    if step is None:
        return None
    if step.approved:
        return _ignored(turn, command, "it was promoted already: workers are being prepared")
    steps = len(turn.spec.rollout.steps)
    at = f"at step {step.index + 1} of {steps}" if step.index < steps else "after every step"
    _taken(turn, command, f"it is promoted {at}, as soon as every worker has it ready")
    turn.remember(step=replace(step, index=steps, approved=True, began_at=turn.seen.now, held=0.0), paused="")
    return None


def _skip_step(turn: Turn, command: Command) -> Outcome | None:
    """The step in hand counts as passed."""
    step = _step_on_trial(turn, command)
    if step is None:
        return None
    steps = len(turn.spec.rollout.steps)
    if step.index >= steps:
        return _ignored(turn, command, "no step is left: use promote")
    _taken(turn, command, f"step {step.index + 1} of {steps} is skipped")
    go_on(turn, step)
    return None


def _pause(turn: Turn, command: Command) -> Outcome | None:
    """Like spec.rollout.paused, for who may command and not edit."""
    memory, under_way = turn.memory, _under_way(turn)
    if not _means(turn, command, under_way):
        return _ignored(turn, command, f"the revision under way is {under_way or 'none'}")
    if memory.paused:
        return _ignored(turn, command, f"it was paused by {memory.paused} already")
    _taken(turn, command, "nothing goes forward until the command resume")
    turn.remember(paused=command.text)
    return None


def _resume(turn: Turn, command: Command) -> Outcome | None:
    """After the command pause, or at a step that has a pause."""
    memory, step, under_way = turn.memory, turn.memory.step, _under_way(turn)
    if not _means(turn, command, under_way):
        return _ignored(turn, command, f"the revision under way is {under_way or 'none'}")
    if memory.paused:
        _taken(turn, command, f"the pause by {memory.paused} is over")
        turn.remember(paused="")
    elif step is not None and awaited(turn) == RESUMPTION:
        _taken(turn, command, f"the pause of step {step.index + 1} is over")
        turn.remember(step=replace(step, resumed=True))
    elif turn.seen.spec is not None and turn.seen.spec.rollout.paused:
        return _ignored(turn, command, "spec.rollout.paused is true: set it to false")
    else:
        return _ignored(turn, command, "nothing waits for it (a manual promotion waits for the command promote)")
    return None


def _retry(turn: Turn, command: Command) -> Outcome | None:
    """One new attempt of what failed or was rejected, with Jobs of new names; or of a target that went back alone."""
    candidate, step = turn.memory.candidate, turn.memory.step
    if candidate is not None and step is not None and step.failed and command.revision in ("", candidate.revision):
        if turn.seen.spec is None:
            return _ignored(turn, command, "the spec cannot be read")
        _taken(turn, command, f"it is tried again on target {', '.join(sorted(step.failed))}")
        # What it failed by stands in the old window. And of the last preparation nobody new is routed: a target that
        # failed there would be promoted without one request.
        last = len(turn.spec.rollout.steps) - 1
        fresh = replace(
            StepMemory(min(step.index, last), step.plan, turn.seen.now, seen_at=step.seen_at, baseline=step.baseline),
            deaths=builds.deaths(turn, candidate),
            weight=step.weight,
            shadow=step.shadow,
            resumed=step.index > last,
        )
        turn.remember(step=fresh, window=new_window(turn.memory))
        return None
    revision = command.revision or builds.wanted_revision(turn)
    meant = {revision, *_platform_of(turn, command)}
    rejected = [r for r in turn.memory.rejected if r.revision in meant]
    if not rejected and turn.memory.failure is None:
        what = f"{revision} was not rejected" if revision else "nothing was rejected"
        return _ignored(turn, command, f"{what}, and no Job has failed")
    _taken(turn, command, "one new attempt is made")
    turn.remember(
        rejected=tuple(r for r in turn.memory.rejected if r.revision not in meant),
        failure=None,
        attempt=turn.memory.attempt + 1,
        source_changes=0,
    )
    return None


def _refresh(turn: Turn, command: Command) -> Outcome | None:
    """Look again at what lies at the addresses: the content may have changed."""
    _taken(turn, command, "the source is resolved again")
    turn.remember(resolve_counter=turn.memory.resolve_counter + 1, source_changes=0)
    return None


def _under_way(turn: Turn) -> str:
    """The revision, or the platform by its hash, that is on trial, being built, or the next; '' if none is."""
    if turn.memory.candidate is not None:
        return turn.memory.candidate.revision
    return builds.revision_in_the_making(turn) or platforms.hash_in_the_making(turn)


def _means(turn: Turn, command: Command, under_way: str) -> bool:
    """Who knows the revision that serves, and not the platform's hash, means that its workers shall not change: while
    others are pending as while they are on trial. At rest it comes too late."""
    if command.revision in ("", under_way):
        return True
    tried, stable = trial(turn.memory), turn.memory.stable
    platform = tried.hash if tried is not None else platforms.hash_in_the_making(turn)
    return bool(platform) and platform == under_way and stable is not None and command.revision == stable.revision


def _platform_of(turn: Turn, command: Command) -> tuple[str, ...]:
    """The platform that the spec asks for, if the command may mean it."""
    wanted = platforms.wanted_platform(turn)
    return (wanted.hash,) if wanted is not None and command.revision in ("", builds.wanted_revision(turn)) else ()


def _step_on_trial(turn: Turn, command: Command) -> StepMemory | None:
    """The step in hand of the revision that the command means; None if there is none, which is told."""
    memory, step = turn.memory, turn.memory.step
    making = builds.revision_in_the_making(turn)
    if memory.candidate is None or step is None or memory.stable is None:
        first = "nothing serves yet, so there are no steps"
        why = first if memory.candidate else f"{making} has not passed its gate yet" if making else "none is on trial"
    elif command.revision not in ("", memory.candidate.revision):
        why = f"the revision on trial is {memory.candidate.revision}"
    elif turn.seen.spec is None:
        why = "the spec cannot be read"
    elif step.back:
        why = f"workers are going back to {memory.candidate.revision} already"
    elif step.failed:
        why = f"it failed on target {', '.join(sorted(step.failed))}: use retry or abort"
    else:
        return step
    _ignored(turn, command, why)
    return None


_HANDLERS: Mapping[str, Callable[[Turn, Command], Outcome | None]] = {
    "abort": _abort,
    "rollback": _rollback,
    "retry": _retry,
    "refresh": _refresh,
    "promote": _promote,
    "skip-step": _skip_step,
    "pause": _pause,
    "resume": _resume,
}
COMMANDS = tuple(_HANDLERS)


def _lost(turn: Turn, goal: Deployed) -> str:
    """Why nobody could serve it: somebody tried and failed (its artifact is gone, say), and nobody holds it. Found
    before any worker is touched."""
    failed = ""
    for worker in facts.present(turn.seen):
        engine = facts.engine(turn.seen, worker, facts.digest_for(worker, goal))
        if engine is not None and engine.state is EngineState.READY:
            return ""
        if engine is not None and engine.state is EngineState.FAILED:
            failed = f"{worker.pod}: {engine.message or engine.reason or 'it gave no reason'}"
    return failed


def _taken(turn: Turn, command: Command, what: str) -> None:
    turn.notices.append(Notice(reasons.COMMAND_TAKEN, f"command {command.text}: {what}"))


def _ignored(turn: Turn, command: Command, why: str) -> Outcome | None:
    turn.notices.append(Notice(reasons.COMMAND_IGNORED, f"command {command.text} does nothing: {why}", warning=True))
    return None  # and the rules go on
