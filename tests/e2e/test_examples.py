"""The examples as they stand in the repository: the API server takes each, and those for CPUs run.

Only addresses and sizes are put in, as their README says: the buckets of these tests, one worker, little memory. Their
models and data are made up from the manifests themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from onnx import TensorProto, helper, numpy_helper

from . import models
from .cluster import Json
from .install import ROOT
from .s3 import DATA, MODELS, Store
from .world import World, revision

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

NAMESPACE = "e2e-cli"
EXAMPLES = ROOT / "examples"
ROWS = 2000
ON_CPUS = ("regression", "shadow-first", "manual-promotion")
SOON: Json = {"steps": [{"workers": 1, "hold": "3s"}], "analysis": {"minRequests": 1, "noData": "Promote"}}


KNOWN = ("trtmodel.io", "admissionregistration.k8s.io", "autoscaling", "v1")


def documents() -> list[tuple[str, Json]]:
    """(file, object) of everything that Kubernetes itself or the definition knows."""
    files = [f for f in sorted(EXAMPLES.rglob("*.yaml")) if "${" not in f.read_text()]
    found = [(f, d) for f in files for d in yaml.safe_load_all(f.read_text())]
    groups = [str(document.get("apiVersion", "")).partition("/")[0] for _, document in found]
    return [(f.name, d) for (f, d), group in zip(found, groups, strict=True) if group in KNOWN]


@pytest.fixture(scope="module")
def world(world_of: Callable[[str], World]) -> World:
    return world_of(NAMESPACE)


def test_the_api_server_takes_every_example(world: World) -> None:
    found = documents()
    assert sum(document["kind"] == "TRTModel" for _, document in found) >= 8
    for file, document in found:
        if "namespace" in document["metadata"]:
            document["metadata"]["namespace"] = NAMESPACE
        said = world.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", text=json.dumps(document))
        assert "dry run" in said, file


@pytest.mark.long
def test_the_examples_for_cpus_serve_and_a_person_promotes_where_one_is_asked(
    world: World, store: Store, endpoint: str, tmp_path: Path
) -> None:
    found = {name: example(name, endpoint) for name in ON_CPUS}
    for model in found.values():
        publish(store, model["spec"], tmp_path, "a")
    world.apply(*found.values())
    for model in found.values():
        world.wait_ready(model["metadata"]["name"], 180)

    model = found["manual-promotion"]
    name, first = model["metadata"]["name"], revision(world.model(model["metadata"]["name"]), "stable")
    model["spec"]["source"]["uri"] = model["spec"]["source"]["uri"].replace("v12", "v13")
    model["spec"]["rollout"] |= SOON
    publish(store, model["spec"], tmp_path, "b")
    world.apply(model)
    waiting = world.wait_condition(name, "Progressing", "False", "AwaitingPromotion", 180)
    assert revision(waiting, "stable") == first
    world.command(name, f"promote@{revision(waiting, 'candidate')}#example")
    promoted = world.wait_condition(name, "Ready", "True", "Serving", 90)
    assert revision(promoted, "stable") == revision(waiting, "candidate")


def example(name: str, endpoint: str) -> Json:
    """The manifest with this cluster's addresses and sizes."""
    model: Json = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    spec = model["spec"]
    model["metadata"].pop("namespace", None)
    spec["source"]["uri"] = spec["source"]["uri"].replace("s3://models/", f"s3://{MODELS}/")
    spec["verify"]["dataset"]["uri"] = spec["verify"]["dataset"]["uri"].replace("s3://data/", f"s3://{DATA}/")
    spec["storage"] |= models.storage(endpoint)
    spec["serving"] |= {"replicas": 1, "contexts": 1, "pod": {"resources": models.SMALL}}
    spec["build"] = {"resources": models.SMALL}
    return model


def publish(store: Store, spec: Json, work: Path, version: str) -> None:
    """A linear model of the manifest's input, and a data set, where the manifest looks for them."""
    ((name, shape),) = spec["engine"]["profiles"][0]["inputs"].items()
    width, task = shape["opt"][1], spec["verify"]["task"]
    random = np.random.default_rng(3)
    rows = random.standard_normal((ROWS, width)).astype(np.float32)
    weights = random.standard_normal((width, 1 if task == "Regression" else 3)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", [name, "weights"], ["y"], "product")],
        task,
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", weights.shape[1]])],
        [numpy_helper.from_array(weights, "weights")],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(made, {"version": version})
    onnx.save(made, work / "model.onnx")
    answers = rows @ weights
    labels: dict[str, Any] = {"Regression": {"labels": answers}, "Classification": {"labels": answers.argmax(axis=1)}}
    np.savez(work / "eval.npz", **{name: rows}, **labels.get(task, {}))
    for file, uri in (("model.onnx", spec["source"]["uri"]), ("eval.npz", spec["verify"]["dataset"]["uri"])):
        bucket, _, key = uri.removeprefix("s3://").partition("/")
        store.put(bucket, key, work / file)
