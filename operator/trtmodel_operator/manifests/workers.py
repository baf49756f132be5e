"""The workers' Deployment, the Service in front of them, and the budget for drains."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from trtmodel_contract.control import CONTROL_PORT, GRPC_PORT, HTTP_PORT, METRICS_PORT
from trtmodel_contract.identity import ModelRef
from trtmodel_contract.jobs import CREDENTIALS_DIR_ENV

from trtmodel_operator.manifests import pods
from trtmodel_operator.manifests.names import (
    ANNOTATION_FINGERPRINT,
    ANNOTATION_POD,
    ENV_MODEL_UID,
    LABEL_MODEL,
    LABEL_PLATFORM,
    LABEL_ROLE,
    LABEL_TARGET,
    NO_SETTINGS,
    ROLE_WORKER,
    keys_name,
    metadata,
    service_name,
)
from trtmodel_operator.manifests.pods import CACHE_DIR, CREDENTIALS_DIR, Manifest
from trtmodel_operator.model import ApplyWorkload, Platform, Spec

POINTER_DIR = "/etc/trtmodel/pointer"
KEYS_DIR = "/etc/trtmodel/keys"
RESOURCES = {"requests": {"cpu": "250m", "memory": "512Mi"}, "limits": {"cpu": "2", "memory": "2Gi"}}


def workload_fingerprint(model: ModelRef, spec: Spec, apply: ApplyWorkload) -> str:
    """What the Deployment carries if it is made of what people chose. Of that, and not of the Deployment itself: else
    an operator that makes pods otherwise (another probe, another volume) would replace all of them when it starts."""
    return pods.fingerprint(_chosen_inputs(model, spec, apply))


def _chosen_inputs(model: ModelRef, spec: Spec, apply: ApplyWorkload) -> Manifest:
    """All that a Deployment is made of but for the replicas and this code. What is rendered and not named here is never
    applied to a Deployment that is there. Names and forms stay from version to version, and a new input is empty where
    nobody chose it."""
    target, platform = apply.target, apply.platform
    return pods.filled(
        namespace=model.namespace,
        model=model.name,
        uid=model.uid,
        platform=platform.hash,
        image=platform.image,
        pod=_kept(platform),
        podOfSpec=spec.serving.pod if _pinned(platform) is None else None,
        target=target.name,
        gpu=target.gpu,
        gpus=target.gpus,
        nodeSelector=target.node_selector,
        tolerations=target.tolerations,
        runtimeClass=target.runtime_class,
        credentialsSecret=spec.credentials_secret,
        runtime=spec.engine.runtime,
        contexts=spec.serving.contexts,
        requestTimeout=f"{spec.serving.request_timeout:g}",
        chosen=_chosen(spec),
    )


def service_fingerprint(model: ModelRef, spec: Spec) -> str:
    return str(service(model, spec)["metadata"]["annotations"][ANNOTATION_FINGERPRINT])


def worker_deployment(model: ModelRef, spec: Spec, apply: ApplyWorkload) -> Manifest:
    """The workers of one target on one platform."""
    chosen = {
        LABEL_MODEL: model.name,
        LABEL_ROLE: ROLE_WORKER,
        LABEL_TARGET: apply.target.name,
        LABEL_PLATFORM: apply.platform.hash,
    }
    settings = _settings(spec, apply.platform)
    manifest: Manifest = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(model, apply.name, chosen),
        "spec": {
            "revisionHistoryLimit": 2,
            # A worker is replaced only when its successor is ready. Engines change inside running workers, so this
            # happens for another platform, another timeout and the like, never for another engine.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "selector": {"matchLabels": chosen},
            "template": {
                "metadata": {
                    "labels": {**pods.strings(settings.get("labels")), **chosen},
                    **pods.filled(annotations=pods.strings(settings.get("annotations"))),
                },
                "spec": _worker_pod(model, spec, apply, settings),
            },
        },
    }
    manifest["metadata"]["annotations"] = pods.filled(**{ANNOTATION_POD: _kept(apply.platform)})
    manifest["metadata"]["annotations"][ANNOTATION_FINGERPRINT] = workload_fingerprint(model, spec, apply)
    manifest["spec"]["replicas"] = apply.replicas
    return manifest


def _settings(spec: Spec, platform: Platform) -> Mapping[str, object]:
    """What the platform's pods are made of, whatever the spec says by now. Total: from a memory that another hand has
    damaged they are the spec's."""
    pinned = _pinned(platform)
    return spec.serving.pod if pinned is None else pinned


