from __future__ import annotations

import contextlib
import copy
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trtmodel_contract.gate import Task, Thresholds
from trtmodel_contract.identity import KeepPrecision, Profile, ShapeRange
from trtmodel_operator.fields import SpecError, duration, size
from trtmodel_operator.model import BatchingSpec, Command, RetrySpec, Spec, Step, Target
from trtmodel_operator.spec import parse, parse_command
from trtmodel_operator.units import quantity

LEAST: dict[str, Any] = {
    "source": {"uri": "s3://models/model.onnx"},
    "storage": {"bucket": "engines"},
    "engine": {"runtime": "ONNXRuntime"},
    "verify": {"task": "Classification", "dataset": {"uri": "s3://data/eval.npz"}},
}


def spec(**changes: Any) -> dict[str, Any]:
    """LEAST with fields set by path: ``rollout__paused=True``."""
    found = copy.deepcopy(LEAST)
    for path, value in changes.items():
        node: dict[str, Any] = found
        *parents, last = path.split("__")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return found


def error(**changes: Any) -> str:
    with pytest.raises(SpecError) as caught:
        parse(spec(**changes))
    return str(caught.value)


def test_what_is_left_out_has_the_same_default_as_in_the_crd() -> None:
    found = parse(LEAST)
    assert found.storage.prefix == "trtmodel"
    assert found.engine.precision == "FP32"
    assert found.targets == (Target("default", gpus=0),)
    assert (found.build.deadline, found.build.retries) == (3600, 2)
    assert (found.verify.task, found.verify.samples, found.verify.thresholds) == (
        Task.CLASSIFICATION,
        2000,
        Thresholds(0.005, 0.01, 0.99),
    )
    assert (found.serving.replicas, found.serving.http_port, found.serving.request_timeout) == (1, 8080, 5.0)
    assert (found.serving.hosts, found.serving.contexts, found.serving.health_interval) == (1, 1, 30.0)
    assert (found.serving.retry, found.serving.batching) == (RetrySpec(3, 10, 0.0), BatchingSpec((), 0.0, 512))
    assert (found.serving.fallback, found.serving.grpc_port) == (True, 9000)
    assert (found.rollout.memory_policy, found.rollout.allow_downtime) == ("Auto", False)
    assert found.rollout.steps == (Step(1, 120.0), Step("50%", 120.0))
    assert (found.rollout.analysis.interval, found.rollout.analysis.min_requests) == (10.0, 3000)
    assert (found.rollout.progress_deadline, found.rollout.history_limit, found.rollout.paused) == (1800.0, 5, False)


def test_a_null_is_as_good_as_a_field_that_is_left_out() -> None:
    assert parse(spec(rollout=None, serving=None, build=None, targets=None)) == parse(LEAST)


def test_everything_that_is_written_is_read() -> None:
    found = parse(
        spec(
            source__sha256="a" * 64,
            storage__credentialsSecret="s3",
            storage__endpoint="http://s3:7070",
            engine__precision="INT8",
            engine__profiles=[{"inputs": {"bytes": {"min": [1, 2048], "opt": [8, 2048], "max": [32, 2048]}}}],
            engine__calibration={"uri": "s3://data/calib.npz", "samples": 64, "method": "MinMax", "perChannel": False},
            engine__keepPrecision={"nodes": ["^/head/.*"], "operators": ["Softmax", "Exp", "Softmax"]},
            engine__workspace="1Gi",
            engine__optimizationLevel=4,
            targets=[{"name": "a10", "gpu": "NVIDIA-A10", "gpus": 1, "tolerations": [{"key": "gpu"}]}],
            build__deadline="1h30m",
            build__simplify=True,
            serving__pod={"labels": {"team": "ml"}, "env": [{"name": "OMP_NUM_THREADS", "value": "1"}]},
            serving__hosts=2,
            serving__contexts="Auto",
            serving__healthInterval="1m",
            serving__retry={"attempts": 1, "budgetPercent": 0, "hedgeAfter": "20ms"},
            serving__batching={"buckets": [1, 8], "maxDelay": "2ms", "maxQueue": 64},
            serving__fallback="Error",
            serving__service={"http": 80, "grpc": 90},
            rollout__memoryPolicy="Resource",
            rollout__allowDowntime=True,
            rollout__steps=[{"workers": "25%", "hold": "500ms"}],
        )
    )
    assert found.source_pin == "a" * 64
    assert found.credentials_secret == "s3"
    assert found.engine.profiles == (Profile({"bytes": ShapeRange((1, 2048), (8, 2048), (32, 2048))}),)
    assert found.engine.keep_precision == KeepPrecision(("^/head/.*",), "FP32", ("Exp", "Softmax"))
    assert found.engine.workspace_bytes == 2**30
    assert found.engine.optimization_level == 4
    assert found.engine.simplify
    assert found.calibration is not None
    assert (found.calibration.samples, found.calibration.method, found.calibration.per_channel) == (64, "MinMax", False)
    assert found.targets[0].gpu == "NVIDIA-A10"
    assert found.targets[0].tolerations == ({"key": "gpu"},)
    assert found.build.deadline == 5400
    assert found.serving.pod["labels"] == {"team": "ml"}
    assert found.rollout.steps == (Step("25%", 0.5),)
    assert (found.serving.hosts, found.serving.contexts, found.serving.health_interval) == (2, 0, 60.0)
    assert found.serving.retry == RetrySpec(1, 0, pytest.approx(0.02))
    assert found.serving.batching == BatchingSpec((1, 8), pytest.approx(0.002), 64)
    assert (found.serving.fallback, found.serving.http_port, found.serving.grpc_port) == (False, 80, 90)
    assert (found.rollout.memory_policy, found.rollout.allow_downtime) == ("Resource", True)


