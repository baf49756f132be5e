"""From kubectl apply to a model that serves, and the everyday commands on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest
from trtmodel_worker.gateway import inference_pb2 as pb

from . import models, sources
from .cluster import Json
from .install import Operator
from .recorder import Recorder
from .world import CHILDREN, CONDITIONS, World, condition, is_ready, revision, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

NAME = "digits"
ROW = sources.samples(1)


@pytest.fixture(scope="module")
def world(world_of: Callable[[str], World]) -> World:
    return world_of("e2e-first")


@pytest.fixture(scope="module")
def recorder(world: World) -> Iterator[Recorder]:
    """What was made in the namespace, in the order of its making."""
    found = Recorder(world, ("ConfigMap", "Deployment", "Pod"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def served(world: World, recorder: Recorder, endpoint: str) -> World:
    """One model that is Ready."""
    world.apply(models.tiny(NAME, endpoint))
    world.kubectl("wait", "--for=condition=Ready", f"trtmodel/{NAME}", "--timeout=90s", seconds=100)
    return world


def assert_answers(world: World, where: str, gain: float = 1.0) -> Json:
    """`where` gives the tiny model's own answer."""
    answer = world.infer(where, NAME, models.tiny_inputs(ROW[0].tolist()))
    np.testing.assert_allclose(models.tiny_scores(answer), gain * sources.scores(ROW)[0], rtol=1e-3, atol=1e-3)
    return answer


def test_an_applied_model_becomes_ready_and_its_service_gives_the_models_answers(served: World) -> None:
    found = served.model(NAME)
    answer = assert_answers(served, f"services/{NAME}:http")
    assert answer["model_version"] == revision(found, "stable") != ""


def test_the_service_gives_the_same_answer_over_grpc(served: World) -> None:
    asked = pb.ModelInferRequest(model_name=NAME, id="7")
    asked.inputs.add(name="x", datatype="FP32", shape=[1, len(ROW[0])])
    asked.raw_input_contents.append(ROW[0].astype("<f4").tobytes())
    with (
        served.cluster.forwarded(served.namespace, f"service/{NAME}", 9000) as address,
        grpc.insecure_channel(address) as channel,
    ):
        infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )
        answer = infer(asked, timeout=30)
    scores = np.frombuffer(answer.raw_output_contents[0], "<f4")
    np.testing.assert_allclose(scores, sources.scores(ROW)[0], rtol=1e-3, atol=1e-3)
    assert (answer.id, answer.model_version) == ("7", revision(served.model(NAME), "stable"))


def test_every_condition_is_there_and_says_that_all_is_well(served: World) -> None:
    found = served.wait_ready(NAME, 10)
    told = {kind: condition(found, kind)["status"] for kind in CONDITIONS}
    assert told == {
        "Available": "True",
        "Ready": "True",
        "Reconciling": "False",
        "Stalled": "False",
        "Built": "True",
        "Verified": "True",
        "Progressing": "False",
        "Degraded": "False",
    }, served.describe(NAME)
    reasons = {reason for _, reason, _ in served.events(NAME)}
    assert {"Resolving", "Building", "Serving"} <= reasons, served.describe(NAME)
    assert not [e for e in served.events(NAME) if e[0] == "Warning"], served.describe(NAME)


def test_workers_are_made_only_after_the_pointer_that_they_boot_from(served: World, recorder: Recorder) -> None:
    (deployment,) = served.children("Deployment", NAME)
    name = deployment["metadata"]["name"]
    order = recorder.order()
    pods = [entry for entry in order if entry[0] == "Pod" and entry[1].startswith(name)]
    pointer, keys = ("ConfigMap", name), ("ConfigMap", f"{NAME}-keys")
    assert pods, order
    assert order.index(keys) < order.index(pointer) < order.index(("Deployment", name)) < order.index(pods[0])


def test_nobody_leaves_an_annotation_a_finalizer_or_a_field_on_the_model_but_kubectl_and_its_status_writers(
    served: World,
) -> None:
    meta = served.model(NAME)["metadata"]
    by_manager = {(entry["manager"], entry.get("subresource", "")) for entry in meta["managedFields"]}
    assert set(meta["annotations"]) == {"kubectl.kubernetes.io/last-applied-configuration"}
    assert not meta.get("finalizers")
    assert by_manager == {
        ("kubectl-client-side-apply", ""),
        ("trtmodel-rollout", "status"),
        ("trtmodel-status", "status"),
    }
    operators = [entry for entry in meta["managedFields"] if entry["manager"].startswith("trtmodel-")]
    assert all(set(entry["fieldsV1"]) == {"f:status"} for entry in operators)
    children = [c for kind in ("ConfigMap", "Deployment", "Service") for c in served.children(kind, NAME)]
    assert len(children) == 4
    assert not [c["metadata"]["name"] for c in children if c["metadata"].get("finalizers")]


