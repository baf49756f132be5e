"""Each alert about models and the operator is caused: a real operator on a real API server, whose workers and Jobs get
into trouble; a real Prometheus scrapes it, and says so."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import hurried
import pytest
from busy_operator import BusyOperator
from debian_prometheus import Missing, programs
from hollow.operators import NAMESPACE, OperatorProcess
from hollow.plane import ControlPlane
from prometheus_server import Prometheus, discovered
from troubled_cluster import ENDLESS, FAILING, TroubledCluster, engines
from trtmodel_contract.control import EngineReport, EngineState, Report, Role

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

Json = dict[str, Any]

TEAM, OPERATOR, BUSY = "ml", "op-0", "op-1"
SECONDS = 180.0
QUIET_SCRAPES = 8
GROUPS = ("trtmodel-models", "trtmodel-operator")
TIMES = {"TRTModelOperatorBehind": ("> 60", "> 2")}
POLICY = {  # somebody's policy that is in the operator's way
    "apiVersion": "admissionregistration.k8s.io/v1",
    "kind": "ValidatingAdmissionPolicy",
    "metadata": {"name": "in-the-way"},
    "spec": {
        "matchConstraints": {
            "resourceRules": [
                {
                    "apiGroups": ["trtmodel.io"], "apiVersions": ["*"], "operations": ["UPDATE"],
                    "resources": ["trtmodels/status"],
                }
            ]
        },
        "validations": [{"expression": "object.metadata.name != 'mute'", "reason": "Forbidden"}],
    },
}  # fmt: skip
BINDING = {
    "apiVersion": "admissionregistration.k8s.io/v1",
    "kind": "ValidatingAdmissionPolicyBinding",
    "metadata": {"name": "in-the-way"},
    "spec": {"policyName": "in-the-way", "validationActions": ["Deny"]},
}
ALERTS = {
    ("TRTModelUnavailable", "gone"),
    ("TRTModelRolledBack", "back"),
    ("TRTModelBuildFailing", "invalid"),
    ("TRTModelBuildFailing", "shut"),
    ("TRTModelStorageTrouble", "shut"),
    ("TRTModelBuildSlow", "endless"),
    ("TRTModelDegraded", "halved"),
    ("TRTModelStandbyMissing", "bare"),
    ("TRTModelOperatorUntrusted", OPERATOR),
    ("TRTModelUnavailable", "stranger"),  # nobody knows whether it serves
    ("TRTModelKeyExchangeStuck", OPERATOR),
    ("TRTModelApiTrouble", OPERATOR),
    ("TRTModelPassesFail", OPERATOR),
    ("TRTModelOperatorBehind", BUSY),
    ("TRTModelNoLeader", ""),
}
WELL = ["well", "gone", "back", "halved", "bare", "stranger", "deaf", "mute"]


def model(name: str, source: str, replicas: int = 1, hold: str = "1s") -> Json:
    spec = {
        "source": {"uri": f"s3://models/{source}.onnx"},
        "storage": {"bucket": "engines"},
        "engine": {"runtime": "ONNXRuntime"},
        "verify": {"task": "Classification", "dataset": {"uri": "s3://data/eval.npz", "samples": 2000}},
        "serving": {"replicas": replicas},
        "rollout": {
            "steps": [{"workers": 1, "weight": 100, "hold": hold}],
            "analysis": {"interval": "1s", "minRequests": 1000},
        },
    }
    meta = {"namespace": TEAM, "name": name}
    return {"apiVersion": "trtmodel.io/v1alpha1", "kind": "TRTModel", "metadata": meta, "spec": spec}


class World:
    def __init__(self, plane: ControlPlane, cluster: TroubledCluster, operator: OperatorProcess) -> None:
        self.plane, self.cluster, self.operator = plane, cluster, operator

    def put(self, *objects: Json) -> None:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        self.plane.kubectl("apply", "-f", "-", text=text)

    def models(self) -> dict[str, Json]:
        found = json.loads(self.plane.kubectl("get", "trtmodels.trtmodel.io", "-n", TEAM, "-o", "json"))["items"]
        return {m["metadata"]["name"]: m for m in found}

    def ready(self, *names: str) -> bool:
        found = self.models()
        return all(_ready(found[name]) for name in names)

    def phase(self, name: str) -> str:
        return str((self.models()[name].get("status") or {}).get("phase", ""))

    def delete_worker(self, name: str) -> None:
        """One of its pods. Nothing makes another here."""
        listed = self.plane.kubectl("get", "pods", "-n", TEAM, "-l", f"trtmodel.io/model={name}", "-o", "json")
        workers = [p for p in json.loads(listed)["items"] if p["metadata"]["labels"]["trtmodel.io/role"] == "worker"]
        pod = workers[0]["metadata"]["name"]
        self.plane.kubectl("delete", "pod", pod, "-n", TEAM, "--force", "--grace-period=0")

    def says(self, name: str, change: Callable[[Report], Report]) -> None:
        self.cluster.fleet.says[name] = change
        self.cluster.news(name)


def _ready(found: Json) -> bool:
    status = found.get("status") or {}
    conditions = {c["type"]: c["status"] for c in status.get("conditions") or ()}
    return status.get("observedGeneration") == found["metadata"]["generation"] and conditions.get("Ready") == "True"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Everybody is well, and `bare` has a standby."""
    folder = tmp_path_factory.mktemp("troubled")
    with contextlib.ExitStack() as stack:
        plane = stack.enter_context(ControlPlane(folder / "plane"))
        plane.install_crd(NAMESPACE, TEAM)
        # Every worker and Job is made under it: a pod that is not so restricted would be refused.
        plane.kubectl("label", "namespace", TEAM, "pod-security.kubernetes.io/enforce=restricted")
        cluster = stack.enter_context(TroubledCluster(plane.kubeconfig("hollow"), "127.68.0.1"))
        operator = stack.enter_context(OperatorProcess(plane.kubeconfig("operator"), folder, OPERATOR))
        found = World(plane, cluster, operator)
        operator.until(operator.leads)
        found.put(*(model(name, name, replicas=2 if name == "halved" else 1) for name in WELL))
        operator.until(lambda: found.ready(*WELL), SECONDS, every=1.0)
        found.put(model("bare", "bare-next"))
        operator.until(lambda: found.ready("bare"), SECONDS, every=0.5)
        yield found