def test_a_tensorrt_target_takes_a_gpu_unless_it_says_otherwise() -> None:
    assert parse(spec(engine__runtime="TensorRT")).targets[0].gpus == 1
    assert parse(spec(engine__runtime="TensorRT", targets=[{"name": "t", "gpus": 0}])).targets[0].gpus == 0


@pytest.mark.parametrize(
    ("text", "seconds"), [("2m", 120), ("1h30m", 5400), ("500ms", 0.5), ("1m500ms", 60.5), ("0s", 0), ("2ms", 0.002)]
)
def test_a_duration_is_read(text: str, seconds: float) -> None:
    assert duration(text, "spec.x") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "5 s", "-5s", "1d", "s", "1.5h", "5sec", "9999999s", None, 5, "5s\n"])
def test_what_is_no_duration_is_refused_with_an_example(text: object) -> None:
    with pytest.raises(SpecError, match=r"spec\.x: .* is not a duration: give one such as 500ms, 90s or 1h30m"):
        duration(text, "spec.x")


@pytest.mark.parametrize(
    ("text", "amount"),
    [("1Gi", 2**30), ("512Mi", 2**29), ("1G", 10**9), ("100k", 100_000), (1024, 1024), ("1.5Gi", 3 * 2**29),
     ("1e3", 1000), ("1500m", 2)],
)  # fmt: skip
def test_a_size_is_read(text: object, amount: int) -> None:
    assert size(text, "spec.x") == amount


@pytest.mark.parametrize("text", ["", "1 Gi", "Gi", "-1Gi", "0", "1gi", "1e3k", "NaN", "1e999", None, True, 1.5])
def test_what_is_no_size_is_refused_with_an_example(text: object) -> None:
    with pytest.raises(SpecError, match=r"spec\.x: .* is not a size: give one such as 512Mi or 1Gi"):
        size(text, "spec.x")


