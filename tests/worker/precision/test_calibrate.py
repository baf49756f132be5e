"""Ranges: streamed, of bounded size, and never of nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_models as models
import pytest
from trtmodel_contract.jobs import Reason
from trtmodel_worker.engines.building import Rejected
from trtmodel_worker.engines.precision import calibrate


def batches(*values: np.ndarray) -> Iterator[dict[str, np.ndarray]]:
    return ({"x": value.astype(np.float32).reshape(-1, 1)} for value in values)


def ranges(folder: Path, method: str, *values: np.ndarray) -> calibrate.Range:
    """Of y = x * x and of x."""
    model = onnx.shape_inference.infer_shapes(onnx.load(models.square(folder / "m.onnx")))
    return calibrate.ranges(model, {"x", "absent"}, batches(*values), method, folder)["x"]


def test_the_range_of_minmax_is_that_of_all_batches(tmp_path: Path) -> None:
    found = ranges(tmp_path, "MinMax", np.array([-1.0, 2.0]), np.array([0.5, 7.0]), np.array([-3.0]))
    assert (found.low, found.high) == (-3, 7)


def test_values_that_are_no_number_have_no_say(tmp_path: Path) -> None:
    for method in calibrate.METHODS:
        found = ranges(tmp_path, method, np.array([np.nan, 1.0, np.inf, -2.0]))
        assert (found.low, found.high) == (-2, 1)


def test_a_range_of_values_of_which_none_is_a_number_is_not_guessed(tmp_path: Path) -> None:
    for method in calibrate.METHODS:
        with pytest.raises(Rejected, match="every value of 'x' is NaN or infinite"):
            ranges(tmp_path, method, np.array([np.nan, np.inf]))


@pytest.mark.parametrize("method", calibrate.METHODS)
def test_neither_the_order_of_batches_nor_their_number_changes_a_range(tmp_path: Path, method: str) -> None:
    values = np.random.default_rng(0).normal(size=4_096)
    parts = np.split(values, 64)
    whole = ranges(tmp_path, method, values)
    for order in (parts, parts[::-1], sorted(parts, key=lambda part: float(np.abs(part).max()))):
        found = ranges(tmp_path, method, *order)
        assert found == whole


def test_entropy_clips_what_is_far_out_and_minmax_does_not(tmp_path: Path) -> None:
    values = np.append(np.random.default_rng(0).normal(size=20_000), [1_000.0])
    assert ranges(tmp_path, "MinMax", values).high == 1_000
    assert 1.5 < ranges(tmp_path, "Entropy", values).high < 100


def test_entropy_keeps_an_even_spread_whole(tmp_path: Path) -> None:
    found = ranges(tmp_path, "Entropy", np.random.default_rng(0).uniform(-4, 4, 50_000))
    assert found.high == pytest.approx(4, rel=0.05)
    assert found.low == pytest.approx(-4, rel=0.05)


def test_a_histogram_stays_as_small_as_it_was_whatever_comes() -> None:
    """ONNX Runtime's own makes as many bins as a later, larger value takes of the first batch's width: here 10**12."""
    histogram = calibrate._Histogram()
    for size in (1e-6, 1.0, 1e6, 1e-6):
        histogram.add(np.full(100, size, np.float32))
    assert histogram.counts.shape == (calibrate.BINS,)
    assert histogram.counts.sum() == 400
    assert histogram.top >= 1e6


def test_after_a_relu_the_zeros_do_not_drown_the_rest(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    values = np.maximum(0, random.normal(size=40_000)) * (random.random(40_000) < 0.1)
    found = ranges(tmp_path, "Entropy", values)
    assert found.low == 0
    assert found.high > 2


@pytest.mark.parametrize("method", calibrate.METHODS)
def test_A27_without_data_there_is_no_range(tmp_path: Path, method: str) -> None:
    with pytest.raises(Rejected, match="never guessed") as e:
        ranges(tmp_path, method)
    assert e.value.reason is Reason.DATASET_INVALID


def test_data_that_the_model_does_not_run_with_is_refused(tmp_path: Path) -> None:
    model = onnx.load(models.square(tmp_path / "m.onnx"))
    with pytest.raises(Rejected, match="does not run with the calibration data") as e:
        calibrate.ranges(model, {"x"}, [{"z": np.ones((1, 1), np.float32)}], "MinMax", tmp_path)
    assert e.value.reason is Reason.DATASET_INVALID


def test_a_tensor_that_is_always_zero_has_a_range_of_zero(tmp_path: Path) -> None:
    for method in calibrate.METHODS:
        found = ranges(tmp_path, method, np.zeros(4))
        assert (found.low, found.high) == (0, 0)
