"""What a build Job leaves beside the figures, and what it says when a reduced precision fails."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx_models as models
from job_harness import make_jobs, profiles, save_npz
from trtmodel_contract.codec import loads
from trtmodel_contract.gate import GateFigures, Task, Verdict
from trtmodel_contract.identity import EngineSettings
from trtmodel_contract.jobs import Reason
from trtmodel_worker.builder.report import Report

WIDTH = 8


def overflowing(path: Path) -> Path:
    """y = (x W) * 2**20 * 2**-20: in half precision the value between is infinite."""
    random = np.random.default_rng(0)
    nodes = [
        models.node("MatMul", ["x", "w"], ["a"], "/in/MatMul"),
        models.node("Mul", ["a", "large"], ["b"], "/norm/Mul"),
        models.node("Mul", ["b", "small"], ["y"], "/norm/Back"),
    ]
    weights = {"w": random.normal(size=(WIDTH, WIDTH)).astype(np.float32)}
    weights |= {"large": np.array(2.0**20, np.float32), "small": np.array(2.0**-20, np.float32)}
    dims = ("n", WIDTH)
    return models.save(path, nodes, [("x", models.FLOAT, dims)], [("y", models.FLOAT, dims)], weights)


def test_A05_an_overflow_fails_the_job_which_names_the_node_to_keep_and_leaves_a_report(tmp_path: Path) -> None:
    source = overflowing(tmp_path / "model.onnx")
    x = np.random.default_rng(1).normal(size=(64, WIDTH)).astype(np.float32)
    settings = EngineSettings("ONNXRuntime", "FP16", profiles=profiles("x", WIDTH))
    jobs = make_jobs(tmp_path, source, save_npz(tmp_path / "eval.npz", x=x), engine=settings, task=Task.RAW)
    code, result = jobs.build()
    assert (code, result.reason) == (42, Reason.GATE_FAILED)
    assert "NaN or infinite where the reference is finite" in result.message
    assert "try keepPrecision: {nodes: ['^/norm/Mul$']}" in result.message
    assert result.build is not None
    figures = result.build.artifact.figures
    assert figures is not None
    assert figures.keep_hints == ("^/norm/Mul$",)
    _check_report(jobs.bucket, figures, Verdict.FAIL, "/norm/Mul")


def _check_report(bucket: Path, figures: GateFigures, verdict: Verdict, words: str) -> None:
    """Both blobs are there under their digests, and say so."""
    assert figures.report is not None
    found = []
    for blob in (figures.report.json, figures.report.html):
        data = (bucket / "blobs/sha256" / blob.digest).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (blob.size, blob.digest)
        found.append(data.decode())
    document = loads(Report, found[0])
    assert document.verdict is verdict
    assert document.figures.manifest_digest == document.subject.manifest_digest == figures.manifest_digest
    assert document.subject.model == "ml/test"
    assert verdict.value in found[1]
    assert words in found[1]
