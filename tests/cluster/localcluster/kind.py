"""CLUSTER=kind: the same cluster inside Docker, for machines that have Docker and kind."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from . import addons, binaries, content
from .addons import S3_NODE_PORT, Kubectl
from .files import put
from .images import PRODUCTS, product_ref
from .settings import GPU_COUNT, HERE, S3_IN_CLUSTER, S3_PORT, ClusterError, Settings
from .shell import run, say, wait_for

_NAME = "trtmodel"
_NODE = f"{_NAME}-control-plane"
_SECONDS = 1800.0
S3_ENDPOINT = f"http://127.0.0.1:{S3_PORT}"
_CONFIG = f"""kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
nodes:
- role: control-plane
  extraPortMappings: [{{containerPort: {S3_NODE_PORT}, hostPort: {S3_PORT}, listenAddress: 127.0.0.1}}]
"""


class Kind:
    """A kind cluster of its own name and its own kubeconfig file."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._kubeconfig = settings.run / "kubeconfig"
        for program in ("docker", "kind", "kubectl", "helm"):
            if shutil.which(program) is None:
                raise ClusterError(f"CLUSTER=kind needs {program} on PATH")
        self._kubectl = Kubectl("kubectl", self._kubeconfig, f"kind-{_NAME}")

    def _exists(self) -> bool:
        return _NAME in run(["kind", "get", "clusters"], timeout=60).split()

    def up(self) -> None:
        """Create the cluster if it is not there, and what it lacks."""
        if not self._exists():
            say("creating the kind cluster")
            put(self._settings.run / "kind.yaml", _CONFIG)
            run(
                ["kind", "create", "cluster", "--name", _NAME, "--kubeconfig", self._kubeconfig,
                 "--config", self._settings.run / "kind.yaml", "--wait", "180s"],
                timeout=_SECONDS,
            )  # fmt: skip
        gateway = binaries.build(self._settings, ("versitygw",)).folders["versitygw"]
        ref = (
            f"localhost/versitygw:{content.key([HERE / 'images/versitygw.Dockerfile'], gateway.name, relative_to=HERE)}"
        )
        self._build(ref, HERE / "images" / "versitygw.Dockerfile", gateway)
        addons.apply_s3(self._kubectl, ref, Path("/var/lib/trtmodel-s3"))
        addons.give_gpus(self._kubectl, _NODE)
        wait_for("S3 answers", lambda: addons.s3_answers(S3_ENDPOINT), seconds=120, check=lambda: None)

    def down(self, *, purge: bool) -> None:
        """Delete the kind cluster: it keeps no state apart from itself."""
        run(["kind", "delete", "cluster", "--name", _NAME, "--kubeconfig", self._kubeconfig], timeout=300)
        if purge:
            shutil.rmtree(self._settings.run, ignore_errors=True)

    def load(self, what: str) -> None:
        """Load an image archive by path, or an image of Docker by name."""
        kind = "image-archive" if Path(what).is_file() else "docker-image"
        run(["kind", "load", kind, what, "--name", _NAME], timeout=_SECONDS)

    def images(self) -> dict[str, str]:
        """Build the product's images with Docker from their Dockerfiles' default base, and load them."""
        refs = {}
        for product in PRODUCTS:
            ref = product_ref(self._settings.clone, product, "")
            self._build(ref, self._settings.clone / product.dockerfile, self._settings.clone)
            refs[f"{product.name.upper()}_IMAGE"] = ref
        return refs

    def _build(self, ref: str, dockerfile: Path, context: Path) -> None:
        say(f"building and loading {ref}")
        with tempfile.TemporaryDirectory(prefix="trtmodel-") as tmp:
            log = self._settings.cache / "log" / "docker.log"
            run(["docker", "build", "-f", dockerfile, "-t", ref, context], timeout=_SECONDS, log=log, cwd=Path(tmp))
        self.load(ref)

    def environment(self) -> dict[str, str]:
        """What a client needs to know."""
        return {
            "KUBECONFIG": str(self._kubeconfig),
            "KUBECTL": str(shutil.which("kubectl")),
            "HELM": str(shutil.which("helm")),
            "S3_ENDPOINT": S3_ENDPOINT,
            "S3_ENDPOINT_IN_CLUSTER": S3_IN_CLUSTER,
        }

    def status(self) -> list[tuple[str, bool, str]]:
        """(name, whether it is well, a detail) of every part, as seen now."""
        node = self._kubectl.get("node", _NODE) if self._exists() else None
        ready, gpus, s3 = addons.node_ready(node), addons.node_gpus(node), addons.s3_answers(S3_ENDPOINT)
        return [
            ("node", ready, f"{_NODE} {'Ready' if ready else 'not Ready'}"),
            ("gpus", gpus == GPU_COUNT, f"{gpus} allocatable"),
            ("s3", s3, f"{'answers' if s3 else 'does not answer'} at {S3_ENDPOINT}"),
        ]
