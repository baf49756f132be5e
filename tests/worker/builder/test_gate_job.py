"""The gate with engines that are wrong in one way each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx_models as models
import pytest
from job_harness import profiles
from trtmodel_contract.gate import GateFigures, Task, Thresholds, Verdict, judge
from trtmodel_contract.jobs import DataSet
from trtmodel_worker.builder import gate
from trtmodel_worker.builder.dataset import DataSetFile
from trtmodel_worker.engines.registry import builder

Answer = Callable[[np.ndarray], np.ndarray]
LIMITS = Thresholds(top1_delta=0.05)


class WrongLane:
    """A lane whose answer is a function of the input."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.sizes = answer, []  # type: ignore[var-annotated]

    def run(
        self, inputs: Mapping[str, np.ndarray], allocate: Callable[[str, np.dtype, tuple[int, ...]], np.ndarray]
    ) -> dict[str, np.ndarray]:
        self.sizes.append(len(inputs["x"]))
        found = self.answer(inputs["x"])
        mine = allocate("y", found.dtype, found.shape)
        mine[:] = found
        return {"y": mine}


def measured(
    folder: Path, make: Callable[[Answer], Answer], samples: int = 101, task: Task = Task.CLASSIFICATION
) -> GateFigures:
    source = models.linear(folder / "model.onnx")
    np.savez(folder / "d.npz", x=np.random.default_rng(0).normal(size=(101, 8)).astype(np.float32))
    reference = gate.Reference(source, 1)
    graph = builder("ONNXRuntime").inspect(source)
    data = DataSetFile(folder / "d.npz", "d.npz", graph.inputs, profiles("x", 8))
    lane = WrongLane(make(lambda x: reference.run({"x": x})["y"]))
    found = gate.measure(reference, lane, graph, data, DataSet("d.npz", samples, "0" * 64), task)
    assert set(lane.sizes) == {1, 2, 4, 8}
    return found.figures


def test_an_engine_that_answers_right_passes_and_a_partial_last_batch_is_counted_once(tmp_path: Path) -> None:
    found = measured(tmp_path, lambda right: right)
    assert (found.samples, found.shapes_checked) == (101, (1, 2, 4, 8))
    assert judge(found, LIMITS).verdict is Verdict.PASS


@pytest.mark.parametrize("size", [1, 8])
def test_an_engine_that_is_wrong_in_one_batch_size_fails(tmp_path: Path, size: int) -> None:
    found = measured(tmp_path, lambda right: lambda x: right(x) if len(x) != size else right(x[::-1]) * -1)
    assert found.top1 is not None
    assert found.top1.disagreements == 0
    assert judge(found, LIMITS).verdict is Verdict.FAIL


def test_an_engine_that_mixes_up_its_rows_fails(tmp_path: Path) -> None:
    assert judge(measured(tmp_path, lambda right: lambda x: right(x)[::-1]), LIMITS).verdict is Verdict.FAIL


def test_an_engine_that_answers_nan_once_fails_whatever_the_limits(tmp_path: Path) -> None:
    def make(right: Answer) -> Answer:
        def answer(x: np.ndarray) -> np.ndarray:
            found = right(x).copy()
            found[0, 0] = np.nan
            return found

        return answer

    assert judge(measured(tmp_path, make), Thresholds(1, 1e9, -1)).verdict is Verdict.FAIL


def test_an_engine_of_other_shapes_fails_and_does_not_crash(tmp_path: Path) -> None:
    assert judge(measured(tmp_path, lambda right: lambda x: right(x)[:, :2]), LIMITS).verdict is Verdict.FAIL


def test_only_the_samples_that_were_asked_for_count(tmp_path: Path) -> None:
    assert measured(tmp_path, lambda right: right, samples=10).samples == 10