def _pinned(platform: Platform) -> Mapping[str, object] | None:
    try:
        found = json.loads(platform.pod or "null")
    except ValueError:
        return None
    return found if isinstance(found, Mapping) else None


def _kept(platform: Platform) -> str:
    """The settings as the Deployment's annotation has them."""
    return platform.pod if platform.pod != NO_SETTINGS else ""


def _worker_pod(model: ModelRef, spec: Spec, apply: ApplyWorkload, settings: Mapping[str, object]) -> Manifest:
    volumes = [
        *pods.shared_volumes(spec),
        ({"name": "dev-shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}, {"mountPath": "/dev/shm"}),  # noqa: S108
        ({"name": "pointer", "configMap": {"name": apply.name}}, {"mountPath": POINTER_DIR, "readOnly": True}),
        ({"name": "keys", "configMap": {"name": keys_name(model)}}, {"mountPath": KEYS_DIR, "readOnly": True}),
    ]
    ready = {"httpGet": {"path": "/v2/health/ready", "port": "http"}, "timeoutSeconds": 5}
    live = {"httpGet": {"path": "/v2/health/live", "port": "http"}, "timeoutSeconds": 5}
    container = {
        "name": "worker",
        "image": apply.platform.image,
        "imagePullPolicy": "IfNotPresent",
        "args": ["serve"],
        "env": [*_worker_env(model, spec), *_extra_env(settings)],
        "ports": [
            {"name": "http", "containerPort": HTTP_PORT, "protocol": "TCP"},
            {"name": "grpc", "containerPort": GRPC_PORT, "protocol": "TCP"},
            {"name": "control", "containerPort": CONTROL_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": METRICS_PORT, "protocol": "TCP"},
        ],
        # Half an hour for the first engine: liveness must not kill a worker that still loads. The worker holds its "no"
        # back for 4 s, so that its "yes" need not wait for the next look.
        "startupProbe": {
            **ready,
            "httpGet": {"path": "/v2/health/ready?wait=4", "port": "http"},
            "periodSeconds": 1,
            "failureThreshold": 450,
        },
        "readinessProbe": {**ready, "periodSeconds": 1, "failureThreshold": 2},
        # One that hangs takes no notice of SIGTERM: it must not have the minute in which others finish their requests.
        "livenessProbe": {**live, "periodSeconds": 10, "failureThreshold": 3, "terminationGracePeriodSeconds": 10},
        "resources": pods.resources(RESOURCES, settings.get("resources"), apply.target.gpus),
        "securityContext": pods.container_security(),
        "volumeMounts": pods.mounts(volumes),
    }
    return {
        **pods.pod_base(settings),
        "terminationGracePeriodSeconds": 60,
        "containers": [container],
        "volumes": [volume for volume, _ in volumes],
        **pods.filled(
            nodeSelector=pods.node_selector(apply.target),
            tolerations=list(apply.target.tolerations),
            affinity=settings.get("affinity"),
            priorityClassName=settings.get("priorityClassName"),
            runtimeClassName=apply.target.runtime_class,
        ),
    }


def _worker_env(model: ModelRef, spec: Spec) -> list[Manifest]:
    from_pod = {
        "POD_NAME": "metadata.name",
        "POD_UID": "metadata.uid",
        "POD_NAMESPACE": "metadata.namespace",
        "NODE_NAME": "spec.nodeName",
    }
    plain = {
        "TRTMODEL_MODEL": model.name,
        ENV_MODEL_UID: model.uid,
        "TRTMODEL_RUNTIME": spec.engine.runtime,
        "TRTMODEL_CONTEXTS": str(spec.serving.contexts or "Auto"),
        "TRTMODEL_REQUEST_TIMEOUT_SECONDS": f"{spec.serving.request_timeout:g}",
        "TRTMODEL_GRPC_PORT": str(GRPC_PORT),
        "TRTMODEL_POINTER_DIR": POINTER_DIR,
        "TRTMODEL_KEYS_DIR": KEYS_DIR,
        CREDENTIALS_DIR_ENV: CREDENTIALS_DIR,
        "TRTMODEL_CACHE_DIR": CACHE_DIR,
        **_chosen(spec),
    }
    return [
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in from_pod.items()),
        *({"name": name, "value": value} for name, value in plain.items()),
    ]


def _chosen(spec: Spec) -> dict[str, str]:
    """What the user wants otherwise than workers do by themselves. What is left alone is not said: a variable more
    would change the fingerprint of every model when the operator is upgraded, and so replace its pods."""
    serving, rollout = spec.serving, spec.rollout
    retry, batching = serving.retry, serving.batching
    said = {
        "TRTMODEL_HOSTS": (f"{serving.hosts}", "1"),
        "TRTMODEL_HEALTH_INTERVAL_SECONDS": (f"{serving.health_interval:g}", "30"),
        "TRTMODEL_RETRY_ATTEMPTS": (f"{retry.attempts}", "3"),
        "TRTMODEL_RETRY_BUDGET_PERCENT": (f"{retry.budget_percent}", "10"),
        "TRTMODEL_HEDGE_AFTER_SECONDS": (f"{retry.hedge_after:g}", "0"),
        "TRTMODEL_BATCH_BUCKETS": (",".join(map(str, batching.buckets)), ""),
        "TRTMODEL_BATCH_DELAY_SECONDS": (f"{batching.max_delay:g}", "0"),
        "TRTMODEL_QUEUE_LIMIT": (f"{batching.max_queue}", "512"),
        "TRTMODEL_FALLBACK": ("Standby" if serving.fallback else "Error", "Standby"),
        "TRTMODEL_MEMORY_POLICY": (rollout.memory_policy, "Auto"),
        "TRTMODEL_ALLOW_DOWNTIME": (str(rollout.allow_downtime).lower(), "false"),
    }
    return {name: value for name, (value, by_itself) in said.items() if value != by_itself}


def service(model: ModelRef, spec: Spec) -> Manifest:
    """In front of the workers of all revisions and platforms."""
    selector = {LABEL_MODEL: model.name, LABEL_ROLE: ROLE_WORKER}
    manifest: Manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(model, service_name(model, spec), {LABEL_MODEL: model.name}),
        "spec": {
            "type": "ClusterIP",
            "selector": selector,
            "ports": [
                {"name": "http", "port": spec.serving.http_port, "targetPort": "http", "protocol": "TCP"},
                {"name": "grpc", "port": spec.serving.grpc_port, "targetPort": "grpc", "protocol": "TCP"},
            ],
        },
    }
    manifest["metadata"]["annotations"] = {ANNOTATION_FINGERPRINT: pods.fingerprint(manifest)}
    return manifest


def pod_disruption_budget(model: ModelRef, spec: Spec) -> Manifest | None:
    """One worker at a time may be drained. None for a single worker: it would be of no use, and one that is left from
    more replicas forbids nothing, since it limits what is unavailable. A worker that is not ready never holds up a
    drain."""
    if spec.serving.replicas * len(spec.targets) <= 1:
        return None
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(model, model.name, {LABEL_MODEL: model.name}),
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": {LABEL_MODEL: model.name, LABEL_ROLE: ROLE_WORKER}},
        },
    }


def _extra_env(settings: Mapping[str, object]) -> list[Manifest]:
    extra = settings.get("env")
    return [dict(e) for e in extra] if isinstance(extra, Sequence) and not isinstance(extra, str) else []
