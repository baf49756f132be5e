"""The chart's rights on a real API server that enforces them: an operator goes through rollouts, its audit log is read.

Nothing is refused, and every verb of the roles was needed: without one of them the same run has a refusal in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hollow.operators import NAMESPACE, OperatorProcess
from hollow.plane import ControlPlane
from localcluster import binaries, settings

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

TESTS = Path(__file__).resolve().parents[1]
CHART = TESTS.parent / "charts" / "trtmodel-operator"
RELEASE, TEAM = "trtmodel-operator", "ml"
POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "ResponseStarted"],
    "rules": [{"level": "Metadata", "users": ["operator"]}, {"level": "None"}],
}
# Asked by the admission plugin OwnerReferencesPermissionEnforcement, in the operator's name: no call of its own.
BY_ADMISSION = ("trtmodel.io", "trtmodels/finalizers", "update")
PLENTY = 120.0
Json = dict[str, Any]
Right = tuple[str, str, str]  # API group, resource, verb


@pytest.fixture(scope="module")
def roles() -> list[Json]:
    """As the chart makes them, bound to the user `operator` instead of a ServiceAccount."""
    helm = binaries.build(settings.from_environment(), ("helm",)).path("helm", "helm")
    done = subprocess.run(
        [helm, "template", RELEASE, CHART, "--namespace", NAMESPACE, "--set", "rbac.aggregate=false"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    found = [o for o in yaml.safe_load_all(done.stdout) if o and o["apiVersion"].startswith("rbac.")]
    for one in found:
        if one["kind"].endswith("Binding"):
            one["subjects"] = [{"kind": "User", "name": "operator", "apiGroup": "rbac.authorization.k8s.io"}]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guarded")


@pytest.fixture(scope="module")
def plane(roles: list[Json], folder: Path) -> Iterator[ControlPlane]:
    (folder / "policy.yaml").write_text(json.dumps(POLICY))
    options = (
        "--audit-policy-file", str(folder / "policy.yaml"), "--audit-log-path", str(folder / "audit.log"),
        "--enable-admission-plugins", "OwnerReferencesPermissionEnforcement",
    )  # fmt: skip
    with ControlPlane(folder, *options, authorization="RBAC") as running:
        running.install_crd(NAMESPACE, TEAM)
        running.kubectl("apply", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": roles}))
        environment = os.environ | {"PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, "-m", "hollow", str(running.kubeconfig("hollow")), "--first", "127.66.0.1"]
        with (folder / "hollow.log").open("w") as log:
            hollow = subprocess.Popen([*command, "--job-seconds", "1"], env=environment, stdout=log, stderr=log)
        try:
            yield running
        finally:
            hollow.terminate()
            hollow.wait(30)


def put(plane: ControlPlane, name: str, source: str, targets: tuple[str, ...] = ("cpu",), **more: Json | str) -> None:
    step = {"workers": 1, "weight": 100, "hold": "1s"}
    spec = {
        "source": {"uri": f"s3://models/{source}.onnx"},
        "storage": {"bucket": "engines"},
        "engine": {"runtime": "ONNXRuntime"},
        "targets": [{"name": target} for target in targets],
        "verify": {"task": "Classification", "dataset": {"uri": "s3://data/eval.npz", "samples": 2000}},
        "serving": {"replicas": 2},
        "rollout": {"steps": [step], "analysis": {"interval": "1s", "minRequests": 1000}},
        **more,
    }
    meta = {"namespace": TEAM, "name": name}
    model = {"apiVersion": "trtmodel.io/v1alpha1", "kind": "TRTModel", "metadata": meta, "spec": spec}
    plane.kubectl("apply", "-f", "-", text=json.dumps(model))


def ready(plane: ControlPlane, *names: str) -> Callable[[], bool]:
    """Whether each serves what its newest spec asks for."""

    def look() -> bool:
        found = json.loads(plane.kubectl("get", "trtmodels.trtmodel.io", "-n", TEAM, "-o", "json"))["items"]
        return all(_serves(model) for model in found if model["metadata"]["name"] in names)

    return look


def _serves(model: Json) -> bool:
    status = model.get("status") or {}
    conditions = {c["type"]: c["status"] for c in status.get("conditions") or ()}
    return status.get("observedGeneration") == model["metadata"]["generation"] and conditions.get("Ready") == "True"


def audited(log: Path) -> tuple[set[Right], list[str]]:
    """(rights that calls of the operator took, calls that were refused)."""
    used: set[Right] = set()
    refused = []
    for line in log.read_text().split("\n")[:-1]:  # what is being written has no end yet
        entry = json.loads(line)
        about, code = entry.get("objectRef"), (entry.get("responseStatus") or {}).get("code")
        if about is None:
            continue
        resource = "/".join(part for part in (about["resource"], about.get("subresource")) if part)
        used.add((about.get("apiGroup", ""), resource, entry["verb"]))
        if entry["verb"] == "patch" and code == 201:  # an apply that made the object takes both
            used.add((about.get("apiGroup", ""), resource, "create"))
        if code == 403:
            refused.append(f"{entry['verb']} {entry['requestURI']}")
    return used, refused


def granted(roles: list[Json]) -> set[Right]:
    rules = [rule for role in roles for rule in role.get("rules", ())]
    return {(g, r, v) for rule in rules for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}


def test_rollouts_need_every_verb_of_the_chart_and_are_refused_nothing(
    plane: ControlPlane, roles: list[Json], folder: Path, tmp_path: Path
) -> None:
    names = {"TRTMODEL_LEASE_NAME": RELEASE, "TRTMODEL_KEY_SECRET": f"{RELEASE}-signing", "TRTMODEL_MAX_BUILDS": "1"}
    with OperatorProcess(plane.kubeconfig("operator"), tmp_path, "operator", **names) as operator:
        operator.until(operator.leads)
        put(plane, "one", "a", ("cpu", "other"))
        put(plane, "two", "a", ("cpu",))  # a build that both wait for
        put(plane, "gone", "b", deletionPolicy="Delete")  # which takes a finalizer
        operator.until(ready(plane, "one", "two", "gone"), PLENTY)
        put(plane, "one", "held/c")  # a target leaves, and the build of the next source is left in the middle
        operator.until(lambda: building(plane), PLENTY)
        lists = ("events.k8s.io", "events", "list")  # nobody makes that Job a pod, which the operator asks about
        operator.until(lambda: lists in audited(folder / "audit.log")[0], PLENTY)
        put(plane, "one", "d")
        operator.until(ready(plane, "one"), PLENTY)
        before = keys(plane)
        secret = f"secret/{RELEASE}-signing"
        plane.kubectl("annotate", "--overwrite", "-n", NAMESPACE, secret, "trtmodel.io/rotate=now")
        operator.until(lambda: keys(plane) != before, PLENTY)
        lose_a_worker_twice(plane, operator)  # of which one event tells
        plane.kubectl("delete", "trtmodels.trtmodel.io/two", "-n", TEAM)  # nobody keeps it any more: it is asked for
        operator.until(lambda: ("trtmodel.io", "trtmodels", "get") in audited(folder / "audit.log")[0], PLENTY)
    deadline = time.monotonic() + PLENTY
    used, refused = audited(folder / "audit.log")
    while granted(roles) - used - {BY_ADMISSION} and time.monotonic() < deadline:  # a watch is logged when it has ended
        time.sleep(0.2)
        used, refused = audited(folder / "audit.log")
    assert refused == []
    assert granted(roles) - used - {BY_ADMISSION} == set()


def lose_a_worker_twice(plane: ControlPlane, operator: OperatorProcess) -> None:
    """As far as status says: it is gone once, and in between nobody wants it."""
    pods = "-n", TEAM, "-l", "trtmodel.io/model=gone,trtmodel.io/role=worker"
    first = json.loads(plane.kubectl("get", "pods", *pods, "-o", "json"))["items"][0]["metadata"]["name"]
    plane.kubectl("delete", f"pod/{first}", "-n", TEAM, "--force", "--grace-period=0")
    for wanted, degraded in ((2, "True"), (1, "False"), (2, "True")):
        put(plane, "gone", "b", deletionPolicy="Delete", serving={"replicas": wanted})
        operator.until(lambda is_it=degraded: condition(plane, "gone", "Degraded") == is_it, PLENTY)  # type: ignore[misc]
    operator.until(lambda: any((e.get("series") or {}).get("count") == 2 for e in events(plane)), PLENTY)


def condition(plane: ControlPlane, name: str, kind: str) -> str:
    model = json.loads(plane.kubectl("get", f"trtmodels.trtmodel.io/{name}", "-n", TEAM, "-o", "json"))
    return next(c["status"] for c in model["status"]["conditions"] if c["type"] == kind)


def events(plane: ControlPlane) -> list[Json]:
    return list(json.loads(plane.kubectl("get", "events.events.k8s.io", "-n", TEAM, "-o", "json"))["items"])


def building(plane: ControlPlane) -> bool:
    jobs = json.loads(plane.kubectl("get", "jobs", "-n", TEAM, "-l", "trtmodel.io/kind=build", "-o", "json"))["items"]
    return any(not (job.get("status") or {}).get("completionTime") for job in jobs)


def keys(plane: ControlPlane) -> Json:
    found = json.loads(plane.kubectl("get", "secret", f"{RELEASE}-signing", "-n", NAMESPACE, "-o", "json"))
    return dict(found["data"])
