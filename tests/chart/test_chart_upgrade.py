"""The definition from one chart to the next and back: every TRTModel stays, whatever becomes of the release."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml
from chart_helm import CHART, Helm, Json
from test_chart_install import Release

pytestmark = pytest.mark.e2e

FIELD = "historyLimit"  # of spec.rollout: what a former chart does not know
MODEL: Json = {
    "apiVersion": "trtmodel.io/v1alpha1",
    "kind": "TRTModel",
    "metadata": {"name": "stays"},
    "spec": {
        "source": {"uri": "s3://models/m.onnx"},
        "storage": {"bucket": "engines"},
        "engine": {"runtime": "ONNXRuntime", "profiles": [{"inputs": {"x": {"min": [1], "opt": [1], "max": [1]}}}]},
        "verify": {"task": "Raw", "dataset": {"uri": "s3://data/d.npz", "samples": 10}, "thresholds": {"cosine": 0.9}},
    },
}


@pytest.fixture(scope="module")
def helm(cluster_helm: Helm) -> Helm:
    return cluster_helm


@pytest.fixture
def former(tmp_path: Path) -> Path:
    """A chart like this one, whose definition lacks a field."""
    shutil.copytree(CHART, tmp_path / "chart")
    file = tmp_path / "chart" / "files" / "trtmodel.yaml"
    definition = yaml.safe_load(file.read_text())
    spec = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del spec["properties"]["rollout"]["properties"][FIELD]
    file.write_text(yaml.safe_dump(definition, sort_keys=False))
    return tmp_path / "chart"


@pytest.fixture
def release(cluster_environment: Mapping[str, str], helm: Helm) -> Iterator[Release]:
    made = Release(f"u{secrets.token_hex(3)}", f"upgrade-{secrets.token_hex(3)}", cluster_environment)
    yield made
    made.kubectl("delete", "trtmodel", "stays", "--namespace", made.namespace, "--ignore-not-found")
    helm.run("uninstall", made.name, "--namespace", made.namespace)
    made.kubectl("delete", "namespace", made.namespace, "--wait=false")
    disown(made)
    made.definition()


def disown(release: Release) -> None:
    """As it was: nobody's, so that any release may take it."""
    release.kubectl(
        "annotate", "crd", "trtmodels.trtmodel.io", "meta.helm.sh/release-name-", "meta.helm.sh/release-namespace-"
    )


def knows_the_field(release: Release) -> bool:
    found = json.loads(release.kubectl("get", "crd", "trtmodels.trtmodel.io", "-o", "json").stdout)
    spec = found["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return FIELD in spec["properties"]["rollout"]["properties"]


def uid(release: Release) -> str:
    found = release.kubectl(
        "get", "trtmodel", "stays", "--namespace", release.namespace, "-o", "jsonpath={.metadata.uid}"
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_the_definition_follows_the_release_and_models_outlive_it(helm: Helm, release: Release, former: Path) -> None:
    where = ("--namespace", release.namespace)

    def upgrade(chart: Path, *flags: str) -> subprocess.CompletedProcess[str]:
        return helm.run(
            "upgrade",
            "--install",
            release.name,
            str(chart),
            *where,
            "--create-namespace",
            "--set",
            "replicas=0",
            *flags,
        )

    release.definition()
    taken = upgrade(former, "--take-ownership", "--force-conflicts")
    assert taken.returncode == 0, taken.stderr
    assert not knows_the_field(release)
    made = release.kubectl("apply", "-f", "-", *where, text=json.dumps(MODEL))
    assert made.returncode == 0, made.stderr
    before = uid(release)

    newer = upgrade(CHART)
    assert newer.returncode == 0, newer.stderr
    assert knows_the_field(release)
    assert uid(release) == before

    helm.ok("rollback", release.name, "1", *where)
    assert not knows_the_field(release)
    assert uid(release) == before

    helm.ok("uninstall", release.name, *where)
    assert uid(release) == before
    again = upgrade(CHART)
    assert again.returncode == 0, again.stderr
    assert knows_the_field(release)
    assert uid(release) == before

    stranger = helm.run("install", f"{release.name}-b", str(CHART), *where, "--set", "replicas=0")
    assert "trtmodels.trtmodel.io" in stranger.stderr  # two releases do not quarrel over it: the second is refused
    assert stranger.returncode != 0
    helm.ok("install", f"{release.name}-c", str(CHART), *where, "--set", "replicas=0,crds.install=false")
    helm.ok("uninstall", f"{release.name}-c", *where)
