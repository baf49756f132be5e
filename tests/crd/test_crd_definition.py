"""The definition as a text: every field is described and bounded, and agrees with the contract."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import yaml
from crd_manifests import DEFINITION, ROOT, Json, definition, schema
from trtmodel_contract.gate import Task, Thresholds, Verdict
from trtmodel_contract.identity import Calibration, EngineSettings, Storage

KUBERNETES_LIMIT = 256 * 1024  # of all annotations: kubectl apply keeps the whole text in one
CHART_COPY = ROOT / "charts/trtmodel-operator/files/trtmodel.yaml"


def nodes(node: Json, path: str = "") -> Iterator[tuple[str, Json]]:
    """Every schema below `node` with its path."""
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if isinstance(node.get("items"), dict):
        yield from nodes(node["items"], f"{path}[]")
    if isinstance(node.get("additionalProperties"), dict):
        yield from nodes(node["additionalProperties"], f"{path}{{}}")


def field(path: str) -> Json:
    return dict(nodes(schema()))[path]


NODES = [pytest.param(path, node, id=path or "the root") for path, node in nodes(schema()) if path != ".metadata"]


def test_C14_the_definition_is_small_enough_for_kubectl_apply() -> None:
    assert len(json.dumps(definition())) < KUBERNETES_LIMIT
    assert DEFINITION.stat().st_size < KUBERNETES_LIMIT


def test_the_chart_and_the_crds_folder_hold_the_same_file() -> None:
    assert DEFINITION.is_symlink()
    assert DEFINITION.resolve() == CHART_COPY


@pytest.mark.parametrize(("path", "node"), NODES)
def test_every_field_is_described(path: str, node: Json) -> None:
    if path.endswith(("[]", "{}")):
        return
    assert node["description"].strip().endswith((".", "?"))


@pytest.mark.parametrize(("path", "node"), NODES)
def test_every_field_is_bounded(path: str, node: Json) -> None:
    if node.get("x-kubernetes-int-or-string"):
        assert "maxLength" in node
        assert "pattern" in node or node["x-kubernetes-validations"]
        return
    match node["type"]:
        case "string":
            assert "maxLength" in node or "enum" in node
        case "integer" | "number":
            assert "minimum" in node
            assert "maximum" in node
        case "array":
            assert "maxItems" in node
            assert "x-kubernetes-list-type" in node
        case "object":
            assert "properties" in node or "maxProperties" in node


def test_only_the_memory_of_the_operator_keeps_unknown_fields() -> None:
    keep = {path for path, node in nodes(schema()) if node.get("x-kubernetes-preserve-unknown-fields")}
    memory = ".status.rollout"
    assert keep == {memory, f"{memory}.stable", f"{memory}.candidate", f"{memory}.standby"}


def test_durations_have_one_grammar() -> None:
    rules = [
        rule["rule"]
        for _, node in nodes(schema())
        for rule in node.get("x-kubernetes-validations", [])
        if "duration(" in rule["rule"]
    ]
    assert len(rules) == 9
    grammar = "self.matches('^([0-9]{1,6}(h|m|s|ms))+$') && "
    assert all(rule.removeprefix("self == 'Auto' || (").startswith(grammar) for rule in rules)


def test_a_refusal_says_what_is_wrong_in_words() -> None:
    for path, node in nodes(schema()):
        for rule in node.get("x-kubernetes-validations", []):
            assert rule.get("message") or rule.get("messageExpression"), path


def test_rules_on_values_to_come_are_marked_as_forbidden() -> None:
    for path, node in nodes(schema()):
        for rule in node.get("x-kubernetes-validations", []):
            text = rule.get("message", "") + rule.get("messageExpression", "")
            if "not supported yet" in text and "hosts" not in text:
                assert rule["reason"] == "FieldValueForbidden", path


def test_defaults_agree_with_the_contract() -> None:
    """Another default here would give every existing model another revision."""
    calibration, engine, limits = Calibration(digest="0" * 64), EngineSettings(runtime="ONNXRuntime"), Thresholds()
    assert field(".spec.engine.precision")["default"] == engine.precision
    assert field(".spec.engine.calibration.samples")["default"] == calibration.samples
    assert field(".spec.engine.calibration.method")["default"] == calibration.method
    assert field(".spec.engine.calibration.perChannel")["default"] == calibration.per_channel
    assert field(".spec.storage.prefix")["default"] == Storage(bucket="engines").prefix
    assert field(".spec.verify.thresholds.top1Delta")["default"] == limits.top1_delta
    assert field(".spec.verify.thresholds.rmseIncrease")["default"] == limits.rmse_increase
    assert field(".spec.verify.thresholds.cosine")["default"] == limits.cosine


def test_words_agree_with_the_contract() -> None:
    assert field(".spec.verify.task")["enum"] == [task.value for task in Task]
    assert field(".status.targets[].gate.verdict")["enum"] == [verdict.value for verdict in Verdict]


def test_fields_of_later_releases_have_no_default() -> None:
    def refused(node: Json) -> bool:
        return any(rule["rule"] == "false" for rule in node.get("x-kubernetes-validations", []))

    later = [path for path, node in nodes(schema()) if refused(node)]
    assert later == []
    for path, node in nodes(schema()):
        if path.startswith(tuple(later)):
            assert "default" not in node, path


def test_the_columns_are_those_of_the_design() -> None:
    columns = definition()["spec"]["versions"][0]["additionalPrinterColumns"]
    assert [c["name"] for c in columns if not c.get("priority")] == [
        "Phase", "Ready", "Stable", "Candidate", "Canary", "Replicas", "Age",
    ]  # fmt: skip
    assert [c["name"] for c in columns if c.get("priority")] == ["GPU", "Precision", "Reason", "Message"]


def test_the_file_is_one_document() -> None:
    assert len(list(yaml.safe_load_all(DEFINITION.read_text()))) == 1
