"""What the chart and the examples make for Prometheus Operator and KEDA is what these take, and its pods are what a
namespace takes that enforces the Pod Security Standard "restricted".

A real API server validates it by their own definitions, from their Go modules, and refuses what is unknown."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from chart_helm import CHART, Helm, Json, one
from hollow.plane import ControlPlane
from localcluster import host, settings

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

ON = (
    "metrics.serviceMonitor.enabled=true", "metrics.podMonitor.enabled=true", "metrics.rules.enabled=true",
    'metrics.rules.labels={"release":"prometheus"}', 'watchNamespaces=["ml","vision"]',
)  # fmt: skip
DEFINITIONS = {
    "github.com/prometheus-operator/prometheus-operator@v0.85.0": (
        "example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml",
        "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
        "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
    ),
    "github.com/kedacore/keda/v2@v2.20.2": ("config/crd/bases/keda.sh_scaledobjects.yaml",),
}
DOWNLOAD_SECONDS = 300


def module(name: str) -> Path:
    """The folder of a Go module, in the cache of the toolchain."""
    go = host.go_toolchain(settings.from_environment())
    done = subprocess.run(
        [go, "mod", "download", "-json", name],
        cwd="/", capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False,
        env={**os.environ, "GOFLAGS": "-mod=mod", "GOTOOLCHAIN": "local", "GONOSUMDB": "*"},
    )  # fmt: skip
    found = json.loads(done.stdout or "{}")
    assert "Dir" in found, f"{name} cannot be had: {found.get('Error') or done.stderr}"
    return Path(found["Dir"])


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("plane")) as running:
        running.install_crd("ops", "ml", "strict")
        running.kubectl("label", "namespace", "strict", "pod-security.kubernetes.io/enforce=restricted")
        for name, files in DEFINITIONS.items():
            folder = module(name)
            for file in files:
                running.kubectl("apply", "--server-side", "-f", str(folder / file))
        running.kubectl("wait", "crd", "--all", "--for=condition=Established", "--timeout=60s")
        yield running


def test_prometheus_operator_takes_the_monitors_and_the_rules(helm: Helm, plane: ControlPlane) -> None:
    mine = [o for o in helm.template(*ON) if o["apiVersion"].startswith("monitoring.coreos.com/")]
    assert [o["kind"] for o in mine] == ["PodMonitor", "PrometheusRule", "ServiceMonitor"]
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": mine})
    taken = plane.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", text=text)
    assert taken.count("created (server dry run)") == len(mine)
    mine[0]["spec"]["selectors"] = {}
    with pytest.raises(RuntimeError, match=r'unknown field "spec\.selectors"'):
        plane.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", text=json.dumps(mine[0]))


@pytest.mark.parametrize("file", ["keda.yaml", "hpa.yaml"])
def test_the_example_of_an_autoscaler_is_taken(plane: ControlPlane, file: str) -> None:
    text = (CHART.parents[1] / "examples" / "autoscaling" / file).read_text()
    assert yaml.safe_load(text)["metadata"]["namespace"] == "ml"
    taken = plane.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", text=text)
    assert "created (server dry run)" in taken


def test_a_namespace_that_enforces_restricted_takes_the_operators_pod_and_that_of_helm_test(
    helm: Helm, plane: ControlPlane
) -> None:
    objects = helm.template('caBundle.configMap="company-ca"')
    operator = one(objects, "Deployment")["spec"]["template"]
    pods = {"operator": operator["spec"] | {"serviceAccountName": "default"}, "asks": one(objects, "Pod")["spec"]}

    def put(name: str, spec: Json) -> str:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "strict"}, "spec": spec}
        return plane.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", text=json.dumps(pod))

    for name, spec in pods.items():
        assert f"pod/{name} created (server dry run)" in put(name, spec)
        with pytest.raises(RuntimeError, match="violates PodSecurity"):
            put(name, spec | {"hostNetwork": True})
