"""A manifest is judged offline as the API server would judge it: the same tables, held against both."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_scene import Typed
from fakes.api_server import FakeApiServer, refusal
from trtmodel_operator.cli import lint, rules, schema

sys.path.insert(0, str(Path(__file__).parents[2] / "crd"))

import test_crd_accepted as accepted
import test_crd_refused as refused
from crd_manifests import ABSENT, BASE, Case, manifest

Type = Callable[..., Typed]
ROOT = Path(__file__).parents[3]
EACH = 5  # every fifth case: the API server is asked about all of them


def words(case: Case) -> str:
    return " ".join(f"{f.path}: {f.message}" for f in lint.findings(manifest(case.changes)))


def test_what_the_api_server_accepts_is_accepted() -> None:
    assert {c.name: w for c in accepted.CASES[::EACH] if (w := words(c))} == {}


def test_what_the_api_server_refuses_is_refused_with_its_words() -> None:
    chosen = [*refused.CASES[::EACH], *(c for c in refused.CASES if "disorder" in c.name)]
    missing = {c.name: words(c) for c in chosen if any(t.lower() not in words(c).lower() for t in c.says)}
    assert missing == {}


def test_every_rule_of_the_definition_can_be_evaluated_here() -> None:
    """But those about a change. Whatever a rule says, it is understood."""
    found = list(expressions(schema.definition()))
    assert len(found) > 50
    for expression in found:
        rules._program(expression)
        names = set(rules.re.findall(r"\.?([a-zA-Z_]+)\(", rules.re.sub(r"'[^']*'", "", expression)))
        assert names <= {*rules.FUNCTIONS, *["size", "matches", "startsWith", "endsWith", "contains", "all", "exists", "exists_one", "has", "string", "type", "int", "filter", "map"]}, expression  # fmt: skip  # noqa: E501


def expressions(of: dict[str, Any]) -> Iterator[str]:
    for rule in of.get("x-kubernetes-validations", ()):
        yield from (rule[name] for name in ("rule", "messageExpression") if name in rule)
    for part in (*of.get("properties", {}).values(), of.get("items"), of.get("additionalProperties")):
        if isinstance(part, dict):
            yield from expressions(part)


def test_a_wrong_value_is_told_with_file_name_and_path(tmp_path: Path, trtmodel: Type) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(yaml.safe_dump(manifest({"build.deadline": "1 day"})))
    shown = trtmodel("lint", str(file))
    assert shown.code == 1
    assert shown.out.startswith(f'{file}: magika: spec.build.deadline: deadline "1 day" is not a duration from 1m to')
    told = json.loads(trtmodel("lint", str(file), "-o", "json").out)
    assert told["manifests"] == 1
    assert told["findings"][0]["path"] == "spec.build.deadline"


def test_what_only_the_operator_knows_is_told_too() -> None:
    half = {"requests": {"nvidia.com/mig-1g.10gb": 1}}
    changes = {"engine.runtime": "TensorRT", "targets": [{"name": "a", "gpus": 1}], "serving.pod": {"resources": half}}
    assert "ask for one slice" in words(Case("", changes))


@pytest.mark.parametrize(
    ("requests", "limit", "needed", "enough"),
    [(100, 0.001, 2703, "0.027"), (2702, 0.001, 2703, "0.0011"), (1, 0.5, 3, "0.74"), (132, 0.02, 133, "0.021")],
)
def test_fewer_requests_than_prove_the_limit_are_a_warning_that_tells_how_many_do(
    requests: int, limit: float, needed: int, enough: str, tmp_path: Path, trtmodel: Type
) -> None:
    file = tmp_path / "m.yaml"
    asked = {"minRequests": requests, "maxErrorRateIncrease": limit}
    file.write_text(yaml.safe_dump(manifest({"rollout.analysis": asked})))
    shown = trtmodel("lint", str(file))
    assert (shown.code, shown.out.splitlines()[1]) == (0, f"{file}: magika: ok")
    assert f"warning: spec.rollout.analysis.minRequests: {requests:,} requests cannot prove" in shown.out
    assert f"Give minRequests {needed} or more, or maxErrorRateIncrease {enough} or more" in shown.out
    told = json.loads(trtmodel("lint", str(file), "-o", "json").out)
    assert (told["findings"], [w["path"] for w in told["warnings"]]) == ([], ["spec.rollout.analysis.minRequests"])
    for way_out in ({**asked, "minRequests": needed}, {**asked, "maxErrorRateIncrease": float(enough)}):
        assert list(lint.warnings(manifest({"rollout.analysis": way_out}))) == []


def test_of_a_file_with_many_documents_only_trtmodels_are_judged(tmp_path: Path, trtmodel: Type) -> None:
    file = tmp_path / "all.yaml"
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}}
    listed = {"apiVersion": "v1", "kind": "List", "items": [BASE, service]}
    file.write_text(yaml.safe_dump_all([service, BASE, listed]))
    shown = trtmodel("lint", str(file))
    assert (shown.code, shown.out) == (0, f"{file}: magika: ok\n" * 2)


def test_a_file_without_a_trtmodel_is_told_and_is_no_success(tmp_path: Path, trtmodel: Type) -> None:
    empty, good = tmp_path / "service.yaml", tmp_path / "good.yaml"
    empty.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}}))
    good.write_text(yaml.safe_dump(BASE))
    for words_, code in (
        ([empty], 2),
        ([empty, "-o", "json"], 2),
        ([good, empty], 1),
        ([good, empty, "-o", "json"], 1),
    ):
        shown = trtmodel("lint", *map(str, words_))
        assert shown.code == code
        assert f"{empty}: there is no TRTModel in it" in shown.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kind: TRTModel\nkind: TRTModel\n", "the key 'kind' stands there twice"),
        ("a: [1", "it is no YAML"),
        ("a: &x [*x]\nb: {a: *x", "it is no YAML"),
        ("\x00", "it is no YAML"),
    ],
)
def test_a_file_that_is_no_manifest_is_told(text: str, says: str, tmp_path: Path, trtmodel: Type) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(text)
    shown = trtmodel("lint", str(file))
    assert shown.code in (1, 2)
    assert says in shown.err
    assert trtmodel("lint", str(tmp_path / "none.yaml")).err.endswith("No such file or directory\n")


@pytest.mark.parametrize("from_a_file", [True, False])
def test_what_is_too_large_to_be_read_is_not_called_good(
    from_a_file: bool, tmp_path: Path, trtmodel: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        yaml.safe_dump(BASE) + "---\n" + "# more\n" * (lint.LARGEST_BYTES // 7) + yaml.safe_dump({**BASE, "spec": {}})
    )
    file = tmp_path / "m.yaml"
    file.write_text(text)
    with file.open() as opened:
        monkeypatch.setattr(sys, "stdin", opened)
        shown = trtmodel("lint", str(file) if from_a_file else "-")
    assert (shown.code, shown.out) == (1, "")
    assert "it is larger than 4 MiB" in shown.err


def test_another_version_of_the_api_is_told() -> None:
    assert (
        words(Case("", {".apiVersion": "trtmodel.io/v1"})) == "apiVersion: 'trtmodel.io/v1' is not trtmodel.io/v1alpha1"
    )
    assert "spec: Required value" in words(Case("", {".spec": ABSENT}))


def test_the_api_server_has_the_last_word(
    api_server: FakeApiServer, tmp_path: Path, trtmodel: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(yaml.safe_dump(BASE))
    assert trtmodel("lint", "--server", "-n", "ml", str(file)).out == f"{file}: magika: ok\n"
    (asked,) = [s for s in api_server.seen if s.method == "POST"]
    assert asked.query == {"dryRun": "All", "fieldValidation": "Strict"}
    assert asked.path == "/apis/trtmodel.io/v1alpha1/namespaces/ml/trtmodels"
    api_server.fault = lambda seen: refusal(422, "the image cannot be changed yet") if seen.method == "PATCH" else None
    shown = trtmodel("lint", "--server", "-n", "ml", str(file))
    assert (shown.code, shown.out) == (1, f"{file}: magika: the API server says: the image cannot be changed yet\n")