@pytest.fixture(scope="module")
def busy() -> Iterator[BusyOperator]:
    """Another operator, which stands by."""
    with BusyOperator() as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(world: World, busy: BusyOperator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    try:
        program = programs()["prometheus"]
    except Missing as e:
        pytest.fail(str(e))
    folder = tmp_path_factory.mktemp("prometheus")
    pods = [(OPERATOR, world.operator.metrics_port), (BUSY, busy.port)]
    (folder / "pods.json").write_text(discovered([hurried.pod(name, "", "operator", port) for name, port in pods]))
    found = Prometheus(program, hurried.config(folder, hurried.rules(*GROUPS, **TIMES)), folder)
    yield found
    found.close()


def test_each_alert_about_models_and_the_operator_fires_when_it_is_caused_and_no_other(
    world: World, busy: BusyOperator, prometheus: Prometheus
) -> None:
    def scrapes() -> float:
        found = prometheus.query("min(count_over_time(trtmodel_operator_leader[1h]))")
        return float(found[0]["value"][1]) if found else 0.0

    seen: hurried.Fired = set()

    def fires(*wanted: tuple[str, str]) -> Callable[[], bool]:
        def look() -> bool:
            seen.update(hurried.fired(prometheus))
            return set(wanted) <= seen

        return look

    world.operator.until(lambda: scrapes() >= QUIET_SCRAPES, SECONDS)
    assert prometheus.alerts() == []

    caused(world)
    busy.change("one")
    busy.change("another")
    try:
        world.operator.until(fires(*(ALERTS - {("TRTModelNoLeader", "")})), SECONDS, every=0.5)
        world.operator.process.kill()
        until(fires(("TRTModelNoLeader", "")))
    except AssertionError as e:
        raise AssertionError(f"missing {ALERTS - seen}, unexpected {seen - ALERTS}: {e}\n{prometheus.log()}") from None
    assert seen == ALERTS
    assert {alert for alert, _ in ALERTS} == {
        rule["alert"] for group in hurried.rules(*GROUPS)["groups"] for rule in group["rules"]
    }
    assert prometheus.broken_rules() == {}


def caused(world: World) -> None:
    """Everything but the end of the operator."""
    invalid, shut = FAILING
    world.put(model("invalid", invalid), model("shut", shut), model("endless", ENDLESS))
    world.delete_worker("gone")
    world.delete_worker("halved")
    world.put(model("back", "back-next", hold="1h"))
    world.operator.until(lambda: world.phase("back") == "Canary", SECONDS, every=0.5)
    world.says("back", lambda report: engines(report, dies))
    world.says("bare", lambda report: engines(report, loses_its_standby))
    listed = world.plane.kubectl("get", "configmap", "deaf-keys", "-n", TEAM, "-o", "jsonpath={.data}")
    (known,) = json.loads(next(iter(json.loads(listed).values())))["keys"]
    world.says("deaf", lambda report: replace(report, key_ids=(known,)))
    secret = "secret/trtmodel-operator-signing"
    world.plane.kubectl("annotate", "--overwrite", "-n", NAMESPACE, secret, "trtmodel.io/rotate=now")
    world.cluster.fleet.unbelieving.add("stranger")
    world.cluster.news("stranger")
    world.put(POLICY, BINDING)
    limits = itertools.cycle((6, 7))
    deadline = time.monotonic() + SECONDS
    while POLICY["metadata"]["name"] not in world.operator.log:  # a policy takes effect in its own time
        assert time.monotonic() < deadline, world.operator.log[-3000:]
        change = json.dumps({"spec": {"rollout": {"historyLimit": next(limits)}}})
        world.plane.kubectl("patch", "trtmodel", "mute", "-n", TEAM, "--type=merge", "-p", change)
        time.sleep(1)


def dies(engine: EngineReport) -> EngineReport:
    return replace(engine, deaths=1) if engine.role is Role.CANDIDATE else engine


def loses_its_standby(engine: EngineReport) -> EngineReport:
    return replace(engine, state=EngineState.DOWN, message="its host ended") if engine.role is Role.STANDBY else engine


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)
