"""What the pods of workers and Jobs have in common: users, volumes, resources, nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from trtmodel_contract.codec import canonical, sha256_hex

from trtmodel_operator.manifests.names import GPU_PRODUCT_LABEL, GPU_RESOURCE
from trtmodel_operator.model import Spec, Target
from trtmodel_operator.units import quantity

Manifest = dict[str, Any]

CREDENTIALS_DIR = "/etc/trtmodel/credentials"
CACHE_DIR = "/var/cache/trtmodel"
USER = 10001


def pod_base(settings: Mapping[str, object]) -> Manifest:
    """What workers and Jobs have in common: identity, image access, and no privilege at all."""
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **filled(
            serviceAccountName=settings.get("serviceAccountName"),
            imagePullSecrets=settings.get("imagePullSecrets"),
        ),
    }


def container_security() -> Manifest:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def shared_volumes(spec: Spec) -> list[tuple[Manifest, Manifest]]:
    """Volumes of every pod, each with how it is mounted."""
    volumes: list[tuple[Manifest, Manifest]] = [
        ({"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": "256Mi"}}, {"mountPath": "/tmp"}),  # noqa: S108
        ({"name": "cache", "emptyDir": {}}, {"mountPath": CACHE_DIR}),
    ]
    if spec.credentials_secret:
        # Optional: a missing Secret then shows as AccessDenied with a message; required, the pod would hang in
        # ContainerCreating, which no status tells. It is mounted as soon as it exists.
        secret = {"secretName": spec.credentials_secret, "optional": True, "defaultMode": 0o440}
        volumes.append(({"name": "credentials", "secret": secret}, {"mountPath": CREDENTIALS_DIR, "readOnly": True}))
    return volumes


def mounts(volumes: Sequence[tuple[Manifest, Manifest]]) -> list[Manifest]:
    return [{"name": volume["name"], **mount} for volume, mount in volumes]


def node_selector(target: Target) -> dict[str, str]:
    product = {GPU_PRODUCT_LABEL: target.gpu} if target.gpu else {}
    return {**product, **target.node_selector}


def resources(defaults: Mapping[str, Mapping[str, str]], asked: object, gpus: int) -> Manifest:
    """The user's values over ours. Where only one of request and limit is given, our other one gives way to it: a
    request above its limit would be refused when the pod is created, far from who wrote it."""
    asked = asked if isinstance(asked, Mapping) else {}
    asked_requests, asked_limits = strings(asked.get("requests")), strings(asked.get("limits"))
    requests, limits = {**defaults["requests"], **asked_requests}, {**defaults["limits"], **asked_limits}
    for name in sorted(set(requests) & set(limits)):
        if _number(requests[name]) <= _number(limits[name]):
            continue
        if name not in asked_requests:
            requests[name] = limits[name]
        elif name not in asked_limits:
            limits[name] = requests[name]
    if gpus:
        limits[GPU_RESOURCE] = str(gpus)
    return {"requests": requests, "limits": limits}


def _number(text: str) -> Decimal:
    """What is no quantity counts as 0: the API server refuses it with its own words."""
    return quantity(text) or Decimal(0)


def strings(value: object) -> dict[str, str]:
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, Mapping) else {}


def filled(**fields: object) -> Manifest:
    """Only what is not empty: server-side apply would own the empty rest."""
    return {name: value for name, value in fields.items() if value}


def fingerprint(manifest: Manifest) -> str:
    return sha256_hex(canonical(manifest))[:16]