def test_kubectl_get_prints_where_the_model_stands(served: World) -> None:
    stable = revision(served.wait_ready(NAME, 10), "stable")
    head, row = served.kubectl("get", "trtmodels", NAME).splitlines()
    assert head.split() == ["NAME", "PHASE", "READY", "STABLE", "CANDIDATE", "CANARY", "REPLICAS", "AGE"]
    assert row.split()[:4] == [NAME, "Serving", "True", stable]
    wide = served.kubectl("get", "trtm", NAME, "-o", "wide").splitlines()
    assert wide[0].split()[-4:] == ["GPU", "PRECISION", "REASON", "MESSAGE"]
    assert "FP32" in wide[1]
    assert f"{stable} serves on every worker" in wide[1]


def test_kubectl_explain_tells_what_a_step_is(served: World) -> None:
    text = served.kubectl("explain", "trtmodel.spec.rollout.steps")
    assert "The steps before promotion to all workers" in text
    assert "hold" in text


def test_a_replacement_serves_stable_while_there_is_no_operator(served: World, operator: Operator) -> None:
    served.kubectl("scale", f"trtmodel/{NAME}", "--replicas=2")
    served.wait(NAME, "two workers", lambda m: m["status"]["replicas"] == 2, 60)
    stable = revision(served.wait_condition(NAME, "Ready", "True", "Serving", 60), "stable")
    operator.stop()
    try:
        before = {p["metadata"]["uid"] for p in served.workers(NAME)}
        served.kubectl("delete", "pod", served.workers(NAME)[0]["metadata"]["name"], "--wait=false")

        def replacement() -> str:
            fresh = [p for p in served.workers(NAME) if p["metadata"]["uid"] not in before and is_ready(p)]
            return fresh[0]["metadata"]["name"] if fresh else ""

        pod = until("a replacement is ready", 60, replacement, lambda: served.describe(NAME))
        answer = assert_answers(served, f"pods/{pod}:8080")
        assert answer["model_version"] == stable
    finally:
        operator.install()
    served.wait_condition(NAME, "Ready", "True", "Serving", 60)
    served.kubectl("scale", f"trtmodel/{NAME}", "--replicas=1")
    served.wait(NAME, "one worker", lambda m: m["status"]["replicas"] == 1, 60)
    served.wait_condition(NAME, "Ready", "True", "Serving", 60)


def test_a_to_b_to_a_in_flight_goes_back_without_a_job(served: World) -> None:
    stable = revision(served.wait_ready(NAME, 30), "stable")
    served.patch(NAME, {"source": {"uri": f"s3://{models.MODELS}/tiny/b.onnx"}})
    trial = served.wait(NAME, "b is on trial", lambda m: m["status"]["phase"] == "Canary", 60)
    candidate = revision(trial, "candidate")
    jobs = served.jobs(NAME)
    served.patch(NAME, {"source": {"uri": f"s3://{models.MODELS}/tiny/a.onnx"}})
    found = served.wait_condition(NAME, "Ready", "True", "Serving", 30)
    assert (revision(found, "stable"), revision(found, "candidate")) == (stable, "")
    assert (found["status"]["history"][0]["revision"], found["status"]["history"][0]["outcome"]) == (
        candidate,
        "Superseded",
    )
    assert served.jobs(NAME) == jobs
    for pod in served.ready_workers(NAME):
        assert assert_answers(served, f"pods/{pod}:8080")["model_version"] == stable


def test_a_deleted_model_takes_everything_with_it_that_it_owned(served: World) -> None:
    served.kubectl("delete", f"trtmodel/{NAME}", "--timeout=30s")

    def left() -> list[tuple[str, str]]:
        return [(kind, c["metadata"]["name"]) for kind in CHILDREN for c in served.children(kind, NAME)]

    until("all children are gone", 90, lambda: not left(), lambda: str(left()))
