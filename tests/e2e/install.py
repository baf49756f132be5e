"""The product as a cluster's administrator installs it: images, chart, namespaces; and what the models need in S3."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .cluster import Cluster

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "tests" / "cluster" / "cluster"
CHART = ROOT / "charts" / "trtmodel-operator"
SYSTEM = "e2e-system"
OUTSIDE = "http://outside.e2e-gates.svc:8080"  # all that queries and webhooks of TRTModels may name
RELEASE = "e2e-trtmodel-operator"
BUILD_SECONDS = 600
HELM_SECONDS = 180


@dataclass(frozen=True)
class Images:
    operator: str
    worker: str


def build_images() -> Images:
    """Builds and loads them, where their sources changed."""
    done = subprocess.run([CLUSTER, "images"], capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    assert done.returncode == 0, f"the images cannot be built: {done.stderr[-3000:]}"
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    return Images(found["OPERATOR_IMAGE"], found["WORKER_IMAGE"])


class Operator:
    """One release of the chart, in the namespace `system`, which looks after `namespaces` and no others."""

    def __init__(
        self, cluster: Cluster, images: Images, namespaces: Sequence[str], system: str = SYSTEM, release: str = RELEASE
    ) -> None:
        self._cluster = cluster
        self._images = images
        self._namespaces = tuple(namespaces)
        self._system, self._release = system, release

    def install(self, replicas: int = 1, chart: Path = CHART) -> None:
        """Also changes the number of replicas, or the chart. helm changes no definition that is there: we do."""
        repository, tag = self._images.operator.rsplit(":", 1)
        self._cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", chart / "files" / "trtmodel.yaml")
        self._helm(
            "upgrade", "--install", self._release, str(chart), "--wait", "--timeout", "2m",
            "--set-string", f"image.repository={repository},image.tag={tag},worker.image={self._images.worker}",
            "--set", "crds.install=false", "--set", f"analysis.allowedAddresses={{{OUTSIDE}}}",
            "--set", f"watchNamespaces={{{','.join(self._namespaces)}}},rbac.aggregate=false,replicas={replicas}",
        )  # fmt: skip

    def stop(self) -> None:
        """No operator: its Deployment has no replicas, and its pod is gone."""
        self.install(replicas=0)
        self._cluster.kubectl(
            "wait", "pod", "-n", self._system, "-l", f"app.kubernetes.io/instance={self._release}", "--for=delete",
            "--timeout=60s", seconds=70,
        )  # fmt: skip

    def pods(self) -> list[str]:
        selector = f"app.kubernetes.io/instance={self._release}"
        found = self._cluster.items(f"/api/v1/namespaces/{self._system}/pods", selector)
        return [p["metadata"]["name"] for p in found if "deletionTimestamp" not in p["metadata"]]

    def kill(self) -> None:
        """Its pod is deleted at once, as when a node dies; the Deployment makes another."""
        for pod in self.pods():
            self._cluster.kubectl("delete", "pod", "-n", self._system, pod, "--grace-period=0", "--force")

    def _helm(self, *arguments: str) -> None:
        done = subprocess.run(
            [self._cluster.environment["HELM"], *arguments, "--namespace", self._system],
            capture_output=True, text=True, timeout=HELM_SECONDS, check=False, env=self._cluster.environment,
        )  # fmt: skip
        assert done.returncode == 0, f"helm {arguments[0]}: {done.stderr}\n{self._trouble()}"

    def _trouble(self) -> str:
        pods = self._cluster.kubectl("get", "pods", "-n", self._system, "-o", "wide")
        log = self._cluster.kubectl(
            "logs", "-n", self._system, f"deployment/{self._release}", "--tail=30", "--ignore-errors", seconds=70
        )
        return f"{pods}\n{log}"
