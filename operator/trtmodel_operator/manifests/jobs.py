"""The Jobs that resolve and build."""

from __future__ import annotations

from trtmodel_contract.codec import dumps
from trtmodel_contract.exitcodes import FINAL_JOB_EXITS
from trtmodel_contract.identity import ModelRef
from trtmodel_contract.jobs import CREDENTIALS_DIR_ENV, TASK_ENV

from trtmodel_operator.manifests import pods
from trtmodel_operator.manifests.names import LABEL_KIND, LABEL_MODEL, LABEL_ROLE, LABEL_TARGET, ROLE_JOB, metadata
from trtmodel_operator.manifests.pods import CACHE_DIR, CREDENTIALS_DIR, Manifest
from trtmodel_operator.model import CreateJob, JobKind, Spec

TTL = 86400  # seconds: the evidence of a failure stays for a day
RESOURCES = {"requests": {"cpu": "250m", "memory": "512Mi"}, "limits": {"cpu": "2", "memory": "4Gi"}}


def job(model: ModelRef, spec: Spec, create: CreateJob) -> Manifest:
    """A resolve or build Job. Its name says what it does, so creating it twice is one Job."""
    building = create.kind is JobKind.BUILD
    labels = {
        LABEL_MODEL: model.name,
        LABEL_ROLE: ROLE_JOB,
        LABEL_KIND: create.kind.value,
        LABEL_TARGET: create.target.name,
    }
    selector = dict(spec.build.node_selector)
    if building:
        selector = {**pods.node_selector(create.target), **selector}
    container = {
        "name": create.kind.value,
        "image": create.image,
        "imagePullPolicy": "IfNotPresent",
        "args": [create.kind.value],
        "env": [
            {"name": TASK_ENV, "value": dumps(create.task).decode()},
            {"name": CREDENTIALS_DIR_ENV, "value": CREDENTIALS_DIR},
            {"name": "TRTMODEL_CACHE_DIR", "value": CACHE_DIR},
        ],
        "resources": pods.resources(RESOURCES, spec.build.resources, create.target.gpus if building else 0),
        "securityContext": pods.container_security(),
        "volumeMounts": pods.mounts(pods.shared_volumes(spec)),
    }
    pod = {
        **pods.pod_base(spec),
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [volume for volume, _ in pods.shared_volumes(spec)],
        **pods.filled(
            nodeSelector=selector,
            tolerations=[*(create.target.tolerations if building else ()), *spec.build.tolerations],
        ),
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(model, create.name, labels),
        "spec": {
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": spec.build.retries,
            "activeDeadlineSeconds": spec.build.deadline,
            "ttlSecondsAfterFinished": TTL,
            # Two builders never hold a GPU, and the only value that podFailurePolicy allows.
            "podReplacementPolicy": "Failed",
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
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
