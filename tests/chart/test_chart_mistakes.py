"""What an administrator may get wrong with the chart: helm says what it is and what to do, before anything is harmed.

On a real API server without machines: only objects matter here."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_helm import CHART, Helm
from hollow.plane import ControlPlane
from test_chart_upgrade import MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(300)]

HERE = ("--namespace", "ops", "--create-namespace")
SHARED = ("--set", "crds.install=false")
NARROW = ("--set", "crds.install=false,rbac.aggregate=false,builds.priorityClass.create=false")


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("plane"), authorization="RBAC") as running:
        for namespace in ("ml", "vision", "tenant"):
            running.kubectl("create", "namespace", namespace)
        yield running


@pytest.fixture(scope="module")
def there(helm: Helm, plane: ControlPlane) -> Helm:
    """helm for that API server."""
    return Helm({**helm.environment, "KUBECONFIG": str(plane.kubeconfig("hollow"))})


@contextlib.contextmanager
def installed(helm: Helm, name: str, *flags: str, chart: Path = CHART, namespace: str = "ops") -> Iterator[str]:
    """What helm says when it installs that release; it is gone afterwards."""
    where = ("--namespace", namespace)
    try:
        yield helm.ok("install", name, str(chart), *where, "--create-namespace", *flags)
    finally:
        helm.run("uninstall", name, *where)


def refused(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode != 0, done.stdout
    return done.stderr


def test_without_the_definition_the_notes_warn_and_say_how_to_apply_it(there: Helm, plane: ControlPlane) -> None:
    with installed(there, "early", *SHARED) as said:
        assert "WARNING: it is not there yet" in said
        assert "kubectl apply --server-side --force-conflicts -f" in said
    plane.install_crd()
    with installed(there, "later", *SHARED) as said:
        assert "WARNING: it is not there yet" not in said


def test_an_image_that_names_no_registry_is_warned_of(there: Helm) -> None:
    with installed(there, "plain", *SHARED) as said:
        assert "WARNING: the image trtmodel-operator:0.1.0 names no registry" in said
    with installed(there, "full", *SHARED, "--set", "image.repository=registry.example.com/operator") as said:
        assert "names no registry" not in said


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ("", "", "the release first in the namespace ops looks after TRTModels of all namespaces already"),
        ("", "ml", "the release first in the namespace ops looks after TRTModels of all namespaces already"),
        ("ml", "", "the release first in the namespace ops looks after TRTModels of the namespace ml already"),
        ("ml,vision", "vision", "the release first in the namespace ops looks after TRTModels of the namespace vision"),
        ("ml", "vision", ""),
    ],
)
def test_two_operators_over_the_same_models_are_refused(there: Helm, first: str, second: str, says: str) -> None:
    def watching(names: str) -> tuple[str, ...]:
        return (*SHARED, *(("--set", f"watchNamespaces={{{names}}}") if names else ()))

    with installed(there, "first", *watching(first)):
        there.ok("upgrade", "first", str(CHART), *HERE, *watching(first))  # which is no other release
        done = there.run(
            "install", "second", str(CHART), "--namespace", "ops2", "--create-namespace", *watching(second)
        )
        try:
            if says:
                assert says in refused(done)
                assert "uninstall it first (models stay and serve on), or give both releases namespaces" in done.stderr
            else:
                assert done.returncode == 0, done.stderr
        finally:
            there.run("uninstall", "second", "--namespace", "ops2")


def test_a_stopped_release_may_stand_beside_another(there: Helm) -> None:
    with installed(there, "first", *SHARED), installed(there, "idle", *SHARED, "--set", "replicas=0"):
        pass


def test_a_namespace_that_is_not_there_is_named_and_once_it_is_the_same_command_goes_on(
    there: Helm, plane: ControlPlane
) -> None:
    command = ("upgrade", "--install", "lost", str(CHART), *HERE, *SHARED, "--set", "watchNamespaces={audio}")
    assert 'namespaces "audio" not found' in refused(there.run(*command))
    plane.kubectl("create", "namespace", "audio")
    there.ok(*command)
    there.ok("uninstall", "lost", "--namespace", "ops")


def test_an_upgrade_that_would_change_the_key_with_the_name_is_refused_unless_both_are_kept(
    there: Helm, plane: ControlPlane
) -> None:
    renamed = ("upgrade", "named", str(CHART), *HERE, *SHARED, "--set", "fullnameOverride=other")
    with installed(there, "named", *SHARED):
        said = refused(there.run(*renamed))
        assert "the operator of this release is called named-trtmodel-operator, now it would be other" in said
        kept = "keySecret=named-trtmodel-operator-signing,leaseName=named-trtmodel-operator"
        there.ok(*renamed, "--set", kept)
        found = json.loads(plane.kubectl("get", "deployments", "-n", "ops", "-o", "json"))["items"]
        assert [d["metadata"]["name"] for d in found] == ["other"]
        told = {e["name"]: e.get("value") for e in found[0]["spec"]["template"]["spec"]["containers"][0]["env"]}
        assert told["TRTMODEL_KEY_SECRET"] == "named-trtmodel-operator-signing"
        assert told["TRTMODEL_LEASE_NAME"] == "named-trtmodel-operator"


def test_an_upgrade_from_a_chart_that_lacked_a_value_names_it_or_takes_its_default(there: Helm, tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "chart")
    for file in ("values.yaml", "values.schema.json"):
        (tmp_path / "chart" / file).unlink()
    former: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    del former["collector"]
    (tmp_path / "chart" / "values.yaml").write_text(yaml.safe_dump(former))
    deployment = tmp_path / "chart" / "templates" / "deployment.yaml"
    lines = deployment.read_text().splitlines()
    dropped = {i + d for i, line in enumerate(lines) if "- name: TRTMODEL_COLLECT" in line for d in (0, 1)}
    deployment.write_text("\n".join(line for i, line in enumerate(lines) if i not in dropped) + "\n")
    with installed(there, "grown", *SHARED, "--set", "logLevel=DEBUG", chart=tmp_path / "chart"):
        command = ("upgrade", "grown", str(CHART), *HERE)
        assert "missing property 'collector'" in refused(there.run(*command, "--reuse-values"))
        there.ok(*command, "--reset-then-reuse-values")
        assert "logLevel: DEBUG" in there.ok("get", "values", "grown", "--namespace", "ops", "--all")


def test_an_upgrade_in_another_namespace_finds_no_release_and_makes_none(there: Helm) -> None:
    with installed(there, "home", *SHARED):
        done = there.run("upgrade", "home", str(CHART), "--namespace", "ml", *SHARED)
        assert "has no deployed releases" in refused(done)
        astray = there.run("upgrade", "--install", "home", str(CHART), "--namespace", "ml", *SHARED)
        assert "the release home in the namespace ops looks after TRTModels of all namespaces already" in refused(
            astray
        )


def test_models_outlive_their_release_and_another_release_takes_the_definition_when_it_is_told_to(
    there: Helm, plane: ControlPlane
) -> None:
    plane.kubectl("delete", "crd", "trtmodels.trtmodel.io", "--ignore-not-found")
    with installed(there, "old"):
        plane.kubectl("wait", "crd/trtmodels.trtmodel.io", "--for=condition=Established", "--timeout=60s")
        plane.kubectl("create", "-n", "ml", "-f", "-", text=json.dumps(MODEL))
        uid = plane.kubectl("get", "trtmodel", "stays", "-n", "ml", "-o", "jsonpath={.metadata.uid}")
        said = there.ok("uninstall", "old", "--namespace", "ops")
        assert "trtmodels.trtmodel.io" in said  # helm lists what it kept
    said = refused(there.run("install", "new", str(CHART), *HERE))
    assert "trtmodels.trtmodel.io" in said
    assert '"meta.helm.sh/release-name" must equal "new": current value is "old"' in said
    with installed(there, "new", "--take-ownership"):
        there.ok("upgrade", "new", str(CHART), *HERE, *SHARED)  # which leaves the definition to somebody else
        again = plane.kubectl("get", "trtmodel", "stays", "-n", "ml", "-o", "jsonpath={.metadata.uid}")
        assert again == uid


def test_an_administrator_of_two_namespaces_alone_can_install_it_there(there: Helm, plane: ControlPlane) -> None:
    """Nothing outside of them is made or looked at; the definition is there already."""
    rbac, user = (
        "rbac.authorization.k8s.io",
        {"kind": "User", "name": "operator", "apiGroup": "rbac.authorization.k8s.io"},
    )
    for namespace in ("tenant", "vision"):
        meta = {"name": "everything", "namespace": namespace}
        rules = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]
        role = {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": meta, "rules": rules}
        ref = {"apiGroup": rbac, "kind": "Role", "name": "everything"}
        binding = {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": ref,
            "subjects": [user],
        }
        plane.kubectl(
            "apply", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": [role, binding]})
        )
    narrow = Helm({**there.environment, "KUBECONFIG": str(plane.kubeconfig("operator"))})
    command = ("install", "own", str(CHART), "--namespace", "tenant", "--set", "watchNamespaces={vision}")
    assert "cannot" in refused(narrow.run(*command))  # the definition and what is the cluster's are not his
    narrow.run("uninstall", "own", "--namespace", "tenant")
    narrow.ok(*command, *NARROW)
    narrow.ok("uninstall", "own", "--namespace", "tenant")
