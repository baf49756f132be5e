"""Steady, checked traffic on a Service: the load generator of the example, run as a pod."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .cluster import Json
from .sources import EXAMPLE
from .world import World, until

PORT = 9090
RATE = 25  # three workers, a build and this share two cores
CONNECTIONS = 16
POD = "load"
Summary = dict[str, Any]


class Traffic:
    """All times are the pod's clock, in seconds since the epoch."""

    def __init__(self, world: World) -> None:
        self._world = world

    def start(self, image: str, model: str, requests: Path, seconds: float) -> None:
        """Returns when the pod sends and is answered."""
        files = [EXAMPLE / "load.py", EXAMPLE / "loadstats.py", requests]
        sources = [f"--from-file={file}" for file in files]
        text = self._world.kubectl("create", "configmap", POD, *sources, "--dry-run=client", "-o", "yaml")
        # Server-side: the data set does not fit into the annotation of the other kind.
        self._world.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", text=text)
        pod = _pod(image, f"http://{model}.{self._world.namespace}:8080", model, requests.name, seconds)
        self._world.kubectl("apply", "-f", "-", text=json.dumps(pod))
        self._world.kubectl("wait", f"pod/{POD}", "--for=condition=Ready", "--timeout=60s", seconds=70)
        until("the traffic is answered", 20, lambda: self.between(0, self.now())["ok"])

    def now(self) -> float:
        return float(self._ask("/healthz")["now"])

    def between(self, begin: float, end: float) -> Summary:
        """Figures of the requests that were due in that time."""
        found: Summary = self._ask("/summary", **{"from": str(begin), "to": str(end)})
        return found

    def settled(self, begin: float) -> Summary:
        """Figures since `begin`, once every request that was due until now has ended."""
        end = self.now()

        def ended() -> Summary | None:
            found = self.between(begin, end)
            return None if found["pending"] else found

        summary: Summary = until("every request ends", 15, ended)
        return summary

    def failures(self) -> list[Json]:
        found: list[Json] = self._ask("/failures")
        return found

    def assert_none_failed(self, begin: float, least: int) -> Summary:
        """At least so many requests were answered since `begin`, and none was not."""
        summary = self.settled(begin)
        told = [f for f in self.failures() if f["due"] >= begin]
        assert summary["failed"] == 0, f"{summary['failures']}, such as {told[:5]}"
        assert summary["ok"] >= least, summary
        return summary

    def _ask(self, path: str, **query: str) -> Any:
        pod = f"/api/v1/namespaces/{self._world.namespace}/pods/{POD}:{PORT}/proxy{path}"
        return self._world.cluster.request("GET", pod, **query)


def _pod(image: str, url: str, model: str, requests: str, seconds: float) -> Json:
    command = ["python", "/load/load.py", "--url", url, "--model", model, "--requests", f"/load/{requests}"]
    command += ["--rate", str(RATE), "--connections", str(CONNECTIONS), "--seconds", f"{seconds:g}"]
    command += ["--linger", f"{seconds:g}", "--port", str(PORT)]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": POD},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": POD,
                    "image": image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": command,
                    "readinessProbe": {"httpGet": {"path": "/healthz", "port": PORT}, "periodSeconds": 1},
                    "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
                    "volumeMounts": [{"name": POD, "mountPath": "/load", "readOnly": True}],
                }
            ],
            "volumes": [{"name": POD, "configMap": {"name": POD}}],
        },
    }