@pytest.mark.parametrize(
    ("text", "number"),
    [("250m", "0.25"), ("2", "2"), (".5", "0.5"), ("+1.", "1"), ("1E3", "1000"), ("1E", "1e18"), ("3n", "3e-9")],
)
def test_a_quantity_is_the_number_that_kubernetes_reads(text: str, number: str) -> None:
    assert quantity(text) == Decimal(number)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": {}}, "spec.source.uri is missing: it has no default"),
        ({"storage": "engines"}, 'spec.storage: expected an object, found "engines"'),
        ({"engine__runtime": "Torch"}, 'spec.engine.runtime: "Torch" is not one of TensorRT, ONNXRuntime'),
        ({"engine__precision": "FP4"}, 'spec.engine.precision: "FP4" is not one of FP32, FP16, BF16, INT8, FP8'),
        ({"engine__profiles": [{"inputs": {"x": {"min": [1], "opt": [1, 2], "max": [1]}}}]}, "same rank"),
        ({"engine__profiles": [{"inputs": {"x": {"min": [0], "opt": [1], "max": [1]}}}]}, "1 <= min <= opt <= max"),
        ({"engine__profiles": {"inputs": {}}}, "spec.engine.profiles: expected a list"),
        ({"engine__optimizationLevel": 9}, "spec.engine.optimizationLevel: 9 is out of range"),
        ({"verify__task": "Guess"}, 'spec.verify.task: "Guess" is not one of Classification'),
        ({"verify__dataset": {"uri": "s3://d", "samples": 0}}, "spec.verify.dataset.samples: 0 is out of range"),
        ({"verify__thresholds": {"top1Delta": "no"}}, 'spec.verify.thresholds.top1Delta: "no" is not a number'),
        ({"serving__replicas": -1}, "spec.serving.replicas: -1 is out of range"),
        ({"serving__replicas": 1.5}, "spec.serving.replicas: expected a whole number, found 1.5"),
        ({"serving__contexts": "auto"}, 'spec.serving.contexts: expected a whole number, found "auto"'),
        ({"serving__hosts": 9}, "spec.serving.hosts: 9 is out of range: give a whole number from 1 to 8"),
        ({"serving__healthInterval": "0s"}, 'spec.serving.healthInterval: "0s" is too short'),
        ({"serving__requestTimeout": "0s"}, 'spec.serving.requestTimeout: "0s" is too short'),
        ({"serving__retry": {"attempts": 0}}, "spec.serving.retry.attempts: 0 is out of range"),
        ({"serving__retry": {"hedgeAfter": "0s"}}, 'spec.serving.retry.hedgeAfter: "0s" is too short'),
        ({"serving__batching": {"buckets": [8, 1]}}, "spec.serving.batching.buckets: [8, 1] must be batch sizes"),
        ({"serving__batching": {"buckets": [1, 1]}}, "in ascending order, each once, such as [1, 4, 16]"),
        ({"serving__batching": {"buckets": [0]}}, "from 1 to 4096"),
        ({"serving__fallback": "Maybe"}, 'spec.serving.fallback: "Maybe" is not one of Standby, Error'),
        (
            {"serving__service": {"grpc": 8080}},
            "spec.serving.service: http and grpc are the same port, 8080: give each its own",
        ),
        ({"rollout__memoryPolicy": "Some"}, 'spec.rollout.memoryPolicy: "Some" is not one of Auto, Availability'),
        ({"serving__pod": {"labels": {"trtmodel.io/model": "x"}}}, "trtmodel.io/model belongs to the operator"),
        ({"serving__pod": {"annotations": {"app.kubernetes.io/name": "x"}}}, "belongs to the operator"),
        (
            {"serving__pod": {"env": [{"name": "TRTMODEL_MODEL", "value": "x"}]}},
            "TRTMODEL_MODEL belongs to the operator",
        ),
        ({"serving__pod": {"env": [{"name": "POD_UID", "value": "x"}]}}, "POD_UID belongs to the operator"),
        ({"serving__pod": {"affinity": []}}, "spec.serving.pod.affinity: expected an object"),
        ({"serving__pod": {"resources": {"limits": {"cpu": []}}}}, "resources.limits.cpu: [] is not a quantity"),
        ({"rollout__steps": [{"workers": "50"}]}, 'spec.rollout.steps[0].workers: "50" is neither a number'),
        ({"rollout__steps": [{"workers": 0}]}, "spec.rollout.steps[0].workers: 0 is neither a number"),
        ({"rollout__steps": [{"workers": True}]}, "is neither a number from 1 on nor a share"),
        ({"rollout__steps": [{"workers": 1, "hold": "soon"}]}, 'spec.rollout.steps[0].hold: "soon" is not a duration'),
        ({"rollout__paused": "yes"}, 'spec.rollout.paused: expected true or false, found "yes"'),
        ({"targets": [{"name": "a"}, {"name": "a"}]}, "two targets are named a"),
        ({"targets": [{"name": "a", "nodeSelector": {"zone": 1}}]}, "nodeSelector.zone: expected text, found 1"),
    ],
)
def test_a_field_that_cannot_be_used_is_named_with_the_way_out(changes: dict[str, Any], message: str) -> None:
    assert message in error(**changes)


def test_an_error_does_not_repeat_a_whole_document() -> None:
    assert len(error(engine__runtime="x" * 10_000)) < 200


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [
    "source",
    "source__uri",
    "storage",
    "storage__bucket",
    "engine",
    "engine__runtime",
    "engine__profiles",
    "engine__calibration",
    "engine__workspace",
    "engine__keepPrecision",
    "targets",
    "build",
    "build__deadline",
    "build__resources",
    "verify",
    "verify__task",
    "verify__dataset",
    "verify__thresholds",
    "serving",
    "serving__replicas",
    "serving__pod",
    "serving__service",
    "serving__hosts",
    "serving__contexts",
    "serving__retry",
    "serving__batching",
    "serving__fallback",
    "rollout__memoryPolicy",
    "rollout",
    "rollout__steps",
    "rollout__analysis",
    "rollout__analysis__noData",
    "rollout__analysis__minAgreement",
    "rollout__analysis__prometheus",
    "rollout__analysis__webhooks",
    "rollout__progressDeadline",
]


