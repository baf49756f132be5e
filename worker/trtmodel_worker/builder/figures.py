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


class OutputSums:
    """One output, engine against reference. An output without a leading batch dimension is one vector per batch; one
    of another shape than the reference's counts as wholly wrong."""

    def __init__(self) -> None:
        self._cosine_sum, self._cosine_worst, self._vectors = 0.0, math.inf, 0
        self._squared_error, self._values = 0.0, 0
        self._mean, self._squared_deviation = 0.0, 0.0
        self._max_abs, self._nonfinite = 0.0, 0
        self._first: tuple[Wide, Wide] | None = None
        self._reference_varies, self._engine_varies = False, False
        self._least_agreement = math.inf
        self._truth_reference, self._truth_engine, self._truths = 0.0, 0.0, 0

    def add(self, reference: Array, engine: Array, rows: int) -> None:
        """One batch of samples."""
        pair = self._compare(reference, engine, rows)
        if pair is None:
            return
        expected, found, cosines = pair
        self._cosine_sum += float(cosines.sum())
        self._vectors += len(cosines)
        self._add_error(expected, found)
        self._watch(expected, found)

    def add_size(self, usual: Array, other: Array) -> None:
        """The engine's answers to the same samples in its usual batch size and in another one. A size adds no samples:
        it is a repeat. But an engine that contradicts itself is wrong, so the mean cosine is at most what it has with
        itself."""
        if usual.shape != other.shape:
            self._least_agreement = 0.0
            return
        expected, found = _wide(usual, len(usual)), _wide(other, len(usual))
        broken = np.isfinite(expected) & ~np.isfinite(found)
        self._nonfinite += int(broken.sum())
        known = np.isfinite(expected) & np.isfinite(found)
        cosines = _cosines(np.where(known, expected, 0.0), np.where(known, found, 0.0))
        self._least_agreement = min(self._least_agreement, float(cosines.mean()))

    def add_truth(self, reference: Array, engine: Array, labels: Array) -> None:
        """Labels of a regression. Raises Rejected if they are not of the output's size."""
        if reference.size != labels.size:
            text = f"labels of {labels.shape[1:]} per sample do not fit an output of {reference.shape[1:]}"
            raise Rejected(Reason.DATASET_INVALID, text)
        truth = labels.astype(np.float64).reshape(-1)
        with np.errstate(invalid="ignore", over="ignore"):
            self._truth_reference += float(((reference.astype(np.float64).reshape(-1) - truth) ** 2).sum())
            self._truth_engine += float(((engine.astype(np.float64).reshape(-1) - truth) ** 2).sum())
        self._truths += truth.size

    def figures(self) -> OutputFigures:
        rmse = math.sqrt(self._squared_error / self._values) if self._values else math.nan
        deviation = math.sqrt(self._squared_deviation / self._values) if self._values else math.nan
        truths = self._truths
        return OutputFigures(
            cosine_mean=min(self._cosine_sum / self._vectors, self._least_agreement) if self._vectors else math.nan,
            cosine_worst=self._cosine_worst,
            relative_rmse=0.0 if rmse == 0 else rmse / deviation if deviation > 0 else math.inf,
            max_abs=self._max_abs,
            nonfinite=self._nonfinite,
            constant=self._reference_varies and not self._engine_varies,
            truth_rmse_reference=math.sqrt(self._truth_reference / truths) if truths else None,
            truth_rmse_engine=math.sqrt(self._truth_engine / truths) if truths else None,
        )

    def _compare(self, reference: Array, engine: Array, rows: int) -> tuple[Wide, Wide, Wide] | None:
        if reference.shape != engine.shape:
            self._cosine_worst, self._max_abs = 0.0, math.inf
            self._squared_error = math.inf
            self._vectors += 1
            return None
        vectors = rows if reference.ndim and reference.shape[0] == rows else 1
        expected, found = _wide(reference, vectors), _wide(engine, vectors)
        known = np.isfinite(expected)
        broken = known & ~np.isfinite(found)
        self._nonfinite += int(broken.sum())
        # Where the reference itself is NaN or infinite there is nothing to compare with.
        expected, found = np.where(known, expected, 0.0), np.where(known & ~broken, found, 0.0)
        cosines = _cosines(expected, found)
        cosines[broken.any(axis=1)] = 0.0
        if found.size:
            self._max_abs = max(self._max_abs, float(np.abs(expected - found).max()))
        self._cosine_worst = min(self._cosine_worst, float(cosines.min()))
        return expected, found, cosines

    def _add_error(self, expected: Wide, found: Wide) -> None:
        """Chan's update of mean and deviation: sums of squares lose all digits of outputs far from zero."""
        count = expected.size
        if not count:
            return
        self._squared_error += float(((expected - found) ** 2).sum())
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


class Top1Counts:
    """Classes: the greatest score of each row."""

    def __init__(self, labelled: bool) -> None:
        self._labelled = labelled
        self._disagreements, self._reference_right, self._engine_right = 0, 0, 0
        self._only_reference_right, self._only_engine_right = 0, 0

    def add(self, reference: Array, engine: Array, labels: Array | None) -> None:
        """Raises Rejected for a label that is no class."""
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


def _cosines(expected: Wide, found: Wide) -> NDArray[Any]:
    norms = np.linalg.norm(expected, axis=1), np.linalg.norm(found, axis=1)
    product = norms[0] * norms[1]
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines = (expected * found).sum(axis=1) / product
    both_zero = (norms[0] == 0) & (norms[1] == 0)
    return np.where(both_zero, 1.0, np.where(product == 0, 0.0, np.clip(cosines, -1.0, 1.0)))
