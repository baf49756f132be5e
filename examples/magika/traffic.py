"""The load pod: started once, asked for the figures of any time since."""

from __future__ import annotations

import json
import string
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from kube import DemoError, Kubectl

HERE = Path(__file__).parent
PORT = 9090
RATE = 40
Summary = dict[str, Any]


class Traffic:
    """Steady requests to the Service `service` of the model, by a pod called load."""

    def __init__(self, kubectl: Kubectl, namespace: str) -> None:
        self._kubectl, self._namespace = kubectl, namespace
        self._ahead = 0.0  # of the pod's clock, seconds

    def start(self, image: str, model: str, requests: Path, seconds: float, rate: float = RATE) -> None:
        """Returns when the pod has begun to send."""
        files = [f"--from-file={path}" for path in (HERE / "load.py", HERE / "loadstats.py", requests)]
        config = ("create", "configmap", "load", "-n", self._namespace, *files, "--dry-run=client", "-o", "yaml")
        self._apply(self._kubectl.run(*config))
        values = {
            "NAMESPACE": self._namespace,
            "IMAGE": image,
            "SERVICE": f"{model}.{self._namespace}",
            "MODEL": model,
            "RATE": f"{rate:g}",
            "SECONDS": f"{seconds:g}",
        }
        self._apply(string.Template((HERE / "load-pod.yaml").read_text()).substitute(values))
        self._kubectl.run(
            "wait", "-n", self._namespace, "pod/load", "--for=condition=Ready", "--timeout=60s", seconds=70
        )
        self._ahead = float(self._ask("/healthz")["now"]) - time.time()

    def summary(self, begin: float, end: float) -> Summary:
        """Figures of the requests that were due between two of this machine's times (seconds since the epoch)."""
        query = urlencode({"from": begin + self._ahead, "to": end + self._ahead})
        found: Summary = self._ask(f"/summary?{query}")
        for of_revision in found["revisions"].values():
            of_revision["first"] -= self._ahead
        return found

    def failures(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask("/failures")
        return [{**failure, "due": failure["due"] - self._ahead} for failure in found]

    def stop(self) -> None:
        """No more traffic, and its figures are gone."""
        self._kubectl.run("delete", "pod", "load", "-n", self._namespace, "--ignore-not-found", "--timeout=30s")

    def wait(self, what: str, seconds: float, done: Callable[[float], bool]) -> None:
        """Until `done(now)` is true, asked once a second: the figures come by the second."""
        deadline = time.monotonic() + seconds
        while not done(time.time()):
            if time.monotonic() > deadline:
                raise DemoError(f"{what}: not in {seconds:g} s")
            time.sleep(1)

    def _ask(self, path: str) -> Any:
        return json.loads(self._kubectl.proxy(self._namespace, "load", PORT, path))

    def _apply(self, manifest: str) -> None:
        # Server-side: the data set does not fit into the annotation of the other kind.
        self._kubectl.run("apply", "--server-side", "--force-conflicts", "-f", "-", text=manifest)
