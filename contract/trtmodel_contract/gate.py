"""The accuracy gate's figures, and the verdict that today's thresholds make of them.

A Job measures the figures once; anybody can judge them again under other thresholds, without a GPU. The verdict is
about what the samples *prove*: the bound of a confidence interval is compared with the limit, not the estimate.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from trtmodel_contract import means
from trtmodel_contract.codec import LATER
from trtmodel_contract.manifest import Blob
from trtmodel_contract.proportions import MOST_SAMPLES, binomial_bounds, paired_bounds, samples_needed

# 2: standard errors, and more shapes than the data set's. 3: what the reference has no answer to. 4: such by labels
GATE_VERSION = 4
MOST_HINTS = 4


class Task(str, enum.Enum):
    CLASSIFICATION = "Classification"
    REGRESSION = "Regression"
    EMBEDDING = "Embedding"
    RAW = "Raw"


class Verdict(str, enum.Enum):
    PASS = "Pass"
    FAIL = "Fail"
    INCONCLUSIVE = "Inconclusive"
    NO_DATA = "NoData"


WORST_FIRST = (Verdict.FAIL, Verdict.NO_DATA, Verdict.INCONCLUSIVE, Verdict.PASS)


@dataclass(frozen=True)
class Thresholds:
    """`top1_delta`: share of answers that may differ (without labels), or of accuracy that may be lost (with).
    `rmse_increase`: RMSE against the reference, relative to the reference's standard deviation (without labels), or
    the relative increase of the RMSE against truth (with). `cosine`: least mean cosine similarity of any output."""

    top1_delta: float = 0.005
    rmse_increase: float = 0.01
    cosine: float = 0.99


@dataclass(frozen=True)
class OutputFigures:
    """One output over all samples, engine against ONNX Runtime FP32. `truth_rmse_*` only with labels (regression).

    The `*_error` are relative standard errors, of what is not below zero: the mean of 1 - cosine, `relative_rmse`, and
    the ratio of the two RMSE against truth. They are of `vectors` independent ones: the samples, or the batches where
    an output has no row for each sample. 0 vectors: figures of a Job that measured no errors.

    A figure that was measured as NaN or infinite becomes None, since JSON has neither: None never passes a check.
    """

    cosine_mean: float | None
    cosine_worst: float | None
    relative_rmse: float | None
    max_abs: float | None
    nonfinite: int  # values that are NaN or infinite in the engine and finite in the reference
    constant: bool  # the engine gives every sample the same answer and the reference does not
    truth_rmse_reference: float | None = None
    truth_rmse_engine: float | None = None
    vectors: int = field(default=0, metadata=LATER)
    cosine_error: float | None = field(default=None, metadata=LATER)
    rmse_error: float | None = field(default=None, metadata=LATER)
    truth_error: float | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, float) and not math.isfinite(value):
                object.__setattr__(self, f.name, None)


@dataclass(frozen=True)
class Top1Figures:
    """Counts over the samples. With labels, `only_*_right` are the discordant pairs of a paired comparison."""

    disagreements: int
    reference_right: int | None = None
    engine_right: int | None = None
    only_reference_right: int | None = None
    only_engine_right: int | None = None


@dataclass(frozen=True)
class GateReport:
    """Where the report about these figures is: two blobs of the same content."""

    json: Blob
    html: Blob


@dataclass(frozen=True)
class GateFigures:
    """What a gate Job measured. Kept in the bucket by (artifact, data set, task, samples, gate version).

    `keep_hints`: patterns for keepPrecision, worst first, that the Job found when the engine failed by the thresholds
    of that day; at most MOST_HINTS.
    """

    SCHEMA: ClassVar[str] = "trtmodel.io/gate/v1"

    manifest_digest: str
    dataset_digest: str
    task: Task
    samples: int
    labelled: bool
    outputs: Mapping[str, OutputFigures]
    top1: Top1Figures | None = None
    shapes_checked: tuple[int, ...] = ()  # batch sizes that were run; they add no samples
    version: int = GATE_VERSION
    report: GateReport | None = field(default=None, metadata=LATER)
    keep_hints: tuple[str, ...] = field(default=(), metadata=LATER)

    def worst(self) -> GateFigures:
        """The same figures with only the worst output of each check: `judge` comes to the same verdict, whatever the
        thresholds, since it is the worst of all checks."""
        if len(self.outputs) <= 1:
            return self
        kept = {max(self.outputs, key=lambda name: badness(self.outputs[name])) for badness in _BADNESS}
        return dataclasses.replace(self, outputs={name: o for name, o in self.outputs.items() if name in kept})


@dataclass(frozen=True)
class _Range:
    """An estimate of something that is not below zero, and the bounds of what it may really be."""

    value: float
    low: float
    high: float


def _range(value: float, error: float | None, vectors: int) -> _Range:
    if vectors == 0 or value == 0 or math.isinf(value):
        return _Range(value, value, value)
    factor = math.inf if error is None else means.factor(error, vectors)
    return _Range(value, value / factor, value * factor)


def _distance(output: OutputFigures) -> _Range | None:
    """1 - mean cosine, None where it is not a number."""
    if output.cosine_mean is None:
        return None
    return _range(max(0.0, 1 - output.cosine_mean), output.cosine_error, output.vectors)


def _rise(output: OutputFigures) -> _Range | None:
    """What `rmse_increase` limits, None where it is not a number. Against truth: the ratio, which is 1 more."""
    before, after = output.truth_rmse_reference, output.truth_rmse_engine
    if before is None and after is None:
        rmse = output.relative_rmse
        return None if rmse is None else _range(rmse, output.rmse_error, output.vectors)
    if before is None or after is None:
        return None
    ratio = after / before if before > 0 else math.inf if after > 0 else 1.0
    return _range(ratio, output.truth_error, output.vectors)


def _badness(of: Callable[[OutputFigures], _Range | None], bound: str) -> Callable[[OutputFigures], float]:
    def badness(output: OutputFigures) -> float:
        found = of(output)
        return math.inf if found is None else float(getattr(found, bound)) - _against_truth(output)

    return badness


def _against_truth(output: OutputFigures) -> float:
    """What makes a ratio a rise."""
    return 0.0 if output.truth_rmse_reference is None else 1.0


_BADNESS: tuple[Callable[[OutputFigures], float], ...] = (
    lambda o: o.nonfinite,
    lambda o: o.constant,
    _badness(_distance, "low"),
    _badness(_distance, "high"),
    _badness(_rise, "low"),
    _badness(_rise, "high"),
)


@dataclass(frozen=True)
class Check:
    """One comparison of the verdict."""

    name: str
    verdict: Verdict
    sentence: str


@dataclass(frozen=True)
class GateVerdict:
    verdict: Verdict
    sentence: str
    checks: tuple[Check, ...] = field(default=())


def judge(figures: GateFigures, limits: Thresholds) -> GateVerdict:
    """The verdict: the worst of all checks; its sentence is that of the first check that gave it. Figures that cannot
    be true (a document that another hand wrote) prove nothing, and raise nothing either."""
    try:
        checks = tuple(_checks(figures, limits))
    except (ValueError, ArithmeticError) as e:
        why = f"the figures cannot be true ({str(e)[:200]}): run the gate again with the command retry"
        checks = (Check("figures", Verdict.INCONCLUSIVE, why),)
    for verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE):
        for check in checks:
            if check.verdict is verdict:
                return GateVerdict(verdict, check.sentence + _hint(figures, verdict), checks)
    return GateVerdict(Verdict.PASS, "; ".join(c.sentence for c in checks), checks)


def _hint(figures: GateFigures, verdict: Verdict) -> str:
    if verdict is not Verdict.FAIL or not figures.keep_hints:
        return ""
    patterns = ", ".join(map(_quoted, figures.keep_hints))
    return f"; most of it begins in these nodes: try keepPrecision: {{nodes: [{patterns}]}}"


def _quoted(pattern: str) -> str:
    """As YAML takes it whatever is in it."""
    return "'" + pattern.replace("'", "''") + "'"


def _checks(figures: GateFigures, limits: Thresholds) -> list[Check]:
    if figures.samples < 1:
        return [Check("samples", Verdict.INCONCLUSIVE, "no sample was compared: the data set is empty")]
    if not figures.outputs:
        return [
            Check("outputs", Verdict.INCONCLUSIVE, "no output was compared: the engine's outputs are not the model's")
        ]
    if figures.task is Task.CLASSIFICATION and figures.top1 is None:
        return [Check("top1", Verdict.INCONCLUSIVE, "no class was compared: a classifier needs an output of scores")]
    found = [_sane(name, output) for name, output in figures.outputs.items()]
    checks = [check for check in found if check is not None]
    if figures.task is Task.CLASSIFICATION and figures.top1 is not None:
        checks.append(_top1(figures, figures.top1, limits.top1_delta))
    for name, output in figures.outputs.items():
        checks.append(_cosine(figures.samples, name, output, limits.cosine))
        if figures.task is Task.CLASSIFICATION and figures.labelled:
            continue  # accuracy against truth decides: a rise in confidence is no error
        if figures.task is not Task.EMBEDDING:
            checks.append(_rmse(figures.samples, name, output, limits.rmse_increase))
    return checks


def _sane(name: str, output: OutputFigures) -> Check | None:
    if output.nonfinite:
        text = f"output {name}: {output.nonfinite} values are NaN or infinite where the reference is finite"
        return Check(f"finite {name}", Verdict.FAIL, f"{text}: keep more nodes in FP32")
    if output.constant:
        return Check(f"constant {name}", Verdict.FAIL, f"output {name}: every sample got the same answer")
    return None


def _top1(figures: GateFigures, top1: Top1Figures, limit: float) -> Check:
    n = figures.samples
    if figures.labelled and top1.only_reference_right is not None and top1.only_engine_right is not None:
        worse, better = top1.only_reference_right, top1.only_engine_right
        what = f"accuracy loss {(worse - better) / n:+.2%} on {n:,} labelled samples ({worse} worse, {better} better)"

        def bounds(m: int) -> tuple[float, float]:
            return paired_bounds(round(worse * m / n), round(better * m / n), m)
    else:
        differ = top1.disagreements
        what = f"top-1 differs in {differ} of {n:,} samples ({differ / n:.2%})"

        def bounds(m: int) -> tuple[float, float]:
            return binomial_bounds(round(differ * m / n), m)

    low, high = bounds(n)
    if high < limit:
        return Check("top1", Verdict.PASS, f"{what}, at most {high:.2%} at 95 % confidence, limit {limit:.2%}")
    if low > limit:
        return Check("top1", Verdict.FAIL, f"{what}, at least {low:.2%} at 95 % confidence, limit {limit:.2%}")
    more = _more(samples_needed(lambda m: bounds(m)[1], limit, n))
    text = f"{what} neither proves nor disproves the limit of {limit:.2%} (95 % bounds {low:.2%} to {high:.2%}): {more}"
    return Check("top1", Verdict.INCONCLUSIVE, text)


def _more(needed: int | None) -> str:
    if needed is None:
        return f"not even {MOST_SAMPLES:,} samples would prove this rate"
    return f"about {needed:,} samples would decide"


def _cosine(samples: int, name: str, output: OutputFigures, limit: float) -> Check:
    found = _distance(output)
    if found is None:
        return _not_a_number("cosine", name)
    worst = "no number" if output.cosine_worst is None else f"{output.cosine_worst:.5f}"
    text = f"output {name}: mean cosine {output.cosine_mean:.5f} (worst {worst})"
    needed = means.samples_needed(found.value, 1 - limit, output.cosine_error or 0.0, output.vectors, samples)
    bounds = f"{1 - found.high:.5f} to {1 - found.low:.5f}"
    return _compared(f"cosine {name}", text, found, 1 - limit, str(limit), bounds, needed)


def _rmse(samples: int, name: str, output: OutputFigures, limit: float) -> Check:
    found, base = _rise(output), _against_truth(output)
    if found is None:
        return _not_a_number("rmse", name)
    if not base:
        what = f"output {name}: RMSE {found.value:.2%} of the reference's standard deviation"
    else:
        before, after = output.truth_rmse_reference, output.truth_rmse_engine
        what = f"output {name}: RMSE against truth {before:.4g} -> {after:.4g} ({found.value - 1:+.2%})"
    error = output.truth_error if base else output.rmse_error
    needed = means.samples_needed(found.value, base + limit, error or 0.0, output.vectors, samples)
    bounds = f"{found.low - base:.2%} to {found.high - base:.2%}"
    return _compared(f"rmse {name}", what, found, base + limit, f"{limit:.2%}", bounds, needed)


def _compared(name: str, what: str, found: _Range, limit: float, shown: str, bounds: str, needed: int | None) -> Check:
    """The bounds against a limit that they must not exceed."""
    if found.high <= limit:
        return Check(name, Verdict.PASS, f"{what}, limit {shown}")
    if found.low > limit:
        return Check(name, Verdict.FAIL, f"{what}, limit {shown}")
    text = f"{what} neither proves nor disproves the limit of {shown} (95 % bounds {bounds}): {_more(needed)}"
    return Check(name, Verdict.INCONCLUSIVE, text)


def _not_a_number(figure: str, name: str) -> Check:
    text = f"output {name}: its {figure} is not a number: the engine or the reference answers NaN or infinity"
    return Check(f"{figure} {name}", Verdict.FAIL, text)
