"""A model of which an engine was built and proven: resolve finds that out without looking into any file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_models as models
import pytest
from job_harness import Jobs, make_jobs, profiles, save_npz
from trtmodel_contract.gate import Task
from trtmodel_contract.identity import EngineSettings
from trtmodel_worker.builder import check
from trtmodel_worker.builder.resolve import resolve
from trtmodel_worker.builder.sources import Place


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    folder = tmp_path_factory.mktemp("known")
    source = models.linear(folder / "model.onnx")
    rows = np.random.default_rng(3).normal(size=(700, 8)).astype(np.float32)
    engine = EngineSettings("ONNXRuntime", profiles=profiles("x", 8))
    dataset = save_npz(folder / "eval.npz", x=rows)
    jobs = make_jobs(folder, source, dataset, engine=engine, task=Task.CLASSIFICATION)
    code, result = jobs.build()
    assert code == 0, result.message
    return jobs


def place(jobs: Jobs, folder: Path) -> Place:
    return Place(jobs.storage, None, folder / "cache")


def refuse(*_: object) -> None:
    raise AssertionError("the model is checked")


def test_a_model_that_was_built_and_proven_is_resolved_without_a_check_and_with_the_same_answer(
    built: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr("trtmodel_worker.builder.resolve._known", lambda *_: None)
    long_way = resolve(built.resolve_task(), place(built, tmp_path))
    monkeypatch.undo()
    monkeypatch.setattr(check, "check", refuse)
    assert resolve(built.resolve_task(), place(built, tmp_path)) == long_way
    assert len(long_way.found) == 1
    assert long_way.found[0].figures is not None


@pytest.mark.parametrize("change", ["samples", "task", "precision"])
def test_what_was_not_proven_so_is_checked(
    built: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    task = built.resolve_task()
    changed = {
        "samples": {"dataset": type(task.dataset)(task.dataset.uri, 600)},
        "task": {"verify_task": Task.RAW},
        "precision": {"engine": EngineSettings("ONNXRuntime", precision="FP16", profiles=task.engine.profiles)},
    }[change]
    monkeypatch.setattr(check, "check", refuse)
    with pytest.raises(AssertionError, match="is checked"):
        resolve(type(task)(**{**vars(task), **changed}), place(built, tmp_path))


def test_a_jobs_process_begins_without_what_reads_models_and_arrays() -> None:
    """A second and more, in a pod that shares two cores with its neighbours."""
    program = (
        "import sys\nfrom trtmodel_worker.builder import main, resolve\n"
        "heavy = {'numpy', 'onnx', 'onnxruntime', 'boto3'} & set(sys.modules)\nassert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
