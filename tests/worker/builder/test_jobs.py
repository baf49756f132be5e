"""Jobs as the operator starts them, against a bucket: what they answer, and what is in the bucket afterwards."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx_models as models
import pytest
from job_harness import Jobs, make_jobs, profiles, save_npz
from trtmodel_contract.codec import dumps
from trtmodel_contract.exitcodes import JobExit
from trtmodel_contract.gate import Task, Thresholds, Verdict, judge
from trtmodel_contract.identity import EngineSettings, KeepPrecision
from trtmodel_contract.jobs import CalibrationRequest, JobResult, Reason
from trtmodel_contract.manifest import Manifest
from trtmodel_worker.engines.registry import runtime
from trtmodel_worker.host import proving
from trtmodel_worker.storage import ArtifactStore

RANDOM = np.random.default_rng(3)
LOOSE = Thresholds(top1_delta=0.05, rmse_increase=0.2, cosine=0.9)


def linear_jobs(folder: Path, **changes: object) -> Jobs:
    source = models.linear(folder / "model.onnx")
    x = RANDOM.normal(size=(700, 8)).astype(np.float32)
    dataset = save_npz(folder / "eval.npz", x=x)
    engine = EngineSettings("ONNXRuntime", profiles=profiles("x", 8))
    return make_jobs(folder, source, dataset, **{"engine": engine, "task": Task.CLASSIFICATION, **changes})


def manifest_of(jobs: Jobs, result: JobResult) -> Manifest:
    assert result.build is not None
    return ArtifactStore(jobs.storage, "ml", None).get_manifest(result.build.artifact.manifest_digest)


def test_a_model_goes_from_its_file_to_a_published_engine(tmp_path: Path) -> None:
    jobs = linear_jobs(tmp_path)
    code, resolved = jobs.resolve()
    assert (code, resolved.reason) == (JobExit.DONE, Reason.DONE)
    assert resolved.resolve is not None
    assert resolved.resolve.source_sha256 == hashlib.sha256((tmp_path / "model.onnx").read_bytes()).hexdigest()
    assert resolved.resolve.found == ()
    assert [(t.name, t.datatype, t.shape) for t in resolved.resolve.inputs] == [("x", "FP32", (-1, 8))]

    code, built = jobs.build(resolved.resolve)
    assert (code, built.reason) == (JobExit.DONE, Reason.DONE)
    assert built.build is not None
    manifest = manifest_of(jobs, built)
    assert manifest.load_key == runtime("ONNXRuntime").load_key()
    assert manifest.revision == resolved.resolve.revision
    assert manifest.plan.size == built.build.plan_bytes
    assert manifest.memory.host_bytes > 10 << 20
    assert [golden.rows for golden in manifest.golden] == [1, 4]
    figures = built.build.artifact.figures
    assert figures is not None
    assert (figures.samples, figures.shapes_checked) == (700, (1, 2, 4, 8))

    code, again = jobs.resolve()
    assert again.resolve is not None
    assert [(f.manifest_digest, f.figures) for f in again.resolve.found] == [
        (built.build.artifact.manifest_digest, figures)
    ]


def test_the_published_engine_passes_the_workers_self_test_and_another_one_does_not(tmp_path: Path) -> None:
    jobs = linear_jobs(tmp_path)
    _, built = jobs.build()
    manifest = manifest_of(jobs, built)
    store = ArtifactStore(jobs.storage, "ml", None)
    plan = store.fetch_blob(manifest.plan.digest, manifest.plan.size, tmp_path / "c").read_bytes()
    goldens = [store.fetch_blob(g.blob.digest, g.blob.size, tmp_path / "c").read_bytes() for g in manifest.golden]
    engine = runtime("ONNXRuntime").load(memoryview(plan), manifest.profiles, 3)
    samples = proving.read_samples(manifest, goldens)
    proving.self_test([engine.create_lane(), engine.create_lane()], samples, manifest.outputs)
    for golden, data in zip(manifest.golden, goldens, strict=True):
        arrays = np.load(io.BytesIO(data))
        assert arrays["i0"].shape == (golden.rows, 8)
        assert 0 < golden.tolerances["y"] < 0.01 * np.abs(arrays["o0"]).max()

    models.linear(tmp_path / "model.onnx", seed=1)
    _, other = jobs.build()
    wrong = manifest_of(jobs, other)
    plan = store.fetch_blob(wrong.plan.digest, wrong.plan.size, tmp_path / "c").read_bytes()
    engine = runtime("ONNXRuntime").load(memoryview(plan), manifest.profiles, 3)
    with pytest.raises(proving.SelfTestFailed):
        proving.self_test([engine.create_lane()], samples, manifest.outputs)


def test_what_was_built_is_not_built_again(tmp_path: Path) -> None:
    jobs = linear_jobs(tmp_path)
    _, first = jobs.build()
    before = jobs.objects()
    code, second = jobs.build()
    assert code == JobExit.DONE
    assert first.build is not None
    assert second.build is not None
    assert second.build.reused
    assert second.build.artifact == first.build.artifact
    assert jobs.objects() == before


def test_another_data_set_runs_the_gate_only(tmp_path: Path) -> None:
    jobs = linear_jobs(tmp_path)
    _, first = jobs.build()
    jobs.dataset = save_npz(tmp_path / "other.npz", x=RANDOM.normal(size=(650, 8)).astype(np.float32))
    code, second = jobs.build()
    assert code == JobExit.DONE
    assert first.build is not None
    assert second.build is not None
    assert second.build.reused
    assert second.build.artifact.manifest_digest == first.build.artifact.manifest_digest
    assert second.build.artifact.figures is not None
    assert second.build.artifact.figures.samples == 650
    assert len([name for name in jobs.objects() if name.endswith("manifest.json")]) == 1
    assert len([name for name in jobs.objects() if name.startswith("gates/")]) == 2


def test_thresholds_that_change_need_no_new_gate(tmp_path: Path) -> None:
    jobs = linear_jobs(tmp_path)
    jobs.build()
    shutil.move(tmp_path / "eval.npz", tmp_path / "gone.npz")
    jobs.thresholds = Thresholds(top1_delta=0.0001)
    shutil.copy(tmp_path / "gone.npz", tmp_path / "eval.npz")
    code, result = jobs.build()
    assert (code, result.reason) == (JobExit.INCONCLUSIVE, Reason.GATE_INCONCLUSIVE)
    assert "samples would" in result.message
    assert result.build is not None
    assert result.build.reused
    assert result.build.gate_seconds == 0


def test_a_revoked_build_is_replaced_by_the_next_number(tmp_path: Path) -> None:
    jobs = linear_jobs(tmp_path)
    _, first = jobs.build()
    (marker,) = jobs.bucket.rglob("1/manifest.json")
    (marker.parent / "revoked").touch()
    _, second = jobs.build()
    assert first.build is not None
    assert second.build is not None
    assert not second.build.reused
    assert second.build.artifact.number == 2


def test_A05_an_fp16_engine_that_overflows_fails_the_gate(tmp_path: Path) -> None:
    source = models.square(tmp_path / "model.onnx")
    engine = EngineSettings("ONNXRuntime", precision="FP16", profiles=profiles("x", 1))
    jobs = make_jobs(
        tmp_path, source, save_npz(tmp_path / "1.npz", x=np.tile([[1], [2], [3]], (9, 1)).astype("f4")), engine=engine
    )
    code, fine = jobs.build()
    assert (code, fine.reason) == (JobExit.DONE, Reason.DONE)

    jobs.dataset = save_npz(tmp_path / "2.npz", x=np.array([[1], [2], [3], [300]], np.float32))
    code, result = jobs.build()
    assert (code, result.reason) == (JobExit.REJECTED, Reason.GATE_FAILED)
    assert "NaN or infinite" in result.message
    assert result.build is not None
    assert result.build.artifact.figures is not None
    assert judge(result.build.artifact.figures, Thresholds(1, 1e9, -1)).verdict is Verdict.FAIL


def test_keeping_the_node_that_overflows_passes_the_gate_and_is_another_revision(tmp_path: Path) -> None:
    source = models.square(tmp_path / "model.onnx")
    engine = EngineSettings("ONNXRuntime", precision="FP16", profiles=profiles("x", 1))
    data = save_npz(tmp_path / "d.npz", x=np.array([[1], [2], [3], [300]], np.float32))
    jobs = make_jobs(tmp_path, source, data, engine=engine)
    _, plain = jobs.resolve()
    jobs.engine = dataclasses.replace(engine, keep_precision=KeepPrecision(("square",)))
    code, kept = jobs.build()
    assert (code, kept.reason) == (JobExit.DONE, Reason.DONE)
    assert plain.resolve is not None
    assert kept.build is not None
    assert kept.build.revision != plain.resolve.revision


def test_int8_is_calibrated_and_the_calibration_decides_the_revision(tmp_path: Path) -> None:
    source = models.convolution(tmp_path / "model.onnx")
    images = RANDOM.normal(size=(600, 3, 8, 8)).astype(np.float32)
    data, calibration = save_npz(tmp_path / "eval.npz", x=images[64:]), save_npz(tmp_path / "c.npz", x=images[:64])
    engine = EngineSettings("ONNXRuntime", precision="INT8", profiles=profiles("x", 3, 8, 8))
    request = CalibrationRequest(dataclasses.replace(calibration, samples=64))
    jobs = make_jobs(tmp_path, source, data, engine=engine, calibration=request, thresholds=LOOSE)
    code, result = jobs.build()
    assert (code, result.reason) == (JobExit.DONE, Reason.DONE), result.message
    manifest = manifest_of(jobs, result)
    assert (manifest.build["precision"], manifest.build["quantizedNodes"]) == ("INT8", "2 of 2")
    save_npz(tmp_path / "c.npz", x=images[1:65])
    _, other = jobs.resolve()
    assert other.resolve is not None
    assert other.resolve.revision != manifest.revision


def test_calibration_means_nothing_to_other_precisions(tmp_path: Path) -> None:
    jobs = linear_jobs(tmp_path)
    _, without = jobs.resolve()
    jobs.calibration = CalibrationRequest(dataclasses.replace(jobs.dataset, uri="s3://not/looked-at.npz"))
    _, with_it = jobs.resolve()
    assert without.resolve == with_it.resolve


def test_a_damaged_graph_fails_the_gate_but_its_engine_is_kept_for_other_thresholds(tmp_path: Path) -> None:
    """The gate compares with the original: damage is what INT8 does with calibration data of another world."""
    source = models.convolution(tmp_path / "model.onnx")
    images = RANDOM.normal(size=(600, 3, 8, 8)).astype(np.float32)
    data, calibration = save_npz(tmp_path / "eval.npz", x=images), save_npz(tmp_path / "c.npz", x=images[:8] * 0.001)
    engine = EngineSettings("ONNXRuntime", precision="INT8", profiles=profiles("x", 3, 8, 8))
    jobs = make_jobs(tmp_path, source, data, engine=engine, calibration=CalibrationRequest(calibration))
    code, result = jobs.build()
    assert (code, result.reason) == (JobExit.REJECTED, Reason.GATE_FAILED)
    assert result.build is not None
    assert [name for name in jobs.objects() if name.endswith("manifest.json")]


def test_labels_decide_where_there_are_some(tmp_path: Path) -> None:
    jobs = linear_jobs(tmp_path)
    x = RANDOM.normal(size=(400, 8)).astype(np.float32)
    jobs.dataset = save_npz(tmp_path / "l.npz", x=x, labels=np.zeros(400, np.int64))
    jobs.thresholds = Thresholds(top1_delta=0.01)
    code, result = jobs.build()
    assert code == JobExit.DONE
    assert "labelled samples" in result.message


def test_a_source_that_changed_since_it_was_resolved_is_resolved_again(tmp_path: Path) -> None:
    jobs = linear_jobs(tmp_path)
    _, resolved = jobs.resolve()
    assert resolved.resolve is not None
    models.linear(tmp_path / "model.onnx", seed=1)
    code, result = jobs.build(resolved.resolve)
    assert (code, result.reason) == (JobExit.SOURCE_CHANGED, Reason.SOURCE_CHANGED)
    assert "resolve again" in result.message


def test_a_data_set_that_changed_since_it_was_resolved_is_resolved_again(tmp_path: Path) -> None:
    jobs = linear_jobs(tmp_path)
    _, resolved = jobs.resolve()
    assert resolved.resolve is not None
    save_npz(tmp_path / "eval.npz", x=np.ones((9, 8), np.float32))
    code, result = jobs.build(resolved.resolve)
    assert (code, result.reason) == (JobExit.SOURCE_CHANGED, Reason.SOURCE_CHANGED)


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        ({"pin": "0" * 64}, Reason.DIGEST_MISMATCH, "spec.source.sha256"),
        ({"source": "file:///absent/model.onnx"}, Reason.SOURCE_NOT_FOUND, "source: "),
        ({"task": Task.EMBEDDING, "engine": EngineSettings("ONNXRuntime")}, Reason.PROFILE_MISMATCH, "'x'"),
        (
            {"engine": EngineSettings("ONNXRuntime", precision="FP8", profiles=profiles("x", 8))},
            Reason.PRECISION_UNSUPPORTED,
            "FP8",
        ),
        (
            {"engine": EngineSettings("ONNXRuntime", precision="INT8", profiles=profiles("x", 8))},
            Reason.PRECISION_UNSUPPORTED,
            "calibration",
        ),
    ],
)
def test_what_cannot_work_is_rejected_for_good_before_a_build(
    tmp_path: Path, change: dict[str, object], reason: Reason, words: str
) -> None:
    code, result = dataclasses.replace(linear_jobs(tmp_path), **change).resolve()  # type: ignore[arg-type]
    assert (code, result.reason) == (JobExit.REJECTED, reason)
    assert words in result.message


def test_an_empty_data_set_and_one_of_the_wrong_shape_are_rejected(tmp_path: Path) -> None:
    jobs = linear_jobs(tmp_path)
    for number, (array, words) in enumerate(((np.ones((0, 8), "f4"), "no sample"), (np.ones((3, 7), "f4"), "[3, 7]"))):
        jobs.dataset = save_npz(tmp_path / f"{number}.npz", x=array)
        code, result = jobs.resolve()
        assert (code, result.reason) == (JobExit.REJECTED, Reason.DATASET_INVALID)
        assert words in result.message


def test_a_missing_data_set_is_named_by_its_field(tmp_path: Path) -> None:
    jobs = linear_jobs(tmp_path)
    jobs.dataset = dataclasses.replace(jobs.dataset, uri="file:///absent.npz")
    code, result = jobs.resolve()
    assert (code, result.reason) == (JobExit.REJECTED, Reason.SOURCE_NOT_FOUND)
    assert result.message.startswith("verify.dataset: ")


def test_a_bucket_that_does_not_exist_is_rejected_and_storage_that_is_down_is_retried(tmp_path: Path) -> None:
    jobs = linear_jobs(tmp_path)
    shutil.rmtree(tmp_path / "bucket/engines")
    code, result = jobs.resolve()
    assert (code, result.reason) == (JobExit.REJECTED, Reason.BUCKET_NOT_FOUND)
    jobs.source = "http://127.0.0.1:1/model.onnx"
    code, result = jobs.resolve()
    assert (code, result.reason) == (JobExit.RETRY, Reason.STORAGE_UNAVAILABLE)


def test_A10_a_profile_of_zeros_is_rejected_with_its_tensor(tmp_path: Path) -> None:
    jobs = linear_jobs(tmp_path)
    _, resolved = jobs.resolve()
    assert resolved.resolve is not None
    task = json.loads(dumps(jobs.build_task(resolved.resolve)))
    for bad in ([0, 8], [-1, 8]):
        task["engine"]["profiles"][0]["inputs"]["x"] = {"min": bad, "opt": bad, "max": bad}
        code, result = jobs.run("build", json.dumps(task))
        assert code == JobExit.REJECTED
        assert "profiles[0].inputs.x" in result.message


@pytest.mark.parametrize("task", ["", "{}", '{"schema":"trtmodel.io/resolve-task/v9"}'])
def test_a_task_that_is_not_understood_is_rejected_with_a_message(tmp_path: Path, task: str) -> None:
    code, result = linear_jobs(tmp_path).run("resolve", task)
    assert (code, result.reason) == (JobExit.REJECTED, Reason.INTERNAL)
    assert "TRTMODEL_TASK" in result.message


def test_settings_that_do_not_make_the_tasks_revision_are_rejected(tmp_path: Path) -> None:
    jobs = linear_jobs(tmp_path)
    _, resolved = jobs.resolve()
    assert resolved.resolve is not None
    task = dataclasses.replace(jobs.build_task(resolved.resolve), revision="0123456789")
    code, result = jobs.run("build", task)
    assert (code, result.reason) == (JobExit.REJECTED, Reason.INTERNAL)
    assert "0123456789" in result.message


def _stage_pid(parent: int) -> int | None:
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            command = (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == parent and b"builder.stages" in command:
            return int(path.parent.name)
    return None


def _job_in_a_stage(jobs: Jobs, folder: Path) -> tuple[subprocess.Popen[bytes], int, Path]:
    """A running build Job, its stage's process, and its termination log. Its cache is `folder`/cache."""
    _, resolved = jobs.resolve()
    assert resolved.resolve is not None
    log = folder / "log"
    variables = {
        "TRTMODEL_TASK": dumps(jobs.build_task(resolved.resolve)).decode(),
        "TRTMODEL_CACHE_DIR": str(folder / "cache"),
        "TRTMODEL_TERMINATION_LOG": str(log),
    }
    process = subprocess.Popen([sys.executable, "-m", "trtmodel_worker", "build"], env={**os.environ, **variables})
    deadline = time.monotonic() + 60
    child = None
    while child is None and time.monotonic() < deadline and process.poll() is None:
        child = _stage_pid(process.pid)
    assert child is not None
    return process, child, log


