"""From an ONNX file through the Jobs into a worker, with the runtime that is shipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_models
import onnxruntime as ort
import pytest
from job_harness import make_jobs, profiles, save_npz
from trtmodel_contract.gate import Task
from trtmodel_contract.identity import EngineSettings
from trtmodel_contract.jobs import BuildResult, FoundArtifact
from trtmodel_worker.engines.registry import runtime
from worker_harness import MODEL, Bucket, Operator, WorkerProcess, fp32


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[tuple[BuildResult, ort.InferenceSession]]]:
    """Two classifiers of other weights, built and gated; the storage and each with its reference."""
    folder = tmp_path_factory.mktemp("built")
    data = save_npz(folder / "eval.npz", x=np.random.default_rng(1).normal(size=(700, 8)).astype(np.float32))
    found = []
    for seed in (1, 2):
        source = onnx_models.linear(folder / f"model-{seed}.onnx", seed=seed)
        engine = EngineSettings("ONNXRuntime", profiles=profiles("x", 8))
        jobs = make_jobs(folder, source, data, engine=engine, task=Task.CLASSIFICATION)
        code, result = jobs.build()
        assert code == 0, result.message
        assert result.build is not None
        found.append((result.build, ort.InferenceSession(source)))
    return jobs.storage, found


def test_built_engines_answer_as_the_onnx_file_does_before_and_after_a_swap(
    start_worker: Callable[..., WorkerProcess], operator: Operator, bucket: Bucket, built: Any
) -> None:
    storage, engines = built
    bucket.storage = storage
    worker = start_worker(TRTMODEL_RUNTIME="ONNXRuntime")
    artifacts: list[FoundArtifact] = [result.artifact for result, _ in engines]
    signed = [operator.artifact(r.revision, r.artifact.manifest_digest, MODEL) for r, _ in engines]
    assert artifacts[0].load_key == runtime("ONNXRuntime").load_key()
    worker.point(signed[0], load_key=artifacts[0].load_key)
    worker.start()
    worker.wait_ready()
    random = np.random.default_rng(7)
    for number, (result, reference) in enumerate(engines):
        if number:
            worker.desire(signed[number], standby=signed[0])
            worker.wait_routed(signed[number].manifest_digest)
        for rows in (1, 3, 8):
            x = random.normal(size=(rows, 8)).astype(np.float32)
            answer = worker.infer(fp32([float(v) for v in x.flat], [rows, 8]))
            assert answer.revision == result.revision
            (expected,) = reference.run(None, {"x": x})
            (output,) = answer.json["outputs"]
            assert output["shape"] == list(expected.shape)
            np.testing.assert_allclose(np.array(output["data"]), expected.ravel(), rtol=1e-5, atol=1e-6)
    report = worker.report()
    assert report.load_key == artifacts[0].load_key
    loaded = worker.engine(signed[1].manifest_digest)
    assert loaded is not None
    assert loaded.load_seconds is not None
    assert loaded.load_seconds < 10.0
    assert worker.infer(fp32([0.0] * 9 * 8, [9, 8])).status == 400
