"""Names and labels of the children: what finds them again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtmodel_contract.codec import canonical, encode
from trtmodel_contract.identity import ModelRef, short_hash

from trtmodel_operator.model import Platform, Spec

GROUP, VERSION, KIND = "trtmodel.io", "v1alpha1", "TRTModel"
API_VERSION = f"{GROUP}/{VERSION}"
LABEL_MODEL = "trtmodel.io/model"
LABEL_ROLE = "trtmodel.io/role"
LABEL_TARGET = "trtmodel.io/target"
LABEL_PLATFORM = "trtmodel.io/platform"
LABEL_KIND = "trtmodel.io/kind"
LABEL_UID = "trtmodel.io/model-uid"  # of a Job that no TRTModel owns: the one for whose end it was made
LABEL_WAITING = "model.trtmodel.io/"  # + name of a TRTModel: it waits for this Job, which may be of several models
ANNOTATION_LOAD_KEY = "trtmodel.io/load-key"  # of a build that is for workers with this load key
ROLE_WORKER = "worker"
ROLE_JOB = "job"
ANNOTATION_FINGERPRINT = "trtmodel.io/fingerprint"
ENV_MODEL_UID = "TRTMODEL_MODEL_UID"  # tells a worker's pod from one of a deleted namesake
GPU_RESOURCE = "nvidia.com/gpu"
GPU_PRODUCT_LABEL = "nvidia.com/gpu.product"
ANNOTATION_POD = "trtmodel.io/pod-settings"  # of a worker Deployment: spec.serving.pod as it was made of
PLATFORM_HASH = 8
NO_SETTINGS = "{}"


def platform(image: str, pod: Mapping[str, object]) -> Platform:
    """Image as it is written, and pod settings: what makes workers of one kind."""
    settings = canonical(encode(pod)).decode()
    return Platform(image, short_hash(image, settings, length=PLATFORM_HASH), settings)


def pod_settings(hash_: str, image: str, annotation: str) -> str:
    """The settings that a worker Deployment was made of, by its annotation; '' if nothing tells. (Without any there is
    no annotation, and the hash proves it.)"""
    for text in (annotation, NO_SETTINGS):
        if text and short_hash(image, text, length=PLATFORM_HASH) == hash_:
            return text
    return ""


def workload_name(model: ModelRef, target: str, hash_: str) -> str:
    """Name of a worker Deployment and of its pointer: at most 40 + 12 + 8 characters and two dashes."""
    return f"{model.name}-{target}-{hash_}"


def keys_name(model: ModelRef) -> str:
    return f"{model.name}-keys"


def service_name(model: ModelRef, spec: Spec) -> str:
    return spec.serving.service_name or model.name


def worker_selector(model: ModelRef) -> str:
    """Selects exactly the workers' pods, of all targets and platforms, and no Job's: for the scale subresource."""
    return f"{LABEL_MODEL}={model.name},{LABEL_ROLE}={ROLE_WORKER}"


def waiting_label(name: str) -> str:
    """The label by which the TRTModel of this name finds its Jobs, also one that another TRTModel made."""
    return LABEL_WAITING + name


def metadata(model: ModelRef, name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """Metadata of a child: Kubernetes collects it when the TRTModel is gone."""
    return {
        "name": name,
        "namespace": model.namespace,
        "labels": {**labels, "app.kubernetes.io/managed-by": "trtmodel-operator"},
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": model.name,
                "uid": model.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
