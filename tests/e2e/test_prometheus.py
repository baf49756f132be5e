"""A real Prometheus, configured as docs/metrics.md has it, scrapes the operator and the workers of the cluster."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator

import pytest
import yaml
from debian_prometheus import Missing, programs
from prometheus_server import ROOT, Prometheus, discovered, documented

from . import models, sources
from .cluster import Refused
from .install import SYSTEM
from .world import World, condition, until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(300)]

NAMESPACE = "e2e-watched"
NAME = "watched"
AUTOSCALING = ROOT / "examples" / "autoscaling"
DASHBOARD = ROOT / "charts" / "trtmodel-operator" / "files" / "dashboard.json"
VARIABLES = {"$namespace": f"{NAMESPACE}", "$model": NAME, "$__rate_interval": "20s"}
ROW = sources.samples(1)[0].tolist()


def panels() -> list[tuple[str, str]]:
    found = json.loads(DASHBOARD.read_text())["panels"]
    return [(panel["title"], target["expr"]) for panel in found for target in panel.get("targets", ())]


@pytest.fixture(scope="module")
def world(world_of: Callable[[str], World]) -> World:
    return world_of(NAMESPACE)


@pytest.fixture(scope="module")
def served(world: World, endpoint: str) -> Iterator[World]:
    """A model that is asked all the time."""
    world.apply(models.tiny(NAME, endpoint))
    world.wait_ready(NAME, 120)
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.1):
            with contextlib.suppress(Refused):  # whether requests fail is asked elsewhere
                world.infer(f"services/{NAME}:http", NAME, models.tiny_inputs(ROW))

    thread = threading.Thread(target=ask, name="asks")
    thread.start()
    yield world
    over.set()
    thread.join(60)


@pytest.fixture(scope="module")
def prometheus(served: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    try:
        program = programs()["prometheus"]
    except Missing as e:
        pytest.fail(str(e))
    folder = tmp_path_factory.mktemp("prometheus")
    pods = [p for n in (SYSTEM, NAMESPACE) for p in served.cluster.items(f"/api/v1/namespaces/{n}/pods")]
    (folder / "pods.json").write_text(discovered(pods))
    config = documented(folder / "pods.json")
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    found = Prometheus(program, config, folder)
    yield found
    found.close()


def test_it_finds_the_operator_and_every_worker_and_scrapes_them(served: World, prometheus: Prometheus) -> None:
    pods = served.cluster.items(f"/api/v1/namespaces/{SYSTEM}/pods", "app.kubernetes.io/name=trtmodel-operator")
    wanted = {p["metadata"]["name"] for p in pods if "deletionTimestamp" not in p["metadata"]}
    wanted |= set(served.ready_workers(NAME))

    def scraped() -> bool:
        found = prometheus.targets()
        return wanted <= found.keys() and not any(found[pod] for pod in wanted)

    until("all pods are scraped", 60, scraped, lambda: f"{prometheus.targets()}\n{prometheus.log()}")


@pytest.mark.parametrize(("title", "expression"), panels())
def test_every_query_of_the_dashboard_has_data(prometheus: Prometheus, title: str, expression: str) -> None:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    found = until(f"panel {title}", 60, lambda: prometheus.query(expression), prometheus.log)
    assert all(len(series["value"]) == 2 for series in found)


def test_the_labels_that_alerts_and_dashboard_use_are_there(served: World, prometheus: Prometheus) -> None:
    (series,) = until("lanes", 60, lambda: prometheus.query(f'trtmodel_lanes{{model="{NAME}"}}'))
    assert series["metric"]["namespace"] == NAMESPACE
    assert series["metric"]["pod"] in served.ready_workers(NAME)
    assert series["metric"]["target"] == served.model(NAME)["spec"]["targets"][0]["name"]
    stage = f'trtmodel_operator_model_stage{{namespace="{NAMESPACE}", name="{NAME}"}}'
    (series,) = until("a stage", 60, lambda: prometheus.query(stage))
    assert series["metric"]["stage"] == "Serving"


def test_the_queries_of_the_examples_for_autoscalers_give_a_share(prometheus: Prometheus) -> None:
    keda = yaml.safe_load((AUTOSCALING / "keda.yaml").read_text())
    (trigger,) = keda["spec"]["triggers"]
    of_keda = trigger["metadata"]["query"].replace('"ml"', f'"{NAMESPACE}"').replace('"magika"', f'"{NAME}"')
    (rule,) = yaml.safe_load((AUTOSCALING / "adapter-rules.yaml").read_text())["rules"]["custom"]
    of_adapter = rule["metricsQuery"].replace("<<.GroupBy>>", "model")
    of_adapter = of_adapter.replace("<<.LabelMatchers>>", f'namespace="{NAMESPACE}", model="{NAME}"')
    for query in (of_keda, of_adapter):
        (series,) = until(query, 60, lambda query=query: prometheus.query(query), prometheus.log)
        assert 0 <= float(series["value"][1]) <= 1


def test_a_model_that_cannot_be_built_raises_its_alert_and_no_other_model_does(
    served: World, prometheus: Prometheus, endpoint: str
) -> None:
    broken = models.tiny("broken", endpoint)
    broken["spec"]["source"]["uri"] = re.sub(r"[^/]+$", "not-there.onnx", broken["spec"]["source"]["uri"])
    served.apply(broken)
    found = served.wait("broken", "it stalls", lambda m: condition(m, "Stalled")["status"] == "True", 120)
    assert condition(found, "Stalled")["reason"] == "SourceNotFound"

    def raised() -> set[tuple[str, str]]:
        mine = [a["labels"] for a in prometheus.alerts() if NAMESPACE in a["labels"].get("namespace", "")]
        return {(a["alertname"], a.get("name") or a.get("model", "")) for a in mine}

    until("the alert", 60, lambda: ("TRTModelBuildFailing", "broken") in raised(), lambda: str(prometheus.alerts()))
    assert raised() == {("TRTModelBuildFailing", "broken")}
    assert prometheus.broken_rules() == {}
    served.kubectl("delete", "trtmodel", "broken", "--wait=true")
    series = 'trtmodel_operator_model_stage{name="broken"}'
    until("its series are gone", 60, lambda: not prometheus.query(series), lambda: str(prometheus.query(series)))
