"""Jobs: what they are asked, what they are called, and what came of them.

A Job is named by a hash of everything that it reads, so the same question is asked once, whoever asks and however
often; one that ended for good stays ended until the spec changes or a person says retry or refresh. Nothing in the name
of a build is its model's: two TRTModels of a namespace that need the same engine wait for the same Job.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtmodel_contract.codec import canonical, encode
from trtmodel_contract.identity import short_hash
from trtmodel_contract.jobs import BuildTask, CalibrationRequest, DataSet, Reason, ResolveTask

from trtmodel_operator import reasons
from trtmodel_operator.decide.turn import LATER, Outcome, Turn
from trtmodel_operator.model import (
    CreateJob,
    Failure,
    JobKind,
    JobState,
    ObservedJob,
    Resolved,
    Situation,
    Stage,
    Target,
)
from trtmodel_operator.text import timestamp

_WAYS_OUT = {
    "OOMKilled": "raise spec.build.resources.limits.memory",
    "DeadlineExceeded": "raise spec.build.deadline, or find out what it waited for",
    "Unschedulable": "add such a node, or change spec.targets or spec.build.nodeSelector",
    "ImagePullBackOff": "check the image's name and spec.serving.pod.imagePullSecrets",
    "FailedCreate": "raise the quota, or correct what it names: spec.targets, spec.build.resources or spec.serving.pod",
    "Evicted": "give the node room, or lower what spec.build.resources asks for",
}
_AGAIN = "then change the spec, or use the command retry"
_OWN = ("model", "thresholds", "cluster")  # fields of a build's task that are its model's own
_KEPT = ("cluster", "keep")  # fields of a resolve task that only say what the collector leaves alone


@dataclass(frozen=True)
class Work:
    """`load_key`, `nodes`: see CreateJob. `image`: '' for that of the workers there are."""

    name: str
    kind: JobKind
    target: Target
    task: ResolveTask | BuildTask
    stage: Stage
    load_key: str = ""
    nodes: tuple[str, ...] = ()
    image: str = ""


def done(turn: Turn, work: Work, what: str) -> ObservedJob | Outcome:
    """The Job once it has ended; until then an Outcome: it is made, it runs, it waits for something, or it had ended
    for good before."""
    failure = turn.memory.failure
    if failure is not None and failure.job == work.name:
        return Outcome(failure_situation(failure))
    job = next((j for j in turn.seen.jobs if j.name == work.name), None)
    limit = f"for {turn.spec.build.deadline} s at most (spec.build.deadline)"
    if job is not None and job.failures:
        limit += f"; {tries(job, turn.spec.build.retries)}"
    if job is None:
        made_by = _image(turn, work.image)
        create = CreateJob(work.name, work.kind, work.target, work.task, made_by, work.load_key, work.nodes)
        message = f"{what} by Job {work.name}, {limit}"
        return Outcome(Situation(work.stage, work.stage.value, message), LATER, (create,))
    if job.state is not JobState.RUNNING:
        return job
    if job.suspended:
        since = f" since {timestamp(job.made_at)}" if job.made_at is not None else ""
        message = (
            f"{what} by Job {job.name}, which waits for its turn{since}: as many builds run as the operator lets run. "
            f"Once it begins it takes {turn.spec.build.deadline} s at most (spec.build.deadline)"
        )
        return Outcome(Situation(work.stage, reasons.BUILD_QUEUED, message), LATER)
    if job.trouble:
        way_out = _WAYS_OUT.get(job.trouble, "it is tried again until spec.build.deadline or spec.build.retries end it")
        message = (
            f"Job {job.name} does not get on: {job.message or job.trouble}. {_sentence(way_out)}. It waits {limit}"
        )
        return Outcome(Situation(work.stage, job.trouble, message, stuck=True), LATER)
    return Outcome(Situation(work.stage, work.stage.value, f"{what} by Job {job.name}, {limit}"), LATER)


def tries(job: ObservedJob, retries: int) -> str:
    """How many of its tries failed, '' for none."""
    return f"{job.failures} of {retries + 1} tries failed" if job.failures else ""


def failed(turn: Turn, job: ObservedJob) -> Outcome:
    reason, message = why(job)
    if job.failures > 1:
        message = f"{message.rstrip('.')} ({tries(job, turn.spec.build.retries)})"
    return remember_failure(turn, Failure(job.name, reason, message))


def no_result(turn: Turn, job: ObservedJob) -> Outcome:
    message = "the Job ended well but its result cannot be read: are operator and worker image of one version?"
    return remember_failure(turn, Failure(job.name, reasons.RESULT_MISSING, message))


def remember_failure(turn: Turn, failure: Failure) -> Outcome:
    turn.remember(failure=failure)
    return Outcome(failure_situation(failure))


def why(job: ObservedJob) -> tuple[str, str]:
    """The Job's own words; where it could not speak any more, the cluster's."""
    if job.result is not None and job.result.reason is not Reason.DONE:
        return job.result.reason.value, job.result.message or job.result.reason.value
    return job.trouble or reasons.JOB_FAILED, job.message or job.trouble or "it gave no reason"


def failure_situation(failure: Failure) -> Situation:
    inconclusive = failure.reason == Reason.GATE_INCONCLUSIVE.value
    way_out = _WAYS_OUT.get(failure.reason)
    hint = f"{_sentence(way_out)}, {_AGAIN}" if way_out else f"Correct the cause, {_AGAIN}"
    if inconclusive:
        hint = "Raise verify.dataset.samples, or the limit"
    message = f"Job {failure.job} ended for good: {failure.message.rstrip('.')}. {hint}"
    return Situation(Stage.GATE_INCONCLUSIVE if inconclusive else Stage.STALLED, failure.reason, message)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def resolve_name(turn: Turn) -> str:
    return f"{turn.seen.model.name}-resolve-{short_hash(resolve_key(turn), _pod(turn))}"


def build_name(turn: Turn, target: Target, resolved: Resolved, load_key: str = "", made_by: str = "") -> str:
    """Without what is the model's own: its name, what it calls the target, and its limits, which judge the figures that
    the Job brings and not the Job. `made_by`: another image than the workers have."""
    task = {name: value for name, value in encode(build_task(turn, resolved)).items() if name not in _OWN}
    place = [target.gpu, target.gpus, target.node_selector, target.tolerations, load_key]
    place += [target.runtime_class] if target.runtime_class else []  # Jobs from before there was one keep their names
    question = canonical([task, encode(place)]).decode()
    again = (str(turn.memory.attempt), str(turn.memory.resolve_counter))
    return f"build-{resolved.revision}-{short_hash(question, _image(turn, made_by), _pod(turn), *again)}"


def _pod(turn: Turn) -> str:
    """What a Job's pod is made of beside its task. Part of its name, not of what was resolved: a Job that waits for a
    node or failed for its credentials is replaced when those are corrected; one that answered is not asked again."""
    spec = turn.spec
    pod = [spec.serving.pod.get(name) for name in ("serviceAccountName", "imagePullSecrets")]
    return canonical(encode([spec.build, spec.credentials_secret, pod])).decode()


def image(turn: Turn) -> str:
    """The image that workers of this model have, once they have one: an engine is built with what will load it."""
    platform = turn.memory.platform
    if platform is not None and platform.image:
        return platform.image
    return turn.spec.serving.image or turn.seen.default_image


def _image(turn: Turn, other: str) -> str:
    return other or image(turn)


def _calibration(turn: Turn, digest: str) -> CalibrationRequest | None:
    asked = turn.spec.calibration
    if asked is None:
        return None
    return CalibrationRequest(DataSet(asked.uri, asked.samples, digest), asked.method, asked.per_channel)


def resolve_key(turn: Turn) -> str:
    """Hash of the fields that the resolve Job reads, and of what makes the same question a new one."""
    memory = turn.memory
    asked = (image(turn), str(memory.resolve_counter), str(memory.attempt), *memory.pinned)
    if asked not in turn.keys:  # most rules ask for it
        task = {name: value for name, value in encode(resolve_task(turn)).items() if name not in _KEPT}
        turn.keys[asked] = short_hash(canonical(task).decode(), *asked)
    return turn.keys[asked]


def resolve_task(turn: Turn) -> ResolveTask:
    spec = turn.spec
    return ResolveTask(
        model=turn.seen.model,
        source_uri=spec.source_uri,
        source_pin=spec.source_pin,
        storage=spec.storage,
        engine=spec.engine,
        calibration=_calibration(turn, ""),
        dataset=DataSet(spec.verify.dataset_uri, spec.verify.samples),
        verify_task=spec.verify.task,
        cluster=turn.seen.cluster,
        keep=_lives_on(turn) if turn.seen.cluster else None,
    )


def _lives_on(turn: Turn) -> tuple[str, ...]:
    """Manifests that the model has, may go back to, or is about to take."""
    memory = turn.memory
    there = [d for d in (memory.stable, memory.candidate, memory.standby) if d is not None]
    digests = {digest for deployed in there for digest in deployed.digests}
    digests |= {digest for entry in memory.history for digest in entry.digests}
    return tuple(sorted(digests | {b.artifact.manifest_digest for b in memory.built}))


def known(turn: Turn) -> Resolved | None:
    """What today's spec was resolved to, lately or when stable was promoted; None while that is not known."""
    if turn.seen.spec is None or not image(turn):
        return None
    key = resolve_key(turn)
    remembered = (turn.memory.resolved, turn.memory.stable_resolved)
    return next((r for r in remembered if r is not None and r.key == key), None)


def build_task(turn: Turn, resolved: Resolved) -> BuildTask:
    spec = turn.spec
    return BuildTask(
        model=turn.seen.model,
        source_uri=spec.source_uri,
        source_sha256=resolved.source_sha256,
        revision=resolved.revision,
        storage=spec.storage,
        engine=spec.engine,
        calibration=_calibration(turn, resolved.calibration_digest),
        dataset=DataSet(spec.verify.dataset_uri, spec.verify.samples, resolved.dataset_digest),
        verify_task=spec.verify.task,
        thresholds=spec.verify.thresholds,
        cluster=turn.seen.cluster,
    )
