"""Figures of the gate against the same figures computed in one piece."""

from __future__ import annotations

import numpy as np
import pytest
from trtmodel_contract.jobs import Reason
from trtmodel_worker.builder.figures import OutputSums, Top1Counts
from trtmodel_worker.engines.building import Rejected

RANDOM = np.random.default_rng(7)
REFERENCE = RANDOM.normal(1000, 1, size=(101, 6)).astype(np.float32)
ENGINE = REFERENCE + RANDOM.normal(0, 0.1, size=REFERENCE.shape).astype(np.float32)


def summed(reference: np.ndarray, engine: np.ndarray, rows: int = 8) -> OutputSums:
    sums = OutputSums()
    for i in range(0, len(reference), rows):
        part = reference[i : i + rows]
        sums.add(part, engine[i : i + rows], len(part))
    return sums


def test_streamed_figures_are_those_of_the_whole() -> None:
    found = summed(REFERENCE, ENGINE).figures()
    wide, other = REFERENCE.astype(np.float64), ENGINE.astype(np.float64)
    cosines = (wide * other).sum(1) / np.linalg.norm(wide, axis=1) / np.linalg.norm(other, axis=1)
    assert found.cosine_mean == pytest.approx(cosines.mean(), abs=1e-12)
    assert found.cosine_worst == pytest.approx(cosines.min(), abs=1e-12)
    assert found.relative_rmse == pytest.approx(np.sqrt(((wide - other) ** 2).mean()) / wide.std(), rel=1e-9)
    assert found.max_abs == pytest.approx(np.abs(wide - other).max())
    assert (found.nonfinite, found.constant) == (0, False)


def test_standard_errors_are_those_of_the_samples() -> None:
    found = summed(REFERENCE, ENGINE).figures()
    wide, other = REFERENCE.astype(np.float64), ENGINE.astype(np.float64)
    squares = ((wide - other) ** 2).sum(1)
    cosines = (wide * other).sum(1) / np.linalg.norm(wide, axis=1) / np.linalg.norm(other, axis=1)
    root = np.sqrt(len(squares))
    assert found.vectors == 101
    assert found.rmse_error == pytest.approx(squares.std(ddof=1) / root / squares.mean() / 2, rel=1e-6)
    assert found.cosine_error == pytest.approx(cosines.std(ddof=1) / root / (1 - cosines).mean(), rel=1e-3)


def test_against_truth_the_errors_of_both_vary_together() -> None:
    truth = REFERENCE[:, :1].astype(np.float64)
    sums = OutputSums()
    sums.add_truth(REFERENCE[:, 1:2], REFERENCE[:, 1:2] + np.float32(0.01), truth)
    paired = sums.figures().truth_error
    other = OutputSums()
    other.add_truth(REFERENCE[:, 1:2], REFERENCE[::-1, 2:3], truth)
    apart = other.figures().truth_error
    assert paired is not None
    assert apart is not None
    assert paired < apart / 20


def test_equal_outputs_have_perfect_figures_even_when_they_are_zero() -> None:
    for array in (REFERENCE, np.zeros((5, 3), np.float32)):
        found = summed(array, array.copy()).figures()
        assert (found.relative_rmse, found.max_abs, found.nonfinite, found.constant) == (0, 0, 0, False)
        assert found.cosine_mean == pytest.approx(1)


def test_A05_nan_and_infinity_are_counted_where_the_reference_is_finite() -> None:
    broken = ENGINE.copy()
    broken[3, 1], broken[4, 2] = np.nan, np.inf
    found = summed(REFERENCE, broken).figures()
    assert found.nonfinite == 2
    assert found.cosine_worst == 0


def test_where_the_reference_is_not_finite_there_is_nothing_to_compare() -> None:
    reference, engine = REFERENCE.copy(), ENGINE.copy()
    reference[0, 0] = engine[0, 0] = np.inf
    reference[1, 1], engine[1, 1] = np.nan, 3
    found = summed(reference, engine).figures()
    assert found.nonfinite == 0
    assert found.max_abs is not None
    assert found.max_abs < 1


def test_an_engine_that_answers_everything_the_same_is_constant() -> None:
    assert summed(REFERENCE, np.tile(REFERENCE[:1], (101, 1))).figures().constant
    same = np.tile(REFERENCE[:1], (101, 1))
    assert not summed(same, same).figures().constant


def test_A22_an_output_of_another_shape_is_wholly_wrong_and_ragged_ones_are_compared() -> None:
    sums = OutputSums()
    sums.add(np.array([[0, 1, 2]]), np.array([[0, 1, 2]]), rows=2)
    sums.add(np.array([[0]]), np.array([[0]]), rows=2)
    sums.add(np.zeros((1, 0), np.int64), np.zeros((1, 0), np.int64), rows=2)
    good = sums.figures()
    assert good.cosine_worst == pytest.approx(1)
    sums.add(np.array([[0, 1]]), np.array([[0]]), rows=2)
    bad = sums.figures()
    assert bad.cosine_worst == 0
    assert bad.max_abs is None


def test_an_engine_that_contradicts_itself_in_another_batch_size_has_that_cosine() -> None:
    sums = summed(REFERENCE, REFERENCE.copy())
    sums.add_repeat(REFERENCE[:4], REFERENCE[:4].copy())
    assert sums.figures().cosine_mean == pytest.approx(1)
    sums.add_repeat(REFERENCE[:4], -REFERENCE[:4])
    assert sums.figures().cosine_mean == pytest.approx(-1)
    assert sums.figures().relative_rmse == 0


