"""The demo's model, on files of this Python installation: what each precision does to its answers."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from trtmodel_contract.gate import GateFigures, Task, Thresholds, Verdict, judge
from trtmodel_contract.identity import EngineSettings, KeepPrecision, Profile, ShapeRange
from trtmodel_contract.jobs import DataSet
from trtmodel_worker.builder import gate, sensitivity
from trtmodel_worker.builder.dataset import DataSetFile
from trtmodel_worker.engines.base import Lane
from trtmodel_worker.engines.building import CalibrationData
from trtmodel_worker.engines.onnxruntime.build import OnnxBuilder
from trtmodel_worker.engines.registry import builder, runtime

pytestmark = pytest.mark.long

TYPES = {".py": "python", ".pyc": "pythonbytecode", ".so": "elf", ".json": "json", ".txt": "txt", ".h": "c"}
PROFILES = (Profile({"bytes": ShapeRange((1, 2048), (8, 2048), (8, 2048))}),)
SAMPLES, CALIBRATION = 240, 32
LIMITS = Thresholds(top1_delta=0.03)
PADDING = 256


@dataclass(frozen=True)
class Magika:
    source: Path
    x: np.ndarray
    folder: Path
    reference: gate.Reference


@pytest.fixture(scope="module")
def magika(tmp_path_factory: pytest.TempPathFactory) -> Magika:
    spec = importlib.util.find_spec("magika")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "models/standard_v3_3/model.onnx"
    labels = json.loads((source.parent / "config.min.json").read_text())["target_labels_space"]
    sys.path.append(str(Path(__file__).parents[3] / "examples/magika"))
    from data import features

    rows, numbers = [], []
    for suffix, label in TYPES.items():
        paths = [
            p for root in ("stdlib", "include", "purelib") for p in Path(sysconfig.get_path(root)).rglob(f"*{suffix}")
        ]
        fit = [p for p in sorted(set(paths)) if 100 < p.stat().st_size < 1 << 22]
        chosen = fit[:: max(1, len(fit) // 60)][:60]
        rows += [features(path) for path in chosen]
        numbers += [labels.index(label)] * len(chosen)
    order = np.random.default_rng(0).permutation(len(rows))
    x, y = np.array(rows, np.int32)[order], np.array(numbers, np.int64)[order]
    folder = tmp_path_factory.mktemp("magika")
    np.savez(folder / "eval.npz", bytes=x[CALIBRATION:], labels=y[CALIBRATION:])
    return Magika(source, x, folder, Remembering(source))


def calibration(magika: Magika, method: str = "MinMax") -> CalibrationData:
    return CalibrationData(({"bytes": magika.x[i : i + 4]} for i in range(0, CALIBRATION, 4)), method, True)


def lane(magika: Magika, data: CalibrationData | None = None, source: Path | None = None, **settings: Any) -> Lane:
    plan = magika.folder / "plan"
    builder("ONNXRuntime").build(source or magika.source, EngineSettings("ONNXRuntime", **settings), data, plan)
    return runtime("ONNXRuntime").load(memoryview(plan.read_bytes()), PROFILES, 64).create_lane()


def figures(magika: Magika, candidate: Lane, samples: int = SAMPLES) -> GateFigures:
    graph = builder("ONNXRuntime").inspect(magika.source)
    data = DataSetFile(magika.folder / "eval.npz", "eval.npz", graph.inputs, PROFILES)
    asked = DataSet("eval.npz", samples, "0" * 64)
    return gate.measure(magika.reference, candidate, graph, data, asked, Task.CLASSIFICATION, PROFILES).figures


class Remembering(gate.Reference):
    """The original's answers are the same in every test: each is computed once."""

    def __init__(self, source: Path) -> None:
        super().__init__(source, 1)
        self._known: dict[bytes, dict[str, np.ndarray]] = {}

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        key = inputs["bytes"].tobytes()
        if key not in self._known:
            self._known[key] = super().run(inputs)
        return self._known[key]


def test_the_optimised_graph_answers_as_the_original(magika: Magika) -> None:
    found = figures(magika, lane(magika, precision="FP32"))
    assert found.samples == SAMPLES
    assert found.top1 is not None
    assert found.top1.disagreements == 0
    assert found.top1.reference_right is not None
    assert found.top1.reference_right > 0.8 * SAMPLES
    assert judge(found, LIMITS).verdict is Verdict.PASS


