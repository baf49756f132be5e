"""Builds on a real GPU, by the stages that a build Job runs: plan, gate figures, timing caches. `TRTMODEL_GPU_RUNTIME`
names another runtime to run the same on a machine without a GPU."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from pathlib import Path

import gpu_models
import numpy as np
import pytest
from trtmodel_contract.gate import Task, Thresholds, Verdict, judge
from trtmodel_contract.identity import EngineSettings, KeepPrecision, Profile, ShapeRange
from trtmodel_contract.jobs import CalibrationRequest, DataSet
from trtmodel_worker.builder import child
from trtmodel_worker.builder.stages import LocalData, Request
from trtmodel_worker.engines import registry
from trtmodel_worker.engines.building import Rejected

RUNTIME = os.environ.get("TRTMODEL_GPU_RUNTIME", "TensorRT")
LEVEL = int(os.environ.get("TRTMODEL_GPU_LEVEL", "3"))
QUICK_LEVEL = 1
TIMED_LEVEL = 3  # below, there is little to time
MAGIKA_BYTES, PADDING = 2048, 256
SAMPLES = {"magika": 600, "resnet50": 64}
CALIBRATION_SAMPLES = {"magika": 96, "resnet50": 16}
ROWS = 8

pytestmark = pytest.mark.timeout(240)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, what it is fed with, and a data set of that."""

    name: str
    source: Path
    task: Task
    profile: Profile
    data: Path


