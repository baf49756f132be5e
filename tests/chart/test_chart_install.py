"""The chart on the real API server: it installs, its rights are what they should be, it upgrades and goes."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
from chart_helm import CALL_SECONDS, CHART, Helm

pytestmark = pytest.mark.e2e

STOPPED = ("--set", "replicas=0,crds.install=false")  # the definition is the whole cluster's
EVERYTHING = (
    "podDisruptionBudget.enabled=true", "networkPolicy.enabled=true", 'networkPolicy.namespaces=["default"]',
    "metrics.dashboard.enabled=true", 'caBundle.configMap="company-ca"', 'imagePullSecrets=[{"name":"registry"}]',
    'tolerations=[{"operator":"Exists"}]', 'nodeSelector={"pool":"system"}', 'priorityClassName="high"',
    'topologySpreadConstraints=[{"maxSkew":1,"topologyKey":"zone","whenUnsatisfiable":"DoNotSchedule"}]',
)  # fmt: skip


@dataclass(frozen=True)
class Release:
    """An installed release, stopped (replicas 0), since only its objects matter here."""

    name: str
    namespace: str
    environment: Mapping[str, str]

    def kubectl(self, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*shlex.split(self.environment["KUBECTL"]), *arguments],
            input=text, capture_output=True, text=True, timeout=CALL_SECONDS, check=False,
            env={**os.environ, **self.environment},
        )  # fmt: skip

    def definition(self) -> None:
        done = self.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CHART / "files" / "trtmodel.yaml"))
        assert done.returncode == 0, done.stderr

    def may(self, verb: str, what: str, namespace: str) -> bool:
        """`what`: a resource or resource/name, and --subresource=... where one is meant."""
        account = f"system:serviceaccount:{self.namespace}:{self.name}-trtmodel-operator"
        answer = self.kubectl(
            "auth", "can-i", verb, *what.split(), "--as", account, "--namespace", namespace
        ).stdout.strip()
        assert answer in ("yes", "no"), answer
        return answer == "yes"


@pytest.fixture(scope="module")
def helm(cluster_helm: Helm) -> Helm:
    return cluster_helm


@pytest.fixture(scope="module")
def release(helm: Helm, cluster_environment: Mapping[str, str]) -> Iterator[Release]:
    made = Release(f"r{secrets.token_hex(3)}", f"chart-{secrets.token_hex(3)}", cluster_environment)
    made.definition()
    helm.ok("install", made.name, str(CHART), "--namespace", made.namespace, "--create-namespace", *STOPPED)
    try:
        yield made
    finally:
        helm.run("uninstall", made.name, "--namespace", made.namespace)
        made.kubectl("delete", "namespace", made.namespace, "--wait=false")


@pytest.mark.parametrize(
    ("verb", "what"),
    [
        ("get", "trtmodels.trtmodel.io"),
        ("watch", "trtmodels.trtmodel.io"),
        ("patch", "trtmodels.trtmodel.io --subresource=status"),
        ("update", "trtmodels.trtmodel.io --subresource=finalizers"),
        ("create", "jobs.batch"),
        ("delete", "jobs.batch"),
        ("patch", "deployments.apps"),
        ("patch", "services"),
        ("patch", "configmaps"),
        ("list", "pods"),
        ("list", "events.events.k8s.io"),
        ("create", "events.events.k8s.io"),
        ("patch", "events.events.k8s.io"),
    ],
)
def test_the_operator_may_do_its_work_in_every_namespace(release: Release, verb: str, what: str) -> None:
    assert release.may(verb, what, "default")


@pytest.mark.parametrize(
    ("verb", "what"),
    [
        ("get", "secrets"),
        ("list", "secrets"),
        ("create", "secrets"),
        ("get", "leases.coordination.k8s.io"),
        ("update", "trtmodels.trtmodel.io"),
        ("delete", "trtmodels.trtmodel.io"),
        ("delete", "pods"),
        ("create", "pods --subresource=exec"),
        ("create", "rolebindings.rbac.authorization.k8s.io"),
        ("list", "nodes"),
    ],
)
def test_the_operator_may_do_nothing_else(release: Release, verb: str, what: str) -> None:
    assert not release.may(verb, what, "default")


def test_in_its_own_namespace_it_reads_one_secret_and_holds_one_lease(release: Release) -> None:
    own = release.namespace
    name = f"{release.name}-trtmodel-operator"
    assert release.may("get", f"secrets/{name}-signing", own)
    assert release.may("create", "secrets", own)
    assert release.may("update", f"leases.coordination.k8s.io/{name}", own)
    assert not release.may("get", "secrets/other", own)
    assert not release.may("list", "secrets", own)
    assert not release.may("update", "leases.coordination.k8s.io/other", own)


def test_an_upgrade_keeps_what_it_does_not_name(helm: Helm, release: Release) -> None:
    helm.ok(
        "upgrade",
        release.name,
        str(CHART),
        "--namespace",
        release.namespace,
        "--reuse-values",
        "--set",
        "logLevel=DEBUG",
    )
    deployment = release.kubectl(
        "get", "deployment", f"{release.name}-trtmodel-operator", "--namespace", release.namespace, "-o", "yaml"
    ).stdout
    assert "value: DEBUG" in deployment
    assert "replicas: 0" in deployment


@pytest.mark.parametrize("watched", ["[]", '["default"]'])
def test_the_api_server_takes_every_object_that_the_chart_can_make(helm: Helm, release: Release, watched: str) -> None:
    """With server-side validation: unknown fields are refused. Definitions of Prometheus Operator are not there."""
    objects = helm.template(*EVERYTHING, f"watchNamespaces={watched}", release="dry")
    for o in objects:
        if o["metadata"].get("namespace") == "ops":
            o["metadata"]["namespace"] = release.namespace
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    done = release.kubectl(
        "apply", "--dry-run=server", "--server-side", "--force-conflicts", "--validate=strict", "-f", "-", text=text
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("serverside-applied") == len(objects)


def test_the_api_server_takes_the_example_of_an_autoscaler(release: Release) -> None:
    text = (CHART.parents[1] / "examples" / "autoscaling" / "hpa.yaml").read_text()
    text = text.replace("namespace: ml", f"namespace: {release.namespace}")
    done = release.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", text=text)
    assert done.returncode == 0, done.stderr


def test_a_release_goes_back_to_what_it_was(helm: Helm, release: Release) -> None:
    helm.ok("upgrade", release.name, str(CHART), "--namespace", release.namespace, *STOPPED, "--set", "replicas=0")
    helm.ok("rollback", release.name, "1", "--namespace", release.namespace)
    level = release.kubectl(
        "get", "deployment", f"{release.name}-trtmodel-operator", "--namespace", release.namespace,
        "-o", "jsonpath={.spec.template.spec.containers[0].env[?(@.name=='TRTMODEL_LOG_LEVEL')].value}",
    ).stdout  # fmt: skip
    assert level == "INFO"


def test_the_notes_tell_how_the_definition_is_upgraded(helm: Helm, release: Release) -> None:
    notes = helm.ok("get", "notes", release.name, "--namespace", release.namespace)
    assert "kubectl apply --server-side --force-conflicts -f" in notes


def test_models_outlive_the_release(helm: Helm, release: Release) -> None:
    """Removing the operator must not remove what serves: the definition stays, and with it every TRTModel."""
    other = f"{release.name}b"
    helm.ok("install", other, str(CHART), "--namespace", release.namespace, *STOPPED)
    helm.ok("uninstall", other, "--namespace", release.namespace)
    assert release.kubectl("get", "crd", "trtmodels.trtmodel.io").returncode == 0
