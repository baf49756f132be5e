"""The examples as they stand in the repository: the API server takes each, and those for CPUs run.

Only addresses and sizes are put in, as their README says: the buckets of these tests, one worker, little memory. The
embedding model runs with ONNX Runtime instead of TensorRT, in FP16 as it asks. But for Magika, models and data are made
up from the manifests themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from argo_cd import health
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
TOKENS, WORDS, WIDTH = 16, 50, 24  # of a text, of the vocabulary, of a vector
DATA_SECONDS = 120
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
        assert health(world.wait_ready(model["metadata"]["name"], 180))[0] == "Healthy"

    model = found["manual-promotion"]
    name, first = model["metadata"]["name"], revision(world.model(model["metadata"]["name"]), "stable")
    model["spec"]["source"]["uri"] = model["spec"]["source"]["uri"].replace("v12", "v13")
    model["spec"]["rollout"] |= SOON
    publish(store, model["spec"], tmp_path, "b")
    assert deploy(world, model, tmp_path) == 4, "the pipeline goes on to its manual stage"
    waiting = world.wait_condition(name, "Progressing", "False", "AwaitingPromotion", 10)
    assert health(waiting)[0] == "Suspended"
    assert revision(waiting, "stable") == first
    world.command(name, f"promote@{revision(waiting, 'candidate')}#example")
    promoted = world.wait_condition(name, "Ready", "True", "Serving", 90)
    assert revision(promoted, "stable") == revision(waiting, "candidate")


@pytest.mark.long
@pytest.mark.night  # demo and canary roll the same model out in INT8
def test_a_pipeline_brings_the_classifier_and_then_the_same_in_int8(
    world: World, store: Store, endpoint: str, tmp_path: Path
) -> None:
    making = [sys.executable, EXAMPLES / "magika" / "data.py", tmp_path]
    subprocess.run(making, check=True, capture_output=True, timeout=DATA_SECONDS)
    before, after = example("magika", endpoint), example("magika-int8", endpoint)
    upload(store, before["spec"]["source"]["uri"], tmp_path / "model.onnx")
    upload(store, before["spec"]["verify"]["dataset"]["uri"], tmp_path / "eval.npz")
    upload(store, after["spec"]["engine"]["calibration"]["uri"], tmp_path / "calib.npz")
    assert deploy(world, before, tmp_path) == 0
    first = world.model("magika")
    assert deploy(world, after | {"spec": after["spec"] | {"rollout": SOON}}, tmp_path) == 0
    second = world.model("magika")
    assert revision(second, "stable") not in ("", revision(first, "stable"))
    assert second["spec"]["engine"]["precision"] == "INT8"
    assert health(second)[0] == "Healthy"


@pytest.mark.long
def test_the_embedding_example_serves_from_a_folder(world: World, store: Store, endpoint: str, tmp_path: Path) -> None:
    model = example("embedding", endpoint)
    spec = model["spec"]
    spec["engine"]["runtime"] = "ONNXRuntime"
    del spec["targets"], spec["serving"]["image"]
    for shape in spec["engine"]["profiles"][0]["inputs"].values():
        shape["opt"], shape["max"] = [4, TOKENS], [8, 2 * TOKENS]
    write_embedder(tmp_path)
    for file in ("model.onnx", "model.data"):
        upload(store, f"{spec['source']['uri']}{file}", tmp_path / file)
    upload(store, spec["verify"]["dataset"]["uri"], tmp_path / "eval.npz")
    world.apply(model)
    served = world.wait_ready("embeddings", 180)
    gate = served["status"]["targets"][0]["gate"]
    assert (gate["verdict"], gate["samples"]) == ("Pass", ROWS)
    tokens = {"datatype": "INT64", "shape": [1, 8], "data": [7] * 8}
    answer = world.infer(
        "services/embeddings:http",
        "embeddings",
        [{"name": name, **tokens} for name in ("input_ids", "attention_mask")],
    )
    assert answer["outputs"][0]["shape"] == [1, WIDTH]


# ---------------------------------------------------------------------------------------------------------------------


def example(name: str, endpoint: str) -> Json:
    """The manifest with this cluster's addresses and sizes."""
    model: Json = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    spec = model["spec"]
    model["metadata"].pop("namespace", None)
    spec["source"]["uri"] = spec["source"]["uri"].replace("s3://models/", f"s3://{MODELS}/")
    for data in (spec["verify"]["dataset"], spec["engine"].get("calibration")):
        if data is not None:
            data["uri"] = data["uri"].replace("s3://data/", f"s3://{DATA}/")
    spec["storage"] |= models.storage(endpoint)
    spec["serving"] |= {"replicas": 1, "contexts": 1, "pod": {"resources": models.SMALL}}
    spec["build"] = {"resources": models.SMALL}
    return model


def deploy(world: World, model: Json, work: Path) -> int:
    """The exit code of the pipeline among the examples."""
    manifest = work / "deployed.yaml"
    manifest.write_text(yaml.safe_dump(model))
    path = os.pathsep.join([str(Path(sys.executable).parent), world.cluster.environment["PATH"]])
    command: Sequence[str | Path] = [
        EXAMPLES / "ci" / "deploy.sh",
        manifest,
        model["metadata"]["name"],
        NAMESPACE,
        "3m",
    ]
    done = subprocess.run(command, env={**world.cluster.environment, "PATH": path}, timeout=240, check=False)
    return done.returncode


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
    upload(store, spec["source"]["uri"], work / "model.onnx")
    upload(store, spec["verify"]["dataset"]["uri"], work / "eval.npz")


def write_embedder(work: Path) -> None:
    """model.onnx with its weights in model.data, and eval.npz: the mean of the words' vectors, normalised."""
    random = np.random.default_rng(4)
    vectors = random.standard_normal((WORDS, WIDTH)).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["vectors", "input_ids"], ["found"], "gather"),
        helper.make_node("Cast", ["attention_mask"], ["mask"], "cast", to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["wide"], "unsqueeze"),
        helper.make_node("Mul", ["found", "wide"], ["kept"], "mul"),
        helper.make_node("ReduceMean", ["kept"], ["mean"], "mean", axes=[1], keepdims=0),
        helper.make_node("LayerNormalization", ["mean", "scale", "bias"], ["embedding"], "norm"),
    ]
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["n", "tokens"])
        for name in ("input_ids", "attention_mask")
    ]
    outputs = [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["n", WIDTH])]
    weights = {
        "vectors": vectors,
        "last": np.array([-1], np.int64),
        "scale": np.ones(WIDTH, np.float32),
        "bias": np.zeros(WIDTH, np.float32),
    }
    constants = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    made = helper.make_model(
        helper.make_graph(nodes, "embedder", inputs, outputs, constants),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    onnx.save(made, work / "model.onnx", save_as_external_data=True, location="model.data", size_threshold=1024)
    words = random.integers(0, WORDS, (ROWS, TOKENS))
    np.savez(work / "eval.npz", input_ids=words, attention_mask=np.ones_like(words))


def upload(store: Store, uri: str, file: Path) -> None:
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    store.put(bucket, key, file)