@pytest.fixture(scope="session", autouse=True)
def _stages_find_the_worker():
    """They are processes of their own, and the search path of this one is not theirs."""
    root = Path(__file__).parents[2]
    paths = [str(root / "contract"), str(root / "worker"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)


@pytest.fixture(scope="session")
def subjects(tmp_path_factory):
    folder = tmp_path_factory.mktemp("subjects")
    return {"magika": _magika(folder), "resnet50": _resnet(folder)}


def _magika(folder):
    import magika as package

    source = max((Path(package.__file__).parent / "models").glob("standard_v3_*/model.onnx"))
    rows = np.stack([_features(path) for path in _files(SAMPLES["magika"])])
    data = folder / "magika.npz"
    np.savez(data, bytes=rows)
    shapes = ShapeRange((1, MAGIKA_BYTES), (ROWS, MAGIKA_BYTES), (32, MAGIKA_BYTES))
    return Subject("magika", source, Task.CLASSIFICATION, Profile({"bytes": shapes}), data)


def _files(count):
    """Files of many kinds, none near another in the list."""
    found = []
    for root in {Path(np.__file__).parents[1], Path(os.__file__).parent}:
        found += [p for p in sorted(root.rglob("*")) if p.is_file() and p.stat().st_size >= MAGIKA_BYTES]
    kinds = {}
    for path in found:
        kinds.setdefault(path.suffix, []).append(path)
    chosen, turn = [], 0
    while len(chosen) < count and any(len(paths) > turn for paths in kinds.values()):
        chosen += [paths[turn] for paths in kinds.values() if len(paths) > turn]
        turn += 1
    return chosen[:count]


def _features(path):
    """As the package makes them: the first and the last bytes without white space at the ends."""
    half = MAGIKA_BYTES // 2
    with path.open("rb") as f:
        first = f.read(4096).lstrip()[:half]
        f.seek(-4096, os.SEEK_END) if path.stat().st_size >= 4096 else f.seek(0)
        last = f.read().rstrip()[-half:]
    row = np.full(MAGIKA_BYTES, PADDING, np.int32)
    row[: len(first)] = np.frombuffer(first, np.uint8)
    if last:
        row[-len(last) :] = np.frombuffer(last, np.uint8)
    return row


def _resnet(folder):
    """Random weights: figures of answers are of the arithmetic, not of a trained network's margins."""
    source = folder / "resnet50.onnx"
    source.write_bytes(gpu_models.make_resnet50())
    generator = np.random.default_rng(3)
    data = folder / "resnet50.npz"
    images = generator.standard_normal((SAMPLES["resnet50"], 3, 8, 8)).astype(np.float32).repeat(28, 2).repeat(28, 3)
    np.savez(data, image=images + 0.3 * generator.standard_normal(images.shape).astype(np.float32))
    row = (3, 224, 224)
    shapes = ShapeRange((1, *row), (ROWS, *row), (32, *row))
    return Subject("resnet50", source, Task.EMBEDDING, Profile({"image": shapes}), data)


def request(subject, precision, level, work, keep=()):
    settings = EngineSettings(
        runtime=RUNTIME, precision=precision, keep_precision=KeepPrecision(keep) if keep else None,
        profiles=(subject.profile,), workspace_bytes=4 << 30, optimization_level=level,
    )  # fmt: skip
    samples = SAMPLES[subject.name]
    data = LocalData(str(subject.data), DataSet("file:///data.npz", samples, "0" * 64))
    calibration = None
    if precision == "INT8":
        calibration = CalibrationRequest(dataclasses.replace(data.data, samples=CALIBRATION_SAMPLES[subject.name]))
    graph = registry.builder(RUNTIME).inspect(subject.source)
    work.mkdir(parents=True, exist_ok=True)
    return Request(
        source=str(subject.source), plan=str(work / "plan"), folder=str(work), graph=graph, engine=settings,
        task=subject.task, dataset=data, calibration=data if calibration else None, calibration_settings=calibration,
    )  # fmt: skip


def built(asked, work):
    began = time.monotonic()
    answer = child.run("build", asked, work)
    return {
        "seconds": round(time.monotonic() - began, 1), "plan_mib": round(Path(asked.plan).stat().st_size / 2**20, 1),
        **answer.built,
    }  # fmt: skip


def proved(asked, work):
    """The gate's figures and what today's thresholds say of them."""
    began = time.monotonic()
    answer = child.run("prove", asked, work)
    verdict = judge(answer.figures, Thresholds())
    shown = {
        name: {"cosine": o.cosine_mean, "worst": o.cosine_worst, "rmse": o.relative_rmse}
        for name, o in list(answer.figures.outputs.items())[:3]
    }
    top1 = dataclasses.asdict(answer.figures.top1) if answer.figures.top1 else None
    seconds = {"prove_seconds": round(time.monotonic() - began, 1), "gate_seconds": round(answer.gate_seconds, 1)}
    tolerances = [dict(golden.tolerances) for golden in answer.golden]
    return verdict, {
        **seconds, "verdict": verdict.verdict.value, "sentence": verdict.sentence, "outputs": shown, "top1": top1,
        "samples": answer.figures.samples, "shapes": answer.figures.shapes_checked, "golden": tolerances,
    }  # fmt: skip


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "precision", "level", "keep"),
    [
        ("magika", "FP32", LEVEL, ()),
        ("magika", "FP16", LEVEL, ("LayerNorm",)),  # without, 7 of 600 answers differ
        ("magika", "INT8", LEVEL, ("Conv_0/Conv2D$",)),  # without, 8 of 600 answers differ
        ("resnet50", "FP32", QUICK_LEVEL, ()),
        ("resnet50", "FP16", QUICK_LEVEL, ()),
        ("resnet50", "INT8", QUICK_LEVEL, ()),
    ],
)
def test_an_engine_of_each_precision_is_built_and_comes_through_the_gate(
    subjects, name, precision, level, keep, tmp_path, figures, bar
):
    asked = request(subjects[name], precision, level, tmp_path, keep)
    done = built(asked, tmp_path)
    figures(model=name, **done)
    bar(f"{name} {precision} at level {level}: build", done["seconds"], None, "s")
    verdict, found = proved(asked, tmp_path)
    figures(**found)
    worst = min(output["worst"] for output in found["outputs"].values())
    bar(f"{name} {precision}: worst cosine of {found['samples']} samples", worst, None)
    bar(f"{name} {precision}: gate passed", float(verdict.verdict is not Verdict.FAIL), 1, least=True)
    assert verdict.verdict is not Verdict.FAIL, verdict.sentence


