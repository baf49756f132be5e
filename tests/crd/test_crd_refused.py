"""What the API server must refuse, with a message that names the cause and the way out."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
from crd_api import Api, refusal_of
from crd_manifests import ABSENT, Case, manifest

pytestmark = pytest.mark.e2e


def no(name: str, changes: dict[str, Any], *says: str) -> Case:
    return Case(name, changes, says)


S3 = {"uri": "s3://data/calibration.npz"}
SHAPES = {"min": [1], "opt": [8], "max": [32]}


def profile(low: list[int], best: list[int], high: list[int]) -> dict[str, Any]:
    return {"engine.profiles": [{"inputs": {"x": {"min": low, "opt": best, "max": high}}}]}


def pod(**settings: Any) -> dict[str, Any]:
    return {"serving.pod": settings}


def batching(**settings: Any) -> dict[str, Any]:
    return {"serving.batching": settings}


def step(**settings: Any) -> dict[str, Any]:
    return {"rollout.steps": [{"workers": 1, **settings}]}


def analysis(**settings: Any) -> dict[str, Any]:
    return {"rollout.analysis": settings}


def webhook(**changes: Any) -> dict[str, Any]:
    return analysis(webhooks=[{"name": "a", "stage": "Event", "url": "https://hooks.example.com/x", **changes}])


ROOT_AND_SOURCE = [
    no("a name that is too long", {".metadata.name": "m" * 41}, "m" * 41, "at most 40 characters"),
    no("a name with a dot", {".metadata.name": "a.b"}, 'the name "a.b" cannot be used'),
    no("a name that begins with a digit", {".metadata.name": "2fast"}, "beginning with a letter"),
    no("no spec", {".spec": ABSENT}, "spec: Required value"),
    no("a field that does not exist", {"sorce": {}}, 'unknown field "spec.sorce"'),
    no("no source", {"source": ABSENT}, "spec.source: Required value"),
    no("a source without a uri", {"source": {}}, "spec.source.uri: Required value"),
    no("an empty uri", {"source.uri": ""}, "spec.source.uri"),
    no("http", {"source.uri": "http://models/model.onnx"}, 'uri "http://models/model.onnx" cannot be read: use s3://'),
    no("a relative path", {"source.uri": "models/model.onnx"}, "cannot be read: use s3://bucket/key, https://host/path"),
    no("a password in the uri", {"source.uri": "https://me:secret@models/model.onnx"}, "without user or password"),
    no("a file of another host", {"source.uri": "file://host/model.onnx"}, "file:///path"),
    no("a bucket without a key", {"source.uri": "s3://models"}, "use s3://bucket/key"),
    no("a space in the uri", {"source.uri": "s3://models/a b.onnx"}, "cannot be read"),
    no("a folder over https", {"source.uri": "https://models/magika/"}, "cannot be listed over https: name the .onnx"),
    no("a bucket as a prefix", {"source.uri": "s3://models/"}, "use s3://bucket/key"),
    no("a pin that is no digest", {"source.sha256": "sha256:abc"}, 'sha256 "sha256:abc" is not a digest', "64"),
    no("a pin in capitals", {"source.sha256": "AB" * 32}, "64 lower-case hex digits"),
    no("a pin that is too long", {"source.sha256": "ab" * 33}, "spec.source.sha256: Too long"),
]  # fmt: skip

STORAGE = [
    no("no storage", {"storage": ABSENT}, "spec.storage: Required value"),
    no("no bucket", {"storage": {}}, "spec.storage.bucket: Required value"),
    no("a bucket as a uri", {"storage.bucket": "s3://engines"}, 'bucket "s3://engines" is not', "without s3://"),
    no(
        "a prefix with a slash at its end",
        {"storage.prefix": "a/"},
        'prefix "a/" is not usable',
        "such as trtmodel",
    ),
    no("a prefix that climbs", {"storage.prefix": "a/../b"}, "is not usable"),
    no("an empty prefix", {"storage.prefix": ""}, "spec.storage.prefix"),
    no("an endpoint without scheme", {"storage.endpoint": "s3:9000"}, 'endpoint "s3:9000"', "give http://host:port"),
    no("an endpoint with a path", {"storage.endpoint": "http://s3/x"}, "without a path"),
    no("a region with a slash", {"storage.region": "eu/1"}, "a name such as eu-central-1"),
    no("a CA bundle", {"storage.caBundle": "-----BEGIN"}, "caBundle holds no certificate: give PEM text"),
    no("no name of a Secret", {"storage.credentialsSecret": "A b"}, "is not the name of a Secret"),
]

ENGINE = [
    no("no engine", {"engine": ABSENT}, "spec.engine: Required value"),
    no("no runtime", {"engine": {}}, "spec.engine.runtime: Required value"),
    no("another runtime", {"engine.runtime": "OpenVINO"}, "supported values", "ONNXRuntime"),
    no("BF16 on a CPU", {"engine.precision": "BF16"}, "has no BF16 on CPUs: use FP16, or runtime TensorRT"),
    no("FP8", {"engine.precision": "FP8"}, "precision FP8 is not supported yet: use FP32, FP16, BF16 or INT8"),
    no("fp16 in small letters", {"engine.precision": "fp16"}, "supported values"),
    no("INT8 without calibration", {"engine.precision": "INT8"}, "spec.engine.calibration: Required value",
       "precision INT8 needs calibration: set engine.calibration.uri"),
    no("calibration without INT8", {"engine.calibration": S3}, "read for precision INT8 only, and precision is FP32"),
    no("calibration with FP16", {"engine.calibration": S3, "engine.precision": "FP16"}, "precision is FP16"),
    no("calibration from nowhere", {"engine.precision": "INT8", "engine.calibration": {}}, "calibration.uri: Required"),
    no("calibration from a whole bucket", {"engine.precision": "INT8", "engine.calibration": {"uri": "s3://data/"}},
       "naming an npz file"),
    no("a data set in a folder over https", {"verify.dataset": {"uri": "https://data/x/"}}, "a folder of them"),
    no("another method", {"engine.precision": "INT8", "engine.calibration": {**S3, "method": "Percentile"}},
       "supported values", "Entropy", "MinMax"),
    no("no samples", {"engine.precision": "INT8", "engine.calibration": {**S3, "samples": 0}},
       "spec.engine.calibration.samples"),
    no("nodes that keep less than FP32", {"engine.precision": "FP16",
                                          "engine.keepPrecision": {"nodes": ["^/head/"], "precision": "BF16"}},
       "precision BF16 of what is kept is not supported yet: use FP32"),
    no("nodes that are kept anyway", {"engine.keepPrecision": {"nodes": ["^/head/"]}},
       "precision FP32 keeps every node in FP32: remove keepPrecision"),
    no("no node that is kept", {"engine.precision": "FP16", "engine.keepPrecision": {}},
       "keepPrecision names nothing: give nodes or operators"),
    no("a workspace", {"engine.workspace": "1Gi"}, "spec.engine.workspace: Forbidden",
       "workspace is a setting of TensorRT, and runtime is ONNXRuntime: remove it"),
    no("a workspace that is no size", {"engine.workspace": "much"}, 'workspace "much" is not a size'),
    no("an optimisation level", {"engine.optimizationLevel": 3}, "spec.engine.optimizationLevel: Forbidden",
       "optimizationLevel is a setting of TensorRT"),
    no("two profiles", {"engine.profiles": [{"inputs": {"x": SHAPES}}] * 2}, "2 profiles are not supported yet",
       "give one whose min and max cover all shapes"),
    no("nine profiles", {"engine.profiles": [{"inputs": {"x": SHAPES}}] * 9}, "spec.engine.profiles: Too many"),
    no("a profile without inputs", {"engine.profiles": [{}]}, "spec.engine.profiles[0].inputs: Required value"),
    no("a profile of nothing", {"engine.profiles": [{"inputs": {}}]}, "spec.engine.profiles[0].inputs"),
    no("a profile of other ranks", profile([1], [8, 4], [32, 4]), "same number of dimensions, not 1, 2 and 2"),
    no("opt below min", profile([4], [2], [8]), "spec.engine.profiles[0].inputs[x]", "min <= opt <= max"),
    no("max below opt in the last dimension", profile([1, 1], [4, 8], [4, 7]), "min <= opt <= max"),
    no("a dimension of zero", profile([0], [1], [1]), "greater than or equal to 1"),
    no("no opt", {"engine.profiles": [{"inputs": {"x": {"min": [1], "max": [2]}}}]}, "opt: Required value"),
]  # fmt: skip

TARGETS = [
    no("no target", {"targets": []}, "spec.targets"),
    no("nine targets", {"targets": [{"name": f"t{n}"} for n in range(9)]}, "spec.targets: Too many"),
    no("a target twice", {"targets": [{"name": "a"}, {"name": "a"}]}, "spec.targets[1]: Duplicate value"),
    no("a target without a name", {"targets": [{}]}, "spec.targets[0].name: Required value"),
    no("a long target", {"targets": [{"name": "nvidia-h200-nvl"}]}, "spec.targets[0].name: Too long"),
    no("a target in capitals", {"targets": [{"name": "A10"}]}, 'target name "A10" cannot be used', "a-z, 0-9"),
    no("GPUs for the CPU", {"targets": [{"name": "a", "gpus": 1}]}, "spec.targets: Forbidden",
       "runtime ONNXRuntime runs on CPUs: remove gpus or set it to 0"),
    no("a GPU for the CPU", {"targets": [{"name": "a", "gpu": "NVIDIA-A10"}]},
       "runtime ONNXRuntime runs on CPUs: remove gpu, and choose nodes with nodeSelector"),
    no("two GPUs for a worker", {"targets": [{"name": "a", "gpus": 2}]}, "spec.targets[0].gpus"),
    no("a GPU that is no label", {"targets": [{"name": "a", "gpu": "NVIDIA A10"}]},
       'gpu "NVIDIA A10" is not the value of a label: copy it from kubectl get nodes -L nvidia.com/gpu.product'),
    no("a RuntimeClass of no name", {"targets": [{"name": "a", "runtimeClassName": "NVIDIA"}]},
       'runtimeClassName "NVIDIA" is not the name of a RuntimeClass: see kubectl get runtimeclasses'),
    no("an unknown operator", {"targets": [{"name": "a", "tolerations": [{"operator": "In"}]}]}, "supported values"),
    no("an unknown effect", {"targets": [{"name": "a", "tolerations": [{"effect": "Nope"}]}]}, "supported values"),
]  # fmt: skip

BUILD_AND_VERIFY = [
    no("another tier", {"build.tier": "Fast"}, "supported values", "Staging"),
    no("a deadline without a unit", {"build.deadline": "60"}, 'deadline "60" is not a duration', "such as 90s"),
    no("a deadline in words", {"build.deadline": "1 hour"}, 'deadline "1 hour" is not a duration from 1m to 24h'),
    no("a short deadline", {"build.deadline": "59s"}, "is not a duration from 1m to 24h"),
    no("a long deadline", {"build.deadline": "25h"}, "is not a duration from 1m to 24h"),
    no("a deadline in days", {"build.deadline": "1d"}, "is not a duration from 1m to 24h"),
    no("a fraction of an hour", {"build.deadline": "1.5h"}, "is not a duration from 1m to 24h"),
    no("a negative deadline", {"build.deadline": "-1h"}, "is not a duration from 1m to 24h"),
    no("an empty deadline", {"build.deadline": ""}, "is not a duration from 1m to 24h"),
    no("too many retries", {"build.retries": 11}, "spec.build.retries", "less than or equal to 10"),
    no("no quantity", {"build.resources": {"limits": {"cpu": "two"}}}, "spec.build.resources.limits.cpu"),
    no("no verification", {"verify": ABSENT}, "spec.verify: Required value"),
    no("no task", {"verify.task": ABSENT}, "spec.verify.task: Required value"),
    no("another task", {"verify.task": "Detection"}, "supported values", "Classification"),
    no("no data set", {"verify.dataset": ABSENT}, "spec.verify.dataset: Required value"),
    no("a data set without a uri", {"verify.dataset": {}}, "spec.verify.dataset.uri: Required value"),
    no("a data set from nowhere", {"verify.dataset": {"uri": "eval.npz"}}, "cannot be read: use s3://bucket/key"),
    no("no samples to verify with", {"verify.dataset.samples": 0}, "spec.verify.dataset.samples"),
    no("a limit that nothing can prove", {"verify.thresholds": {"top1Delta": 0}}, "spec.verify.thresholds.top1Delta"),
    no("a cosine above one", {"verify.thresholds": {"cosine": 1.1}}, "spec.verify.thresholds.cosine"),
]

SERVING = [
    no("negative replicas", {"serving.replicas": -1}, "spec.serving.replicas"),
    no("too many replicas", {"serving.replicas": 1001}, "less than or equal to 1000"),
    no("a space in the image", {"serving.image": "a b"}, "it holds a space"),
    no("no hosts", {"serving.hosts": 0}, "hosts 0 is out of range: use a number from 1 to 8"),
    no("nine hosts", {"serving.hosts": 9}, "hosts 9 is out of range: use a number from 1 to 8"),
    no("hosts Auto", {"serving.hosts": "Auto"}, "hosts Auto is not supported yet: use a number from 1 to 8"),
    no("contexts by another word", {"serving.contexts": "All"}, "contexts All is out of range", "from 1 to 8, or Auto"),
    no("no contexts", {"serving.contexts": 0}, "contexts 0 is out of range: use a number from 1 to 8, or Auto"),
    no("nine contexts", {"serving.contexts": 9}, "contexts 9 is out of range: use a number from 1 to 8, or Auto"),
    no("probes all the time", {"serving.healthInterval": "100ms"},
       'healthInterval "100ms" is not a duration from 1s to 24h, such as 30s or 5m'),
    no("an endless request", {"serving.requestTimeout": "1h"}, "is not a duration from 10ms to 10m"),
    no("no attempt", {"serving.retry": {"attempts": 0}}, "spec.serving.retry.attempts", "greater than or equal to 1"),
    no("eleven attempts", {"serving.retry": {"attempts": 11}}, "less than or equal to 10"),
    no("more retries than requests", {"serving.retry": {"budgetPercent": 101}}, "less than or equal to 100"),
    no("hedging at once", {"serving.retry": {"hedgeAfter": "0s"}},
       'hedgeAfter "0s" is neither Auto nor a duration from 1ms to 10m, such as 50ms'),
    no("hedging by another word", {"serving.retry": {"hedgeAfter": "Never"}}, 'hedgeAfter "Never" is neither Auto'),
    no("no bucket", batching(buckets=[]), "spec.serving.batching.buckets"),
    no("buckets in disorder", batching(buckets=[8, 1]), "must be in ascending order, each once, such as [1, 4, 16]"),
    no("a bucket twice", batching(buckets=[1, 8, 8]), "buckets must be in ascending order, each once"),
    no("a bucket of nothing", batching(buckets=[0, 1]), "spec.serving.batching.buckets[0]"),
    no("a bucket that is too large", batching(buckets=[1, 4097]), "less than or equal to 4096"),
    no("seventeen buckets", batching(buckets=list(range(1, 18))), "spec.serving.batching.buckets: Too many"),
    no("a long wait", batching(maxDelay="11s"), 'maxDelay "11s" is not a duration from 0s to 10s, such as 2ms'),
    no("no queue", batching(maxQueue=0), "spec.serving.batching.maxQueue"),
    no("another fallback", {"serving.fallback": "Retry"}, "supported values", "Standby"),
    no("one port for both", {"serving.service": {"grpc": 8080}}, "http and grpc are the same port: give each its own"),
    no("HTTP on gRPC's port", {"serving.service": {"http": 9000}}, "http and grpc are the same port"),
    no("a gRPC port that is none", {"serving.service": {"grpc": 0}}, "spec.serving.service.grpc"),
    no("a Service in capitals", {"serving.service": {"name": "Magika"}}, 'service name "Magika" cannot be used'),
    no("a port that is none", {"serving.service": {"http": 70000}}, "spec.serving.service.http"),
    no("our label", pod(labels={"trtmodel.io/role": "x"}), "keys that begin with trtmodel.io/", "choose others"),
    no("our annotation", pod(annotations={"app.kubernetes.io/name": "x"}), "or app.kubernetes.io/ are the operator's"),
    no("our variable", pod(env=[{"name": "TRTMODEL_UID", "value": "x"}]), 'variable "TRTMODEL_UID" cannot be set'),
    no("a variable that is none", pod(env=[{"name": "A-B", "value": "x"}]), 'variable "A-B" cannot be used'),
    no("a variable from elsewhere", pod(env=[{"name": "A", "value": "", "valueFrom": {}}]), "unknown field"),
    no("a variable twice", pod(env=[{"name": "A", "value": "x"}] * 2), "Duplicate value"),
    no("volumes", pod(volumes=[]), 'unknown field "spec.serving.pod.volumes"'),
    no("half an affinity", pod(affinity={"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{}]}}),
       "topologyKey: Required value"),
]  # fmt: skip

ROLLOUT = [
    no("no step", {"rollout.steps": []}, "spec.rollout.steps"),
    no("eleven steps", {"rollout.steps": [{"workers": 1}] * 11}, "spec.rollout.steps: Too many"),
    no("a step of nobody", step(workers=0), "workers 0 is not a number of workers from 1 to 1000 nor a share"),
    no("a step of 0%", step(workers="0%"), "workers 0% is not a number of workers"),
    no("a step of 101%", step(workers="101%"), "workers 101% is not a number of workers"),
    no("a step of half", step(workers="half"), "workers half is not", '"1%" to "100%"'),
    no("a step without workers", {"rollout.steps": [{"hold": "1m"}]}, "spec.rollout.steps[0].workers: Required value"),
    no("more than all requests", step(weight=101), "spec.rollout.steps[0].weight"),
    no("a shadow of none", step(shadow=9), "none is left to mirror: set weight to 0 to mirror only, or remove shadow"),
    no("a step that does nothing", step(weight=0), "with neither weight nor shadow the candidate does nothing"),
    no("a last step that only mirrors", step(weight=0, shadow=10), "in the last step clients get no answer"),
    no("two engines where memory holds one", {"rollout.memoryPolicy": "Resource",
                                              "rollout.steps": [{"workers": 1, "weight": 50}]},
       "takes two engines in memory, and memoryPolicy Resource keeps one"),
    no("a hold of two days", step(hold="48h"), 'hold "48h" is not a duration from 0s to 24h'),
    no("another policy for no data", analysis(noData="Guess"), "noData"),
    no("an agreement of nothing", analysis(minAgreement=0.99), "no step has shadow: add a step with shadow"),
    no("an agreement beyond all", analysis(minAgreement=1.5), "minAgreement"),
    no("a query without a bound", analysis(prometheus=[{"name": "a", "query": "up"}]), "the query a has no bound"),
    no("a query that nothing can pass", analysis(prometheus=[{"name": "a", "query": "up", "min": 1, "max": 0.5}]),
       "the query a has a min above its max"),
    no("a query of a file", analysis(prometheus=[{"name": "a", "query": "up", "min": 1, "address": "file:///x"}]),
       'address "file:///x" is not one of a server'),
    no("two queries of one name", analysis(prometheus=[{"name": "a", "query": "up", "min": 1}] * 2), "Duplicate value"),
    no("a webhook with a password", webhook(url="https://me:secret@hooks/x"), "without user or password"),
    no("a webhook that is no address", webhook(url="hooks/x"), 'url "hooks/x" is not an address'),
    no("a webhook at no stage", webhook(stage="Sometimes"), "stage"),
    no("a webhook that is waited for long", webhook(timeout="2m"), 'timeout "2m" is not a duration from 100ms to 1m'),
    no("an error rate that nothing can prove", analysis(maxErrorRateIncrease=0), "maxErrorRateIncrease"),
    no("a candidate that must be faster", analysis(maxLatencyRatio=0.9), "maxLatencyRatio"),
    no("no requests", analysis(minRequests=0), "minRequests"),
    no("a hectic look", analysis(interval="1ms"), 'interval "1ms" is not a duration from 1s to 10m'),
    no("another promotion", {"rollout.promotion": "Maybe"}, "supported values", "Automatic"),
    no("another memory policy", {"rollout.memoryPolicy": "Some"}, "supported values", "Availability"),
    no("another answer to a failed target", {"rollout.onTargetFailure": "Ignore"}, "supported values", "RollbackAll"),
    no("a deadline that is too short", {"rollout.progressDeadline": "5s"}, "is not a duration from 1m to 168h"),
    no("no history", {"rollout.historyLimit": 0}, "spec.rollout.historyLimit"),
    no("a long history", {"rollout.historyLimit": 21}, "less than or equal to 20"),
    no("another deletion policy", {"deletionPolicy": "Orphan"}, "supported values", "Retain"),
]  # fmt: skip

CASES = [*ROOT_AND_SOURCE, *STORAGE, *ENGINE, *TARGETS, *BUILD_AND_VERIFY, *SERVING, *ROLLOUT]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_is_refused_with_its_message(api: Api, case: Case) -> None:
    answer = api.refusal(manifest(case.changes))
    assert answer, "it was accepted"
    assert not [text for text in case.says if text.lower() not in answer.lower()], answer


def test_a_refusal_names_nothing_but_its_cause(api: Api) -> None:
    """One wrong value gives one cause, so that the way out is not lost among others."""
    for changes in ({"build.deadline": "1 day"}, {"engine.precision": "FP8"}, {"source.uri": "gs://models/x.onnx"}):
        answer = api.refusal(manifest(changes))
        assert answer.startswith(f'TRTModel.trtmodel.io "magika" is invalid: spec.{next(iter(changes))}: ')
        assert "\n" not in answer


IMMUTABLE = [
    Case("the Service is renamed", {"service": {"name": "other"}}, ("would cut its clients off",)),
]


@pytest.mark.parametrize("case", IMMUTABLE, ids=lambda case: case.name)
def test_cannot_be_changed_yet(api: Api, case: Case) -> None:
    name = f"m-{secrets.token_hex(4)}"
    api.create(manifest({".metadata.name": name}), dry_run=False)
    answer = refusal_of(lambda: api.patch(name, {"spec": {"serving": case.changes}}))
    assert case.says[0] in answer


def test_everything_else_can_be_changed(api: Api) -> None:
    name = f"m-{secrets.token_hex(4)}"
    api.create(manifest({".metadata.name": name, "serving.pod": {"labels": {"a": "b"}}}), dry_run=False)
    changed = api.patch(
        name,
        {
            "spec": {
                "source": {"uri": "s3://models/other.onnx"},
                "engine": {"precision": "INT8", "calibration": S3},
                "serving": {
                    "replicas": 3,
                    "image": "worker:2",
                    "pod": {"labels": {"a": "c"}},
                    "hosts": 2,
                    "contexts": "Auto",
                    "requestTimeout": "1s",
                    "retry": {"attempts": 1},
                    "batching": {"buckets": [1, 8]},
                    "service": {"http": 80, "grpc": 90},
                },
                "rollout": {"paused": True, "memoryPolicy": "Resource"},
            }
        },
    )
    assert changed["metadata"]["generation"] == 2
    assert changed["spec"]["serving"]["pod"] == {"labels": {"a": "c"}}