@given(st.dictionaries(st.sampled_from(FIELDS), json, max_size=4), json)
def test_whatever_is_in_it_there_is_a_spec_or_an_error_that_names_a_field(
    changes: dict[str, Any], other: object
) -> None:
    tried: list[object] = [other]
    with contextlib.suppress(AttributeError, TypeError):  # a parent may have been replaced by something without fields
        tried.append(spec(**{k: changes[k] for k in sorted(changes)}))
    for each in tried:
        message = ""
        try:
            assert isinstance(parse(each), Spec)
        except SpecError as e:
            message = str(e)
        assert not message or message.startswith("spec")


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("retry#1", Command("retry", "", "retry#1")),
        (" abort@83789d6313#x \n", Command("abort", "83789d6313", "abort@83789d6313#x")),
        ("skip-step#2026-11-29T20:00:00Z", Command("skip-step", "", "skip-step#2026-11-29T20:00:00Z")),
        ("retry", Command("", "", "retry")),
        ("retry#", Command("", "", "retry#")),
        ("abort@NOT-HEX#1", Command("", "", "abort@NOT-HEX#1")),
        ("rm -rf /#1", Command("", "", "rm -rf /#1")),
    ],
)
def test_a_command_is_read_or_kept_as_one_that_cannot_be(text: str, command: Command) -> None:
    assert parse_command(text) == command


@pytest.mark.parametrize("nothing", [None, "", "  ", 7])
def test_no_annotation_is_no_command(nothing: object) -> None:
    assert parse_command(nothing) is None


def test_a_long_command_is_remembered_in_part() -> None:
    command = parse_command("x" * 10_000)
    assert command is not None
    assert len(command.text) == 200


def test_queries_webhooks_and_the_policy_for_no_data_are_read() -> None:
    raw = spec(
        rollout__analysis={
            "noData": "Synthetic",
            "minAgreement": 0.99,
            "prometheus": [
                {"name": "ctr", "query": "sum(x)", "min": -1, "max": 2.5},
                {"name": "lag", "query": "max(y)", "max": 5, "address": "http://prometheus:9090"},
            ],
            "webhooks": [
                {"name": "begin", "stage": "ConfirmRollout", "url": "https://hooks/x", "timeout": "500ms"},
                {"name": "chat", "stage": "Event", "url": "https://chat/x"},
            ],
        }
    )
    found = parse(raw).rollout.analysis
    assert (found.no_data.value, found.min_agreement) == ("Synthetic", 0.99)
    assert [(q.name, q.query, q.address, q.low, q.high) for q in found.prometheus] == [
        ("ctr", "sum(x)", "", -1.0, 2.5),
        ("lag", "max(y)", "http://prometheus:9090", None, 5.0),
    ]
    assert [(w.name, w.stage.value, w.url, w.timeout) for w in found.webhooks] == [
        ("begin", "ConfirmRollout", "https://hooks/x", 0.5),
        ("chat", "Event", "https://chat/x", 10.0),
    ]


@pytest.mark.parametrize(
    ("analysis", "says"),
    [
        ({"noData": "Guess"}, "noData"),
        ({"minAgreement": 2}, "minAgreement: 2.0 is not a share from 0 to 1"),
        ({"minAgreement": "0.9"}, "minAgreement"),
        ({"prometheus": [{"name": "a", "query": "up"}]}, "neither min nor max is given"),
        ({"prometheus": [{"name": "a", "query": "up", "min": 2, "max": 1}]}, "min 2 is above max 1"),
        ({"prometheus": [{"name": "a", "query": "up", "min": 1e300}]}, "is not a number from -1e15"),
        ({"prometheus": [{"name": "a", "min": 1}]}, "query is missing"),
        ({"prometheus": [{"name": "a", "query": "up", "min": 1}] * 2}, "two are named a"),
        ({"prometheus": [{"name": f"q{i}", "query": "up", "min": 1} for i in range(9)]}, "9 are too many"),
        ({"webhooks": [{"name": "a", "stage": "Sometimes", "url": "https://x"}]}, "stage"),
        ({"webhooks": [{"name": "a", "stage": "Event"}]}, "url is missing"),
        ({"webhooks": [{"name": "a", "stage": "Event", "url": "https://x", "timeout": "2m"}]}, "give at most 1m"),
        ({"webhooks": [{"name": "a", "stage": "Event", "url": "https://x", "timeout": "0s"}]}, "too short"),
    ],
)
def test_an_analysis_that_cannot_be_done_is_an_error_that_names_its_field(analysis: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says) as refused:
        parse(spec(rollout__analysis=analysis))
    assert str(refused.value).startswith("spec.rollout.analysis")
