"""What is made only where somebody asks for it: monitors, rules, policies, budgets."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from chart_helm import CHART, Helm, Json, one

pytestmark = pytest.mark.e2e  # helm is built with the local cluster

OPERATOR = {"app.kubernetes.io/name": "trtmodel-operator", "app.kubernetes.io/instance": "trtmodel-operator"}
MONITORS = (
    "metrics.serviceMonitor.enabled=true", "metrics.podMonitor.enabled=true", "metrics.rules.enabled=true",
    "metrics.dashboard.enabled=true",
)  # fmt: skip


def container(objects: list[Json]) -> Json:
    found: Json = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    return found


def test_nothing_of_prometheus_operator_is_made_unasked(helm: Helm) -> None:
    assert not [o for o in helm.template() if o["apiVersion"].startswith("monitoring.coreos.com")]


def test_the_service_monitor_finds_the_operator_through_its_service(helm: Helm) -> None:
    objects = helm.template(*MONITORS, 'metrics.serviceMonitor.labels={"release":"prometheus"}')
    monitor, service = one(objects, "ServiceMonitor"), one(objects, "Service")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint == {"port": "metrics", "interval": "30s", "honorLabels": True}
    (port,) = service["spec"]["ports"]
    assert (port["name"], port["port"], port["targetPort"]) == ("metrics", 9090, "metrics")
    assert (
        service["spec"]["selector"].items()
        <= one(objects, "Deployment")["spec"]["template"]["metadata"]["labels"].items()
    )
    assert service["spec"]["clusterIP"] == "None"


def test_a_service_monitor_without_its_service_is_refused(helm: Helm) -> None:
    said = helm.refusal("metrics.serviceMonitor.enabled=true", "metrics.service.create=false")
    assert "a ServiceMonitor finds pods through a Service" in said


@pytest.mark.parametrize(
    ("watched", "where"), [("[]", {"any": True}), ('["ml","vision"]', {"matchNames": ["ml", "vision"]})]
)
def test_the_pod_monitor_looks_where_models_are(helm: Helm, watched: str, where: Json) -> None:
    spec = one(helm.template(*MONITORS, f"watchNamespaces={watched}"), "PodMonitor")["spec"]
    assert spec["namespaceSelector"] == where
    assert spec["selector"] == {"matchLabels": {"trtmodel.io/role": "worker"}}
    (endpoint,) = spec["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["interval"]) == ("metrics", "15s")
    assert {r["targetLabel"] for r in endpoint["relabelings"]} == {"model", "target"}


def test_the_rules_are_those_that_are_tested_with_runbooks_where_they_are(helm: Helm) -> None:
    base = "https://docs.example.com/runbooks/"
    rule = one(helm.template(*MONITORS, f'metrics.rules.runbooks="{base}"'), "PrometheusRule")["spec"]
    tested = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    for group in tested["groups"]:
        for alert in group["rules"]:
            assert alert["annotations"]["runbook_url"].startswith("docs/runbooks/")
            alert["annotations"]["runbook_url"] = f"{base}{alert['alert']}.md"
    assert rule == tested


def test_the_dashboard_is_the_one_that_is_tested(helm: Helm) -> None:
    objects = helm.template(*MONITORS, 'metrics.dashboard.annotations={"grafana_folder":"ML"}')
    found = one(objects, "ConfigMap")
    assert json.loads(found["data"]["trtmodel.json"]) == json.loads((CHART / "files" / "dashboard.json").read_text())
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert found["metadata"]["annotations"] == {"grafana_folder": "ML"}


def policies(helm: Helm, *settings: str) -> dict[tuple[str, str], Json]:
    objects = helm.template("networkPolicy.enabled=true", *settings)
    found = [o for o in objects if o["kind"] == "NetworkPolicy"]
    return {(o["metadata"]["namespace"], o["metadata"]["name"]): o["spec"] for o in found}


def allowed(spec: Json) -> dict[str, Any]:
    """Who may reach a port; None for everybody."""
    return {port["port"]: rule.get("from") for rule in spec["ingress"] for port in rule["ports"]}


def test_control_and_progress_ports_are_the_operators_alone(helm: Helm) -> None:
    found = policies(helm, 'watchNamespaces=["ml"]')
    operator = [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ops"}},
            "podSelector": {"matchLabels": OPERATOR},
        }
    ]
    workers, jobs = found["ml", "trtmodel-operator-workers"], found["ml", "trtmodel-operator-jobs"]
    assert workers["podSelector"] == {"matchLabels": {"trtmodel.io/role": "worker"}}
    anybody = [{"namespaceSelector": {}}]
    assert allowed(workers) == {"http": None, "grpc": None, "control": operator, "metrics": anybody}
    assert jobs["podSelector"] == {"matchLabels": {"trtmodel.io/role": "job"}}
    assert allowed(jobs) == {"progress": operator}
    assert allowed(found["ops", "trtmodel-operator"]) == {"probes": None, "metrics": anybody}
    assert all(spec["policyTypes"] == ["Ingress"] for spec in found.values())


def test_metrics_are_read_by_whom_one_says(helm: Helm) -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    settings = ('networkPolicy.namespaces=["ml"]', f"networkPolicy.metricsFrom={json.dumps(peers)}")
    for spec in policies(helm, *settings).values():
        assert allowed(spec).get("metrics", peers) == peers


def test_policies_are_made_where_one_says(helm: Helm) -> None:
    assert {namespace for namespace, _ in policies(helm)} == {"ops"}
    assert {n for n, _ in policies(helm, 'networkPolicy.namespaces=["ml","vision"]')} == {"ops", "ml", "vision"}


def test_labels_of_ones_own_are_on_every_object_and_replace_none_of_the_charts(helm: Helm) -> None:
    own = {"team": "ml", "app.kubernetes.io/name": "mine"}
    settings = (*MONITORS, "networkPolicy.enabled=true", "podDisruptionBudget.enabled=true", "crds.install=false")
    objects = helm.template(*settings, f"commonLabels={json.dumps(own)}")
    without = helm.template(*settings)
    for labelled, plain in zip(objects, without, strict=True):
        labels = plain["metadata"]["labels"]
        if labels["app.kubernetes.io/name"] == OPERATOR["app.kubernetes.io/name"]:
            assert labelled["metadata"]["labels"] == labels | {"team": "ml"}, plain["kind"]
    assert one(objects, "Deployment")["spec"]["selector"] == one(without, "Deployment")["spec"]["selector"]


def test_labels_of_one_object_go_before_those_of_all(helm: Helm) -> None:
    objects = helm.template(
        *MONITORS, 'commonLabels={"team":"ml"}', 'podLabels={"team":"a"}', 'metrics.rules.labels={"team":"b"}'
    )
    assert one(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]["team"] == "a"
    assert one(objects, "PrometheusRule")["metadata"]["labels"]["team"] == "b"
    assert one(objects, "Service")["metadata"]["labels"]["team"] == "ml"


def test_a_budget_for_drains_is_about_the_operators_pods(helm: Helm) -> None:
    budget = one(
        helm.template("podDisruptionBudget.enabled=true", 'podDisruptionBudget.maxUnavailable="50%"'),
        "PodDisruptionBudget",
    )
    assert budget["spec"]["maxUnavailable"] == "50%"
    assert budget["spec"]["selector"]["matchLabels"] == OPERATOR


def test_replicas_spread_over_nodes_and_as_one_says(helm: Helm) -> None:
    def spread(*settings: str) -> list[Json]:
        found: list[Json] = one(helm.template(*settings), "Deployment")["spec"]["template"]["spec"][
            "topologySpreadConstraints"
        ]
        return found

    (default,) = spread()
    assert (default["topologyKey"], default["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    assert default["labelSelector"] == {"matchLabels": OPERATOR}
    zone = {"topologyKey": "topology.kubernetes.io/zone", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule"}
    own = zone | {"labelSelector": {"matchLabels": {"a": "b"}}}
    assert spread(f"topologySpreadConstraints={json.dumps([zone, own])}") == [
        zone | {"labelSelector": {"matchLabels": OPERATOR}},
        own,
    ]


def test_authorities_of_ones_own_are_mounted_and_used(helm: Helm) -> None:
    objects = helm.template('caBundle={"configMap":"company-ca","key":"root.pem"}')
    (path,) = [e["value"] for e in container(objects)["env"] if e["name"] == "SSL_CERT_FILE"]
    (mount,) = [m for m in container(objects)["volumeMounts"] if path.startswith(m["mountPath"])]
    (volume,) = [
        v for v in one(objects, "Deployment")["spec"]["template"]["spec"]["volumes"] if v["name"] == mount["name"]
    ]
    (item,) = volume["configMap"]["items"]
    assert (volume["configMap"]["name"], item["key"]) == ("company-ca", "root.pem")
    assert f"{mount['mountPath']}/{item['path']}" == path
    assert not [e for e in container(helm.template())["env"] if e["name"] == "SSL_CERT_FILE"]


def test_the_test_of_the_release_is_a_hook_and_as_restricted_as_the_operator(helm: Helm) -> None:
    objects = helm.template()
    pod, deployment = one(objects, "Pod"), one(objects, "Deployment")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["spec"]["securityContext"] == deployment["spec"]["template"]["spec"]["securityContext"]
    assert pod["spec"]["containers"][0]["securityContext"] == container(objects)["securityContext"]
    assert pod["spec"]["automountServiceAccountToken"] is False
    selector = deployment["spec"]["selector"]["matchLabels"]
    assert not selector.items() <= pod["metadata"]["labels"].items()  # the Service must not lead to it
    compile(pod["spec"]["containers"][0]["args"][0], "helm test", "exec")


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ('metrics.podMonitor.interval="soon"', "interval"),
        ('metrics.rules.runbooks="a b"', "runbooks"),
        ("networkPolicy.metricsFrom=[{}, 3]", "metricsFrom"),
        ('networkPolicy.metricsFrom=[{"cidr":"10.0.0.0/8"}]', "metricsFrom"),
        ('podDisruptionBudget.maxUnavailable="half"', "maxUnavailable"),
        ('topologySpreadConstraints=[{"maxSkew":1}]', "topologySpreadConstraints"),
        ('caBundle.configMap="A b"', "configMap"),
        ("terminationGracePeriodSeconds=0", "terminationGracePeriodSeconds"),
    ],
)
def test_values_that_mean_nothing_are_refused(helm: Helm, setting: str, says: str) -> None:
    assert says in helm.refusal(setting)
