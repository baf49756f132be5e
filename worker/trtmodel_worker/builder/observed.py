"""What the gate saw beside its figures, for the report: the worst samples with both answers, how errors are spread,
each class, and which answers became which. Collected batch by batch in bounded memory, and small when done."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trtmodel_worker.builder.figures import Wide
from trtmodel_worker.engines.base import Array

WORST = 12  # samples
OUTPUTS = 12  # of a model, in the order of the graph
CLASSES = 40  # rows of the table
CHANGES = 40  # pairs of classes
TEXT = 160  # characters of an answer
LEAST_EXPONENT, MOST_EXPONENT, PER_DECADE = -8, 2, 4
_PAIRS = 20_000  # pairs of classes that are counted; beyond it, new ones are not
_VALUES = 8
_BEST = 3


@dataclass(frozen=True)
class Answer:
    """One output for one sample, both answers cut to a readable length. `error` is relative to the reference's
    length, None where it is no number."""

    output: str
    reference: str
    engine: str
    error: float | None


@dataclass(frozen=True)
class WorstSample:
    """`index` counts from 0 in the data set. `label` is '' without labels."""

    index: int
    changed: bool
    label: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class ErrorSpread:
    """How many samples have which relative error in one output: `counts` has PER_DECADE bins for each power of ten
    from LEAST_EXPONENT to MOST_EXPONENT; what is beyond is in the first and last."""

    output: str
    exact: int
    counts: tuple[int, ...]
    broken: int


@dataclass(frozen=True)
class ClassRow:
    """Samples of one class: the label's, without labels the reference's answer."""

    number: int
    samples: int
    agree: int
    reference_right: int | None = None
    engine_right: int | None = None

    def loss(self) -> int:
        """By how many samples the engine is worse."""
        if self.reference_right is None or self.engine_right is None:
            return self.samples - self.agree
        return self.reference_right - self.engine_right


@dataclass(frozen=True)
class Change:
    """`samples` whose class is `reference` by the original and `engine` by the engine."""

    reference: int
    engine: int
    samples: int


@dataclass(frozen=True)
class Findings:
    """`classes` are those that lost most, then the largest; `class_count` is how many occur at all."""

    worst: tuple[WorstSample, ...] = ()
    spreads: tuple[ErrorSpread, ...] = ()
    classes: tuple[ClassRow, ...] = ()
    class_count: int = 0
    changes: tuple[Change, ...] = ()
    change_count: int = 0
    shapes: tuple[str, ...] = ()


class Observer:
    """Sees every batch. `scores` is the output that holds classes, '' if none does."""

    def __init__(self, outputs: tuple[str, ...], scores: str) -> None:
        first = (scores,) if scores else ()
        self._outputs = (*first, *(name for name in outputs if name != scores))[:OUTPUTS]
        self._scores = scores
        self._seen = 0
        self._spreads = {name: _Spread() for name in self._outputs}
        self._worst: list[tuple[float, int, WorstSample]] = []
        self._changes: Counter[tuple[int, int]] = Counter()
        self._classes: dict[str, Array] = {}
        self._labelled = False
        self.shapes: list[str] = []

    def add(
        self,
        expected: Mapping[str, Array],
        found: Mapping[str, Array],
        errors: Mapping[str, Wide],
        labels: Array | None,
        count: int,
    ) -> None:
        """`errors` are relative, one for each of the `count` samples; other outputs are passed over."""
        known = {name: errors[name] for name in self._outputs if len(errors[name]) == count}
        for name, relative in known.items():
            self._spreads[name].add(relative)
        changed = np.zeros(count, np.bool_)
        if self._scores:
            changed = self._add_classes(expected[self._scores], found[self._scores], labels)
        if known:
            self._add_worst(expected, found, known, changed, labels)
        self._seen += count

    def findings(self) -> Findings:
        rows = self._rows()
        return Findings(
            worst=tuple(sample for _, _, sample in sorted(self._worst, key=lambda entry: (-entry[0], -entry[1]))),
            spreads=tuple(spread.done(name) for name, spread in self._spreads.items() if spread.any()),
            classes=tuple(sorted(rows, key=lambda row: (-row.loss(), -row.samples, row.number))[:CLASSES]),
            class_count=len(rows),
            changes=tuple(Change(*pair, n) for pair, n in self._changes.most_common(CHANGES)),
            change_count=len(self._changes),
            shapes=tuple(self.shapes),
        )

    def _add_classes(self, expected: Array, found: Array, labels: Array | None) -> Array:
        before = expected.argmax(axis=1)
        after = found.argmax(axis=1) if found.shape == expected.shape else np.full_like(before, -1)
        of = before if labels is None else labels.astype(np.int64)
        counted = {"samples": of, "agree": of[before == after]}
        if labels is not None:
            self._labelled = True
            counted |= {"reference": of[before == labels], "engine": of[after == labels]}
        for name, classes in counted.items():
            added = np.bincount(classes, minlength=expected.shape[1])
            self._classes[name] = self._classes.get(name, 0) + added
        changed: Array = before != after
        for pair in zip(before[changed].tolist(), after[changed].tolist(), strict=True):
            if pair in self._changes or len(self._changes) < _PAIRS:
                self._changes[pair] += 1
        return changed

    def _add_worst(
        self,
        expected: Mapping[str, Array],
        found: Mapping[str, Array],
        errors: Mapping[str, Wide],
        changed: Array,
        labels: Array | None,
    ) -> None:
        """A changed answer is worse than any error that changes none, and what is no number worse than that."""
        greatest = np.max([np.where(np.isfinite(e), np.minimum(e, 1e30), 1e32) for e in errors.values()], axis=0)
        badness = greatest + np.where(changed, 1e31, 0.0)
        for i in np.argsort(-badness, kind="stable")[:WORST]:
            bad, index = float(badness[i]), self._seen + int(i)
            if not bad or (len(self._worst) == WORST and bad <= self._worst[0][0]):
                break
            answers = tuple(
                Answer(name, self._text(name, expected[name], i), self._text(name, found[name], i), _number(e[i]))
                for name, e in errors.items()
            )
            label = "" if labels is None else _values(labels[i])
            entry = (bad, -index, WorstSample(index, bool(changed[i]), label, answers))
            (heapq.heappush if len(self._worst) < WORST else heapq.heappushpop)(self._worst, entry)

    def _text(self, name: str, output: Array, i: int) -> str:
        if not output.ndim or i >= len(output):
            return f"shape {list(output.shape)}"
        if name == self._scores and output.ndim == 2:
            best = np.argsort(-output[i], kind="stable")[:_BEST]
            return ", ".join(f"{c} ({output[i][c]:.4g})" for c in best)
        return _values(output[i])

    def _rows(self) -> list[ClassRow]:
        if not self._classes:
            return []
        there = np.flatnonzero(self._classes["samples"])

        def row(number: int) -> ClassRow:
            samples, agree = (int(self._classes[name][number]) for name in ("samples", "agree"))
            if not self._labelled:
                return ClassRow(number, samples, agree)
            right = (int(self._classes[name][number]) for name in ("reference", "engine"))
            return ClassRow(number, samples, agree, *right)

        return [row(int(number)) for number in there]


class _Spread:
    def __init__(self) -> None:
        self._counts = np.zeros((MOST_EXPONENT - LEAST_EXPONENT) * PER_DECADE, np.int64)
        self._exact, self._broken = 0, 0

    def add(self, relative: Wide) -> None:
        finite = relative[np.isfinite(relative)]
        self._broken += len(relative) - len(finite)
        some = finite[finite > 0]
        self._exact += len(finite) - len(some)
        bins = np.floor((np.log10(some) - LEAST_EXPONENT) * PER_DECADE).astype(np.int64)
        self._counts += np.bincount(np.clip(bins, 0, len(self._counts) - 1), minlength=len(self._counts))

    def any(self) -> bool:
        return bool(self._exact or self._broken or self._counts.any())

    def done(self, name: str) -> ErrorSpread:
        return ErrorSpread(name, self._exact, tuple(self._counts.tolist()), self._broken)


def _values(values: Array) -> str:
    flat = np.asarray(values).reshape(-1)
    text = ", ".join(f"{value:.5g}" for value in flat[:_VALUES].tolist())
    more = f", ... ({flat.size:,} values)" if flat.size > _VALUES else ""
    return text[:TEXT] + more


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
