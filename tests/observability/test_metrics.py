"""The page about metrics names every metric, and queries name none that is not there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import catalogue
import pytest
import yaml
from catalogue import Known

FILES = catalogue.ROOT / "charts" / "trtmodel-operator" / "files"
SCRAPED = {"namespace", "pod", "model", "target", "job", "instance", "le"}  # what a scrape adds, and a histogram
EVERYBODYS = {"process_resident_memory_bytes"}  # of every Python process


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Known]:
    """By the name of each series."""
    worker = catalogue.worker(tmp_path_factory.mktemp("worker"))
    return {series: metric for metric in [*catalogue.operator(), *worker] for series in metric.series}


def test_the_page_has_every_metric_as_it_is_registered(tmp_path: Path) -> None:
    tables = {"operator": catalogue.table(catalogue.operator()), "worker": catalogue.table(catalogue.worker(tmp_path))}
    text = catalogue.PAGE.read_text()
    assert catalogue.page(text, tables) == text, "write it anew: python tests/observability/catalogue.py"


def test_every_metric_has_a_name_of_ours_and_a_text_that_stands_alone(known: dict[str, Known]) -> None:
    for metric in known.values():
        assert metric.name.startswith("trtmodel_")
        assert metric.text[:1].isupper() or metric.text[:1].isdigit()
        assert not re.search(r"\b(those|them|it) ", metric.text.lower().split(";")[0].split(":")[0][:12])


def queries() -> list[tuple[str, str]]:
    """(where, query) of all alerts, of the dashboard and of the pages."""
    alerts = yaml.safe_load((FILES / "alerts.yaml").read_text())
    found = [(rule["alert"], rule["expr"]) for group in alerts["groups"] for rule in group["rules"]]
    found += [(f"panel {title}", query) for title, query in panels()]
    rows = re.findall(r"^\| ([a-z0-9 ,]+) \| `([^`]+)` \|$", catalogue.PAGE.read_text(), re.MULTILINE)
    found += rows
    for page in sorted((catalogue.ROOT / "docs" / "runbooks").glob("*.md")):
        lines = re.findall(r"^    (.*trtmodel_.*)$", page.read_text(), re.MULTILINE)
        found += [(page.stem, line) for line in lines if not line.startswith("kubectl")]
    for file in sorted((catalogue.ROOT / "examples" / "autoscaling").glob("*.yaml")):
        lines = re.findall(r"(?:query|metricsQuery|seriesQuery): *['\"](.+)['\"]$", file.read_text(), re.MULTILINE)
        found += [(file.name, line) for line in lines]
    return found


def panels() -> list[tuple[str, str]]:
    dashboard = json.loads((FILES / "dashboard.json").read_text())
    return [(p["title"], t["expr"]) for p in dashboard["panels"] for t in p.get("targets", ())]


@pytest.mark.parametrize(("where", "query"), queries())
def test_every_query_uses_metrics_and_labels_that_exist(where: str, query: str, known: dict[str, Known]) -> None:
    query = query.replace("<<.GroupBy>>", "namespace, model")  # Prometheus Adapter's
    names = set(re.findall(r"\b(?:trtmodel|process)_\w+", query)) - EVERYBODYS
    assert names or EVERYBODYS & set(re.findall(r"\w+", query)), f"{where} asks for nothing of ours"
    labels: set[str] = set(SCRAPED)
    for name in names:
        assert name in known, f"{where}: there is no {name}"
        labels |= set(known[name].labels)
    used = set(re.findall(r'(\w+) *(?:=~|!=|!~|=) *"', query))
    for group in re.findall(r"(?:by|on|without|ignoring) *\(([^)]*)\)", query):
        used |= {word.strip() for word in group.split(",")}
    assert used <= labels, f"{where}: no such label: {used - labels}"


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    dashboard: dict[str, Any] = json.loads((FILES / "dashboard.json").read_text())
    ids = [p["id"] for p in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    assert {v["name"] for v in dashboard["templating"]["list"]} == {"datasource", "namespace", "model"}
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        if panel["type"] != "row":
            assert panel["title"]
            assert panel["description"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert panel["targets"]