@pytest.mark.parametrize("method", ["Entropy", "MinMax"])
def test_int8_keeps_the_answers_and_is_much_faster(magika: Magika, method: str) -> None:
    candidate = lane(magika, calibration(magika, method), precision="INT8")
    original = lane(magika, precision="FP32")
    found = figures(magika, candidate)
    verdict = judge(found, LIMITS)
    assert verdict.verdict is Verdict.PASS, verdict.sentence
    assert found.top1 is not None
    assert found.top1.disagreements <= 0.02 * SAMPLES
    spent = {name: [_cpu_seconds(each, magika) for _ in range(8)] for name, each in _both(candidate, original)}
    assert min(spent["original"]) > 1.6 * min(spent["candidate"])


def test_int8_that_was_calibrated_with_a_single_short_text_fails_and_says_how_much_worse_it_is(magika: Magika) -> None:
    text = np.full((1, 2048), PADDING, np.int32)
    text[0, :16] = ord("a")
    one = CalibrationData([{"bytes": text}], "MinMax", True)
    found = figures(magika, lane(magika, one, precision="INT8"))
    verdict = judge(found, LIMITS)
    assert verdict.verdict is Verdict.FAIL
    assert re.match(r"accuracy loss \+\d+\.\d+% on 240 labelled samples \(\d+ worse, \d+ better\)", verdict.sentence)
    assert verdict.sentence.endswith("at 95 % confidence, limit 3.00%")


def test_weights_that_are_damaged_fail_and_the_sentence_says_how_many_answers_got_worse(magika: Magika) -> None:
    """The engine was built of a file in which one weight's rows are shuffled: a truncated upload, a wrong converter."""
    model = onnx.load(magika.source)
    weight = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    values = onnx.numpy_helper.to_array(weight)
    weight.CopyFrom(onnx.numpy_helper.from_array(np.random.default_rng(0).permuted(values, axis=0), weight.name))
    onnx.save(model, magika.folder / "damaged.onnx")
    found = figures(magika, lane(magika, source=magika.folder / "damaged.onnx", precision="FP32"))
    verdict = judge(found, LIMITS)
    assert verdict.verdict is Verdict.FAIL
    assert "on 240 labelled samples" in verdict.sentence
    assert "at 95 % confidence, limit 3.00%" in verdict.sentence


def test_twenty_samples_do_not_prove_half_a_per_cent_and_the_verdict_says_how_many_would(magika: Magika) -> None:
    found = figures(magika, lane(magika, precision="FP32"), samples=20)
    verdict = judge(found, Thresholds(top1_delta=0.005))
    assert verdict.verdict is Verdict.INCONCLUSIVE
    assert "20 labelled samples (0 worse, 0 better) neither proves nor disproves the limit of 0.50%" in verdict.sentence
    assert "about 598 samples would decide" in verdict.sentence


def test_A05_half_precision_overflows_in_its_layer_norm_and_passes_with_the_node_kept_that_is_named(
    magika: Magika,
) -> None:
    verdict = judge(figures(magika, lane(magika, precision="FP16")), LIMITS)
    assert verdict.verdict is Verdict.FAIL
    assert verdict.sentence == "output target_label: every sample got the same answer"
    graph = OnnxBuilder().reduced(magika.source, EngineSettings("ONNXRuntime", "FP16"), None, magika.folder)
    assert graph is not None
    found = sensitivity.find(graph, [{"bytes": magika.x[:4]}], magika.folder)
    assert found is not None
    assert "LayerNorm" in found.kept[0].node
    kept = KeepPrecision(tuple(each.pattern for each in found.kept))
    again = judge(figures(magika, lane(magika, precision="FP16", keep_precision=kept)), LIMITS)
    assert again.verdict is Verdict.PASS, again.sentence


def _both(candidate: Lane, original: Lane) -> list[tuple[str, Lane]]:
    return [("candidate", candidate), ("original", original)]


def _cpu_seconds(each: Lane, magika: Magika) -> float:
    """Processor time of this process: other load on the machine does not count. One thread, since lanes were 64."""
    started = time.process_time()
    each.run({"bytes": magika.x[:8]}, lambda _name, dtype, shape: np.empty(shape, dtype))
    return time.process_time() - started
