"""From what lies in the cluster, and what workers say, to the facts of one pass.

Total: an object that another hand has damaged becomes an absent fact, never an exception.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import logging
from collections.abc import Mapping, Sequence

from trtmodel_contract.codec import DocumentError, decode, loads
from trtmodel_contract.control import KEYS_FILE, POINTER_FILE, POINTER_SIGNATURE_FILE
from trtmodel_contract.exitcodes import FINAL_JOB_EXITS
from trtmodel_contract.identity import ModelRef
from trtmodel_contract.jobs import JobResult
from trtmodel_contract.signing import KeySet

from trtmodel_operator import manifests
from trtmodel_operator import spec as specs
from trtmodel_operator.adapters.cluster import FINALIZER, owner_uid, owner_uids
from trtmodel_operator.adapters.refusals import FAILED_CREATE
from trtmodel_operator.adapters.troubles import container_states, death_of, shortened, trouble_of
from trtmodel_operator.fields import SpecError
from trtmodel_operator.model import (
    SEQUENCE_MOST,
    Answer,
    JobKind,
    JobState,
    Memory,
    Observed,
    ObservedJob,
    ObservedPointer,
    ObservedWorker,
    ObservedWorkload,
    Spec,
)
from trtmodel_operator.ports import Json, Progress, Refusals, Signer, WorkerError, Workers

ANNOTATION_COMMAND = "trtmodel.io/command"
POD_SECONDS = 3.0  # after which a Job without a pod is asked about

log = logging.getLogger(__name__)


async def observe(
    raw: Json,
    children: Mapping[str, Sequence[Json]],
    *,
    workers: Workers,
    signer: Signer,
    default_image: str,
    now: float,
    progress: Progress | None = None,
    refusals: Refusals | None = None,
    cluster: str = "",
    answers: tuple[Answer, ...] = (),
) -> Observed:
    """`raw` and `children` as the API server gave them. Asks every running worker for its report, every running Job for
    its progress, and the cluster why a Job has no pod, in parallel."""
    meta = raw["metadata"]
    model = ModelRef(meta["namespace"], meta["name"], meta["uid"])
    spec, spec_error = _spec(raw)
    own = {kind: [c for c in items if _is_of(c, model)] for kind, items in children.items()}
    pods = children.get("Pod", ())
    seen_workers, seen_jobs = await asyncio.gather(
        _workers([p for p in pods if _is_worker_of(p, model)], workers),
        _jobs(own.get("Job", ()), pods, progress, refusals, now),
    )
    return Observed(
        now=now,
        model=model,
        generation=int(meta.get("generation", 0)),
        deleting="deletionTimestamp" in meta,
        spec=spec,
        spec_error=spec_error,
        memory=memory_of(raw),
        command=specs.parse_command((meta.get("annotations") or {}).get(ANNOTATION_COMMAND)),
        jobs=seen_jobs,
        workloads=tuple(_workload(d) for d in own.get("Deployment", ())),
        pointers=tuple(p for c in own.get("ConfigMap", ()) if (p := _pointer(c)) is not None),
        workers=seen_workers,
        default_image=default_image,
        service_fingerprint=next((_fingerprint(s) for s in own.get("Service", ())), ""),
        key_ids=tuple(signer.public_keys()),
        published_key_ids=_published(own.get("ConfigMap", ())),
        cluster=cluster,
        answers=answers,
        guarded=FINALIZER in (meta.get("finalizers") or ()),
        deleted_at=_epoch(meta["deletionTimestamp"]) if meta.get("deletionTimestamp") else None,
    )


def _is_of(child: Json, model: ModelRef) -> bool:
    return (
        model.uid in owner_uids(child) or (child["metadata"].get("labels") or {}).get(manifests.LABEL_UID) == model.uid
    )


def memory_of(raw: Json) -> Memory:
    """.status.rollout. One that cannot be read counts as lost: stable is then adopted from pointers and reports, as
    after a restore, and the sequence from what workers hold."""
    stored = (raw.get("status") or {}).get("rollout")
    if stored is None:
        return Memory()
    try:
        memory = decode(Memory, stored, "status.rollout")
        _require_sound(memory)
    except DocumentError as e:
        log.error("%s/%s: the memory cannot be read: %s", raw["metadata"]["namespace"], raw["metadata"]["name"], e)
        return Memory()
    return memory


def _require_sound(memory: Memory) -> None:
    """Raises DocumentError for numbers that no pass ever wrote."""
    if not 0 <= memory.sequence <= SEQUENCE_MOST:
        raise DocumentError(f"status.rollout.sequence: {memory.sequence} is none that was ever given")
    step = memory.step
    if step is not None and not (step.index >= 0 and 0 <= step.weight <= 100 and 0 <= step.shadow <= 100):
        text = f"index {step.index}, weight {step.weight} and shadow {step.shadow} are no step"
        raise DocumentError(f"status.rollout.step: {text}")


def _spec(raw: Json) -> tuple[Spec | None, str]:
    try:
        return specs.parse(raw.get("spec")), ""
    except SpecError as e:
        return None, str(e)


# ---------------------------------------------------------------------------------------------------------------
# Jobs
# ---------------------------------------------------------------------------------------------------------------


async def _jobs(
    raw: Sequence[Json], pods: Sequence[Json], progress: Progress | None, refusals: Refusals | None, now: float
) -> tuple[ObservedJob, ...]:
    async def one(raw_job: Json) -> ObservedJob | None:
        mine = _pods_of(raw_job, pods)
        job = _job(raw_job, mine)
        if job is None or job.state is not JobState.RUNNING:
            return job
        try:
            if progress is not None and mine and (ip := _running_at(mine[0])):
                return dataclasses.replace(job, progress=await progress.ask(ip))
            if refusals is not None and not mine and _is_awaited(job, now):
                meta = raw_job["metadata"]
                why = await refusals.why(meta["namespace"], meta["uid"])
                return dataclasses.replace(job, trouble=FAILED_CREATE, message=why) if why else job
        except WorkerError as e:
            log.debug("progress of Job %s: %s", job.name, e)
        return job

    return tuple(job for job in await asyncio.gather(*map(one, raw)) if job is not None)


def _is_awaited(job: ObservedJob, now: float) -> bool:
    """Whether it should have a pod by now."""
    return not job.suspended and job.made_at is not None and now - job.made_at >= POD_SECONDS


def _pods_of(job: Json, pods: Sequence[Json]) -> list[Json]:
    """Newest first."""
    uid = job["metadata"]["uid"]
    return sorted((p for p in pods if owner_uid(p) == uid), key=_created, reverse=True)


def _running_at(pod: Json) -> str:
    """The pod's address, once a container of it runs."""
    status = pod.get("status") or {}
    running = any("running" in (s.get("state") or {}) for s in status.get("containerStatuses") or ())
    return str(status.get("podIP") or "") if running and "deletionTimestamp" not in pod["metadata"] else ""


