"""How often the gate's verdict is wrong, by simulation of whole data sets: a model that is at its limit passes in at
most 5 % of them, and one that is as good as the original fails in at most 5 %."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from trtmodel_contract.gate import GateFigures, OutputFigures, Task, Thresholds, Top1Figures, Verdict, judge
from trtmodel_worker.builder.figures import OutputSums

Values = NDArray[np.float64]
Noise = Callable[[np.random.Generator, int], Values]

TRIALS = 600  # of figures, and
DRAWS = 1_000  # of counts
LIMITS = Thresholds(top1_delta=0.005, rmse_increase=0.01, cosine=0.99)
CLEAN = OutputFigures(1.0, 1.0, 0.0, 0.0, 0, False)
SIZES = (5, 20, 100, 600)


def most(trials: int) -> float:
    """Three standard errors of the simulation itself above 5 %."""
    return 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials)


def normal(random: np.random.Generator, n: int) -> Values:
    return random.normal(size=n)


def double_exponential(random: np.random.Generator, n: int) -> Values:
    return random.laplace(size=n) / math.sqrt(2)


def figures(task: Task, output: OutputFigures, n: int, labelled: bool = False, **more: object) -> GateFigures:
    return GateFigures("a" * 64, "b" * 64, task, n, labelled, {"y": output}, **more)  # type: ignore[arg-type]


def shares(counted: Counter[Verdict]) -> dict[Verdict, float]:
    whole = sum(counted.values())
    return {verdict: counted[verdict] / whole for verdict in Verdict}


def of_counts(
    counts: NDArray[np.int64], make: Callable[..., Top1Figures], n: int, labelled: bool
) -> dict[Verdict, float]:
    """Equal counts have equal verdicts: each is asked for once."""
    found: Counter[Verdict] = Counter()
    for row, times in zip(*np.unique(counts, axis=0, return_counts=True), strict=True):
        judged = judge(figures(Task.CLASSIFICATION, CLEAN, n, labelled, top1=make(*row.tolist())), LIMITS)
        found[judged.verdict] += int(times)
    return shares(found)


@pytest.mark.parametrize("n", [20, 600, 2_000, 10_000])
def test_answers_that_differ_as_often_as_the_limit_says_or_more_seldom_pass(n: int) -> None:
    random = np.random.default_rng(n)
    for rate in (0.005, 0.0075, 0.02):
        found = of_counts(random.binomial(n, rate, size=(DRAWS, 1)), Top1Figures, n, labelled=False)
        assert found[Verdict.PASS] <= most(DRAWS)
    same = of_counts(np.zeros((1, 1), np.int64), Top1Figures, n, labelled=False)
    assert same[Verdict.FAIL] == 0
    half = of_counts(random.binomial(n, 0.0025, size=(DRAWS, 1)), Top1Figures, n, labelled=False)
    assert half[Verdict.FAIL] <= most(DRAWS)


@pytest.mark.parametrize(("n", "churn"), [(600, 0.0), (600, 0.02), (2_000, 0.002)])
def test_an_accuracy_that_is_lost_up_to_the_limit_seldom_passes_and_mere_churn_seldom_fails(
    n: int, churn: float
) -> None:
    """`churn`: answers that are right in one engine only, as many in each."""
    random = np.random.default_rng(round(n + churn * 1e6))

    def drawn(loss: float) -> dict[Verdict, float]:
        pairs = random.multinomial(n, [loss + churn, churn, 1 - loss - 2 * churn], size=DRAWS)[:, :2]
        return of_counts(
            pairs, lambda worse, better: Top1Figures(worse + better, n, n, worse, better), n, labelled=True
        )

    assert drawn(0.005)[Verdict.PASS] <= most(DRAWS)
    assert drawn(0.0075)[Verdict.PASS] <= most(DRAWS)
    assert drawn(0.0)[Verdict.FAIL] <= most(DRAWS)


def simulated(
    task: Task, trial: Callable[[np.random.Generator], OutputFigures], n: int, labelled: bool = False
) -> dict[Verdict, float]:
    random = np.random.default_rng(n)
    found = Counter(judge(figures(task, trial(random), n, labelled), LIMITS).verdict for _ in range(TRIALS))
    return shares(found)


@pytest.mark.parametrize("noise", [normal, double_exponential])
@pytest.mark.parametrize("n", SIZES)
def test_a_relative_error_at_the_limit_seldom_passes_and_half_of_it_seldom_fails(n: int, noise: Noise) -> None:
    def at(size: float) -> dict[Verdict, float]:
        def trial(random: np.random.Generator) -> OutputFigures:
            # The spread that the limit is relative to is the reference's own: exactly 1 here.
            reference = np.resize([-1.0, 1.0], (n, 1))
            sums = OutputSums()
            sums.add(reference, reference + size * noise(random, n)[:, None], n)
            return sums.figures()

        return simulated(Task.RAW, trial, n)

    assert at(0.01)[Verdict.PASS] <= most(TRIALS)
    assert at(0.005)[Verdict.FAIL] <= most(TRIALS)


@pytest.mark.parametrize("noise", [normal, double_exponential])
@pytest.mark.parametrize("n", SIZES)
def test_a_regression_that_loses_as_much_as_the_limit_seldom_passes_and_an_equal_one_seldom_fails(
    n: int, noise: Noise
) -> None:
    def at(ratio: float) -> dict[Verdict, float]:
        """Two models with errors that mostly are the same; the engine's RMSE is `ratio` times the reference's."""
        shared = 0.99

        def trial(random: np.random.Generator) -> OutputFigures:
            truth = random.normal(size=(n, 1))
            common = noise(random, n)[:, None]
            errors = [shared * common + math.sqrt(1 - shared**2) * noise(random, n)[:, None] for _ in range(2)]
            sums = OutputSums()
            sums.add(truth, truth.copy(), n)
            sums.add_truth(truth + errors[0], truth + ratio * errors[1], truth)
            return sums.figures()

        return simulated(Task.REGRESSION, trial, n, labelled=True)

    assert at(1.01)[Verdict.PASS] <= most(TRIALS)
    assert at(1.0)[Verdict.FAIL] <= most(TRIALS)


@pytest.mark.parametrize("n", SIZES)
def test_embeddings_whose_mean_cosine_is_at_the_limit_seldom_pass_and_better_ones_seldom_fail(n: int) -> None:
    def at(distance: float) -> dict[Verdict, float]:
        def trial(random: np.random.Generator) -> OutputFigures:
            # Squares of normal numbers: as skewed as distances of scattered vectors in two dimensions are.
            cosines = 1 - np.minimum(2.0, distance * random.normal(size=n) ** 2)
            reference = np.tile([1.0, 0.0], (n, 1))
            sums = OutputSums()
            sums.add(reference, np.stack([cosines, np.sqrt(1 - cosines**2)], axis=1), n)
            return sums.figures()

        return simulated(Task.EMBEDDING, trial, n)

    assert at(0.01)[Verdict.PASS] <= most(TRIALS)
    assert at(0.005)[Verdict.FAIL] <= most(TRIALS)


def test_twenty_samples_do_not_prove_half_a_per_cent_and_the_verdict_names_how_many_would() -> None:
    judged = judge(figures(Task.CLASSIFICATION, CLEAN, 20, top1=Top1Figures(0)), LIMITS)
    assert judged.verdict is Verdict.INCONCLUSIVE
    assert "about 598 samples would decide" in judged.sentence
