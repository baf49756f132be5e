"""Each alert fires in a world that causes it, and in no other. promtool evaluates, as Prometheus does."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import catalogue
import pytest
import yaml
from alert_scenes import CALM, SCENES, Scene
from prometheus_server import documented

RULES = catalogue.ROOT / "charts" / "trtmodel-operator" / "files" / "alerts.yaml"
RUNBOOKS = catalogue.ROOT / "docs" / "runbooks"
SECONDS = 60


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


ALERTS = [rule["alert"] for rule in rules()]


def test_prometheus_understands_the_rules(promtool: Path) -> None:
    done = run(promtool, "check", "rules", RULES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_understands_the_documented_configuration(promtool: Path, tmp_path: Path) -> None:
    (tmp_path / "pods.json").write_text("[]")
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(documented(tmp_path / "pods.json")))
    done = run(promtool, "check", "config", tmp_path / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_scene_that_causes_it() -> None:
    assert {name for scene in SCENES for name in scene.alerts} == set(ALERTS)


def test_each_alert_fires_in_its_scene_and_in_no_other(promtool: Path, tmp_path: Path) -> None:
    file = tmp_path / "scenes.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": [played(s) for s in SCENES]}))
    done = run(promtool, "test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_scenes_are_made_of_metrics_that_exist(tmp_path: Path) -> None:
    known = {s: m for m in [*catalogue.operator(), *catalogue.worker(tmp_path)] for s in m.series}
    added = {"namespace", "pod", "model"}  # by the scrape
    for series in [*CALM, *(series for scene in SCENES for series in scene.changes)]:
        name, labels = series.split("{")
        assert set(re.findall(r'(\w+)="', labels)) - added == set(known[name].labels) - added, series


@pytest.mark.parametrize("rule", rules(), ids=ALERTS)
def test_every_alert_has_a_severity_and_a_page_that_names_it(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{rule['alert']}.md"
    page = (RUNBOOKS / f"{rule['alert']}.md").read_text()
    assert page.startswith(f"# {rule['alert']}\n")
    for part in ("## What it means", "## How to look", "## What to do"):
        assert part in page


def test_no_page_is_about_an_alert_that_is_not_there() -> None:
    assert {p.stem for p in RUNBOOKS.glob("*.md")} == {*ALERTS, "README"}


def played(scene: Scene) -> dict[str, Any]:
    series = {**CALM, **scene.changes}

    def expected(alert: str) -> list[dict[str, Any]]:
        if alert not in scene.alerts:
            return []
        labels, summary = scene.alerts[alert]
        said = {"summary": summary, "runbook_url": f"docs/runbooks/{alert}.md"}
        return [{"exp_labels": dict(labels), "exp_annotations": said}]

    return {
        "name": scene.name,
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            *({"eval_time": f"{scene.by}m", "alertname": a, "exp_alerts": expected(a)} for a in ALERTS),
            *({"eval_time": f"{scene.not_yet}m", "alertname": a, "exp_alerts": []} for a in ALERTS),
        ],
    }


def run(promtool: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [promtool, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
