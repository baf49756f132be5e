"""What the API server must accept, and the defaults that it fills in."""

from __future__ import annotations

import pytest
import yaml
from crd_api import Api
from crd_manifests import BASE, EXAMPLES, Case, manifest

pytestmark = pytest.mark.e2e

CALIBRATION = {"uri": "s3://data/calibration.npz"}
SHAPES = {"min": [1, 2048], "opt": [8, 2048], "max": [32, 2048]}

CASES = [
    Case("the least", {}),
    Case("an https source", {"source.uri": "https://models.example.com/m/model.onnx"}),
    Case("an https source with a query", {"source.uri": "https://models.example.com:8443/model.onnx?version=3"}),
    Case("a file", {"source.uri": "file:///models/model.onnx"}),
    Case("a folder of the bucket", {"source.uri": "s3://models/magika/v3/"}),
    Case("a data set in a folder", {"verify.dataset.uri": "s3://data/eval/"}),
    Case("a folder of a volume", {"source.uri": "file:///models/magika/"}),
    Case("nodes and operators that are kept", {"engine.precision": "FP16", "engine.keepPrecision": {
        "nodes": ["^/head/.*"], "operators": ["Softmax", "LayerNormalization"]}}),
    Case("TensorRT", {"engine.runtime": "TensorRT", "engine.precision": "BF16", "engine.workspace": "4Gi",
                      "engine.optimizationLevel": 5, "targets": [{"name": "a10", "gpu": "NVIDIA-A10", "gpus": 1}]}),
    Case("a pin", {"source.sha256": "ab" * 32}),
    Case("an empty pin", {"source.sha256": ""}),
    Case("a longer prefix", {"storage.prefix": "team-a/engines.v1"}),
    Case("an endpoint", {"storage.endpoint": "http://s3.storage:7070"}),
    Case("an endpoint with a slash", {"storage.endpoint": "https://s3.example.com/"}),
    Case("empty optional strings", {"storage.endpoint": "", "storage.region": "", "storage.caBundle": "",
                                    "storage.credentialsSecret": "", "serving.image": "", "serving.pod": {}}),
    Case("a region and a Secret", {"storage.region": "eu-central-1", "storage.credentialsSecret": "s3.creds"}),
    Case("a private CA", {"storage.caBundle": "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"}),
    Case("FP16", {"engine.precision": "FP16"}),
    Case("INT8 with calibration", {"engine.precision": "INT8", "engine.calibration": CALIBRATION}),
    Case("MinMax", {"engine.precision": "INT8", "engine.calibration": {**CALIBRATION, "method": "MinMax"}}),
    Case("no profile", {"engine.profiles": []}),
    Case("one profile", {"engine.profiles": [{"inputs": {"bytes": SHAPES, "length": {k: [1] for k in SHAPES}}}]}),
    Case("a profile with eight dimensions", {"engine.profiles": [{"inputs": {"x": {k: [2] * 8 for k in SHAPES}}}]}),
    Case("a target by node label", {"targets": [{"name": "cpu", "nodeSelector": {"pool": "cpu"}}]}),
    Case("a target that wants no GPU", {"targets": [{"name": "cpu", "gpu": "", "gpus": 0}]}),
    Case("a target with a RuntimeClass", {"targets": [{"name": "x", "runtimeClassName": "nvidia-cdi"}]}),
    Case("a target that tolerates", {"targets": [{"name": "x", "tolerations": [{"operator": "Exists"}]}]}),
    Case("two targets", {"targets": [{"name": "old", "nodeSelector": {"isa": "avx2"}}, {"name": "new"}],
                         "rollout.onTargetFailure": "Hold"}),
    Case("eight targets", {"targets": [{"name": f"t{n}"} for n in range(8)]}),
    Case("a quick build", {"build.tier": "Development"}),
    Case("a quick build of what asks for INT8", {"build.tier": "Development", "engine.precision": "INT8",
                                                 "engine.calibration": CALIBRATION}),
    Case("no build", {"build.tier": "Production"}),
    Case("a build elsewhere", {"build.nodeSelector": {"pool": "build"}, "build.deadline": "24h", "build.retries": 0,
                               "build.resources": {"limits": {"cpu": 2, "memory": "4Gi"}}}),
    Case("no simplification", {"build.simplify": False}),
    Case("simplification", {"build.simplify": True}),
    Case("regression", {"verify.task": "Regression"}),
    Case("embedding", {"verify.task": "Embedding"}),
    Case("raw", {"verify.task": "Raw"}),
    Case("other thresholds", {"verify.thresholds": {"top1Delta": 0.02, "rmseIncrease": 0, "cosine": 1}}),
    Case("zero replicas", {"serving.replicas": 0}),
    Case("one host and eight lanes", {"serving.hosts": 1, "serving.contexts": 8}),
    Case("eight hosts, and lanes by measurement", {"serving.hosts": 8, "serving.contexts": "Auto"}),
    Case("a probe each second", {"serving.healthInterval": "1s"}),
    Case("no retries", {"serving.retry": {"attempts": 1, "budgetPercent": 0, "hedgeAfter": "1ms"}}),
    Case("hedging by measurement", {"serving.retry": {"attempts": 10, "budgetPercent": 100, "hedgeAfter": "Auto"}}),
    Case("one bucket", {"serving.batching": {"buckets": [1]}}),
    Case("sixteen buckets", {"serving.batching": {"buckets": list(range(1, 17)), "maxDelay": "10s", "maxQueue": 1}}),
    Case("an error instead of the standby", {"serving.fallback": "Error"}),
    Case("both ports elsewhere", {"serving.service": {"http": 80, "grpc": 443}}),
    Case("ports the other way round", {"serving.service": {"http": 9000, "grpc": 8080}}),
    Case("memory before availability", {"rollout.memoryPolicy": "Resource", "rollout.allowDowntime": True}),
    Case("an image of one's own", {"serving.image": "registry.example.com:5000/worker@sha256:" + "ab" * 32}),
    Case("another Service", {"serving.service": {"name": "files", "http": 80}}),
    Case("pod settings", {"serving.pod": {
        "labels": {"team": "vision"}, "annotations": {"example.com/owner": "me"}, "env": [{"name": "A", "value": ""}],
        "imagePullSecrets": [{"name": "registry"}], "serviceAccountName": "reader", "priorityClassName": "high"}}),
    Case("node affinity", {"serving.pod": {"affinity": {"nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]}]},
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 1, "preference": {"matchExpressions": [{"key": "fast", "operator": "Exists"}]}}]}}}}),
    Case("pod affinity", {"serving.pod": {"affinity": {"podAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": "db"}}, "namespaces": ["x"]}]}}}}),
    Case("one step by share", {"rollout.steps": [{"workers": "10%"}]}),
    Case("a step without a hold", {"rollout.steps": [{"workers": 1, "hold": "0s", "shadow": 0}]}),
    Case("ten steps", {"rollout.steps": [{"workers": n} for n in range(1, 11)]}),
    Case("all durations", {"rollout.analysis.interval": "1m30s", "rollout.progressDeadline": "2h",
                           "serving.requestTimeout": "1s500ms"}),
    Case("another analysis", {"rollout.analysis": {"minRequests": 150, "maxErrorRateIncrease": 0.02,
                                                   "maxLatencyRatio": 2, "noData": "Hold"}}),
    Case("empty lists", {"rollout.analysis": {"prometheus": [], "webhooks": []}}),
    Case("a plan of all kinds of steps", {"rollout.promotion": "Manual", "rollout.steps": [
        {"workers": 1, "weight": 0, "shadow": 100, "hold": "0s"},
        {"workers": 1, "weight": 1, "shadow": 50, "pause": True},
        {"workers": "100%", "weight": 50, "shadow": 0, "pause": False}, {"workers": 3}]}),
    Case("policies for no data", {"rollout.analysis.noData": "Synthetic"}),
    Case("agreement of mirrored answers", {"rollout": {"steps": [{"workers": 1, "weight": 0, "shadow": 20},
                                                               {"workers": "50%"}],
                                                     "analysis": {"minAgreement": 0.99}}}),
    Case("queries", {"rollout.analysis.prometheus": [
        {"name": "ctr", "query": "sum(rate(clicks[1m]))", "min": 0.9},
        {"name": "lag", "query": "max(lag)", "max": 5, "address": "http://prometheus.monitoring.svc:9090/base"}]}),
    Case("webhooks", {"rollout.analysis.webhooks": [
        {"name": "may-begin", "stage": "ConfirmRollout", "url": "https://hooks.example.com/begin?for=magika"},
        {"name": "may-promote", "stage": "ConfirmPromotion", "url": "http://approvals.ops.svc:80/", "timeout": "500ms"},
        {"name": "chat", "stage": "Event", "url": "https://chat.example.com/hook"}]}),
    Case("today's policies by name", {"rollout.promotion": "Automatic", "rollout.memoryPolicy": "Availability",
                                      "rollout.allowDowntime": False, "deletionPolicy": "Retain",
                                      "build.tier": "Staging"}),
    Case("artifacts that go with it", {"deletionPolicy": "Delete"}),
    Case("a pause", {"rollout.paused": True, "rollout.historyLimit": 20}),
    Case("a name of 40 characters", {".metadata.name": "m" * 40}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_is_accepted(api: Api, case: Case) -> None:
    assert api.refusal(manifest(case.changes)) == ""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_accepted(api: Api, path) -> None:  # type: ignore[no-untyped-def]
    for document in yaml.safe_load_all(path.read_text()):
        if document["kind"] == "TRTModel":
            document["metadata"].pop("namespace", None)
            assert api.refusal(document) == ""


def test_the_least_manifest_gets_every_default(api: Api) -> None:
    spec = api.create(BASE)["spec"]
    assert spec == {
        "source": {"uri": "s3://models/magika/model.onnx"},
        "storage": {"bucket": "engines", "prefix": "trtmodel"},
        "engine": {"runtime": "ONNXRuntime", "precision": "FP32"},
        "targets": [{"name": "default"}],
        "build": {"tier": "Staging", "deadline": "1h", "retries": 2},
        "verify": {
            "task": "Classification",
            "dataset": {"uri": "s3://data/eval.npz", "samples": 2000},
            "thresholds": {"top1Delta": 0.005, "rmseIncrease": 0.01, "cosine": 0.99},
        },
        "serving": {
            "replicas": 1,
            "image": "",
            "healthInterval": "30s",
            "retry": {"attempts": 3, "budgetPercent": 10, "hedgeAfter": "Auto"},
            "batching": {"maxDelay": "0s", "maxQueue": 512},
            "requestTimeout": "5s",
            "fallback": "Standby",
            "service": {"name": "", "http": 8080, "grpc": 9000},
            "pod": {},
        },
        "rollout": {
            "steps": [
                {"workers": 1, "weight": 100, "hold": "2m"},
                {"workers": "50%", "weight": 100, "hold": "2m"},
            ],
            "analysis": {
                "interval": "10s",
                "minRequests": 3000,
                "noData": "Hold",
                "maxErrorRateIncrease": 0.001,
                "maxLatencyRatio": 1.2,
            },
            "promotion": "Automatic",
            "memoryPolicy": "Auto",
            "allowDowntime": False,
            "onTargetFailure": "RollbackAll",
            "progressDeadline": "30m",
            "historyLimit": 5,
            "paused": False,
        },
        "deletionPolicy": "Retain",
    }


def test_steps_and_calibration_get_their_defaults(api: Api) -> None:
    changes = {
        "engine.precision": "INT8",
        "engine.calibration": CALIBRATION,
        "rollout.steps": [{"workers": "25%"}],
    }
    spec = api.create(manifest(changes))["spec"]
    assert spec["engine"]["calibration"] == {**CALIBRATION, "samples": 500, "method": "Entropy", "perChannel": True}
    assert spec["rollout"]["steps"] == [{"workers": "25%", "weight": 100, "hold": "2m"}]
