"""What a bare cluster lacks: DNS, S3, and GPUs as far as scheduling sees them. Works on any cluster's kubectl."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import settings as fixed
from .files import filled
from .settings import ClusterError
from .shell import run

_SECONDS = 60.0
S3_NODE_PORT = 30070


class Kubectl:
    """kubectl bound to one kubeconfig, so that it never follows ~/.kube/config."""

    def __init__(self, program: str | Path, kubeconfig: Path, context: str = "") -> None:
        self._base = [str(program), "--kubeconfig", str(kubeconfig), *(["--context", context] if context else [])]

    def __call__(self, *args: str, stdin: str | None = None) -> str:
        """Run it. Raises ClusterError with what it said."""
        return run([*self._base, *args], timeout=_SECONDS, stdin=stdin)

    def get(self, *args: str) -> dict[str, Any] | None:
        """An object or list as a dict, or None when it is not there or the server does not answer."""
        try:
            found: dict[str, Any] = json.loads(self("get", *args, "--request-timeout=5s", "-o", "json"))
        except (ClusterError, ValueError):
            return None
        return found

    def apply(self, manifest: str, values: Mapping[str, str]) -> None:
        """Apply a manifest of manifests/ with its ${NAMES} filled in."""
        text = filled(manifest, values)
        self("apply", "--server-side", "--field-manager=trtmodel-cluster", "--force-conflicts", "-f", "-", stdin=text)


def apply_dns(kubectl: Kubectl, image: str) -> None:
    """CoreDNS as kube-dns."""
    kubectl.apply("dns.yaml", {"COREDNS_IMAGE": image, "SERVICE_DNS": fixed.SERVICE_DNS})


def apply_s3(kubectl: Kubectl, image: str, folder: Path, cluster_ip: str = "") -> None:
    """versitygw as the Service s3 in namespace s3, on a folder of the node."""
    kubectl.apply(
        "s3.yaml",
        {
            "S3_IMAGE": image,
            "S3_FOLDER": str(folder),
            "S3_CLUSTER_IP": f"\n  clusterIP: {cluster_ip}" if cluster_ip else "",
            "S3_PORT": str(fixed.S3_PORT),
            "S3_NODE_PORT": str(S3_NODE_PORT),
            "S3_REGION": fixed.S3_REGION,
            "S3_ACCESS_KEY": fixed.S3_ACCESS_KEY,
            "S3_SECRET_KEY": fixed.S3_SECRET_KEY,
        },
    )


def s3_answers(endpoint: str) -> bool:
    """Whether the S3 server reports its health at this address."""
    try:
        with urllib.request.urlopen(f"{endpoint}/health", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def dns_answers(server: str, name: str) -> bool:
    """Whether a DNS server knows an A record of `name`: one UDP query, asked by hand to need no package."""
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    query = b"\x2a\x2a\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + labels + b"\x00\x00\x01\x00\x01"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(1)
        try:
            client.sendto(query, (server, 53))
            answer = client.recv(512)
        except OSError:
            return False
    return len(answer) > 7 and answer[:2] == query[:2] and int.from_bytes(answer[6:8], "big") > 0


def node_ready(node: Mapping[str, Any] | None) -> bool:
    """Whether a node object says Ready."""
    conditions = (node or {}).get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def node_gpus(node: Mapping[str, Any] | None) -> int:
    """How many GPUs the scheduler sees on a node."""
    return int((node or {}).get("status", {}).get("allocatable", {}).get(fixed.GPU_RESOURCE, 0))


def give_gpus(kubectl: Kubectl, node: str) -> None:
    """Give a node GPUs and their labels. It counts, it gives a container no device.

    The kubelet keeps a capacity that it does not manage and copies it to allocatable within 10 s; writing
    both saves that time.
    """
    found = kubectl.get("node", node) or {}
    labels = found.get("metadata", {}).get("labels", {})
    if any(labels.get(k) != v for k, v in fixed.GPU_LABELS.items()):
        kubectl("label", "node", node, "--overwrite", *(f"{k}={v}" for k, v in fixed.GPU_LABELS.items()))
    if node_gpus(found) != fixed.GPU_COUNT:
        amount = {fixed.GPU_RESOURCE: str(fixed.GPU_COUNT)}
        patch = {"status": {"capacity": amount, "allocatable": amount}}
        kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", json.dumps(patch))