def _job(job: Json, mine: Sequence[Json]) -> ObservedJob | None:
    """`mine`: its pods, newest first."""
    labels = job["metadata"].get("labels") or {}
    try:
        kind = JobKind(labels.get(manifests.LABEL_KIND))
    except ValueError:
        return None
    status = job.get("status") or {}
    failed = _condition(status, "Failed")
    state = JobState.COMPLETE if _condition(status, "Complete") else JobState.FAILED if failed else JobState.RUNNING
    # Pods of a Job follow one another: what an older try said explains nothing that came after it.
    result, unreadable = _result(mine[:1])
    if state is JobState.RUNNING and result is not None:
        state = _foreseen(mine[0])
    trouble, message = "", ""
    if state is JobState.RUNNING and result is not None:
        trouble, message = result.reason.value, result.message  # it is tried again
    elif result is None:
        trouble, message = next((t for p in mine[:1] if (t := trouble_of(p))[0]), ("", ""))
        if failed is not None and (not trouble or failed.get("reason") == "DeadlineExceeded"):
            trouble = str(failed.get("reason") or "Failed")
            message = ": ".join(filter(None, (str(failed.get("message") or ""), message or unreadable)))
    started = status.get("startTime")
    return ObservedJob(
        name=job["metadata"]["name"],
        kind=kind,
        target=labels.get(manifests.LABEL_TARGET, ""),
        state=state,
        result=result,
        trouble=trouble,
        message=shortened(message),
        started_at=_epoch(started) if started else None,
        suspended=state is JobState.RUNNING and bool((job.get("spec") or {}).get("suspend")),
        made_by=labels.get(manifests.LABEL_MODEL, ""),
        load_key=str((job["metadata"].get("annotations") or {}).get(manifests.ANNOTATION_LOAD_KEY, "")),
        made_at=_epoch(made) if (made := job["metadata"].get("creationTimestamp")) else None,
        failures=int(status.get("failed") or 0),
    )


def _foreseen(pod: Json) -> JobState:
    """What the Job controller will say, a second or three later, of a Job whose newest pod ended with its result."""
    exits = [((s.get("state") or {}).get("terminated") or {}).get("exitCode") for s in container_states(pod)]
    # Not the phase, which follows the containers a moment later.
    if all(code == 0 for code in exits):
        return JobState.COMPLETE
    return JobState.FAILED if any(code in FINAL_JOB_EXITS for code in exits) else JobState.RUNNING


def _result(pods: Sequence[Json]) -> tuple[JobResult | None, str]:
    """The newest message that can be read; else what stands there instead."""
    unreadable = ""
    for pod in pods:
        for status in container_states(pod):
            ended = (status.get("state") or {}).get("terminated") or {}
            if message := ended.get("message"):
                try:
                    return loads(JobResult, message), ""
                except DocumentError as e:
                    unreadable = unreadable or f"its termination message cannot be read ({e}): {message}"
    return None, unreadable


