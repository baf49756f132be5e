"""The accuracy gate's figures, and the verdict that today's thresholds make of them.

A Job measures the figures once; anybody can judge them again under other thresholds, without a GPU. The verdict is
about what the samples *prove*: the bound of a confidence interval is compared with the limit, not the estimate.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

GATE_VERSION = 1
CONFIDENCE = 0.95


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
    """One output over all samples, engine against ONNX Runtime FP32. `truth_rmse_*` only with labels (regression)."""

    cosine_mean: float
    cosine_worst: float
    relative_rmse: float
    max_abs: float
    nonfinite: int  # values that are NaN or infinite in the engine and finite in the reference
    constant: bool  # the engine gives every sample the same answer and the reference does not
    truth_rmse_reference: float | None = None
    truth_rmse_engine: float | None = None


@dataclass(frozen=True)
class Top1Figures:
    """Counts over the samples. With labels, `only_*_right` are the discordant pairs of a paired comparison."""

    disagreements: int
    reference_right: int | None = None
    engine_right: int | None = None
    only_reference_right: int | None = None
    only_engine_right: int | None = None


@dataclass(frozen=True)
class GateFigures:
    """What a gate Job measured. Kept in the bucket by (artifact, data set, task, samples, gate version)."""

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
    """The verdict: the worst of all checks; its sentence is that of the first check that gave it."""
    checks = tuple(_checks(figures, limits))
    for verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE):
        for check in checks:
            if check.verdict is verdict:
                return GateVerdict(verdict, check.sentence, checks)
    return GateVerdict(Verdict.PASS, "; ".join(c.sentence for c in checks), checks)


def _checks(figures: GateFigures, limits: Thresholds) -> list[Check]:
    if figures.samples < 1:
        return [Check("samples", Verdict.INCONCLUSIVE, "no sample was compared: the data set is empty")]
    found = [_sane(name, output) for name, output in figures.outputs.items()]
    checks = [check for check in found if check is not None]
    if figures.task is Task.CLASSIFICATION and figures.top1 is not None:
        checks.append(_top1(figures, figures.top1, limits.top1_delta))
    for name, output in figures.outputs.items():
        checks.append(_cosine(name, output, limits.cosine))
        if figures.task is Task.CLASSIFICATION and figures.labelled:
            continue  # accuracy against truth decides: a rise in confidence is no error
        if figures.task is not Task.EMBEDDING:
            checks.append(_rmse(name, output, limits.rmse_increase))
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
        low, high = paired_bounds(worse, better, n)
        estimate = (worse - better) / n
        what = f"accuracy loss {estimate:+.2%} on {n:,} labelled samples ({worse} worse, {better} better)"
        needed = _samples_needed(lambda m: paired_bounds(round(worse / n * m), round(better / n * m), m)[1], limit, n)
    else:
        low, high = binomial_bounds(top1.disagreements, n)
        estimate = top1.disagreements / n
        what = f"top-1 differs in {top1.disagreements} of {n:,} samples ({estimate:.2%})"
        needed = _samples_needed(lambda m: binomial_bounds(round(estimate * m), m)[1], limit, n)
    if high < limit:
        return Check("top1", Verdict.PASS, f"{what}, at most {high:.2%} at 95 % confidence, limit {limit:.2%}")
    if low > limit:
        return Check("top1", Verdict.FAIL, f"{what}, at least {low:.2%} at 95 % confidence, limit {limit:.2%}")
    more = f"about {needed:,} samples would decide" if needed else "no number of samples would prove this rate"
    text = f"{what} neither proves nor disproves the limit of {limit:.2%} (95 % bounds {low:.2%} to {high:.2%}): {more}"
    return Check("top1", Verdict.INCONCLUSIVE, text)


def _cosine(name: str, output: OutputFigures, limit: float) -> Check:
    good = output.cosine_mean >= limit
    text = f"output {name}: mean cosine {output.cosine_mean:.5f} (worst {output.cosine_worst:.5f}), limit {limit}"
    return Check(f"cosine {name}", Verdict.PASS if good else Verdict.FAIL, text)


def _rmse(name: str, output: OutputFigures, limit: float) -> Check:
    if output.truth_rmse_reference is not None and output.truth_rmse_engine is not None:
        before, after = output.truth_rmse_reference, output.truth_rmse_engine
        rise = (after - before) / before if before > 0 else math.inf if after > 0 else 0.0
        what = f"output {name}: RMSE against truth {before:.4g} -> {after:.4g} ({rise:+.2%})"
    else:
        rise = output.relative_rmse
        what = f"output {name}: RMSE {rise:.2%} of the reference's standard deviation"
    return Check(f"rmse {name}", Verdict.PASS if rise <= limit else Verdict.FAIL, f"{what}, limit {limit:.2%}")


def _samples_needed(upper: Callable[[int], float], limit: float, n: int) -> int | None:
    """The least number of samples, doubled and bisected, at which the same rate would pass. None above 10 million."""
    high = max(n, 1)
    while upper(high) >= limit:
        high *= 2
        if high > 10_000_000:
            return None
    low = high // 2
    while high - low > max(1, high // 200):
        middle = (low + high) // 2
        low, high = (low, middle) if upper(middle) < limit else (middle, high)
    return high


def binomial_bounds(successes: int, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """One-sided Clopper-Pearson bounds of a proportion, each at `confidence`."""
    alpha = 1 - confidence
    low = 0.0 if successes == 0 else _bisect(lambda p: 1 - _binomial_cdf(successes - 1, n, p) < alpha)
    high = 1.0 if successes == n else _bisect(lambda p: _binomial_cdf(successes, n, p) > alpha)
    return low, high


def paired_bounds(worse: int, better: int, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """One-sided score bounds of the difference of two paired proportions (Tango, Statistics in Medicine 17, 1998).

    Unlike the Wald interval it is not of zero width when no pair is discordant.
    """
    z = _normal_quantile(confidence)
    estimate = (worse - better) / n

    def score(delta: float) -> float:
        a, b = 2.0 * n, (2.0 * n - worse + better) * delta - worse - better
        c = -better * delta * (1 - delta)
        q = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)
        variance = n * (2 * q + delta * (1 - delta))
        distance = worse - better - n * delta
        if variance <= 0:
            return math.copysign(math.inf, distance) if distance else 0.0
        return distance / math.sqrt(variance)

    high = 1.0 if estimate >= 1 else _bisect(lambda d: score(d) > -z, estimate, 1.0)
    low = -1.0 if estimate <= -1 else _bisect(lambda d: score(d) > z, -1.0, estimate)
    return low, high


def _bisect(below: Callable[[float], bool], low: float = 0.0, high: float = 1.0) -> float:
    """The point where `below` turns from true to false."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return (low + high) / 2


def _binomial_cdf(k: int, n: int, p: float) -> float:
    if p <= 0:
        return 1.0
    if p >= 1:
        return 1.0 if k >= n else 0.0
    log_p, log_q, whole = math.log(p), math.log1p(-p), math.lgamma(n + 1)
    return min(
        1.0,
        math.fsum(
            math.exp(whole - math.lgamma(i + 1) - math.lgamma(n - i + 1) + i * log_p + (n - i) * log_q)
            for i in range(k + 1)
        ),
    )


def _normal_quantile(confidence: float) -> float:
    return _bisect(lambda x: 0.5 * (1 + math.erf(x / math.sqrt(2))) < confidence, 0.0, 10.0)
