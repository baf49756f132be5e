"""The examples are what the API accepts, and what they claim of Argo CD and pipelines is so."""

from __future__ import annotations

import os
import string
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from argo_cd import health, script
from cli_scene import Typed, as_object
from test_conditions import SITUATIONS
from trtmodel_operator.cli.outcome import FOR_A_PERSON, outcome

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
MANIFESTS = sorted(EXAMPLES.rglob("*.yaml"))

Type = Callable[..., Typed]


def test_every_manifest_among_the_examples_is_accepted(trtmodel: Type) -> None:
    models = [f for f in MANIFESTS if "kind: TRTModel\n" in f.read_text()]
    assert len(models) >= 9
    shown = trtmodel("lint", *map(str, models))
    assert shown.code == 0, shown.out
    assert "warning" not in shown.out


def test_every_manifest_among_the_examples_is_yaml_and_says_what_it_is_for() -> None:
    for file in MANIFESTS:
        text = file.read_text()
        assert text.startswith("# "), file
        assert all(isinstance(document, dict) for document in yaml.safe_load_all(text)), file


def test_the_manifest_of_the_quick_start_is_accepted(trtmodel: Type, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    text = page.partition("cat > digits.yaml <<END\n")[2].partition("END\n")[0]
    file = tmp_path / "digits.yaml"
    file.write_text(string.Template(text).substitute(BUCKET="models", S3_ENDPOINT_IN_CLUSTER="http://s3.s3:7070"))
    assert trtmodel("lint", str(file)).out == f"{file}: digits: ok\n"


def test_every_example_stands_in_the_list_of_examples() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    assert [f.name for f in sorted(EXAMPLES.iterdir()) if f.name != "README.md" and f"({f.name}" not in listed] == []


# ---------------------------------------------------------------------------------------------------------------------


BY_EXIT = {0: "Healthy", 3: "Degraded", 4: "Suspended", None: "Progressing"}


@pytest.mark.parametrize("name", SITUATIONS)
def test_argo_cd_sees_what_a_pipeline_sees(name: str) -> None:
    model = as_object(SITUATIONS[name][0])
    ended = outcome(model)
    status, message = health(model)
    if name == "scaled to zero":  # nobody waits, and nothing is amiss
        assert status == "Suspended"
    else:
        assert status == BY_EXIT[ended and ended.code]
    assert message


def test_argo_cd_waits_for_an_operator_and_for_the_newest_spec() -> None:
    model = as_object(SITUATIONS["serving"][0])
    model["metadata"]["generation"] += 1
    assert health(model) == ("Progressing", "the newest spec was not looked at yet")
    del model["status"]
    assert health(model) == ("Progressing", "waiting for the operator")


def test_argo_cds_text_and_file_are_one_and_know_who_waits_for_a_person() -> None:
    text = script()
    assert text == (EXAMPLES / "argo-cd" / "health.lua").read_text()
    assert [reason for reason in FOR_A_PERSON if f'"{reason}"' not in text] == []


# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "says"), [(0, "lint,apply,status"), (3, "lint,apply,status,explain,history"), (124, "explain,history")]
)
def test_a_pipeline_ends_with_the_exit_code_of_the_rollout(code: int, says: str, tmp_path: Path) -> None:
    called = tmp_path / "called"
    for name, body in (("trtmodel", f'[ "$1" = status ] && exit {code}; exit 0'), ("kubectl", "exit 0")):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho "$1" >> {called}\n{body}\n')
        program.chmod(0o755)
    done = subprocess.run(
        [EXAMPLES / "ci" / "deploy.sh", "model.yaml", "prices", "ml", "1m"],
        env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}, timeout=30, check=False, capture_output=True,
    )  # fmt: skip
    assert done.returncode == code, done
    assert ",".join(called.read_text().split()).endswith(says)


def test_a_pipeline_stops_before_a_manifest_that_is_wrong_reaches_the_cluster(tmp_path: Path) -> None:
    for name, code in (("trtmodel", 1), ("kubectl", 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} >> {tmp_path}/called\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [EXAMPLES / "ci" / "deploy.sh", "model.yaml", "prices", "ml"],
        env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}, timeout=30, check=False, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert (tmp_path / "called").read_text().split() == ["trtmodel"]