def test_a_job_that_is_asked_to_end_ends_at_once_with_its_stage_and_leaves_nothing(tmp_path: Path) -> None:
    process, child, log = _job_in_a_stage(linear_jobs(tmp_path), tmp_path)
    process.terminate()
    assert process.wait(timeout=5) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{child}").exists()
    assert not log.exists()
    assert list((tmp_path / "cache").glob("work-*")) == []


def test_a_builder_that_is_killed_leaves_the_job_able_to_say_so(tmp_path: Path) -> None:
    jobs = linear_jobs(tmp_path)
    process, child, log = _job_in_a_stage(jobs, tmp_path)
    os.kill(child, signal.SIGKILL)
    assert process.wait(timeout=60) == JobExit.RETRY
    result = json.loads(log.read_bytes())
    assert result["reason"] == Reason.BUILD_FAILED.value
    assert "memory" in result["message"]
    assert not jobs.bucket.exists() or "engines" not in {p.name for p in jobs.bucket.iterdir()}
    assert list((tmp_path / "cache").glob("work-*")) == []


def test_two_jobs_that_build_at_once_agree_on_one_engine(tmp_path: Path) -> None:
    jobs = linear_jobs(tmp_path)
    _, resolved = jobs.resolve()
    assert resolved.resolve is not None
    task = dumps(jobs.build_task(resolved.resolve)).decode()
    running = []
    for number in range(2):
        variables = {
            "TRTMODEL_TASK": task,
            "TRTMODEL_CACHE_DIR": str(tmp_path / f"c{number}"),
            "TRTMODEL_TERMINATION_LOG": str(tmp_path / f"log{number}"),
        }
        command = [sys.executable, "-m", "trtmodel_worker", "build"]
        running.append(subprocess.Popen(command, env={**os.environ, **variables}))
    assert [process.wait(timeout=100) for process in running] == [0, 0]
    digests = {json.loads((tmp_path / f"log{n}").read_bytes())["build"]["artifact"]["manifestDigest"] for n in range(2)}
    assert len(digests) == 1
    assert len([name for name in jobs.objects() if name.endswith("manifest.json")]) == 1
