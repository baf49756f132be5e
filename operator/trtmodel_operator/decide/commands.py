"""What a person asks for by the annotation trtmodel.io/command: ``<verb>[@<revision>]#<nonce>``.

Each text is taken once; a repeated one does nothing. The revision, where given, guards against a command that comes too
late: abort and retry name the revision on trial or in trouble, rollback names the one to go back to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trtmodel_operator import reasons
from trtmodel_operator.decide import builds
from trtmodel_operator.decide.turn import SOON, Outcome, Turn, record, reject, roll_back
from trtmodel_operator.model import Command, Notice, Situation, Stage


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
    """One new attempt of what failed or was rejected, with Jobs of new names."""
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


def _taken(turn: Turn, command: Command, what: str) -> None:
    turn.notices.append(Notice(reasons.COMMAND_TAKEN, f"command {command.text}: {what}"))


def _ignored(turn: Turn, command: Command, why: str) -> Outcome | None:
    turn.notices.append(Notice(reasons.COMMAND_IGNORED, f"command {command.text} does nothing: {why}", warning=True))
    return None  # and the rules go on
