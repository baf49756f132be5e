"""What a person asks for by the annotation trtmodel.io/command: ``<verb>[@<revision>]#<nonce>``.

Each text is taken once; a repeated one does nothing. The revision, where given, guards against a command that comes too
late: abort and retry name the revision on trial or in trouble, rollback names the one to go back to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from trtmodel_contract.control import EngineState

from trtmodel_operator import facts, reasons
from trtmodel_operator.decide import builds
from trtmodel_operator.decide.turn import SOON, Outcome, Turn, record, reject, roll_back
from trtmodel_operator.model import Command, Deployed, Notice, Situation, Stage, StepMemory


def take_command(turn: Turn) -> Outcome | None:
    command = turn.seen.command
    if command is None or command.text == turn.memory.command:
        return None
    turn.remember(command=command.text)
    handler = _HANDLERS.get(command.verb)
    if handler is None:
        known = ", ".join(_HANDLERS)
        return _ignored(turn, command, f"known are {known}, in the form verb@revision#nonce, such as retry#1")
    return handler(turn, command)


def _abort(turn: Turn, command: Command) -> Outcome | None:
    """The revision on trial, or the one that is being built, is not wanted any more."""
    why = "a person aborted the rollout"
    on_trial = turn.memory.candidate.revision if turn.memory.candidate else builds.revision_in_the_making(turn)
    if not on_trial:
        return _ignored(turn, command, "no rollout is under way")
    if command.revision not in ("", on_trial):
        return _ignored(turn, command, f"the revision on trial is {on_trial}")
    _taken(turn, command, f"{on_trial} is taken back")
    if turn.memory.candidate is not None:
        return roll_back(turn, reasons.ABORTED, why, outcome=reasons.ABORTED)
    record(turn, on_trial, reasons.ABORTED, reasons.ABORTED, why)
    reject(turn, on_trial, reasons.ABORTED, why)
    return None  # the rule `rejected` says the rest


def _rollback(turn: Turn, command: Command) -> Outcome | None:
    """To stable if a candidate is on trial, else to the standby: workers hold it, so it is a pointer flip."""
    memory = turn.memory
    goal = memory.stable if memory.candidate else memory.standby
    if goal is None or memory.stable is None:
        return _ignored(turn, command, "there is nothing to go back to")
    if command.revision not in ("", goal.revision):
        return _ignored(turn, command, f"the revision to go back to is {goal.revision}")
    if memory.candidate is None and (lost := _lost(turn, goal)):
        return _ignored(turn, command, f"no worker can serve {goal.revision} any more ({lost}): apply its spec instead")
    why = "a person asked to go back"
    _taken(turn, command, f"going back to {goal.revision}")
    if memory.candidate is not None:
        return roll_back(turn, reasons.ROLLED_BACK_BY_COMMAND, why)
    left = memory.stable
    record(turn, left.revision, reasons.ROLLED_BACK, reasons.ROLLED_BACK_BY_COMMAND, why, left.digests)
    reject(turn, left.revision, reasons.ROLLED_BACK_BY_COMMAND, why)
    turn.remember(stable=goal, standby=left, stable_resolved=None)
    message = f"going back from {left.revision} to {goal.revision}: {why}"
    return Outcome(Situation(Stage.PROMOTING, reasons.ROLLED_BACK_BY_COMMAND, message), SOON)


def _retry(turn: Turn, command: Command) -> Outcome | None:
    """One new attempt of what failed or was rejected, with Jobs of new names; or of a target that went back alone."""
    candidate, step = turn.memory.candidate, turn.memory.step
    if candidate is not None and step is not None and step.failed and command.revision in ("", candidate.revision):
        _taken(turn, command, f"it is tried again on target {', '.join(sorted(step.failed))}")
        fresh = StepMemory(step.index, step.plan, turn.seen.now, seen_at=step.seen_at, baseline=step.baseline)
        turn.remember(step=replace(fresh, deaths=builds.deaths(turn, candidate)))
        return None
    revision = command.revision or builds.wanted_revision(turn)
    rejected = [r for r in turn.memory.rejected if r.revision == revision]
    if not rejected and turn.memory.failure is None:
        what = f"{revision} was not rejected" if revision else "nothing was rejected"
        return _ignored(turn, command, f"{what}, and no Job has failed")
    _taken(turn, command, "one new attempt is made")
    turn.remember(
        rejected=tuple(r for r in turn.memory.rejected if r.revision != revision),
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


def _not_yet(turn: Turn, command: Command) -> Outcome | None:
    return _ignored(turn, command, "it is not supported yet: promotion is automatic")


_HANDLERS: Mapping[str, Callable[[Turn, Command], Outcome | None]] = {
    "abort": _abort,
    "rollback": _rollback,
    "retry": _retry,
    "refresh": _refresh,
    "promote": _not_yet,
    "skip-step": _not_yet,
}


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
