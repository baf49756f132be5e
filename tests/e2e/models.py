"""Manifests of the TRTModels under test."""

from __future__ import annotations

from .cluster import Json
from .s3 import DATA, ENGINES, MODELS
from .sources import CLASSES, MAGIKA_SAMPLES, SAMPLES, WIDTH

SECRET = "s3-credentials"
SMALL = {"requests": {"cpu": "25m", "memory": "128Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}}
WORKER = {"requests": {"cpu": "150m", "memory": "128Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}}  # before any build
ROLLOUT: Json = {
    "steps": [{"workers": 1, "hold": "6s"}],
    "analysis": {"interval": "2s", "minRequests": 80, "maxErrorRateIncrease": 0.05, "maxLatencyRatio": 1.5},
    "progressDeadline": "3m",
}
# Where it is not latency that a test is about: workers, builds and tests share two cores.
PATIENT: Json = {
    "steps": [{"workers": 1, "hold": "4s"}],
    "analysis": {"interval": "2s", "minRequests": 60, "maxErrorRateIncrease": 0.05, "maxLatencyRatio": 20},
    "progressDeadline": "3m",
}


def tiny(name: str, endpoint: str, **spec: Json) -> Json:
    """The tiny classifier in FP32, one worker. `spec` replaces whole sections."""
    return _model(
        name,
        {
            "source": {"uri": f"s3://{MODELS}/tiny/a.onnx"},
            "storage": storage(endpoint),
            "engine": {"runtime": "ONNXRuntime", "profiles": [{"inputs": {"x": shapes(WIDTH)}}]},
            "verify": {
                "task": "Classification",
                "dataset": {"uri": f"s3://{DATA}/tiny/eval.npz", "samples": SAMPLES},
                "thresholds": {"top1Delta": 0.05},
            },
            **spec,
        },
        replicas=1,
    )


def magika(name: str, endpoint: str, replicas: int) -> Json:
    return _model(
        name,
        {
            "source": magika_source("model"),
            "storage": storage(endpoint),
            "engine": {
                "runtime": "ONNXRuntime",
                "precision": "FP32",
                "profiles": [{"inputs": {"bytes": shapes(2048)}}],
            },
            "verify": {
                "task": "Classification",
                "dataset": {"uri": f"s3://{DATA}/magika/eval.npz", "samples": MAGIKA_SAMPLES},
                "thresholds": {"top1Delta": 0.05},
            },
        },
        replicas,
    )


def magika_source(variant: str) -> Json:
    return {"uri": f"s3://{MODELS}/magika/{variant}.onnx"}


INT8: Json = {
    "precision": "INT8",
    "calibration": {"uri": f"s3://{DATA}/magika/calib.npz", "samples": 64, "method": "MinMax"},
}


def storage(endpoint: str) -> Json:
    return {"bucket": ENGINES, "endpoint": endpoint, "region": "us-east-1", "credentialsSecret": SECRET}


def shapes(width: int) -> Json:
    return {"min": [1, width], "opt": [4, width], "max": [8, width]}


def tiny_inputs(row: list[float]) -> list[Json]:
    assert len(row) == WIDTH
    return [{"name": "x", "datatype": "FP32", "shape": [1, WIDTH], "data": row}]


def tiny_scores(answer: Json) -> list[float]:
    found: list[float] = answer["outputs"][0]["data"]
    assert len(found) == CLASSES
    return found


def secret(name: str, key: str, secret_key: str) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name},
        "stringData": {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret_key},
    }


def _model(name: str, spec: Json, replicas: int) -> Json:
    common: Json = {
        "build": {"resources": SMALL, "retries": 1, "deadline": "5m"},
        "serving": {"replicas": replicas, "contexts": 1, "pod": {"resources": WORKER if replicas > 1 else SMALL}},
        "rollout": ROLLOUT,
    }
    return {
        "apiVersion": "trtmodel.io/v1alpha1",
        "kind": "TRTModel",
        "metadata": {"name": name},
        "spec": {**common, **spec},
    }
