"""One pass: what was seen, the memory as it becomes, and how a rule ends it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from trtmodel_contract.codec import canonical, encode
from trtmodel_contract.identity import short_hash

from trtmodel_operator import reasons
from trtmodel_operator.model import (
    Action,
    Deployed,
    HistoryEntry,
    Lookup,
    Memory,
    Notice,
    Observed,
    ObservedWorker,
    Rejected,
    Situation,
    Spec,
    Stage,
)
from trtmodel_operator.text import cut, timestamp

NEXT = 0.05  # seconds: one thing is done, the next is to be decided
SOON = 2.0  # seconds: something moves in the workers; their long polls usually tell it first
LATER = 15.0  # seconds: a Job runs or a pod starts; events usually tell it first
RENEW = 100.0  # seconds: a third of the candidate's time to live in the workers
LEAST_GAP = 30.0  # seconds between two looks that still count as watching

REJECTED_KEPT = 10
BUILT_KEPT = 8
MESSAGE_LENGTH = 1000  # of what is remembered


@dataclass(frozen=True)
class Outcome:
    """How a rule ends the pass. `halt`: nothing at all may be done to children or workers."""

    situation: Situation
    requeue: float | None = None
    actions: tuple[Action, ...] = ()
    halt: bool = False


@dataclass
class Turn:
    """A rule may change `memory` and return None: the change is written whatever rule ends the pass. `keys` keeps
    hashes of the spec that are asked for again, `lookups` are what the rules want to be looked up outside."""

    seen: Observed
    memory: Memory
    notices: list[Notice] = field(default_factory=list)
    keys: dict[tuple[str, ...], str] = field(default_factory=dict)
    lookups: list[Lookup] = field(default_factory=list)

    def remember(self, **changes: object) -> None:
        self.memory = replace(self.memory, **changes)  # type: ignore[arg-type]  # the names are Memory's own

    @property
    def spec(self) -> Spec:
        """For rules behind `spec_unreadable`."""
        assert self.seen.spec is not None
        return self.seen.spec


def interval(spec: Spec | None) -> float:
    """Seconds between two looks."""
    return spec.rollout.analysis.interval if spec else 10.0


def watched(now: float, seen_at: float, every: float) -> float | None:
    """Seconds to count between two looks; None if nobody watched in between (the operator was down). However long an
    interval is, a pass is made each `RENEW` seconds, so a look that is later than that was not taken by anybody."""
    gap = now - seen_at
    return gap if 0 <= gap <= max(LEAST_GAP, min(3 * every, every + RENEW)) else None


def verification_key(spec: Spec | None) -> str:
    """What a rejection holds for: with other thresholds the revision may be tried again. Whom webhooks tell is none."""
    if spec is None:
        return ""
    return short_hash(canonical(encode([spec.verify, replace(spec.rollout.analysis, webhooks=())])).decode())


def steps_key(spec: Spec) -> str:
    return short_hash(canonical(encode(spec.rollout.steps)).decode())


def short_uid(worker: ObservedWorker) -> str:
    """A worker's name in the memory."""
    return short_hash(worker.uid, length=8)


def is_paused(turn: Turn) -> bool:
    """By the spec or by a command: nothing goes forward."""
    return bool(turn.memory.paused) or (turn.seen.spec is not None and turn.seen.spec.rollout.paused)


def record(
    turn: Turn, revision: str, outcome: str, reason: str, message: str, deployed: Deployed | None = None
) -> None:
    """A finished rollout, newest first. Of a promoted one the engines are kept: one may go back to it."""
    engines = deployed.artifacts if deployed is not None and outcome == reasons.PROMOTED else ()
    entry = HistoryEntry(
        revision=revision,
        outcome=outcome,
        reason=reason,
        at=timestamp(turn.seen.now),
        digests=deployed.digests if deployed is not None else (),
        message=cut(message, MESSAGE_LENGTH),
        engines=tuple(replace(e, verdict_text="") for e in engines),
    )
    limit = turn.seen.spec.rollout.history_limit if turn.seen.spec else 5
    turn.remember(history=_kept((entry, *turn.memory.history), limit))


def _kept(entries: tuple[HistoryEntry, ...], limit: int) -> tuple[HistoryEntry, ...]:
    """The newest, but that half of the places are for revisions that one may go back to: any number of rollouts that
    failed since must not push them out."""
    promoted = [e for e in entries if e.engines][: limit // 2]
    free = limit - len(promoted)
    others = [e for e in entries if not any(e is p for p in promoted)][:free]
    return tuple(e for e in entries if any(e is k for k in (*promoted, *others)))


def overdue(turn: Turn, message: str, progress: str, then: str = "") -> Outcome:
    """What is waited for beyond progressDeadline, since nothing would be won by taking it back; and what it takes."""
    message += f". This takes longer than progressDeadline ({turn.spec.rollout.progress_deadline:g} s)"
    return Outcome(Situation(Stage.STALLED, reasons.DEADLINE, message + (f"; {then}" if then else ""), progress), LATER)


def patience(turn: Turn, then: str = "") -> str:
    """For how long, at the end of a message that says what is waited for; and what comes after it."""
    until = f"; then {then}" if then else ""
    return f" (it is waited for {turn.spec.rollout.progress_deadline:g} s of watched time, progressDeadline{until})"


def reject(turn: Turn, revision: str, reason: str, message: str) -> None:
    """Not tried again until verify or analysis change, or a person asks for it."""
    entry = Rejected(revision, verification_key(turn.seen.spec), reason, cut(message, MESSAGE_LENGTH))
    others = [r for r in turn.memory.rejected if r.revision != revision]
    turn.remember(rejected=(entry, *others)[:REJECTED_KEPT])


def drop_candidate(turn: Turn, outcome: str, reason: str, message: str) -> None:
    """The candidate is no more: workers go back to stable with this very pass."""
    candidate = turn.memory.candidate
    assert candidate is not None
    record(turn, candidate.revision, outcome, reason, message, candidate)
    turn.remember(candidate=None, step=None, waiting="", waited=0.0, waited_at=0.0)


def roll_back(turn: Turn, reason: str, message: str, outcome: str = reasons.ROLLED_BACK) -> Outcome:
    """Ends the trial of the candidate for good. Of a platform it is said what it is: its name is only a hash."""
    assert turn.memory.candidate is not None
    revision, stable = turn.memory.candidate.revision, turn.memory.stable
    if turn.memory.step is not None and turn.memory.step.platform is not None:
        message = f"workers of image {turn.memory.step.platform.image}, {message}"
    drop_candidate(turn, outcome, reason, message)
    reject(turn, revision, reason, message)
    return Outcome(rolled_back(revision, stable.revision if stable else "", reason, message), SOON)


def rolled_back(revision: str, stable: str, reason: str, message: str) -> Situation:
    back = f"{stable} serves" if stable else "nothing to roll back to: no revision was ever promoted"
    way_out = "change the spec, or try it once more with the command retry"
    return Situation(Stage.ROLLED_BACK, reason, f"{revision} was taken back: {message}. {back}; {way_out}")
