"""The chart gives the operator the rights that its code needs, and no others."""

from __future__ import annotations

import re

import pytest
from chart_helm import CHART, Helm, Json
from operator_calls import CALLS, Right, needed, public_calls

pytestmark = pytest.mark.e2e  # helm is built with the local cluster

# Asked of by the API server itself, in the name of who writes an owner reference with blockOwnerDeletion.
NOT_CALLED = {("trtmodel.io", "trtmodels/finalizers", "update")}


def granted(objects: list[Json]) -> set[Right]:
    bound = {(o["roleRef"]["kind"], o["roleRef"]["name"]) for o in objects if o["kind"].endswith("RoleBinding")}
    rules = [rule for o in objects if (o["kind"], o["metadata"]["name"]) in bound for rule in o["rules"]]
    return {(g, r, v) for rule in rules for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}


def test_every_call_of_the_adapter_is_among_those_that_are_played() -> None:
    assert public_calls() - {"close", "apply", "post_event"} == set(CALLS)


def test_the_operator_has_the_rights_that_it_needs_and_no_more(helm: Helm, monkeypatch: pytest.MonkeyPatch) -> None:
    assert granted(helm.template()) == needed(monkeypatch) | NOT_CALLED


def test_without_deletion_of_artifacts_it_may_not_change_models(helm: Helm) -> None:
    assert granted(helm.template()) - granted(helm.template("rbac.deleteArtifacts=false")) == {
        ("trtmodel.io", "trtmodels", "patch")
    }


def test_the_roles_are_the_same_in_the_cluster_and_in_named_namespaces(helm: Helm) -> None:
    assert granted(helm.template()) == granted(helm.template('watchNamespaces=["ml","vision"]'))


@pytest.mark.parametrize("file", ["_helpers.tpl", "rbac.yaml"])
def test_every_verb_of_the_operator_has_its_reason(file: str) -> None:
    text = (CHART / "templates" / file).read_text()
    lists = re.findall(r"  verbs:\n((?:  (?:- |\{\{).*\n)+)", text)
    assert lists
    for verbs in lists:
        lines = [line for line in verbs.splitlines() if line.lstrip().startswith("- ")]
        # `create` and `patch` of a server-side apply share one.
        assert all("#" in line or line.strip() == "- patch" for line in lines), verbs
