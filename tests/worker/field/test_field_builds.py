"""Cases from the field (group E): builds that run out of memory, once or each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_models as models
import pytest
from job_harness import Jobs, make_jobs, profiles, save_npz
from trtmodel_contract.exitcodes import FINAL_JOB_EXITS, JobExit
from trtmodel_contract.gate import Task
from trtmodel_contract.identity import EngineSettings
from trtmodel_contract.jobs import JobResult, Reason

STUB = Path(__file__).parent / "stub_builder"
SHORT = "requested 15 GB, 2 GB are free: could not find any implementation for node conv1"


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    source = models.linear(tmp_path / "model.onnx")
    x = np.random.default_rng(3).normal(size=(700, 8)).astype(np.float32)
    settings = EngineSettings("ONNXRuntime", profiles=profiles("x", 8))
    data = save_npz(tmp_path / "eval.npz", x=x)
    return make_jobs(tmp_path, source, data, engine=settings, task=Task.CLASSIFICATION)


def tries(jobs: Jobs, fails: Path, most: int) -> list[tuple[int, JobResult]]:
    """The pods of one build Job, as Kubernetes starts them: another one after each exit that is not final."""
    environment: dict[str, Any] = {"PYTHONPATH": str(STUB), "BUILDER_FAILS": str(fails)}
    _, resolved = jobs.resolve()
    found: list[tuple[int, JobResult]] = []
    while len(found) < most and (not found or found[-1][0] not in (JobExit.DONE, *FINAL_JOB_EXITS)):
        found.append(jobs.build(resolved.resolve, **environment))
    return found


@pytest.mark.long
@pytest.mark.parametrize("how", ["device", "host"])
def test_E12_a_build_that_runs_out_of_memory_once_is_tried_again_and_succeeds(
    jobs: Jobs, tmp_path: Path, how: str
) -> None:
    fails = tmp_path / "fails"
    fails.mkdir()
    (fails / how).write_text(SHORT)
    (first, short), (second, built) = tries(jobs, fails, 3)
    assert (first, short.reason) == (JobExit.RETRY, Reason.BUILD_FAILED)
    assert SHORT in short.message  # which attempt failed and why stays in its pod's status
    assert (second, built.reason) == (JobExit.DONE, Reason.DONE)
    assert built.build is not None
    assert built.build.artifact.number == 1  # what failed left nothing in the bucket
    assert len([name for name in jobs.objects() if name.endswith("manifest.json")]) == 1


@pytest.mark.long
def test_E12_a_build_that_never_has_enough_memory_points_at_it_each_time_and_publishes_nothing(
    jobs: Jobs, tmp_path: Path
) -> None:
    fails = tmp_path / "fails"
    fails.mkdir()
    (fails / "always").write_text(SHORT)
    found = tries(jobs, fails, 3)
    assert [code for code, _ in found] == [JobExit.RETRY] * 3
    for _, result in found:
        assert result.reason is Reason.BUILD_FAILED
        assert SHORT in result.message
        assert "spec.build.resources.limits.memory" in result.message
        assert "spec.engine.workspace" in result.message
    assert jobs.objects() == [] if jobs.bucket.exists() else True