@pytest.mark.timeout(400)
def test_a_timing_cache_makes_the_next_build_faster(subjects, tmp_path, figures, bar):
    first, second = tmp_path / "first", tmp_path / "second"
    asked = request(subjects["resnet50"], "FP16", TIMED_LEVEL, first)
    cold = built(asked, first)
    figures(model="resnet50", **cold)
    (second / "timing").mkdir(parents=True)
    shutil.copy(first / "timing" / "built.cache", second / "timing" / "before.cache")
    warm = built(request(subjects["resnet50"], "FP16", TIMED_LEVEL, second), second)
    whats = ("buildSeconds", "engineSeconds")
    ratios = {what: float(cold[what]) / float(warm[what]) for what in whats}
    figures(warm=warm, speed_up={k: round(v, 1) for k, v in ratios.items()})
    bar("timing cache: files of which TensorRT took something", float(warm["timingCaches"]), 1, least=True)
    bar("timing cache: building the engine is faster by", ratios["engineSeconds"], 3, "x", least=True)
    bar("timing cache: the whole build is faster by", ratios["buildSeconds"], 3, "x", least=True)


def test_layers_that_are_to_be_kept_in_full_precision_are(subjects, tmp_path, figures):
    done = built(request(subjects["magika"], "FP16", QUICK_LEVEL, tmp_path, keep=(".*",)), tmp_path)
    figures(**done)
    assert int(done["keptLayers"]) > 0
    assert "FP16" not in done["layersByPrecision"]


def test_a_timing_cache_of_another_device_is_left_alone(subjects, tmp_path, figures):
    from trtmodel_worker.engines.tensorrt import timing

    asked = request(subjects["magika"], "FP16", 0, tmp_path)
    (tmp_path / "timing").mkdir()
    (tmp_path / "timing" / "other.cache").write_bytes(timing.pack("9.9 some other device", b"\x00" * 64))
    (tmp_path / "timing" / "torn.cache").write_bytes(b"half of a header")
    done = built(asked, tmp_path)
    figures(**done)
    assert done["timingCaches"] == "0"


def test_what_the_parser_refuses_is_told_by_node(tmp_path, figures, bar):
    from onnx import TensorProto, helper

    node = helper.make_node("Det", ["x"], ["y"], "determinant")
    graph = helper.make_graph(
        [node], "det",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [])],
    )  # fmt: skip
    source = tmp_path / "det.onnx"
    source.write_bytes(gpu_models.model_of(graph))
    with pytest.raises(Rejected) as refused:
        registry.builder("TensorRT").build(source, EngineSettings("TensorRT"), None, tmp_path / "plan")
    figures(message=refused.value.message)
    told = "'determinant' (Det)" in refused.value.message
    bar("what the parser refuses is told by node, operator and code", float(told), 1, least=True)
    assert told, refused.value.message


def test_an_output_whose_shape_only_the_data_tells_is_built_from_10_on_and_refused_before(tmp_path, figures, bar):
    from trtmodel_worker.engines.tensorrt import compat

    model = gpu_models.nonzero()
    settings = EngineSettings("TensorRT", profiles=model.profiles, optimization_level=0)
    if compat.capabilities(compat.load()).data_shaped_outputs:
        registry.builder("TensorRT").build(model.onnx, settings, None, tmp_path / "plan")
        return
    with pytest.raises(Rejected) as refused:
        registry.builder("TensorRT").build(model.onnx, settings, None, tmp_path / "plan")
    figures(message=refused.value.message)
    left = (tmp_path / "plan").exists()
    bar("an output whose shape only the data tells is refused by the builder", float(not left), 1, least=True)
    assert not left


def test_shapes_that_do_not_fit_are_refused_with_the_input(subjects, tmp_path, figures):
    subject = subjects["magika"]
    wrong = Profile({"bytes": ShapeRange((1, 1000), (1, 1000), (1, 1000))})
    settings = EngineSettings("TensorRT", profiles=(wrong,), optimization_level=0)
    with pytest.raises(Rejected) as refused:
        registry.builder("TensorRT").build(subject.source, settings, None, tmp_path / "plan")
    figures(message=refused.value.message)
    assert refused.value.reason.value == "ProfileMismatch"
