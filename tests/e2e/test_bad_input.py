"""What cannot work is told, with the cause and the way out; nothing is tried for ever; what served goes on serving."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from . import models, sources
from .cluster import Cluster, Json
from .s3 import DATA, MODELS, endpoints_of_s3
from .world import World, condition, revision, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

STEADY = "steady"
BEHIND = "s3-down"  # reaches S3 by a Service that we can take away
NEW = {"uri": f"s3://{MODELS}/tiny/b.onnx"}
ROW = sources.samples(1)[0].tolist()
FAILED_SECONDS = 90
RUNTIME_CLASS = "e2e-nobody-made-it"
INT8 = {
    "runtime": "ONNXRuntime",
    "precision": "INT8",
    "profiles": [{"inputs": {"x": models.shapes(sources.WIDTH)}}],
    "calibration": {"uri": f"s3://{DATA}/tiny/eval.npz", "samples": 32, "method": "MinMax"},
}


def _verify(file: str) -> Json:
    return {"task": "Classification", "dataset": {"uri": f"s3://{DATA}/tiny/{file}"}}


def _profile(name: str, width: int) -> Json:
    return {"runtime": "ONNXRuntime", "profiles": [{"inputs": {name: models.shapes(width)}}]}


@dataclass(frozen=True)
class Case:
    """`spec` replaces sections of the good spec; `says` are words of the message: the cause, and the way out. `stuck`:
    the Job goes on waiting, since the cluster may still change. `alone`: it is tried only without one that serves."""

    name: str
    spec: Json
    reason: str
    says: tuple[str, ...]
    stuck: bool = False
    alone: bool = False


CASES = (
    Case(
        "object-missing",
        {"source": {"uri": f"s3://{MODELS}/tiny/nothing.onnx"}},
        "SourceNotFound",
        (f"s3://{MODELS}/tiny/nothing.onnx", "no such object"),
    ),
    Case(
        "access-denied",
        {"storage": {"credentialsSecret": "s3-wrong"}},
        "AccessDenied",
        ("credentials are not valid", "correct the Secret"),
    ),
    Case(
        "no-credentials",
        {"storage": {"credentialsSecret": "nobody-made-it"}},
        "AccessDenied",
        ("no credentials", "name a Secret"),
        alone=True,
    ),
    Case(
        "bucket-missing",
        {"source": {"uri": "s3://e2e-nowhere/a.onnx"}},
        "BucketNotFound",
        ("s3://e2e-nowhere", "create it or correct its name"),
        alone=True,
    ),
    Case(
        "engine-bucket-missing",
        {"storage": {"bucket": "e2e-nowhere"}},
        "BucketNotFound",
        ("e2e-nowhere", "create it or correct its name"),
        alone=True,
    ),
    Case(
        "s3-does-not-answer",
        {"storage": {"endpoint": "http://s3-nobody:7070"}},
        "StorageUnavailable",
        ("cannot be reached", "check the endpoint"),
        alone=True,
    ),
    Case(
        "not-onnx",
        {"source": {"uri": f"s3://{MODELS}/tiny/page.onnx"}},
        "ModelInvalid",
        ("page.onnx", "an HTML page", "look at what the URL really serves"),
    ),
    Case(
        "other-digest",
        {"source": {"uri": f"s3://{MODELS}/tiny/a.onnx", "sha256": "0" * 64}},
        "DigestMismatch",
        ("000000", "spec.source.sha256"),
        alone=True,
    ),
    Case(
        "profile-of-another-input",
        {"engine": _profile("y", 16)},
        "ProfileMismatch",
        ("no input 'y'", "['x']"),
        alone=True,
    ),
    Case("profile-too-wide", {"engine": _profile("x", 17)}, "ProfileMismatch", ("fixed at 16", "write 16")),
    Case(
        "precision-unavailable",
        {"engine": INT8, "source": {"uri": f"s3://{MODELS}/tiny/plain.onnx"}},
        "PrecisionUnsupported",
        ("INT8 was asked for", "MatMul"),
    ),
    Case(
        "data-set-empty",
        {"verify": _verify("empty.npz")},
        "DatasetInvalid",
        ("empty.npz", "it holds no sample"),
        alone=True,
    ),
    Case(
        "data-set-of-another-shape",
        {"verify": _verify("narrow.npz")},
        "DatasetInvalid",
        ("narrow.npz", "[200, 15]", "samples first"),
    ),
    Case(
        "image-missing",
        {"serving": {"image": "localhost/nobody-made:it", "replicas": 1}},
        "ImagePullBackOff",
        ("localhost/nobody-made:it", "Check the image's name"),
        stuck=True,
        alone=True,
    ),
    Case(
        "job-without-a-node",
        {"build": {"nodeSelector": {"e2e": "nobody"}, "resources": models.SMALL, "retries": 1}},
        "Unschedulable",
        ("didn't match Pod's node affinity/selector", "spec.build.nodeSelector"),
        stuck=True,
    ),
    Case(
        "runtime-class-missing",
        {
            "targets": [{"name": "default", "runtimeClassName": RUNTIME_CLASS}],
            "storage": {"prefix": f"nobody-built-{uuid.uuid4().hex[:8]}"},  # so that there is something to build
        },
        "FailedCreate",
        (f'RuntimeClass "{RUNTIME_CLASS}" not found', "spec.targets"),
        stuck=True,
        alone=True,
    ),
)


@pytest.fixture(scope="module")
def world(world_of: Callable[[str], World]) -> World:
    return world_of("e2e-bad")


@pytest.fixture(scope="module")
def applied(world: World, endpoint: str) -> World:
    """All of them at once, and Services without anything behind them."""
    world.apply(*(_service(name) for name in ("s3-nobody", BEHIND)))
    world.apply(*(_bad(case, endpoint) for case in CASES))
    return world


@pytest.fixture(scope="module")
def steady(applied: World, endpoint: str) -> World:
    """A model that serves. It is made after the others, which need not wait for it."""
    applied.apply(models.tiny(STEADY, endpoint))
    applied.wait_ready(STEADY, 120)
    return applied


def _bad(case: Case, endpoint: str) -> Json:
    storage = {**models.storage(endpoint), **case.spec.get("storage", {})}
    return models.tiny(case.name, endpoint, **{**case.spec, "storage": storage})


def _service(name: str) -> Json:
    ports = [{"name": "s3", "port": 7070}]
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": {"ports": ports}}


def assert_told(world: World, name: str, case: Case) -> Json:
    """By conditions, by an event, and to whoever waits."""
    if case.stuck:
        found = world.wait_condition(name, "Progressing", "False", case.reason, FAILED_SECONDS)
    else:
        found = world.wait_condition(name, "Stalled", "True", case.reason, FAILED_SECONDS)
    ready = condition(found, "Ready")
    assert (ready["status"], ready["reason"]) == ("False", case.reason)
    for words in case.says:
        assert words in ready["message"], ready["message"]
    until(
        "there is an event",
        10,
        lambda: [e for e in world.events(name) if e[1] == case.reason and case.says[0] in e[2]],
        lambda: world.describe(name),
    )
    return found


def assert_no_new_attempt(world: World, name: str) -> None:
    """A further pass over the model, caused by a change that has nothing to do with it, starts nothing."""
    before = world.jobs(name)
    limit = world.model(name)["spec"]["rollout"]["historyLimit"]
    world.patch(name, {"rollout": {"historyLimit": limit + 1}})
    world.wait_observed(name)
    assert world.jobs(name) == before, world.describe(name)
    retries = world.model(name)["spec"]["build"]["retries"]
    assert all(pods <= 1 + retries for pods in before.values()), before


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_told_and_not_tried_for_ever(applied: World, case: Case) -> None:
    assert_told(applied, case.name, case)
    assert_no_new_attempt(applied, case.name)


def test_a_precision_that_no_runtime_has_is_refused_when_it_is_applied(applied: World, endpoint: str) -> None:
    manifest = models.tiny("fp8", endpoint, engine={"runtime": "ONNXRuntime", "precision": "FP8"})
    with pytest.raises(AssertionError, match="precision FP8 is not supported yet: use FP32, FP16, BF16 or INT8"):
        applied.apply(manifest)


@pytest.mark.parametrize("case", [c for c in CASES if not c.alone], ids=lambda case: case.name)
def test_the_stable_engine_goes_on_serving(steady: World, endpoint: str, case: Case) -> None:
    """The same mistake, made on a model that serves, together with a new source."""
    stable = revision(steady.model(STEADY), "stable")
    good, bad = models.tiny(STEADY, endpoint)["spec"], _bad(case, endpoint)["spec"]
    steady.replace_spec(STEADY, {**bad, "source": case.spec.get("source", NEW)})
    found = assert_told(steady, STEADY, case)
    assert condition(found, "Available")["status"] == "True", steady.describe(STEADY)
    assert answering(steady, STEADY) == stable
    assert_no_new_attempt(steady, STEADY)
    steady.replace_spec(STEADY, good)
    assert revision(steady.wait_condition(STEADY, "Ready", "True", "Serving", 60), "stable") == stable


def test_a_job_without_a_node_goes_on_when_the_selector_is_corrected(applied: World) -> None:
    """As the message says; nobody has to delete the Job that waits, or to ask for another try."""
    name = "job-without-a-node"
    applied.wait_condition(name, "Progressing", "False", "Unschedulable", FAILED_SECONDS)
    waits = applied.jobs(name)
    applied.kubectl("patch", "trtmodel", name, "--type=merge", "-p", '{"spec": {"build": {"nodeSelector": null}}}')
    applied.wait_ready(name, 60)
    assert not waits.keys() & applied.jobs(name).keys()


def test_what_a_missing_runtime_class_held_up_goes_on_when_there_is_one(applied: World) -> None:
    name = "runtime-class-missing"
    applied.wait_condition(name, "Progressing", "False", "FailedCreate", FAILED_SECONDS)
    made = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": RUNTIME_CLASS}}
    try:
        applied.apply({**made, "handler": "runc"})
        applied.wait_ready(name, 150)
        assert {worker["spec"]["runtimeClassName"] for worker in applied.workers(name)} == {RUNTIME_CLASS}
    finally:
        applied.kubectl("delete", "runtimeclass", RUNTIME_CLASS, "--ignore-not-found")


def test_wrong_credentials_are_told_and_corrected_ones_are_used(applied: World) -> None:
    name = "access-denied"
    applied.wait_condition(name, "Stalled", "True", "AccessDenied", FAILED_SECONDS)
    applied.patch(name, {"storage": {"credentialsSecret": models.SECRET}})
    applied.wait_ready(name, 60)


def test_a_replacement_boots_although_the_spec_names_storage_that_nobody_can_reach(
    steady: World, endpoint: str
) -> None:
    stable = revision(steady.model(STEADY), "stable")
    steady.patch(STEADY, {"storage": {"endpoint": "http://s3-nobody:7070"}, "build": {"retries": 0}})
    steady.wait_condition(STEADY, "Stalled", "True", "StorageUnavailable", FAILED_SECONDS)
    (old,) = steady.ready_workers(STEADY)
    steady.kubectl("delete", "pod", old, "--wait=false")

    def replacements() -> list[str]:
        return [pod for pod in steady.ready_workers(STEADY) if pod != old]

    (fresh,) = until("a replacement is ready", 60, replacements, lambda: steady.describe(STEADY))
    answer = steady.infer(f"pods/{fresh}:8080", STEADY, models.tiny_inputs(ROW))
    assert answer["model_version"] == stable
    steady.replace_spec(STEADY, models.tiny(STEADY, endpoint)["spec"])
    assert revision(steady.wait_condition(STEADY, "Ready", "True", "Serving", 60), "stable") == stable


def test_credentials_that_stop_to_work_are_told_and_workers_that_have_their_engine_serve_on(
    steady: World, endpoint: str
) -> None:
    stable = revision(steady.model(STEADY), "stable")
    steady.patch(STEADY, {"storage": {"credentialsSecret": "s3-wrong"}})
    found = steady.wait_condition(STEADY, "Degraded", "True", "AccessDenied", 60)
    assert "correct the Secret that spec.storage names" in condition(found, "Degraded")["message"]
    assert condition(found, "Available")["status"] == "True"
    assert answering(steady, STEADY) == stable
    until("there is a warning", 10, lambda: ("Warning", "AccessDenied") in {e[:2] for e in steady.events(STEADY)})
    steady.patch(STEADY, {"storage": {"credentialsSecret": models.SECRET}})
    assert revision(steady.wait_condition(STEADY, "Ready", "True", "Serving", 60), "stable") == stable


def test_s3_goes_away_and_comes_back(applied: World, cluster: Cluster) -> None:
    """A model that begins while S3 is down, serves on when it is down again, and goes on when a person says retry."""
    world, name = applied, "sees-s3-go"
    down = Case(name, {}, "StorageUnavailable", ("cannot be reached", "check the endpoint"))
    build: Json = {"resources": models.SMALL, "retries": 0}
    world.apply(models.tiny(name, f"http://{BEHIND}:7070", build=build))
    assert_told(world, name, down)
    world.apply(endpoints_of_s3(cluster, BEHIND))
    world.command(name, "retry#1")
    stable = revision(world.wait_ready(name, 60), "stable")
    world.kubectl("delete", "endpointslice", BEHIND)
    world.patch(name, {"source": NEW})
    found = assert_told(world, name, down)
    assert condition(found, "Available")["status"] == "True"
    assert answering(world, name) == stable
    assert_no_new_attempt(world, name)
    world.apply(endpoints_of_s3(cluster, BEHIND))
    world.command(name, "retry#2")
    world.wait(name, "the new source is on trial", lambda m: revision(m, "candidate") != "", 60)


def answering(world: World, name: str) -> str:
    """The revision that the Service's answer comes from."""
    return str(world.infer(f"services/{name}:http", name, models.tiny_inputs(ROW))["model_version"])
