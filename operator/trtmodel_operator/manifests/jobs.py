"""The Jobs that resolve, build and collect."""

from __future__ import annotations

from dataclasses import dataclass

from trtmodel_contract.codec import dumps
from trtmodel_contract.exitcodes import FINAL_JOB_EXITS
from trtmodel_contract.identity import ModelRef
from trtmodel_contract.jobs import CREDENTIALS_DIR_ENV, TASK_ENV
from trtmodel_contract.progress import PROGRESS_PORT

from trtmodel_operator.manifests import pods
from trtmodel_operator.manifests.names import (
    ANNOTATION_LOAD_KEY,
    LABEL_KIND,
    LABEL_MODEL,
    LABEL_ROLE,
    LABEL_TARGET,
    LABEL_UID,
    ROLE_JOB,
    metadata,
    waiting_label,
)
from trtmodel_operator.manifests.pods import CACHE_DIR, CREDENTIALS_DIR, Manifest
from trtmodel_operator.model import CreateJob, JobKind, Spec

JOB_TTL = 86400  # seconds: the evidence of a failure stays for a day
RESOURCES = {"requests": {"cpu": "250m", "memory": "512Mi"}, "limits": {"cpu": "2", "memory": "4Gi"}}
COLLECT_RESOURCES = {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}}
COLLECT_DEADLINE = 1800  # seconds, all tries included; five minutes of them it only waits (builder/collect.py)
COLLECTOR_DEADLINE = 6 * 3600  # it goes through all that lies there
COLLECT_RETRIES = 4


@dataclass(frozen=True)
class JobPolicy:
    """What the operator's own settings make of Jobs. `queued`: builds are made suspended, and begin when it is their
    turn. `priority_class`: of the pods; '' leaves it to the cluster. `keep`: seconds that a Job that ended stays."""

    queued: bool = False
    priority_class: str = ""
    keep: int = JOB_TTL


def job(model: ModelRef, spec: Spec, create: CreateJob, policy: JobPolicy = JobPolicy()) -> Manifest:
    """A Job of a TRTModel. Its name says what it does, so creating it twice is one Job. One that collects has no owner:
    it outlives the model for whose end it was made."""
    labels = {LABEL_MODEL: model.name, LABEL_ROLE: ROLE_JOB, LABEL_KIND: create.kind.value}
    if create.kind is JobKind.BUILD:
        labels[LABEL_TARGET] = create.target.name
    meta = metadata(model, create.name, {**labels, waiting_label(model.name): ""})
    if create.kind is JobKind.COLLECT:
        del meta["ownerReferences"]
        meta["labels"] |= {LABEL_UID: model.uid}
    if create.load_key:
        meta["annotations"] = {ANNOTATION_LOAD_KEY: create.load_key}
    return _manifest(meta, labels, spec, create, policy)


def collector_job(namespace: str, spec: Spec, create: CreateJob, policy: JobPolicy) -> Manifest:
    """A Job that collects in the bucket that `spec` names, for no TRTModel in particular."""
    labels = {LABEL_ROLE: ROLE_JOB, LABEL_KIND: create.kind.value}
    meta = {
        "name": create.name,
        "namespace": namespace,
        "labels": {**labels, "app.kubernetes.io/managed-by": "trtmodel-operator"},
    }
    found = _manifest(meta, labels, spec, create, policy)
    found["spec"]["activeDeadlineSeconds"] = COLLECTOR_DEADLINE
    return found


def _manifest(meta: Manifest, labels: dict[str, str], spec: Spec, create: CreateJob, policy: JobPolicy) -> Manifest:
    building, collecting = create.kind is JobKind.BUILD, create.kind is JobKind.COLLECT
    container = {
        "name": create.kind.value,
        "image": create.image,
        "imagePullPolicy": "IfNotPresent",
        # One that is killed writes nothing: then the end of its log stands in status, and says what it was at.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "args": [create.kind.value],
        "env": [
            {"name": TASK_ENV, "value": dumps(create.task).decode()},
            {"name": CREDENTIALS_DIR_ENV, "value": CREDENTIALS_DIR},
            {"name": "TRTMODEL_CACHE_DIR", "value": CACHE_DIR},
        ],
        "ports": [{"name": "progress", "containerPort": PROGRESS_PORT, "protocol": "TCP"}],
        "resources": COLLECT_RESOURCES
        if collecting
        else pods.resources(RESOURCES, spec.build.resources, create.target.gpus if building else 0),
        "securityContext": pods.container_security(),
        "volumeMounts": pods.mounts(pods.shared_volumes(spec)),
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": meta,
        "spec": {
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": COLLECT_RETRIES if collecting else spec.build.retries,
            "activeDeadlineSeconds": COLLECT_DEADLINE if collecting else spec.build.deadline,
            "ttlSecondsAfterFinished": policy.keep,
            # Two builders never hold a GPU, and the only value that podFailurePolicy allows.
            "podReplacementPolicy": "Failed",
            # An eviction, a drain or a pre-emption is none of the retries.
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {
                            "containerName": container["name"],
                            "operator": "In",
                            "values": sorted(int(code) for code in FINAL_JOB_EXITS),
                        },
                    },
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            **pods.filled(suspend=policy.queued and building),
            "template": {"metadata": {"labels": labels}, "spec": _pod(spec, create, policy, container)},
        },
    }


def _pod(spec: Spec, create: CreateJob, policy: JobPolicy, container: Manifest) -> Manifest:
    building = create.kind is JobKind.BUILD
    selector = dict(spec.build.node_selector)
    if building:
        selector = {**pods.node_selector(create.target), **selector}
    return {
        **pods.pod_base(spec.serving.pod),
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [volume for volume, _ in pods.shared_volumes(spec)],
        **pods.filled(
            nodeSelector=selector,
            tolerations=[*(create.target.tolerations if building else ()), *spec.build.tolerations],
            affinity=_on(create.nodes),
            priorityClassName=policy.priority_class,
            runtimeClassName=create.target.runtime_class if building else "",
        ),
    }


def _on(nodes: tuple[str, ...]) -> Manifest:
    """On one of these nodes, by their names: they need not carry a label of their own."""
    if not nodes:
        return {}
    terms = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]} for name in nodes]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