# ---------------------------------------------------------------------------------------------------------------
# Workers
# ---------------------------------------------------------------------------------------------------------------


def _is_worker_of(pod: Json, model: ModelRef) -> bool:
    """A pod's owner is a ReplicaSet, so the uid of its TRTModel is read from its environment. A pod that ended (an
    evicted one stays until it is collected) is no worker any more: the Deployment made another."""
    if (pod["metadata"].get("labels") or {}).get(manifests.LABEL_ROLE) != manifests.ROLE_WORKER:
        return False
    if (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded"):
        return False
    variables = (e for c in (pod.get("spec") or {}).get("containers") or () for e in c.get("env") or ())
    return any(e.get("name") == manifests.ENV_MODEL_UID and e.get("value") == model.uid for e in variables)


async def _workers(pods: Sequence[Json], workers: Workers) -> tuple[ObservedWorker, ...]:
    ordered = sorted(pods, key=lambda p: (_created(p), p["metadata"]["uid"]))
    return tuple(await asyncio.gather(*(_worker(pod, workers) for pod in ordered)))


async def _worker(pod: Json, workers: Workers) -> ObservedWorker:
    meta, status = pod["metadata"], pod.get("status") or {}
    labels = meta.get("labels") or {}
    ip, terminating = status.get("podIP") or "", "deletionTimestamp" in meta
    running = any("running" in (s.get("state") or {}) for s in status.get("containerStatuses") or ())
    trouble, message = trouble_of(pod)
    report, silence = None, ""
    if terminating:
        silence = "it is being deleted"
    elif not ip or not running:
        silence = f"its container does not run ({trouble})" if trouble else "its container has not started"
    else:
        try:
            report = await workers.report(ip, meta["uid"])
        except WorkerError as e:
            silence = str(e)
    return ObservedWorker(
        pod=meta["name"],
        uid=meta["uid"],
        ip=ip,
        target=labels.get(manifests.LABEL_TARGET, ""),
        ready=_condition(status, "Ready") is not None,
        terminating=terminating,
        report=report,
        silence=silence,
        restarts=sum(int(s.get("restartCount") or 0) for s in status.get("containerStatuses") or ()),
        death=death_of(pod),
        trouble=trouble,
        message=message,
        node=str((pod.get("spec") or {}).get("nodeName") or ""),
        running=running,
        platform=labels.get(manifests.LABEL_PLATFORM, ""),
    )


def _workload(deployment: Json) -> ObservedWorkload:
    meta, status = deployment["metadata"], deployment.get("status") or {}
    labels = meta.get("labels") or {}
    failure = _condition(status, "ReplicaFailure") or {}
    spec = deployment.get("spec") or {}
    containers: Sequence[Json] = ((spec.get("template") or {}).get("spec") or {}).get("containers") or ({},)
    platform, image = labels.get(manifests.LABEL_PLATFORM, ""), str(containers[0].get("image") or "")
    settings = str((meta.get("annotations") or {}).get(manifests.ANNOTATION_POD, ""))
    return ObservedWorkload(
        name=meta["name"],
        target=labels.get(manifests.LABEL_TARGET, ""),
        platform=platform,
        replicas=int(spec.get("replicas") or 0),
        fingerprint=_fingerprint(deployment),
        image=image,
        trouble=str(failure.get("reason") or ""),
        message=shortened(str(failure.get("message") or "")),
        pod=manifests.pod_settings(platform, image, settings),
    )


def _pointer(config_map: Json) -> ObservedPointer | None:
    text = (config_map.get("data") or {}).get(POINTER_FILE)
    if text is None:
        return None  # the public keys
    meta = config_map["metadata"]
    target = (meta.get("labels") or {}).get(manifests.LABEL_TARGET, "")
    signature = (config_map.get("data") or {}).get(POINTER_SIGNATURE_FILE, "")
    return manifests.read_pointer(meta["name"], target, text, signature)


def _published(config_maps: Sequence[Json]) -> tuple[str, ...]:
    """The ids of the public keys that the workers mount; none if there are no keys yet, or no readable ones."""
    for config_map in config_maps:
        if (text := (config_map.get("data") or {}).get(KEYS_FILE)) is not None:
            try:
                return tuple(sorted(loads(KeySet, text).keys))
            except DocumentError:
                return ()
    return ()


# ---------------------------------------------------------------------------------------------------------------
# Pieces
# ---------------------------------------------------------------------------------------------------------------


def _condition(status: Json, kind: str) -> Json | None:
    """The condition of this type if it is True."""
    conditions = status.get("conditions") or ()
    return next((dict(c) for c in conditions if c.get("type") == kind and c.get("status") == "True"), None)


def _fingerprint(child: Json) -> str:
    return str((child["metadata"].get("annotations") or {}).get(manifests.ANNOTATION_FINGERPRINT, ""))


def _created(child: Json) -> float:
    return _epoch(child["metadata"]["creationTimestamp"])


def _epoch(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()