def test_another_batch_size_that_gives_nan_is_not_finite() -> None:
    sums = summed(REFERENCE, REFERENCE.copy())
    sums.add_repeat(REFERENCE[:4], np.full_like(REFERENCE[:4], np.nan))
    assert sums.figures().nonfinite == 24


def test_truth_is_compared_for_both() -> None:
    sums = OutputSums()
    truth = np.zeros((10, 2))
    sums.add_truth(np.full((10, 2), 3.0), np.full((10, 2), 4.0), truth)
    found = sums.figures()
    assert (found.truth_rmse_reference, found.truth_rmse_engine) == (3, 4)
    with pytest.raises(Rejected, match="do not fit"):
        sums.add_truth(np.ones((10, 2)), np.ones((10, 2)), np.ones((10, 3)))


def test_top1_counts_pairs() -> None:
    reference = np.eye(4, dtype=np.float32)[[0, 1, 2, 3, 0]]
    engine = np.eye(4, dtype=np.float32)[[0, 1, 3, 2, 1]]
    counts = Top1Counts(labelled=True)
    counts.add(reference, engine, np.array([0, 0, 2, 2, 3]))
    found = counts.figures()
    assert found.disagreements == 3
    assert (found.reference_right, found.engine_right) == (2, 2)
    assert (found.only_reference_right, found.only_engine_right) == (1, 1)
    plain = Top1Counts(labelled=False)
    plain.add(reference, engine, None)
    assert plain.figures().reference_right is None


def test_a_label_that_is_no_class_is_refused() -> None:
    for labels in (np.array([4]), np.array([-1])):
        with pytest.raises(Rejected, match="classes 0 to 3"):
            Top1Counts(labelled=True).add(np.eye(4)[:1], np.eye(4)[:1], labels)


def test_samples_to_which_the_reference_has_no_answer_prove_nothing() -> None:
    nothing = np.full_like(REFERENCE, np.nan)
    blank = summed(nothing, nothing.copy()).figures()
    assert (blank.cosine_mean, blank.relative_rmse, blank.vectors) == (None, None, 0)
    half = summed(np.concatenate([nothing, REFERENCE]), np.concatenate([nothing, ENGINE])).figures()
    whole = summed(REFERENCE, ENGINE).figures()
    assert half.vectors == whole.vectors
    assert half.relative_rmse == pytest.approx(whole.relative_rmse)
    assert half.cosine_mean == pytest.approx(whole.cosine_mean)


def test_scores_and_labels_that_are_no_numbers_are_refused() -> None:
    scores = np.array([[0.5, np.nan], [0.1, 0.9]], np.float32)
    with pytest.raises(Rejected, match="answers NaN to 1 of 2 samples"):
        Top1Counts(labelled=False).add(scores, scores, None)
    with pytest.raises(Rejected, match="labels hold NaN"):
        OutputSums().add_truth(REFERENCE[:2, :1], ENGINE[:2, :1], np.array([1.0, np.nan]))


def test_of_integers_the_share_of_equal_values_counts_and_not_their_size() -> None:
    """A classifier of skl2onnx has the class as INT64 beside its scores: 3 is as far from 4 as from 9."""
    labels = np.arange(200, dtype=np.int64) % 10
    near, far = labels.copy(), labels.copy()
    near[0], far[0] = 1, 9
    for engine in (near, far):
        found = summed(labels, engine).figures()
        assert found.cosine_mean == pytest.approx(1 - 1 / 200)
        assert found.cosine_worst == 0.0
        assert found.relative_rmse == pytest.approx(1 / 200)
    same = summed(labels, labels.copy()).figures()
    assert (same.cosine_mean, same.relative_rmse, same.constant) == (1.0, 0.0, False)
    assert summed(labels, np.zeros_like(labels)).figures().constant


def test_of_several_integers_each_counts() -> None:
    best = np.tile(np.array([4, 2, 7, 1], np.int32), (50, 1))
    found = best.copy()
    found[:, 3] = 0
    figures = summed(best, found).figures()
    assert figures.cosine_mean == pytest.approx(0.75)
    assert figures.relative_rmse == pytest.approx(0.25)


@pytest.mark.parametrize("answer", [np.nan, np.inf, 1e200], ids=["nan", "infinity", "an error beyond all numbers"])
def test_A05_a_regression_whose_original_has_no_error_to_compare_with_is_refused(answer: float) -> None:
    """Both errors would be no number, which is how figures say that there were no labels."""
    truth = np.zeros((4, 2))
    reference = truth + 1
    reference[2, 1] = answer
    with pytest.raises(Rejected, match="answers NaN or infinity to 1 of 4 samples") as e:
        OutputSums().add_truth(reference, reference + 9, truth)
    assert e.value.reason is Reason.DATASET_INVALID


def test_a_regression_whose_engine_alone_has_no_answer_fails() -> None:
    reference, engine = np.ones((4, 2)), np.ones((4, 2))
    engine[2, 1] = np.nan
    sums = OutputSums()
    sums.add_truth(reference, engine, np.zeros((4, 2)))
    found = sums.figures()
    assert (found.truth_rmse_reference, found.truth_rmse_engine) == (1, None)
