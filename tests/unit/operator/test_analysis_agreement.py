"""Agreement of mirrored answers: what proves it, what proves the opposite, and what proves nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trtmodel_contract.control import AttemptCounts, OutputAgreement, ShadowCounts
from trtmodel_contract.gate import Verdict
from trtmodel_operator.analysis import look, total
from trtmodel_operator.analysis.agreement import LEAST_ERRORS, judge_agreement
from trtmodel_operator.model import AnalysisSpec

LIMITS = AnalysisSpec(interval=5.0, min_requests=150, max_error_rate_increase=0.02, max_latency_ratio=1.2)
STABLE = AttemptCounts(ok=1000, compute={"1": {200: 1000}})


def ranked(rows: int, equal: int, incomparable: int = 0) -> OutputAgreement:
    return OutputAgreement(rows, rows - incomparable, equal, float(equal), 0.0, incomparable)


def measured(rows: int, error: float) -> OutputAgreement:
    """One value a row, such as a price."""
    return OutputAgreement(rows, 0, 0, float(rows), error * rows, 0)


def shadow(mirrored: int, **outputs: OutputAgreement) -> ShadowCounts:
    return ShadowCounts(mirrored, 0, {}, {"1": {200: mirrored}}, outputs)


@pytest.mark.parametrize(
    ("mirrored", "equal", "verdict"),
    [
        (1000, 1000, Verdict.PASS),
        (1000, 998, Verdict.PASS),
        (1000, 989, Verdict.INCONCLUSIVE),
        (1000, 960, Verdict.FAIL),
        (100, 100, Verdict.INCONCLUSIVE),  # 0.99 takes 268 answers that all agree
        (268, 268, Verdict.PASS),
        (20, 2, Verdict.FAIL),
    ],
)
def test_a_share_passes_and_fails_only_when_it_is_proved(mirrored: int, equal: int, verdict: Verdict) -> None:
    found, text = judge_agreement(shadow(mirrored, y=ranked(mirrored, equal)), 0.99)
    assert found is verdict
    assert f"of {mirrored:,} mirrored answers agree in output y, limit 99.00%" in text


def test_the_output_that_agrees_least_counts() -> None:
    found, text = judge_agreement(shadow(1000, fine=ranked(1000, 1000), poor=ranked(1000, 900)), 0.99)
    assert found is Verdict.FAIL
    assert "90.00% of 1,000 mirrored answers agree in output poor" in text


def test_rows_of_one_request_prove_no_more_than_the_request() -> None:
    """Fifty requests of 32 rows each."""
    assert judge_agreement(shadow(50, y=ranked(1600, 1600)), 0.99)[0] is Verdict.INCONCLUSIVE
    assert judge_agreement(shadow(1600, y=ranked(1600, 1600)), 0.99)[0] is Verdict.PASS


def test_answers_that_cannot_be_compared_do_not_agree() -> None:
    assert judge_agreement(shadow(1000, y=ranked(1000, 900, incomparable=100)), 0.99)[0] is Verdict.FAIL
    assert judge_agreement(shadow(500, y=ranked(500, 0, incomparable=500)), 0.99)[0] is Verdict.FAIL


@pytest.mark.parametrize(
    ("mirrored", "error", "verdict"),
    [
        (LEAST_ERRORS, 0.001, Verdict.PASS),
        (LEAST_ERRORS, 0.05, Verdict.FAIL),
        (LEAST_ERRORS - 1, 0.05, Verdict.INCONCLUSIVE),
        (5000, 7.0, Verdict.FAIL),
    ],
)
def test_an_output_without_a_first_place_is_compared_by_its_error(
    mirrored: int, error: float, verdict: Verdict
) -> None:
    found, text = judge_agreement(shadow(mirrored, price=measured(mirrored, error)), 0.99)
    assert found is verdict
    assert f"in the mean of {mirrored:,} mirrored answers, limit 99.00%" in text


def test_without_a_limit_it_is_told_and_never_judged() -> None:
    found, text = judge_agreement(shadow(1000, y=ranked(1000, 300)), None)
    assert (found, text) == (Verdict.PASS, "30.00% of 1,000 mirrored answers agree in output y")
    assert judge_agreement(None, 0.99) == (Verdict.PASS, "")  # nothing is mirrored in this step


def test_nothing_that_was_compared_is_no_agreement() -> None:
    found, text = judge_agreement(replace(shadow(0), dropped=12), 0.99)
    assert found is Verdict.INCONCLUSIVE
    assert "12 were dropped" in text


def test_mirrored_requests_are_attempts_of_a_candidate_that_no_client_met() -> None:
    """A step with weight 0: all that is known of the candidate comes from its shadow."""
    limits = replace(LIMITS, min_agreement=0.9)
    found = look(AttemptCounts(shadow=shadow(400, y=ranked(400, 400))), STABLE, limits, "stable")
    assert (found.verdict, found.requests) == (Verdict.PASS, 400)
    assert "100.00% of 400 mirrored answers agree" in found.sentence
    failing = replace(shadow(300, y=ranked(300, 300)), failed={"Error": 100})
    assert look(AttemptCounts(shadow=failing), STABLE, limits, "stable").errors is Verdict.FAIL
    slow = replace(shadow(400, y=ranked(400, 400)), compute={"1": {230: 400}})
    assert look(AttemptCounts(shadow=slow), STABLE, limits, "stable").latency is Verdict.FAIL
    other = look(AttemptCounts(shadow=shadow(400, y=ranked(400, 200))), STABLE, limits, "stable")
    assert (other.verdict, other.agreement) == (Verdict.FAIL, Verdict.FAIL)


def test_shadows_of_several_workers_are_added_up() -> None:
    one = AttemptCounts(ok=5, shadow=replace(shadow(10, y=ranked(10, 9)), failed={"Down": 1}))
    two = AttemptCounts(ok=2, shadow=shadow(20, y=ranked(20, 20), z=ranked(20, 1)))
    added = total([one, two, AttemptCounts(ok=1)])
    assert added.ok == 8
    assert added.shadow is not None
    assert (added.shadow.mirrored, dict(added.shadow.failed)) == (30, {"Down": 1})
    assert (added.shadow.outputs["y"].rows, added.shadow.outputs["y"].top1_equal) == (30, 29)
    assert added.shadow.compute["1"] == {200: 30}
    assert total([AttemptCounts(ok=1)]).shadow is None


@given(
    st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6),
    st.floats(0, 1e9), st.floats(0, 1) | st.none(),
)  # fmt: skip
def test_whatever_a_worker_reports_there_is_a_verdict(
    mirrored: int, rows: int, ranked_: int, equal: int, error: float, limit: float | None
) -> None:
    found = OutputAgreement(rows, ranked_, equal, 0.0, error, max(0, rows - ranked_))  # also one that lies
    verdict, _ = judge_agreement(shadow(mirrored, y=found), limit)
    assert verdict in Verdict
