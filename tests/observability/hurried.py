"""The alert rules with less patience: what Prometheus waits for in minutes is waited for in seconds. Expressions and
thresholds are as they are; the true times are promtool's to test."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from prometheus_server import ALERTS, Prometheus, documented

SECONDS = 3  # for each minute of a range such as [5m], and of a `for`
PATIENCE_MOST = 10  # seconds of a `for`
_MINUTES = {"m": 1, "h": 60}

Fired = set[tuple[str, str]]  # alert, and whom it is about


def rules(*groups: str, **thresholds: tuple[str, str]) -> dict[str, Any]:
    """Those of these groups. `thresholds`, for limits that are times: by alert, what its expression says and what it is
    to say instead."""
    found: dict[str, Any] = yaml.safe_load(ALERTS.read_text())
    found["groups"] = [group for group in found["groups"] if group["name"] in groups]
    assert len(found["groups"]) == len(groups)
    for rule in [rule for group in found["groups"] for rule in group["rules"]]:
        rule["expr"] = re.sub(r"\[(\d+)m\]", lambda m: f"[{int(m[1]) * SECONDS}s]", rule["expr"])
        if "for" in rule:
            minutes = int(rule["for"][:-1]) * _MINUTES[rule["for"][-1]]
            rule["for"] = f"{min(PATIENCE_MOST, minutes * SECONDS)}s"
        if rule["alert"] in thresholds:
            before, after = thresholds[rule["alert"]]
            assert before in rule["expr"]
            rule["expr"] = rule["expr"].replace(before, after)
    return found


def config(folder: Path, found: Mapping[str, Any]) -> dict[str, Any]:
    """As documented, scraping each second, with these rules. Pods are read from pods.json in the folder."""
    (folder / "rules.yaml").write_text(yaml.safe_dump(found))
    every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    return documented(folder / "pods.json") | {"rule_files": [str(folder / "rules.yaml")], "global": every}


def fired(prometheus: Prometheus) -> Fired:
    """Whom: the TRTModel, the model of the worker, or the operator's pod; '' for an alert about nobody."""
    return {
        (
            a["labels"]["alertname"],
            str(next((a["labels"][n] for n in ("name", "model", "pod") if n in a["labels"]), "")),
        )
        for a in prometheus.alerts()
        if a["state"] == "firing"
    }


def pod(name: str, model: str, role: str, port: int) -> dict[str, Any]:
    """A pod on this machine as the API server would show it, as far as a scrape is concerned."""
    labels = {"trtmodel.io/role": role, "trtmodel.io/model": model, "trtmodel.io/target": "cpu"}
    if role == "operator":
        labels = {"app.kubernetes.io/name": "trtmodel-operator"}
    return {
        "metadata": {"namespace": "ml", "name": name, "labels": labels},
        "status": {"podIP": "127.0.0.1"},
        "spec": {"containers": [{"ports": [{"name": "metrics", "containerPort": port}]}]},
    }
