"""What the chart makes of its values."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from chart_helm import CHART, Helm, Json, one
from trtmodel_operator.settings import from_environment
from values_table import values

pytestmark = pytest.mark.e2e  # helm is built with the local cluster

EXPECTED = {
    "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "Deployment", "PriorityClass", "Pod",
    "Service", "CustomResourceDefinition",
}  # fmt: skip
NO_NAMESPACE = ("ClusterRole", "ClusterRoleBinding", "PriorityClass", "CustomResourceDefinition")
EVERYTHING_OF_ITS_OWN = (
    "networkPolicy.enabled=true", "podDisruptionBudget.enabled=true", "metrics.dashboard.enabled=true",
    "metrics.serviceMonitor.enabled=true", "metrics.podMonitor.enabled=true", "metrics.rules.enabled=true",
)  # fmt: skip
WRITE = {"create", "update", "patch", "delete", "deletecollection", "*"}


def container(objects: list[Json]) -> Json:
    containers: list[Json] = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert len(containers) == 1
    return containers[0]


def environment(objects: list[Json]) -> dict[str, Any]:
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in container(objects)["env"]}


def rules_of_the_operator(objects: list[Json]) -> list[Json]:
    """Of all roles that are bound to its ServiceAccount."""
    bound = {
        (binding["roleRef"]["kind"], binding["roleRef"]["name"])
        for binding in objects
        if binding["kind"] in ("RoleBinding", "ClusterRoleBinding")
    }
    return [rule for o in objects if (o["kind"], o["metadata"]["name"]) in bound for rule in o["rules"]]


def test_lint_finds_nothing(helm: Helm) -> None:
    assert "0 chart(s) failed" in helm.ok("lint", "--strict", str(CHART))


def test_the_objects_are_the_expected_ones(helm: Helm) -> None:
    assert {o["kind"] for o in helm.template()} == EXPECTED


def test_the_definition_of_trtmodel_is_upgraded_with_the_release_and_outlives_it(helm: Helm) -> None:
    definition = one(helm.template(), "CustomResourceDefinition")
    assert definition == yaml.safe_load((CHART / "files" / "trtmodel.yaml").read_text())
    assert definition["metadata"]["name"] == "trtmodels.trtmodel.io"
    assert definition["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert not [o for o in helm.template("crds.install=false") if o["kind"] == "CustomResourceDefinition"]


def test_everything_lies_in_the_namespace_of_the_release(helm: Helm) -> None:
    for o in helm.template():
        assert o["metadata"].get("namespace") == (None if o["kind"] in NO_NAMESPACE else "ops")


def test_every_container_has_requests_and_limits(helm: Helm) -> None:
    for bound in ("requests", "limits"):
        assert set(container(helm.template())["resources"][bound]) == {"cpu", "memory"}


def test_probes_ask_for_progress_and_give_five_seconds(helm: Helm) -> None:
    found = container(helm.template())
    ports = {port["name"]: port["containerPort"] for port in found["ports"]}
    assert ports == {"probes": 8080, "metrics": 9090}
    for probe, path in {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}.items():
        assert found[probe]["httpGet"] == {"path": path, "port": "probes"}
        assert found[probe]["timeoutSeconds"] == 5
    assert found["livenessProbe"]["terminationGracePeriodSeconds"] == 10  # one that hangs takes no notice of SIGTERM


def test_the_pod_is_restricted_as_the_pod_security_standard_wants_it(helm: Helm) -> None:
    objects = helm.template()
    pod = one(objects, "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(objects)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_operator_is_told_everything_by_its_environment(helm: Helm) -> None:
    found = environment(helm.template('worker.image="localhost/trtmodel-worker:abc"', 'logLevel="DEBUG"'))
    assert found == {
        "POD_NAME": {"fieldRef": {"fieldPath": "metadata.name"}},
        "TRTMODEL_NAMESPACE": {"fieldRef": {"fieldPath": "metadata.namespace"}},
        "TRTMODEL_WATCH_NAMESPACES": "",
        "TRTMODEL_WORKER_IMAGE": "localhost/trtmodel-worker:abc",
        "TRTMODEL_KEY_SECRET": "trtmodel-operator-signing",
        "TRTMODEL_LEASE_NAME": "trtmodel-operator",
        "TRTMODEL_HTTP_PORT": "8080",
        "TRTMODEL_METRICS_PORT": "9090",
        "TRTMODEL_LOG_LEVEL": "DEBUG",
        "TRTMODEL_MAX_BUILDS": "0",
        "TRTMODEL_JOB_PRIORITY_CLASS": "trtmodel-operator-builds",
        "TRTMODEL_KEY_MAX_AGE_DAYS": "0",
        "TRTMODEL_COLLECT_EVERY_HOURS": "0",
        "TRTMODEL_COLLECT_DELETE": "false",
        "TRTMODEL_COLLECT_GRACE_HOURS": "48",
        "TRTMODEL_ALLOWED_ADDRESSES": "",
        "TRTMODEL_PROMETHEUS_ADDRESS": "",
    }


def test_the_operator_understands_its_environment(helm: Helm) -> None:
    rendered = environment(helm.template('watchNamespaces=["ml","vision"]'))
    told = {name: value if isinstance(value, str) else "from-the-pod" for name, value in rendered.items()}
    settings = from_environment(told)
    assert settings.watch_namespaces == ("ml", "vision")
    assert (settings.http_port, settings.metrics_port) == (8080, 9090)
    assert settings.key_secret == "trtmodel-operator-signing"


def test_services_of_the_namespace_do_not_reach_the_environment(helm: Helm) -> None:
    assert one(helm.template(), "Deployment")["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_image_and_worker_image_follow_the_version_of_the_chart(helm: Helm) -> None:
    objects = helm.template()
    version = one(objects, "Deployment")["metadata"]["labels"]["app.kubernetes.io/version"]
    assert container(objects)["image"] == f"trtmodel-operator:{version}"
    assert environment(objects)["TRTMODEL_WORKER_IMAGE"] == f"trtmodel-worker:{version}"


def test_a_digest_goes_before_a_tag(helm: Helm) -> None:
    digest = "sha256:" + "ab" * 32
    assert container(helm.template('image.tag="x"', f'image.digest="{digest}"'))["image"].endswith(f"operator@{digest}")


def test_two_releases_have_different_names(helm: Helm) -> None:
    names = [
        {(o["kind"], o["metadata"]["name"]) for o in helm.template("crds.install=false", release=r)}
        for r in ("one", "two")
    ]
    assert not names[0] & names[1]


def test_no_right_on_secrets_but_the_key_pair_of_the_operator(helm: Helm) -> None:
    secrets = [
        (o["kind"], o["metadata"].get("namespace"), rule.get("resourceNames"), set(rule["verbs"]))
        for o in helm.template()
        for rule in o.get("rules", [])
        if {"secrets", "*"} & set(rule["resources"])
    ]
    assert secrets == [
        ("Role", "ops", None, {"create"}),
        ("Role", "ops", ["trtmodel-operator-signing"], {"get", "update"}),
    ]


def test_the_operator_writes_no_trtmodel_but_for_the_finalizer_which_can_be_forbidden(helm: Helm) -> None:
    def writes(*values: str) -> set[str]:
        rules = [r for r in rules_of_the_operator(helm.template(*values)) if "trtmodels" in r["resources"]]
        return set().union(*(WRITE & set(rule["verbs"]) for rule in rules))

    assert writes() == {"patch"}
    assert writes("rbac.deleteArtifacts=false") == set()


def test_no_rule_has_a_wildcard(helm: Helm) -> None:
    for o in helm.template():
        for rule in o.get("rules", []):
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]


def test_pods_are_only_looked_at(helm: Helm) -> None:
    verbs = [set(r["verbs"]) for r in rules_of_the_operator(helm.template()) if "pods" in r["resources"]]
    assert verbs == [{"list", "watch"}]


def test_with_named_namespaces_the_operator_has_no_right_elsewhere(helm: Helm) -> None:
    objects = helm.template('watchNamespaces=["ml","vision"]')
    assert not [o for o in objects if o["kind"] == "ClusterRoleBinding"]
    models = [o for o in objects if o["kind"] == "RoleBinding" and o["metadata"]["name"].endswith("-models")]
    assert [o["metadata"]["namespace"] for o in models] == ["ml", "vision"]
    assert all(o["subjects"][0]["namespace"] == "ops" for o in models)
    assert environment(objects)["TRTMODEL_WATCH_NAMESPACES"] == "ml,vision"
    everywhere = [o["rules"] for o in helm.template() if o["metadata"]["name"] == "trtmodel-operator" and "rules" in o]
    here = [o["rules"] for o in objects if o["kind"] == "Role" and o["metadata"]["name"].endswith("-models")]
    assert here == everywhere * 2


def test_without_rbac_there_are_no_roles(helm: Helm) -> None:
    kinds = {o["kind"] for o in helm.template("rbac.create=false")}
    assert kinds == {k for k in EXPECTED if "Role" not in k}


def test_builds_drive_no_other_pod_away_and_wait_behind_pods_that_serve(helm: Helm) -> None:
    found = one(helm.template("builds.concurrent=3", "keyMaxAgeDays=90"), "PriorityClass")
    assert (found["preemptionPolicy"], found["value"], found["globalDefault"]) == ("Never", -1, False)
    told = environment(helm.template("builds.concurrent=3", "keyMaxAgeDays=90"))
    assert (told["TRTMODEL_MAX_BUILDS"], told["TRTMODEL_KEY_MAX_AGE_DAYS"]) == ("3", "90")
    assert told["TRTMODEL_JOB_PRIORITY_CLASS"] == found["metadata"]["name"]


@pytest.mark.parametrize(("name", "used"), [("", ""), ("mine", "mine")])
def test_a_priority_class_of_ones_own_is_used_and_not_made(helm: Helm, name: str, used: str) -> None:
    objects = helm.template(f'builds.priorityClass={{"create":false,"name":"{name}"}}')
    assert "PriorityClass" not in {o["kind"] for o in objects}
    assert environment(objects)["TRTMODEL_JOB_PRIORITY_CLASS"] == used


def test_an_account_of_ones_own_is_used_and_not_made(helm: Helm) -> None:
    objects = helm.template('serviceAccount={"create":false,"name":"mine"}')
    assert "ServiceAccount" not in {o["kind"] for o in objects}
    assert one(objects, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == "mine"
    assert one(objects, "ClusterRoleBinding")["subjects"][0]["name"] == "mine"


def test_labels_of_ones_own_do_not_replace_the_selector(helm: Helm) -> None:
    spec = one(helm.template('podLabels={"team":"ml"}'), "Deployment")["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert labels["team"] == "ml"
    assert spec["selector"]["matchLabels"].items() <= labels.items()


def test_scheduling_settings_arrive(helm: Helm) -> None:
    objects = helm.template(
        'nodeSelector={"pool":"system"}', 'tolerations=[{"operator":"Exists"}]', 'affinity={"nodeAffinity":{}}',
        'priorityClassName="high"', 'imagePullSecrets=[{"name":"registry"}]', 'podAnnotations={"a":"b"}',
    )  # fmt: skip
    template = one(objects, "Deployment")["spec"]["template"]
    assert template["metadata"]["annotations"] == {"a": "b"}
    assert template["spec"]["nodeSelector"] == {"pool": "system"}
    assert template["spec"]["tolerations"] == [{"operator": "Exists"}]
    assert template["spec"]["affinity"] == {"nodeAffinity": {}}
    assert template["spec"]["priorityClassName"] == "high"
    assert template["spec"]["imagePullSecrets"] == [{"name": "registry"}]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("replica=2", "replica"),
        ("replicas=-1", "replicas"),
        ('replicas="2"', "replicas"),
        ('logLevel="verbose"', "logLevel"),
        ('image.repository=""', "repository"),
        ('image.digest="sha256:1"', "digest"),
        ('image.repository="registry.example.com:5000/operator:1.0"', "repository"),
        ('image.repository="operator@sha256:ab"', "repository"),
        ('image.pullPolicy="Sometimes"', "pullPolicy"),
        ('worker.image="a b"', "image"),
        ('watchNamespaces="ml"', "watchNamespaces"),
        ('watchNamespaces=["ML"]', "watchNamespaces"),
        ('watchNamespaces=["ml","ml"]', "watchNamespaces"),
        ("ports.probes=80", "probes"),
        ('resources={"requests":{"cpu":"1","memory":"1Gi"},"limits":null}', "limits"),
        ('resources.limits={"cpu":"1","memory":null}', "memory"),
        ('resources.limits={"cpu":"1","memory":"1 GB"}', "memory"),
        ('resources.requests={"cpu":-1,"memory":"1Gi"}', "cpu"),
        ('keySecret="A_b"', "keySecret"),
        ('podLabels={"a b":"c"}', "podLabels"),
        ('commonLabels={"team":"machine learning"}', "commonLabels"),
        ('podLabels={"number":1}', "podLabels"),
        ('nodeSelector={"pool":true}', "nodeSelector"),
        ('podAnnotations={"/x":"y"}', "podAnnotations"),
        ('priorityClassName="A b"', "priorityClassName"),
        ('fullnameOverride="1st"', "fullnameOverride"),
        (f'fullnameOverride="{"a" * 49}"', "fullnameOverride"),
        ("builds.concurrent=-1", "concurrent"),
        ("keyMaxAgeDays=0.5", "keyMaxAgeDays"),
    ],
)
def test_values_that_mean_nothing_are_refused(helm: Helm, setting: str, says: str) -> None:
    assert says in helm.refusal(setting)


def test_a_value_of_another_kind_is_refused_whatever_it_is(helm: Helm) -> None:
    """A list for what is none, and a number for what is a list or a map: all at once, since helm names them all."""
    wrong = {v.path: "3" if isinstance(json.loads(v.default), (list, dict)) else "[]" for v in values() if v.default}
    said = helm.refusal(*(f"{path}={value}" for path, value in wrong.items()))
    assert [path for path in wrong if f"'/{path.replace('.', '/')}'" not in said] == []


def test_a_value_that_is_taken_away_is_missed_by_its_name(helm: Helm) -> None:
    needed = [v.path for v in values() if v.default and not isinstance(json.loads(v.default), (list, dict))]
    said = helm.refusal(*(f"{path}=null" for path in needed))
    assert [path for path in needed if f"'{path.rpartition('.')[2]}'" not in said] == []
    sections = list(dict.fromkeys(path.partition(".")[0] for path in needed if "." in path))
    said = helm.refusal(*(f"{section}=null" for section in sections))
    assert [section for section in sections if f"'{section}'" not in said] == []


def test_a_list_or_map_that_is_taken_away_is_an_empty_one(helm: Helm) -> None:
    free = {v.path: v.default for v in values() if v.default in ("[]", "{}")}
    assert len(free) > 15
    without = helm.template(*EVERYTHING_OF_ITS_OWN, *(f"{path}=null" for path in free))
    assert without == helm.template(*EVERYTHING_OF_ITS_OWN, *(f"{path}={empty}" for path, empty in free.items()))
    bare = one(helm.template("metrics.dashboard.enabled=true", "metrics.dashboard.labels=null"), "ConfigMap")
    assert "grafana_dashboard" not in bare["metadata"]["labels"]


def test_the_name_of_a_release_that_no_service_may_have_is_mended_or_refused(helm: Helm) -> None:
    assert (
        one(helm.template(release="my.models"), "Service")["metadata"]["name"] == "my-models-trtmodel-operator-metrics"
    )
    said = helm.refusal(release="2nd")
    assert "set fullnameOverride to a name that begins with a letter" in said
    assert helm.refusal('fullnameOverride="second"', release="2nd") == ""
    longest = "a" * 53  # which helm takes
    for o in helm.template(*EVERYTHING_OF_ITS_OWN, release=longest):
        assert len(o["metadata"]["name"]) <= 63, o["kind"]


def test_two_ports_that_are_one_are_refused(helm: Helm) -> None:
    assert "ports.probes and ports.metrics are both 9090: give them two ports" in helm.refusal("ports.probes=9090")


def test_what_selects_the_operators_pods_does_not_change_with_any_value(helm: Helm) -> None:
    """A Deployment's selector cannot be changed: an upgrade would be refused."""
    labels = '{"app.kubernetes.io/name":"mine","app.kubernetes.io/instance":"mine"}'
    changed = helm.template(f"commonLabels={labels}", f"podLabels={labels}", 'fullnameOverride="other"', "replicas=3")
    selectors = [one(found, "Deployment")["spec"]["selector"] for found in (changed, helm.template())]
    assert selectors[0] == selectors[1]
