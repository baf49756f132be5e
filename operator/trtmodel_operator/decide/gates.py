"""What people and their systems have a say in: queries of Prometheus, and webhooks that confirm.

Nothing is asked here. A pass names what it wants to know (`Decision.lookups`), and what came of it is a fact of a later
pass (`Observed.answers`). So a decision waits for nobody, and a crash loses nothing but answers, which are asked for
again under the same key.
"""

from __future__ import annotations

from trtmodel_contract.gate import Verdict
from trtmodel_contract.identity import short_hash

from trtmodel_operator import analysis, reasons
from trtmodel_operator.decide.turn import LATER, LEAST_GAP, Outcome, Turn, interval, overdue, patience
from trtmodel_operator.envelope import envelope
from trtmodel_operator.model import (
    Answer,
    Check,
    Confirmation,
    Lookup,
    Query,
    QuerySpec,
    Situation,
    Stage,
    WebhookSpec,
    WebhookStage,
)

LEAST_PAUSE = 5.0  # seconds between two times that a webhook is asked the same


def lookups(turn: Turn) -> tuple[Lookup, ...]:
    """What is to be looked up until the next pass: what rules asked for, and the queries while a candidate answers."""
    memory, spec = turn.memory, turn.seen.spec
    if spec is None or memory.candidate is None or memory.stable is None or memory.step is None:
        return tuple(turn.lookups)
    if not memory.step.seen_at or memory.step.back:
        return tuple(turn.lookups)
    queries = [Query(_query_key(turn, q), q.address, q.query, interval(spec)) for q in spec.rollout.analysis.prometheus]
    return (*turn.lookups, *queries)


def checks(turn: Turn) -> tuple[Check, ...]:
    """How each query stands at this look."""
    memory, spec = turn.memory, turn.spec
    before = {c.name: c for c in memory.step.checks} if memory.step is not None else {}
    stale = max(LEAST_GAP, 3 * interval(spec))
    return tuple(
        analysis.judge_query(q, _answer(turn, _query_key(turn, q)), before.get(q.name), turn.seen.now, stale)
        for q in spec.rollout.analysis.prometheus
    )


def judged(found: tuple[Check, ...]) -> list[Verdict]:
    """Their verdicts. One answer outside the bounds is no Fail yet."""
    return [
        Verdict.INCONCLUSIVE if c.verdict == Verdict.FAIL.value and c.fails < analysis.FAILING_ANSWERS else verdict
        for c in found
        for verdict in [Verdict(c.verdict)]
    ]


def confirm_rollout(turn: Turn, revision: str) -> Outcome | None:
    """Asked by the rule `gate`: the revision passed its gate, and no worker has been told of it."""
    missing = _missing(turn, WebhookStage.CONFIRM_ROLLOUT, revision)
    if not missing:
        return None
    message = f"{revision} passed its gate. Its rollout waits for {'; '.join(missing)}"
    late = turn.memory.waited >= turn.spec.rollout.progress_deadline
    if late and turn.memory.waiting == confirmation(revision):
        return overdue(turn, message, "to be confirmed", "it goes on when all of them say yes")
    message += patience(turn, "a wait for this model ends, and it is asked on")
    return Outcome(Situation(Stage.PREPARING, reasons.AWAITING_CONFIRMATION, message, "to be confirmed", True), LATER)


def awaits_rollout(turn: Turn, revision: str) -> bool:
    """A webhook was asked about this rollout and did not say yes."""
    hooks = [h for h in turn.spec.rollout.analysis.webhooks if h.stage is WebhookStage.CONFIRM_ROLLOUT]
    return any((a := _answer(turn, _question(turn, h, revision))) is not None and not a.yes for h in hooks)


def confirmation(revision: str) -> str:
    """What the deadline counts for while it waits."""
    return f"confirmation of {revision}"


def confirm_promotion(turn: Turn) -> Outcome | None:
    """Every step was passed, and every worker has the candidate ready: whoever is to confirm has the last word. Until
    then it answers where it answers, and the looks go on."""
    memory = turn.memory
    if memory.candidate is None or memory.step is None or memory.stable is None or memory.step.back:
        return None
    missing = _missing(turn, WebhookStage.CONFIRM_PROMOTION, memory.candidate.revision)
    if not missing:
        return None
    message = f"{memory.candidate.revision} passed every step. Its promotion waits for {'; '.join(missing)}"
    message += patience(turn, "it is taken back")
    summary = f"to be confirmed, {memory.step.figures}" if memory.step.figures else "to be confirmed"
    pause = min(interval(turn.spec), LATER)
    return Outcome(Situation(Stage.CANARY, reasons.AWAITING_CONFIRMATION, message, summary, True), pause)


def unconfirmed(turn: Turn) -> str:
    """Whose confirmation a promotion waits for, and what came of it; '' for nobody's."""
    memory, spec = turn.memory, turn.seen.spec
    if spec is None or memory.candidate is None or memory.step is None or memory.stable is None or memory.step.back:
        return ""
    if memory.step.index < len(spec.rollout.steps):
        return ""
    return "; ".join(_missing(turn, WebhookStage.CONFIRM_PROMOTION, memory.candidate.revision, asking=False))


def _missing(turn: Turn, stage: WebhookStage, revision: str, *, asking: bool = True) -> list[str]:
    """The webhooks that have not said yes, each with what is known. All of them are asked, as long as one is missing:
    a yes that an operator took with it when it ended is asked for again."""
    found = []
    questions = []
    for hook in turn.spec.rollout.analysis.webhooks:
        if hook.stage is not stage:
            continue
        key = _question(turn, hook, revision)
        every = max(LEAST_PAUSE, interval(turn.spec))
        questions.append(Confirmation(key, hook.url, hook.timeout, every, _body(turn, hook, revision, key)))
        answer = _answer(turn, key)
        if answer is None or not answer.yes:
            found.append(f"the webhook {hook.name}: {answer.error if answer is not None else 'it is being asked'}")
    if found and asking:
        turn.lookups.extend(questions)
    return found


def _answer(turn: Turn, key: str) -> Answer | None:
    return next((a for a in turn.seen.answers if a.key == key), None)


def _query_key(turn: Turn, query: QuerySpec) -> str:
    """Of this window: an answer about the step before says nothing about this one."""
    return f"{turn.memory.window}/{query.name}/{short_hash(query.address, query.query)}"


def _question(turn: Turn, hook: WebhookSpec, revision: str) -> str:
    """The same as long as it is the same trial: one that ended is in the history, and a retry is counted."""
    memory = turn.memory
    ended = memory.history[0].at if memory.history else ""
    return short_hash(
        turn.seen.model.uid, hook.stage.value, hook.name, hook.url, revision, str(memory.attempt), ended, length=32
    )


def _body(turn: Turn, hook: WebhookSpec, revision: str, key: str) -> str:
    stable, step = turn.memory.stable, turn.memory.step
    said = {
        "revision": revision,
        "stable": stable.revision if stable is not None else "",
        "verdict": step.verdict if step is not None else "",
        "message": step.sentence if step is not None else "",
    }
    return envelope(turn.seen.model, hook, key, said)
