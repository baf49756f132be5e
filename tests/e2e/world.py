"""One namespace with TRTModels in it: what is there, and waiting until it is as it should be."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

from trtmodel_contract.codec import DocumentError, loads
from trtmodel_contract.jobs import BuildResult, JobResult

from .cluster import Cluster, Json, Refused

POLL_SECONDS = 0.3
API = "/apis/trtmodel.io/v1alpha1/namespaces/{}/trtmodels"
CONDITIONS = ("Available", "Ready", "Reconciling", "Stalled", "Built", "Verified", "Progressing", "Degraded")
CHILDREN = {
    "Job": "/apis/batch/v1/namespaces/{}/jobs",
    "Pod": "/api/v1/namespaces/{}/pods",
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Service": "/api/v1/namespaces/{}/services",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
}


def until(what: str, seconds: float, done: Callable[[], Any], tell: Callable[[], str] = str) -> Any:
    """The first answer of `done` that is true. Fails with what `tell` says when it takes too long."""
    deadline = time.monotonic() + seconds
    while True:
        found = done()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not in {seconds:g} s\n{tell()}")
        time.sleep(POLL_SECONDS)


class World:
    """A namespace. `operator` names the namespace and Deployment whose log is shown when something goes wrong."""

    def __init__(self, cluster: Cluster, namespace: str, operator: tuple[str, str]) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self._operator = operator

    # ------------------------------------------------------------------------------------------------ as a user

    def kubectl(self, *arguments: str, text: str = "", seconds: float = 60.0) -> str:
        return self.cluster.kubectl("--namespace", self.namespace, *arguments, text=text, seconds=seconds)

    def apply(self, *manifests: Json) -> None:
        self.kubectl("apply", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests}))

    def patch(self, name: str, spec: Json) -> Json:
        """A merge patch of the spec."""
        self.kubectl("patch", "trtmodel", name, "--type=merge", "-p", json.dumps({"spec": spec}))
        return self.model(name)

    def replace_spec(self, name: str, spec: Json) -> None:
        """The whole of it. `kubectl replace` reads and then writes, and fails if the operator writes between."""
        patch = [{"op": "replace", "path": "/spec", "value": spec}]
        self.kubectl("patch", "trtmodel", name, "--type=json", "-p", json.dumps(patch))

    def command(self, name: str, command: str) -> None:
        self.kubectl("annotate", "--overwrite", f"trtmodel/{name}", f"trtmodel.io/command={command}")

    # ------------------------------------------------------------------------------------------- what is there

    def model(self, name: str) -> Json:
        found: Json = self.cluster.request("GET", f"{API.format(self.namespace)}/{name}")
        return found

    def children(self, kind: str, name: str, *more: str) -> list[Json]:
        """Objects of a kind with the label of the model, and `more` labels (role=worker, kind=build)."""
        selector = ",".join([f"trtmodel.io/model={name}", *(f"trtmodel.io/{label}" for label in more)])
        return self.cluster.items(CHILDREN[kind].format(self.namespace), selector)

    def workers(self, name: str) -> list[Json]:
        """Worker pods that are not on their way out."""
        return [p for p in self.children("Pod", name, "role=worker") if "deletionTimestamp" not in p["metadata"]]

    def ready_workers(self, name: str) -> list[str]:
        return sorted(p["metadata"]["name"] for p in self.workers(name) if is_ready(p))

    def jobs(self, name: str) -> dict[str, int]:
        """Each Job's name and how many pods it has made."""
        pods = self.children("Pod", name, "role=job")
        return {
            job["metadata"]["name"]: sum(owner(p) == job["metadata"]["uid"] for p in pods)
            for job in self.children("Job", name)
        }

    def build_result(self, name: str, revision: str) -> BuildResult:
        """What the Job that built the revision said."""
        said = [r.build for r in map(job_result, self.children("Pod", name, "kind=build")) if r and r.build]
        found = [build for build in said if build.revision == revision]
        assert found, f"no Job says that it built {revision}\n{self.describe(name)}"
        return found[-1]

    def events(self, name: str) -> list[tuple[str, str, str]]:
        """(type, reason, message) of what was said about the model."""
        uid = self.model(name)["metadata"]["uid"]
        found = self.cluster.items(f"/apis/events.k8s.io/v1/namespaces/{self.namespace}/events")
        return [
            (e["type"], e["reason"], e.get("note", ""))
            for e in sorted(found, key=lambda e: e["metadata"]["creationTimestamp"])
            if (e.get("regarding") or {}).get("uid") == uid
        ]

    def metrics(self, pod: str) -> dict[str, float]:
        """Samples of a worker's metrics port, by name with labels."""
        lines = self.cluster.text(f"{CHILDREN['Pod'].format(self.namespace)}/{pod}:8082/proxy/metrics").splitlines()
        pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def infer(self, where: str, model: str, inputs: list[Json]) -> Json:
        """The answer of `where`, services/NAME:PORT or pods/NAME:PORT. Raises Refused."""
        path = f"/api/v1/namespaces/{self.namespace}/{where}/proxy/v2/models/{model}/infer"
        found: Json = self.cluster.request("POST", path, {"inputs": inputs})
        return found

    # ------------------------------------------------------------------------------------------------- waiting

    def wait(self, name: str, what: str, done: Callable[[Json], bool], seconds: float) -> Json:
        """The first state of the TRTModel of which `done` is true."""

        def look() -> Json | None:
            found = self.model(name)
            return found if done(found) else None

        found: Json = until(f"{name}: {what}", seconds, look, lambda: self.describe(name))
        return found

    def wait_condition(self, name: str, kind: str, status: str, reason: str, seconds: float) -> Json:
        """The model when the condition of its newest generation is so; any reason if it is ''."""

        def done(found: Json) -> bool:
            now = condition(found, kind)
            return now["status"] == status and reason in ("", now["reason"])

        return self.wait(name, f"{kind}={status} {reason}".strip(), done, seconds)

    def wait_ready(self, name: str, seconds: float) -> Json:
        return self.wait_condition(name, "Ready", "True", "", seconds)

    def wait_observed(self, name: str, seconds: float = 20.0) -> Json:
        """The model after a pass over its newest generation."""

        def done(found: Json) -> bool:
            return found.get("status", {}).get("observedGeneration") == found["metadata"]["generation"]

        return self.wait(name, "this generation is observed", done, seconds)

    def describe(self, name: str) -> str:
        """All that a person would look at, to find out why it is not as it should be."""
        parts = [self._describe_model(name), "jobs:", *self._describe_jobs(name), "workers:"]
        parts += [self._describe_pod(pod) for pod in self.children("Pod", name, "role=worker")]
        namespace, deployment = self._operator
        log = self.cluster.kubectl("logs", "-n", namespace, f"deployment/{deployment}", "--tail=25", "--ignore-errors")
        return "\n".join([*parts, "operator's log:", log])

    def _describe_model(self, name: str) -> str:
        try:
            found = self.model(name)
        except Refused as e:
            return f"{name}: {e}"
        status = found.get("status", {})
        lines = [f"{name}: generation {found['metadata']['generation']}, phase {status.get('phase')}"]
        lines += [f"  {c['type']}={c['status']} {c['reason']}: {c['message']}" for c in status.get("conditions", ())]
        lines += [f"  {entry}" for entry in status.get("history", ())]
        lines += [f"  event {kind} {reason}: {note}" for kind, reason, note in self.events(name)]
        return "\n".join(lines)

    def _describe_jobs(self, name: str) -> Iterable[str]:
        for job in self.children("Job", name):
            ended = [f"{c['type']} {c.get('reason', '')}" for c in job["status"].get("conditions", ())]
            yield f"  {job['metadata']['name']}: {', '.join(ended) or 'runs'}"
        for pod in self.children("Pod", name, "role=job"):
            yield self._describe_pod(pod)

    def _describe_pod(self, pod: Json) -> str:
        status = pod["status"]
        states = [s.get("state") for s in status.get("containerStatuses", ())]
        text = f"  {pod['metadata']['name']}: {status.get('phase')}, ready {is_ready(pod)}, {states}"
        return text + "".join(f", {c['message']}" for c in status.get("conditions", ()) if c.get("message"))


# ------------------------------------------------------------------------------------------------------ reading


def condition(model: Json, kind: str) -> Json:
    """The condition if it is about the newest generation; else one that says nothing."""
    for found in model.get("status", {}).get("conditions", ()):
        if found["type"] == kind and found.get("observedGeneration") == model["metadata"]["generation"]:
            return dict(found)
    return {"type": kind, "status": "", "reason": "", "message": ""}


def revision(model: Json, role: str) -> str:
    """Of stable, candidate or standby; '' if there is none."""
    memory = model.get("status", {}).get("rollout", {}).get(role) or {}
    return str(memory.get("revision", ""))


def is_ready(pod: Json) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))


def owner(child: Json) -> str:
    return next((o["uid"] for o in child["metadata"].get("ownerReferences", ()) if o.get("controller")), "")


def job_result(pod: Json) -> JobResult | None:
    for status in pod["status"].get("containerStatuses", ()):
        message = ((status.get("state") or {}).get("terminated") or {}).get("message")
        if message:
            try:
                return loads(JobResult, message)
            except DocumentError:
                return None
    return None
