"""A TRTModel that goes, and its artifacts with it where deletionPolicy says Delete.

A finalizer holds such a model until a Job has removed what only it needed. Only where Delete is asked for: without it
nothing holds a TRTModel. The Job has no owner, so that no kind of deletion takes it away in the middle, and its end,
good or bad, lets the model go: a bucket that is gone, or credentials that are no longer valid, leave files behind and a
warning, never an object that cannot be deleted.

    Jobs and workers of the model end --> a Job removes --> the model goes, with an event that says what became of it
                                      └── no Job within GIVE_UP ──────┘
"""

from __future__ import annotations

from trtmodel_contract.codec import canonical, encode
from trtmodel_contract.identity import short_hash
from trtmodel_contract.jobs import CollectTask

from trtmodel_operator import reasons
from trtmodel_operator.decide import jobs
from trtmodel_operator.decide.turn import LATER, MESSAGE_LENGTH, Outcome, Turn
from trtmodel_operator.model import (
    Action,
    CreateJob,
    DeleteJob,
    DeleteWorkload,
    Guard,
    JobKind,
    JobState,
    Notice,
    ObservedJob,
    Situation,
    Stage,
)
from trtmodel_operator.text import cut

GIVE_UP = 3600.0  # seconds after which the model goes, whatever its Job does: more than the Job's own deadline
AT_ONCE = "To let it go at once, and keep them, set spec.deletionPolicy to Retain"


def guard(turn: Turn) -> list[Guard]:
    """The finalizer is there exactly where it is needed. Of a spec that cannot be read nobody knows; it stays."""
    seen = turn.seen
    if seen.deleting or seen.spec is None or seen.spec.deletes_artifacts == seen.guarded:
        return []
    return [Guard(seen.spec.deletes_artifacts)]


def deleting(turn: Turn) -> Outcome | None:
    """Kubernetes collects the children by their owner, so nothing is made any more but what removes artifacts."""
    if not turn.seen.deleting:
        return None
    if not turn.seen.guarded:
        return Outcome(_going("being deleted, with everything that it owns"), halt=True)
    spec = turn.seen.spec
    if spec is None:
        why = turn.seen.spec_error or "the spec cannot be read"
        return _let_go(turn, reasons.ARTIFACTS_KEPT, f"its artifacts stay, since nothing tells where they lie: {why}")
    if not spec.deletes_artifacts:
        return _let_go(turn, reasons.ARTIFACTS_KEPT, "its artifacts stay: spec.deletionPolicy is Retain", expected=True)
    return _remove_artifacts(turn)


def _remove_artifacts(turn: Turn) -> Outcome:
    name = collect_name(turn)
    job = next((j for j in turn.seen.jobs if j.name == name), None)
    if job is not None and job.state is not JobState.RUNNING:
        return _ended(turn, job)
    since = turn.seen.deleted_at
    if since is not None and turn.seen.now - since > GIVE_UP:
        return _let_go(turn, reasons.ARTIFACTS_KEPT, f"its artifacts stay: not removed in an hour. {_by_hand(turn)}")
    others = [j for j in turn.seen.jobs if j.kind is not JobKind.COLLECT]
    workers: list[Action] = [DeleteWorkload(w.name) for w in turn.seen.workloads]
    if others:  # they would go on writing
        situation = _going(f"its Jobs are ended, then its artifacts are removed, in an hour at most. {AT_ONCE}")
        return Outcome(situation, 1.0, (*workers, *(DeleteJob(j.name) for j in others)), halt=True)
    if job is None:
        storage = turn.spec.storage
        task = CollectTask(turn.seen.model.namespace, storage, turn.seen.cluster, turn.seen.model, delete=True)
        workers.append(CreateJob(name, JobKind.COLLECT, turn.spec.targets[0], task, jobs.image(turn)))
    trouble = f" It does not get on: {job.message or job.trouble}." if job is not None and job.trouble else ""
    message = f"Job {name} removes its artifacts, which takes some minutes, and an hour at most.{trouble} {AT_ONCE}"
    return Outcome(_going(message, stuck=bool(trouble)), LATER, tuple(workers), halt=True)


def collect_name(turn: Turn) -> str:
    """With other storage or credentials another Job is tried."""
    what = canonical(encode([turn.spec.storage, turn.spec.credentials_secret])).decode()
    return f"{turn.seen.model.name}-collect-{short_hash(turn.seen.model.uid, what)}"


def _ended(turn: Turn, job: ObservedJob) -> Outcome:
    if job.state is JobState.COMPLETE:
        said = job.result.message if job.result is not None else "removed"
        return _let_go(turn, reasons.ARTIFACTS_REMOVED, f"artifacts by Job {job.name}: {said}", expected=True)
    _, message = jobs.why(job)
    text = f"its artifacts stay: Job {job.name} failed: {message.rstrip('.')}. {_by_hand(turn)}"
    return _let_go(turn, reasons.ARTIFACTS_KEPT, text)


def _let_go(turn: Turn, reason: str, message: str, *, expected: bool = False) -> Outcome:
    turn.notices.append(Notice(reason, cut(message, MESSAGE_LENGTH), warning=not expected))
    return Outcome(_going(f"being deleted: {message}"), None, (Guard(on=False),), halt=True)


def _by_hand(turn: Turn) -> str:
    """What frees the space later: the model's pins keep its engines for ever otherwise."""
    place = turn.spec.storage
    where = f"s3://{place.bucket}/{place.prefix}/{turn.seen.model.namespace}"
    return f"Delete {where}/pins/{turn.seen.cluster}/{turn.seen.model.uid}, then run trtmodel cache collect {where}"


def _going(message: str, *, stuck: bool = False) -> Situation:
    reason = reasons.REMOVING_ARTIFACTS if AT_ONCE in message else reasons.DELETING
    return Situation(Stage.DELETING, reason, cut(message, MESSAGE_LENGTH), stuck=stuck)
