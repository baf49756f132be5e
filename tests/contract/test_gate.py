"""Verdicts: what each task looks at, what counts prove, and that a NaN never passes."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import pytest
from documents import instances
from hypothesis import given
from hypothesis import strategies as st
from trtmodel_contract.codec import dumps, loads
from trtmodel_contract.gate import (
    GateFigures,
    GateVerdict,
    OutputFigures,
    Task,
    Thresholds,
    Top1Figures,
    Verdict,
    judge,
)

PASS, FAIL, INCONCLUSIVE = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE
CLEAN = OutputFigures(1.0, 0.9999, 0.001, 0.01, 0, False)
LIMITS = Thresholds(top1_delta=0.005, rmse_increase=0.01, cosine=0.99)


def figures(task: Task, output: OutputFigures = CLEAN, **more: Any) -> GateFigures:
    defaults: dict[str, Any] = {"samples": 2_000, "labelled": False, "outputs": {"y": output}}
    if task is Task.CLASSIFICATION:
        defaults["top1"] = Top1Figures(0)
    return GateFigures("a" * 64, "b" * 64, task, **{**defaults, **more})


def output(**changes: Any) -> OutputFigures:
    return dataclasses.replace(CLEAN, **changes)


def labelled(worse: int, better: int, n: int = 2_000, result: OutputFigures = CLEAN) -> GateFigures:
    right = n - 100
    top1 = Top1Figures(worse + better, right, right - worse + better, worse, better)
    return figures(Task.CLASSIFICATION, result, samples=n, labelled=True, top1=top1)


def unlabelled(disagreements: int, n: int, **more: Any) -> GateFigures:
    return figures(Task.CLASSIFICATION, samples=n, top1=Top1Figures(disagreements), **more)


C, R, E, W = Task.CLASSIFICATION, Task.REGRESSION, Task.EMBEDDING, Task.RAW
TRUTH_WORSE = output(truth_rmse_reference=1.0, truth_rmse_engine=1.02)
TRUTH_SAME = output(truth_rmse_reference=1.0, truth_rmse_engine=1.005)


@pytest.mark.parametrize(
    ("given_figures", "verdict", "words"),
    [
        # Any task
        (figures(R), PASS, "output y: mean cosine 1.00000"),
        (figures(R, samples=0), INCONCLUSIVE, "the data set is empty"),
        (figures(R, outputs={}), INCONCLUSIVE, "no output was compared"),
        (figures(R, output(nonfinite=3)), FAIL, "3 values are NaN or infinite where the reference is finite"),
        (figures(R, output(constant=True)), FAIL, "every sample got the same answer"),
        (figures(R, output(cosine_mean=0.98)), FAIL, "mean cosine 0.98000"),
        (figures(R, output(cosine_worst=-1.0)), PASS, "worst -1.00000"),  # shown, not judged
        (figures(R, outputs={"y": CLEAN, "z": output(cosine_mean=0.5)}), FAIL, "output z: mean cosine"),
        # Classification without labels
        (unlabelled(4, 2_000), PASS, "top-1 differs in 4 of 2,000 samples (0.20%), at most 0.46%"),
        (unlabelled(5, 2_000), INCONCLUSIVE, "samples would decide"),
        (unlabelled(30, 2_000), FAIL, "at least 1.08% at 95 % confidence, limit 0.50%"),
        (unlabelled(0, 2_000, outputs={"y": output(relative_rmse=0.02)}), FAIL, "RMSE 2.00% of the reference's"),
        (figures(C, top1=None), INCONCLUSIVE, "no class was compared"),
        # Classification with labels: accuracy decides, and neither disagreement nor RMSE
        (labelled(2, 11), PASS, "accuracy loss -0.45% on 2,000 labelled samples (2 worse, 11 better)"),
        (labelled(20, 20), INCONCLUSIVE, "neither proves nor disproves"),
        (labelled(40, 2), FAIL, "accuracy loss +1.90%"),
        (labelled(0, 0, result=output(relative_rmse=0.3)), PASS, "accuracy loss +0.00%"),
        (labelled(0, 0, result=output(cosine_mean=0.5)), FAIL, "mean cosine"),
        # Regression, with truth and without
        (figures(R, output(relative_rmse=0.02)), FAIL, "RMSE 2.00% of the reference's standard deviation"),
        (figures(R, TRUTH_WORSE, labelled=True), FAIL, "RMSE against truth 1 -> 1.02 (+2.00%)"),
        (figures(R, TRUTH_SAME, labelled=True), PASS, "(+0.50%)"),
        (figures(R, output(truth_rmse_reference=0.0, truth_rmse_engine=0.1), labelled=True), FAIL, "+inf%"),
        (figures(R, output(truth_rmse_reference=0.0, truth_rmse_engine=0.0), labelled=True), PASS, "+0.00%"),
        # Embeddings are compared by angle alone
        (figures(E, output(relative_rmse=0.5)), PASS, "mean cosine"),
        (figures(E, output(cosine_mean=0.98)), FAIL, "mean cosine 0.98000"),
        # Raw: all there is
        (figures(W), PASS, "RMSE 0.10%"),
        (figures(W, output(relative_rmse=0.02)), FAIL, "RMSE 2.00%"),
        # What the samples do not prove
        (figures(W, output(relative_rmse=0.009, rmse_error=0.01, vectors=900)), PASS, "RMSE 0.90%"),
        (figures(W, output(relative_rmse=0.009, rmse_error=0.1, vectors=900)), INCONCLUSIVE, "0.73% to 1.11%"),
        (figures(W, output(relative_rmse=0.011, rmse_error=0.1, vectors=900)), INCONCLUSIVE, "samples would decide"),
        (figures(W, output(relative_rmse=0.02, rmse_error=0.1, vectors=900)), FAIL, "RMSE 2.00%"),
        (figures(W, output(relative_rmse=0.001, vectors=1)), INCONCLUSIVE, "4,000 samples would decide"),
        (figures(W, output(relative_rmse=0.0, cosine_mean=1.0, vectors=1)), PASS, "RMSE 0.00%"),
        (figures(E, output(cosine_mean=0.992, cosine_error=0.3, vectors=20)), INCONCLUSIVE, "0.98015 to 0.99678"),
        (figures(E, output(cosine_mean=0.992, cosine_error=0.05, vectors=20)), PASS, "mean cosine 0.99200"),
        (figures(E, output(cosine_mean=0.9, cosine_error=0.3, vectors=20)), FAIL, "mean cosine 0.90000"),
        (figures(R, dataclasses.replace(TRUTH_SAME, vectors=50, truth_error=0.02)), INCONCLUSIVE, "-4.55% to 5.82%"),
        (figures(R, dataclasses.replace(TRUTH_SAME, vectors=50, truth_error=0.001)), PASS, "(+0.50%)"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "value", ""),
)
def test_a_verdict_comes_with_the_sentence_that_decided(
    given_figures: GateFigures, verdict: Verdict, words: str
) -> None:
    judged = judge(given_figures, LIMITS)
    assert judged.verdict is verdict, judged.sentence
    assert words in judged.sentence


def test_a_failure_is_named_before_what_is_only_undecided() -> None:
    judged = judge(unlabelled(5, 2_000, outputs={"y": output(cosine_mean=0.5)}), LIMITS)
    assert (judged.verdict, judged.sentence[:8]) == (FAIL, "output y")
    assert [check.verdict for check in judged.checks] == [INCONCLUSIVE, FAIL, PASS]


@pytest.mark.parametrize(("n", "most"), [(598, 0), (2_000, 4), (10_000, 38)])
def test_so_many_disagreements_are_allowed_at_half_a_per_cent(n: int, most: int) -> None:
    assert judge(unlabelled(most, n), LIMITS).verdict is PASS
    assert judge(unlabelled(most + 1, n), LIMITS).verdict is INCONCLUSIVE


@pytest.mark.parametrize("make", [unlabelled, lambda _, n: labelled(0, 0, n)], ids=["unlabelled", "labelled"])
def test_about_600_clean_samples_are_the_least_for_half_a_per_cent(make: Any) -> None:
    too_few = judge(make(0, 597), LIMITS)
    assert too_few.verdict is INCONCLUSIVE
    assert "about 598 samples would decide" in too_few.sentence
    assert judge(make(0, 598), LIMITS).verdict is PASS


def test_the_sample_count_that_is_asked_for_decides() -> None:
    undecided = judge(unlabelled(3, 1_000), LIMITS)
    needed = int(undecided.sentence.split("about ")[1].split(" ")[0].replace(",", ""))
    assert judge(unlabelled(round(0.003 * needed), needed), LIMITS).verdict is PASS
    assert "not even 1,000,000 samples" in judge(unlabelled(6, 1_000), LIMITS).sentence


@pytest.mark.parametrize("rate", [0.0, 0.0049, 0.03, 0.5, 1.0])
@pytest.mark.parametrize("n", [1, 1_000, 1_000_000])
def test_a_verdict_takes_no_time_whatever_the_counts(n: int, rate: float) -> None:
    """The operator judges in its loop; summing a binomial tail took half a minute for 3 % of 1,000."""
    begin = time.perf_counter()
    judge(unlabelled(round(rate * n), n), LIMITS)
    judge(labelled(round(rate * n), 0, n), LIMITS)
    assert time.perf_counter() - begin < 2


def test_a_failure_says_which_nodes_to_keep_and_a_pass_does_not() -> None:
    hints = ("^/encoder/norm/Pow$", "^it's$")
    failed = judge(figures(W, output(relative_rmse=0.5), keep_hints=hints), LIMITS)
    assert failed.sentence.endswith("try keepPrecision: {nodes: ['^/encoder/norm/Pow$', '^it''s$']}")
    assert "keepPrecision" not in judge(figures(W, keep_hints=hints), LIMITS).sentence


def test_the_error_that_is_not_known_proves_nothing() -> None:
    """A spread that was measured as infinite travels as null."""
    unknown = output(relative_rmse=0.001, rmse_error=math.inf, vectors=900)
    assert judge(figures(W, unknown), LIMITS).verdict is INCONCLUSIVE


NUMBERS = ("cosine_mean", "cosine_worst", "relative_rmse", "max_abs", "truth_rmse_reference", "truth_rmse_engine")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_figure_that_is_no_number_travels_as_null(name: str, value: float) -> None:
    before = figures(R, output(**{name: value}))
    assert loads(GateFigures, dumps(before)) == before
    assert getattr(before.outputs["y"], name) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("task", "name"),
    [
        *((task, "cosine_mean") for task in Task),
        *((task, "relative_rmse") for task in (C, R, W)),
        (R, "truth_rmse_reference"),
        (R, "truth_rmse_engine"),
    ],
)
def test_nan_and_infinity_never_pass(task: Task, name: str, value: float) -> None:
    start = TRUTH_SAME if name.startswith("truth") else CLEAN
    judged = judge(figures(task, dataclasses.replace(start, **{name: value})), LIMITS)
    assert judged.verdict is FAIL
    assert "not a number" in judged.sentence


@pytest.mark.parametrize("limits", [Thresholds(math.nan, math.nan, math.nan), Thresholds(0.005, math.nan, 0.99)])
def test_a_limit_that_is_no_number_lets_nothing_pass(limits: Thresholds) -> None:
    for task in (C, R, W):
        assert judge(figures(task), limits).verdict is not PASS


ANY_OUTPUTS = st.dictionaries(st.text(max_size=3), instances(OutputFigures), max_size=8)
ANY_LIMITS = st.builds(Thresholds, st.floats(0, 0.1), st.floats(0, 2), st.floats(-1, 1))


@given(st.sampled_from(Task), ANY_OUTPUTS, ANY_LIMITS, st.booleans())
def test_the_worst_outputs_alone_give_the_same_verdict(
    task: Task, outputs: dict[str, OutputFigures], limits: Thresholds, has_labels: bool
) -> None:
    whole = figures(task, outputs=outputs, labelled=has_labels)
    assert judge(whole.worst(), limits).verdict is judge(whole, limits).verdict
    assert len(whole.worst().outputs) <= 6


@given(st.sampled_from(Task), ANY_OUTPUTS, ANY_LIMITS)
def test_every_verdict_has_a_sentence(task: Task, outputs: dict[str, OutputFigures], limits: Thresholds) -> None:
    judged: GateVerdict = judge(figures(task, outputs=outputs), limits)
    assert judged.sentence
    assert judged.checks
