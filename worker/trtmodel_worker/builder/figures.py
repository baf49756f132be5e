"""Figures of the gate, summed batch by batch in bounded memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from trtmodel_contract.gate import OutputFigures, Top1Figures
from trtmodel_contract.jobs import Reason

from trtmodel_worker.engines.base import Array
from trtmodel_worker.engines.building import Rejected

Wide = NDArray[np.float64]
_NAMES = "biu"  # numpy's kinds of BOOL, INT and UINT
# reference, engine, cosine of each vector, whether the engine's is broken, whether the reference's has a finite value
_Pair = tuple[Wide, Wide, Wide, NDArray[np.bool_], NDArray[np.bool_]]


class OutputSums:
    """One output, engine against reference. An output without a leading batch dimension is one vector per batch; one
    of another shape than the reference's counts as wholly wrong.

    Integers are names, not sizes (skl2onnx gives a classifier's label as INT64): of such an output the share of equal
    values stands for the cosine, and the share of others for the error."""

    def __init__(self) -> None:
        self._exact = False
        self._distances, self._squares = _Moments(), _Moments()  # of each vector: 1 - cosine, sum of squared errors
        self._cosine_worst = math.inf
        self._squared_error, self._values = 0.0, 0
        self._mean, self._squared_deviation = 0.0, 0.0
        self._max_abs, self._nonfinite = 0.0, 0
        self._first: tuple[Wide, Wide] | None = None
        self._reference_varies, self._engine_varies = False, False
        self._least_agreement = math.inf
        self._truth_reference, self._truth_engine, self._truths = _Moments(), _Moments(), 0
        self._truth_products = 0.0

    def add(self, reference: Array, engine: Array, rows: int) -> Wide:
        """One batch of samples. Returns the error of each vector relative to the reference's length; infinite where it
        cannot be told, 0 where the reference has no finite value: such a sample says nothing, and is not counted."""
        pair = self._compare(reference, engine, rows)
        if pair is None:
            return np.full(rows, np.inf)
        expected, found, cosines, broken, told = pair
        squares = _squares(expected, found, exact=self._exact)
        if told.any():
            self._cosine_worst = min(self._cosine_worst, float(cosines[told].min()))
            self._distances.add(1 - cosines[told])
            self._squares.add(squares[told])
            self._squared_error += float(squares[told].sum())
            self._add_deviation(expected[told])
            self._watch(expected[told], found[told])
        lengths = np.linalg.norm(expected, axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            relative = np.where(squares == 0, 0.0, np.sqrt(squares) / lengths)
        return np.where(broken, np.inf, relative)

    def add_repeat(self, right: Array, other: Array) -> None:
        """Answers in another shape, which adds no samples, and what they should be: the engine's own in its usual
        shape, or the reference's. An engine that contradicts either is wrong, so the mean cosine is at most that of
        these answers."""
        if right.shape != other.shape:
            self._least_agreement = 0.0
            return
        vectors = len(right) if right.ndim and len(right) else 1
        expected, found = _wide(right, vectors), _wide(other, vectors)
        known = np.isfinite(expected)
        self._nonfinite += int((known & ~np.isfinite(found)).sum())
        known &= np.isfinite(found)
        cosines = _likeness(
            np.where(known, expected, 0.0), np.where(known, found, 0.0), exact=right.dtype.kind in _NAMES
        )
        self._least_agreement = min(self._least_agreement, float(cosines.mean()))

    def add_truth(self, reference: Array, engine: Array, labels: Array) -> None:
        """Labels of a regression. Raises Rejected if they are not of the output's size, or no numbers, and for samples
        whose error by the reference is no number: with none of either, figures would look like those without labels."""
        if reference.size != labels.size:
            text = f"labels of {labels.shape[1:]} per sample do not fit an output of {reference.shape[1:]}"
            raise Rejected(Reason.DATASET_INVALID, text)
        truth = _wide(labels, len(labels))
        if not np.isfinite(truth).all():
            text = "labels hold NaN or infinite values, from which no error can be told"
            raise Rejected(Reason.DATASET_INVALID, f"{text}: leave such samples out")
        with np.errstate(invalid="ignore", over="ignore"):
            before = ((_wide(reference, len(labels)) - truth) ** 2).sum(axis=1)
            untold = int((~np.isfinite(before)).sum())
            if untold:
                text = f"the original model itself answers NaN or infinity to {untold} of {len(truth)} samples"
                raise Rejected(Reason.DATASET_INVALID, f"{text} of a batch, so no error can be told: leave them out")
            same = engine.size == labels.size
            after = ((_wide(engine, len(labels)) - truth) ** 2).sum(axis=1) if same else np.full(len(labels), np.inf)
            self._truth_reference.add(before)
            self._truth_engine.add(after)
            self._truth_products += float((before * after).sum())
        self._truths += truth.size

    def figures(self) -> OutputFigures:
        rmse = math.sqrt(self._squared_error / self._values) if self._values else math.nan
        deviation = math.sqrt(self._squared_deviation / self._values) if self._values else math.nan
        if self._exact:
            rmse, deviation = rmse**2, 1.0
        mean = 1 - self._distances.mean if self._distances.count else math.nan
        truths = self._truths
        return OutputFigures(
            cosine_mean=min(mean, self._least_agreement),
            cosine_worst=self._cosine_worst,
            relative_rmse=0.0 if rmse == 0 else rmse / deviation if deviation > 0 else math.inf,
            max_abs=self._max_abs,
            nonfinite=self._nonfinite,
            constant=self._reference_varies and not self._engine_varies,
            truth_rmse_reference=math.sqrt(self._truth_reference.total / truths) if truths else None,
            truth_rmse_engine=math.sqrt(self._truth_engine.total / truths) if truths else None,
            vectors=self._truth_reference.count or self._distances.count,
            # One contradiction is enough: it is no mean of samples.
            cosine_error=0.0 if self._least_agreement < mean else self._distances.relative_error(),
            rmse_error=self._squares.relative_error() / (1 if self._exact else 2),  # a root halves it
            truth_error=self._truth_error() if truths else None,
        )

    def _truth_error(self) -> float:
        """Relative standard error of RMSE / RMSE, by the delta method: of errors of the same samples, which vary
        together."""
        before, after = self._truth_reference, self._truth_engine
        if not before.total or not after.total:
            return 0.0
        together = self._truth_products / (before.count * before.mean * after.mean) - 1
        variance = before.relative_variance() + after.relative_variance() - 2 * together
        return math.sqrt(max(0.0, variance) / max(1, before.count - 1)) / 2 if math.isfinite(variance) else math.inf

    def _compare(self, reference: Array, engine: Array, rows: int) -> _Pair | None:
        if reference.shape != engine.shape:
            self._cosine_worst, self._max_abs = 0.0, math.inf
            self._squared_error = math.inf
            self._distances.add(np.ones(1))
            return None
        vectors = rows if reference.ndim and reference.shape[0] == rows else 1
        self._exact = reference.dtype.kind in _NAMES
        expected, found = _wide(reference, vectors), _wide(engine, vectors)
        known = np.isfinite(expected)
        broken = known & ~np.isfinite(found)
        self._nonfinite += int(broken.sum())
        # Where the reference itself is NaN or infinite there is nothing to compare with.
        expected, found = np.where(known, expected, 0.0), np.where(known & ~broken, found, 0.0)
        cosines = _likeness(expected, found, exact=self._exact)
        cosines[broken.any(axis=1)] = 0.0
        if found.size:
            self._max_abs = max(self._max_abs, float(np.abs(expected - found).max()))
        told = known.any(axis=1) if known.shape[1] else np.ones(vectors, np.bool_)
        return expected, found, cosines, np.asarray(broken.any(axis=1)), np.asarray(told)

    def _add_deviation(self, expected: Wide) -> None:
        """Chan's update of mean and deviation: sums of squares lose all digits of outputs far from zero."""
        count = expected.size
        if not count:
            return
        mean = float(expected.mean())
        shift, total = mean - self._mean, self._values + count
        self._squared_deviation += float(((expected - mean) ** 2).sum()) + shift**2 * self._values * count / total
        self._mean += shift * count / total
        self._values = total

    def _watch(self, expected: Wide, found: Wide) -> None:
        if self._first is None:
            self._first = (expected[0].copy(), found[0].copy())
        first_expected, first_found = self._first
        if expected.shape[1] != len(first_expected):  # ragged
            self._reference_varies = self._engine_varies = True
            return
        self._reference_varies = self._reference_varies or bool((expected != first_expected).any())
        self._engine_varies = self._engine_varies or bool((found != first_found).any())


class _Moments:
    """Count, sum and sum of squares of what is not below zero."""

    def __init__(self) -> None:
        self.count, self.total, self._squares = 0, 0.0, 0.0

    def add(self, values: Wide) -> None:
        self.count += len(values)
        self.total += float(values.sum())
        self._squares += float((values**2).sum())

    @property
    def mean(self) -> float:
        return self.total / self.count

    def relative_variance(self) -> float:
        """Of one value, relative to the mean's square; 0 where all are 0."""
        if not self.total:
            return 0.0
        return max(0.0, self._squares / self.count / self.mean**2 - 1)

    def relative_error(self) -> float:
        """Standard error of the mean, relative to it."""
        if self.count < 2:
            return 0.0
        variance = self.relative_variance()
        return math.sqrt(variance / (self.count - 1)) if math.isfinite(variance) else math.inf


class Top1Counts:
    """Classes: the greatest score of each row."""

    def __init__(self, labelled: bool) -> None:
        self._labelled = labelled
        self._disagreements, self._reference_right, self._engine_right = 0, 0, 0
        self._only_reference_right, self._only_engine_right = 0, 0

    def add(self, reference: Array, engine: Array, labels: Array | None) -> None:
        """Raises Rejected for a label that is no class, and for samples to which the reference has no answer."""
        unanswered = int(np.isnan(reference).any(axis=1).sum())
        if unanswered:
            text = f"the original model itself answers NaN to {unanswered} of {len(reference)} samples of a batch"
            raise Rejected(Reason.DATASET_INVALID, f"{text}, so there is no class to compare with: leave them out")
        expected = reference.argmax(axis=1)
        found = engine.argmax(axis=1) if engine.shape == reference.shape else np.full_like(expected, -1)
        self._disagreements += int((expected != found).sum())
        if labels is None:
            return
        classes = reference.shape[1]
        if labels.size and (int(labels.min()) < 0 or int(labels.max()) >= classes):
            text = f"labels run from {labels.min()} to {labels.max()}, the model knows classes 0 to {classes - 1}"
            raise Rejected(Reason.DATASET_INVALID, text)
        reference_right, engine_right = expected == labels, found == labels
        self._reference_right += int(reference_right.sum())
        self._engine_right += int(engine_right.sum())
        self._only_reference_right += int((reference_right & ~engine_right).sum())
        self._only_engine_right += int((engine_right & ~reference_right).sum())

    def figures(self) -> Top1Figures:
        if not self._labelled:
            return Top1Figures(self._disagreements)
        return Top1Figures(
            self._disagreements,
            self._reference_right,
            self._engine_right,
            self._only_reference_right,
            self._only_engine_right,
        )


def _wide(array: Array, vectors: int) -> Wide:
    return np.asarray(array, np.float64).reshape(vectors, -1)


def _likeness(expected: Wide, found: Wide, *, exact: bool) -> Wide:
    """Of each vector: its cosine, or the share of equal values."""
    if not exact:
        return _cosines(expected, found)
    return np.asarray((expected == found).mean(axis=1) if expected.shape[1] else np.ones(len(expected)), np.float64)


def _squares(expected: Wide, found: Wide, *, exact: bool) -> Wide:
    wrong = (expected != found).astype(np.float64) if exact else (expected - found) ** 2
    return np.asarray(wrong.sum(axis=1), np.float64)


def _cosines(expected: Wide, found: Wide) -> NDArray[Any]:
    norms = np.linalg.norm(expected, axis=1), np.linalg.norm(found, axis=1)
    product = norms[0] * norms[1]
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines = (expected * found).sum(axis=1) / product
    both_zero = (norms[0] == 0) & (norms[1] == 0)
    return np.where(both_zero, 1.0, np.where(product == 0, 0.0, np.clip(cosines, -1.0, 1.0)))
