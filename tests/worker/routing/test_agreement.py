"""How near one output is to another: figures that one would write down by hand, and no number that breaks a report."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from trtmodel_contract.codec import encode
from trtmodel_contract.control import AttemptCounts, OutputAgreement, ShadowCounts
from trtmodel_contract.manifest import TensorSpec
from trtmodel_worker.front.agreement import BUDGET_BYTES, MOST_OUTPUTS, Sample, agreement
from trtmodel_worker.front.windows import Windows

DTYPES = [np.dtype(t) for t in ("?", "u1", "i4", "i8", "u8", "f2", "f4", "f8")]


def rows(*values: Any, dtype: str = "f4") -> np.ndarray[Any, Any]:
    return np.array(values, dtype)


def test_equal_answers_agree_wholly() -> None:
    same = rows([0.5, 0.0], [0.0, 0.0])
    assert agreement(same, same.copy()) == OutputAgreement(2, 2, 2, 2.0, 0.0, 0)


def test_each_figure_is_what_its_name_says() -> None:
    found = agreement(rows([3.0, 4.0], [1.0, 0.0], [2.0, 1.0]), rows([6.0, 8.0], [0.0, 1.0], [-2.0, -1.0]))
    assert (found.rows, found.ranked, found.top1_equal, found.incomparable) == (3, 3, 1, 0)
    assert found.cosine == pytest.approx(1.0 + 0.0 - 1.0)
    assert found.relative_error == pytest.approx(1.0 + math.sqrt(2) + 2.0)


@pytest.mark.parametrize(
    ("stable", "candidate", "expected"),
    [
        ([math.nan, 1.0], [math.nan, 1.0], OutputAgreement(1, 1, 1, 1.0, 0.0, 0)),
        ([math.inf, 1.0], [math.inf, 1.0], OutputAgreement(1, 1, 1, 1.0, 0.0, 0)),
        ([1.0, 2.0], [1.0, math.nan], OutputAgreement(1, 1, 0, 0.0, 1.0, 1)),
        ([math.inf, 2.0], [-math.inf, 2.0], OutputAgreement(1, 1, 0, 0.0, 1.0, 1)),
        ([math.nan, 2.0], [5.0, 2.0], OutputAgreement(1, 1, 0, 0.0, 1.0, 1)),
        ([0.0, 0.0], [0.0, 1.0], OutputAgreement(1, 1, 0, 0.0, 1.0, 0)),
        ([1e-30, 0.0], [1.0, 0.0], OutputAgreement(1, 1, 1, 1.0, 1000.0, 0)),
    ],
)
def test_what_is_no_number_or_no_direction_has_a_figure_too(
    stable: list[float], candidate: list[float], expected: OutputAgreement
) -> None:
    assert agreement(rows(stable), rows(candidate)) == expected


def test_one_whole_number_a_row_is_a_first_place_and_one_fraction_is_none() -> None:
    labels = agreement(rows([3], [4], dtype="i8"), rows([3], [5], dtype="i8"))
    assert (labels.ranked, labels.top1_equal) == (2, 1)
    scores = agreement(rows([3.0], [4.0]), rows([3.0], [5.0]))
    assert (scores.rows, scores.ranked, scores.top1_equal) == (2, 0, 0)


@given(st.data())
def test_no_pair_of_outputs_breaks_a_report(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(hnp.array_shapes(min_dims=2, max_dims=2, max_side=5))
    one, other = (data.draw(hnp.arrays(dtype, shape)) for _ in range(2))
    found = agreement(one, other)
    assert found.rows == shape[0]
    assert 0 <= found.top1_equal <= found.ranked <= found.rows
    assert abs(found.cosine) <= found.rows
    assert 0 <= found.relative_error <= 1000 * found.rows
    assert 0 <= found.incomparable <= found.rows
    counts = AttemptCounts(shadow=ShadowCounts(1, outputs={"y": found}))
    assert encode(counts)["shadow"]["outputs"]["y"]["rows"] == found.rows
    assert agreement(one, one.copy()).cosine == pytest.approx(shape[0])
    assert agreement(one, one.copy()).relative_error == 0.0


def views(*arrays: np.ndarray[Any, Any]) -> list[tuple[tuple[int, ...], memoryview]]:
    return [(a.shape, memoryview(a.tobytes())) for a in arrays]


def test_of_a_large_output_the_first_rows_are_compared_and_of_too_large_ones_none() -> None:
    wide = np.ones((1000, 128), np.float32)  # 512 bytes a row
    huge = np.ones((1, BUDGET_BYTES), np.float32)
    specs = [TensorSpec("huge", "FP32", (-1, -1)), TensorSpec("wide", "FP32", (-1, 128))]
    found = Sample(specs, views(huge, wide)).compare(views(huge, wide))
    assert list(found) == ["wide"]
    assert found["wide"].rows == BUDGET_BYTES // 512


def test_outputs_are_compared_up_to_a_number_and_strings_and_scalars_are_not() -> None:
    specs = [TensorSpec("s", "BYTES", (-1,)), TensorSpec("n", "FP32", ()), TensorSpec("none", "FP32", (-1, 2))]
    specs += [TensorSpec(f"y{i}", "FP32", (-1, 2)) for i in range(40)]
    arrays = [np.zeros(4, np.uint8), np.float32(1), np.zeros((0, 2), np.float32)]
    answer = views(*(np.asarray(a) for a in arrays), *[np.ones((1, 2), np.float32)] * 40)
    assert list(Sample(specs, answer).compare(answer)) == [f"y{i}" for i in range(MOST_OUTPUTS)]


def test_another_shape_is_no_agreement() -> None:
    specs = [TensorSpec("y", "FP32", (-1, -1))]
    found = Sample(specs, views(np.ones((3, 2), np.float32))).compare(views(np.ones((2, 2), np.float32)))
    assert found["y"] == OutputAgreement(3, 3, 0, 0.0, 3.0, 3)


def test_figures_of_several_workers_are_added() -> None:
    one, other = OutputAgreement(1, 1, 1, 0.5, 0.25, 0), OutputAgreement(2, 2, 0, 1.5, 1.0, 1)
    assert one.plus(other) == OutputAgreement(3, 3, 1, 2.0, 1.25, 1)


def test_shadow_requests_are_counted_apart_and_a_report_without_any_is_as_it_was() -> None:
    windows = Windows()
    counts = windows.counters("d")
    counts.count_ok("1", 0.001)
    assert "shadow" not in encode(counts.snapshot())
    mirror = counts.mirror()
    mirror.attempts.count_ok("1", 0.002)
    mirror.attempts.count_failed("Recoverable")
    mirror.attempts.abandoned += 1
    mirror.mirrored += 1
    found = windows.snapshot()[""]["d"]
    assert (found.ok, found.failed, found.abandoned) == (1, {}, 0)
    assert found.shadow is not None
    assert (found.shadow.mirrored, found.shadow.failed) == (1, {"Recoverable": 1, "Abandoned": 1})
