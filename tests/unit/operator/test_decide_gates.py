"""What people and their systems have a say in: webhooks that confirm, queries of Prometheus, policies for no data."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from decide_scene import (
    MODEL,
    A,
    B,
    C,
    Scene,
    asks_for,
    busy,
    canary,
    decide,
    edited,
    has_built,
    later,
    members,
    new,
    obey,
    of,
    serving,
    silent,
    with_worker,
)
from trtmodel_contract.control import AttemptCounts, OutputAgreement, ShadowCounts
from trtmodel_operator import conditions
from trtmodel_operator.decide.turn import verification_key
from trtmodel_operator.model import (
    Answer,
    Confirmation,
    Decision,
    Lookup,
    Query,
    Signal,
    Stage,
    WebhookStage,
)

LIMITS = {"interval": "5s", "minRequests": 150, "maxErrorRateIncrease": 0.02}
BEGIN = {"name": "begin", "stage": "ConfirmRollout", "url": "https://hooks/begin"}
PROMOTE = {"name": "promote", "stage": "ConfirmPromotion", "url": "https://hooks/promote", "timeout": "3s"}
EVENT = {"name": "chat", "stage": "Event", "url": "https://hooks/chat"}
QUALITY = {"name": "quality", "query": "avg(quality)", "min": 0.9}
Outside = Callable[[Lookup, float], Answer | None]


def judged_by(**analysis: Any) -> dict[str, Any]:
    return {"rollout__analysis": {**LIMITS, **analysis}}


def gated(*webhooks: dict[str, Any]) -> Scene:
    return edited(serving(A), **judged_by(webhooks=list(webhooks)))


def watched(query: dict[str, Any] = QUALITY) -> Scene:
    return serving(A, **judged_by(prometheus=[query]))


def yes(lookup: Lookup, at: float) -> Answer:
    return Answer(lookup.key, at, yes=True)


def no(lookup: Lookup, at: float) -> Answer:
    return Answer(lookup.key, at, error="it says no (403: not on a Friday)")


def nothing(lookup: Lookup, at: float) -> None:
    """Nobody has answered yet."""


def gives(value: float) -> Outside:
    return lambda lookup, at: Answer(lookup.key, at, value=value)


def fails(lookup: Lookup, at: float) -> Answer:
    return Answer(lookup.key, at, error="no answer from http://prometheus:9090 within 10 s")


def after(seen: Scene, decision: Decision, outside: Outside, **figures: Any) -> Scene:
    """Five seconds later, with what the decision asked for looked up in the meantime."""
    seen = later(busy(obey(seen, decision, seconds=0), **figures), 5)
    found = [answer for lookup in decision.lookups if (answer := outside(lookup, seen.now - 1)) is not None]
    return replace(seen, answers=tuple(found))


def goes_on(
    seen: Scene, outside: Outside, until: Callable[[Decision], bool], passes: int = 90, **figures: Any
) -> tuple[Scene, Decision]:
    for _ in range(passes):
        decision = decide(seen)
        if until(decision):
            return seen, decision
        seen = after(seen, decision, outside, **figures)
    raise AssertionError(f"it never came to that: {decision.rule}, {decision.situation}")


def by(rule: str) -> Callable[[Decision], bool]:
    return lambda decision: decision.rule == rule


def ended(decision: Decision) -> bool:
    return decision.memory.candidate is None


def questions(decision: Decision) -> list[str]:
    return [json.loads(a.body)["webhook"] for a in decision.lookups if isinstance(a, Confirmation)]


# ---------------------------------------------------------------------------------------------------------------
# webhooks
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("outside", "says"), [(nothing, "it is being asked"), (no, "not on a Friday")])
def test_no_worker_hears_of_a_revision_before_its_rollout_is_confirmed(outside: Outside, says: str) -> None:
    seen = asks_for(gated(BEGIN), B)
    for _ in range(40):
        decision = decide(seen)
        assert (decision.rule, decision.memory.candidate, of(decision, Signal)) == ("gate", None, [])
        assert questions(decision) == ["begin"]
        seen = after(seen, decision, outside)
    assert (decision.situation.stage, decision.situation.reason) == (Stage.PREPARING, "AwaitingConfirmation")
    assert f"Its rollout waits for the webhook begin: {'it is' if outside is nothing else 'it says'}" in (
        decision.situation.message
    )
    assert says in decision.situation.message
    progressing = next(c for c in conditions.status(seen, decision, {})["conditions"] if c["type"] == "Progressing")  # type: ignore[attr-defined]
    assert (progressing["status"], progressing["reason"]) == ("False", "AwaitingConfirmation")


def test_a_rollout_begins_in_the_very_pass_that_hears_yes_and_asks_no_more() -> None:
    seen = asks_for(gated(BEGIN), B)
    decision = decide(seen)
    decision = decide(after(seen, decision, yes))
    assert decision.memory.candidate is not None
    assert decision.memory.candidate.revision == B
    assert decision.lookups == ()


def test_all_of_several_webhooks_have_to_say_yes() -> None:
    other = {**BEGIN, "name": "other", "url": "https://hooks/other"}
    seen = asks_for(gated(BEGIN, other), B)

    def one_of_them(lookup: Lookup, at: float) -> Answer:
        return yes(lookup, at) if "hooks/other" in lookup.url else no(lookup, at)  # type: ignore[union-attr]

    for _ in range(3):
        decision = decide(seen)
        assert questions(decision) == ["begin", "other"]
        seen = after(seen, decision, one_of_them)
    assert "waits for the webhook begin: it says no" in decide(seen).situation.message
    assert "other" not in decide(seen).situation.message


def test_the_first_revision_of_a_model_is_confirmed_too() -> None:
    seen = has_built(edited(new(), **judged_by(webhooks=[BEGIN])), A)
    decision = decide(seen)
    assert (decision.situation.reason, decision.memory.candidate) == ("AwaitingConfirmation", None)
    assert decide(after(seen, decision, yes)).memory.candidate is not None


@pytest.mark.parametrize("outside", [nothing, no])
def test_every_step_passes_and_the_promotion_waits_for_its_confirmation(outside: Outside) -> None:
    seen = asks_for(gated(PROMOTE), B)
    seen, decision = goes_on(seen, outside, by("confirm_promotion"))
    assert questions(decision) == ["promote"]
    step = decision.memory.step
    assert step is not None
    assert step.index == 2
    assert len(members(seen)) == 2  # those of the last step, and nobody else
    assert decision.situation.reason == "AwaitingConfirmation"
    decision = decide(after(seen, decision, yes))
    assert decision.rule == "promote"
    assert decision.memory.stable is not None
    assert decision.memory.stable.revision == B
    assert decision.lookups == ()


def test_a_promotion_that_nobody_confirms_ends_at_the_deadline_with_what_was_said() -> None:
    seen, decision = goes_on(asks_for(gated(PROMOTE), B), no, ended, passes=150)
    seen, decision = goes_on(seen, no, lambda d: bool(d.memory.rejected), passes=150)
    assert decision.memory.rejected[0].reason == "ProgressDeadlineExceeded"
    assert "the webhook promote: it says no (403: not on a Friday)" in decision.memory.rejected[0].message


def test_while_a_promotion_waits_a_bad_candidate_is_still_taken_back() -> None:
    seen, decision = goes_on(asks_for(gated(PROMOTE), B), no, by("confirm_promotion"))
    decision = decide(later(busy(obey(seen, decision, seconds=0), failed=100), 5))
    assert (decision.situation.stage, decision.situation.reason) == (Stage.ROLLED_BACK, "ErrorRateTooHigh")


def test_a_question_is_the_same_until_its_trial_ends_and_then_another() -> None:
    seen = asks_for(gated(PROMOTE), B)
    seen, decision = goes_on(seen, no, by("confirm_promotion"))
    (first,) = decision.lookups
    seen, decision = goes_on(after(seen, decision, no), no, by("confirm_promotion"))
    (same,) = decision.lookups
    assert isinstance(first, Confirmation)
    assert same.key == first.key
    assert (first.url, first.timeout, first.every) == ("https://hooks/promote", 3.0, 5.0)
    seen, _ = goes_on(seen, no, ended, passes=150)
    retried = replace(seen, memory=replace(decide(seen).memory, rejected=()))  # as a retry does
    _, decision = goes_on(retried, no, by("confirm_promotion"))
    (another,) = decision.lookups
    assert another.key != first.key


def test_a_question_says_what_it_is_about() -> None:
    _, decision = goes_on(asks_for(gated(PROMOTE), B), no, by("confirm_promotion"))
    (asked,) = decision.lookups
    assert isinstance(asked, Confirmation)
    body = json.loads(asked.body)
    assert (body["stage"], body["namespace"], body["name"]) == ("ConfirmPromotion", MODEL.namespace, MODEL.name)
    assert (body["revision"], body["stable"], body["verdict"], body["id"]) == (B, A, "Pass", asked.key)
    assert "requests failed on the candidate" in body["message"]


def test_who_is_only_told_of_events_is_not_asked() -> None:
    seen, decision = goes_on(asks_for(gated(EVENT), B), nothing, by("promote"))
    assert decision.lookups == ()
    assert seen.spec is not None
    assert seen.spec.rollout.analysis.webhooks[0].stage is WebhookStage.EVENT


def test_whom_webhooks_tell_does_not_change_what_was_rejected() -> None:
    before = serving(A).spec
    told = serving(A, **judged_by(webhooks=[EVENT])).spec
    assert verification_key(before) == verification_key(told)
    assert verification_key(before) != verification_key(serving(A, **judged_by(prometheus=[QUALITY])).spec)


# ---------------------------------------------------------------------------------------------------------------
# Prometheus
# ---------------------------------------------------------------------------------------------------------------


def test_queries_are_asked_while_a_candidate_answers_and_at_no_other_time() -> None:
    seen = watched()
    assert decide(seen).lookups == ()
    seen = asks_for(seen, B)
    assert (decide(seen).rule, decide(seen).lookups) == ("gate", ())
    seen, decision = goes_on(seen, gives(1.0), by("watch"))
    (asked,) = decision.lookups
    assert isinstance(asked, Query)
    assert (asked.query, asked.address, asked.every) == ("avg(quality)", "", 5.0)
    seen, decision = goes_on(seen, gives(1.0), by("promote"))
    assert decision.lookups == ()


def test_a_candidate_whose_query_stays_within_its_bounds_is_promoted() -> None:
    seen, _ = goes_on(asks_for(watched(), B), gives(0.95), by("promote"))
    step = seen.memory.step
    assert step is not None
    assert (step.checks[0].verdict, step.checks[0].value) == ("Pass", 0.95)
    assert "quality is 0.95, min 0.9" in step.sentence
    assert step.figures.endswith(", quality 0.95")


@pytest.mark.parametrize(
    ("query", "value"), [(QUALITY, 0.5), ({"name": "lag", "query": "max(lag)", "max": 2, "min": 0}, 3.0)]
)
def test_two_answers_in_a_row_outside_the_bounds_take_it_back(query: dict[str, Any], value: float) -> None:
    seen, decision = goes_on(asks_for(watched(query), B), gives(value), ended, passes=30)
    seen, decision = goes_on(seen, gives(value), lambda d: bool(d.memory.rejected))
    assert decision.memory.rejected[0].reason == "MetricOutOfBounds"
    assert f"{query['name']} is {value:g}" in decision.memory.rejected[0].message
    assert "in 2 answers in a row" in decision.memory.rejected[0].message


def test_one_answer_outside_the_bounds_holds_the_step_and_the_next_within_forgives_it() -> None:
    seen = canary(watched())
    seen = after(seen, decide(seen), gives(0.5))
    decision = decide(seen)
    step = decision.memory.step
    assert step is not None
    assert (step.checks[0].verdict, step.checks[0].fails, step.verdict) == ("Fail", 1, "Inconclusive")
    decision = decide(after(seen, decision, gives(0.95)))
    step = decision.memory.step
    assert step is not None
    assert (step.checks[0].fails, step.verdict) == (0, "Pass")


def test_the_same_answer_is_counted_once_however_often_it_is_looked_at() -> None:
    seen = canary(watched())
    (asked,) = decide(seen).lookups
    old = Answer(asked.key, seen.now + 1, value=0.5)
    for _ in range(4):
        seen = replace(later(busy(obey(seen, decide(seen), seconds=0)), 5), answers=(old,))
    step = decide(seen).memory.step
    assert step is not None
    assert step.checks[0].fails == 1


@pytest.mark.parametrize(
    ("outside", "says"),
    [
        (nothing, "quality: not answered yet"),
        (fails, "quality: no answer from http://prometheus:9090 within 10 s"),
        (gives(float("nan")), "quality: nan is no number that can be compared"),
        (gives(float("inf")), "quality: inf is no number that can be compared"),
    ],
)
def test_without_a_number_the_candidate_waits_with_the_cause_and_goes_back_at_the_deadline(
    outside: Outside, says: str
) -> None:
    seen = canary(watched())
    for _ in range(12):
        decision = decide(seen)
        assert decision.memory.candidate is not None
        seen = after(seen, decision, outside)
    step = decide(seen).memory.step
    assert step is not None
    assert (step.index, step.verdict, step.checks[0].verdict) == (0, "Inconclusive", "Inconclusive")
    assert says in step.sentence
    _, decision = goes_on(seen, outside, lambda d: bool(d.memory.rejected), passes=120)
    assert decision.memory.rejected[0].reason == "ProgressDeadlineExceeded"
    assert says in decision.memory.rejected[0].message


def test_answers_grow_old() -> None:
    seen = canary(edited(watched(), rollout__steps=[{"workers": 1, "hold": "60s"}]))
    (asked,) = decide(seen).lookups
    old = Answer(asked.key, seen.now, value=1.0)
    for _ in range(8):
        seen = replace(later(busy(obey(seen, decide(seen), seconds=0)), 5), answers=(old,))
    step = decide(seen).memory.step
    assert step is not None
    assert (step.index, step.verdict) == (0, "Inconclusive")
    assert "quality: the last answer is" in step.sentence


def test_an_answer_about_one_step_says_nothing_about_the_next() -> None:
    seen, decision = goes_on(canary(watched()), gives(1.0), by("advance"))
    (first,) = decide(canary(watched())).lookups
    seen, decision = goes_on(seen, gives(1.0), lambda d: d.rule == "watch" and d.memory.step.index == 1)  # type: ignore[union-attr]
    (second,) = decision.lookups
    assert first.key != second.key


def test_status_tells_the_verdict_its_figures_and_each_query_while_a_candidate_is_on_trial() -> None:
    seen = canary(watched())
    seen = after(seen, decide(seen), fails)
    decision = decide(seen)
    told: Any = conditions.status(seen, decision, {})["analysis"]
    assert (told["revision"], told["verdict"]) == (B, "Inconclusive")
    assert "0 of 200 requests failed on the candidate" in told["message"]
    (check,) = told["checks"]
    assert (check["name"], check["verdict"], "value" in check) == ("quality", "Inconclusive", False)
    assert "within 10 s" in check["message"]
    at_rest = serving(A)
    assert "analysis" not in conditions.status(at_rest, decide(at_rest), {})


# ---------------------------------------------------------------------------------------------------------------
# no data
# ---------------------------------------------------------------------------------------------------------------


def quiet(policy: str) -> Scene:
    return canary(serving(A, **judged_by(noData=policy)))


def test_hold_waits_for_requests_until_the_deadline() -> None:
    _, decision = goes_on(quiet("Hold"), nothing, lambda d: bool(d.memory.rejected), passes=120, requests=0)
    assert decision.memory.rejected[0].reason == "ProgressDeadlineExceeded"
    assert "NoTraffic" in decision.memory.rejected[0].message


def test_promote_lets_a_candidate_pass_that_nobody_asked_and_says_so() -> None:
    _, decision = goes_on(quiet("Promote"), nothing, by("promote"), requests=0)
    assert "noData Promote lets it pass, though nothing is proved" in decision.memory.history[0].message


def test_promote_still_holds_each_step_for_its_time() -> None:
    seen = quiet("Promote")
    for _ in range(2):
        decision = decide(seen)
        assert decision.memory.step is not None
        assert decision.memory.step.index == 0
        seen = after(seen, decision, nothing, requests=0)


@pytest.mark.parametrize("figures", [{"requests": 8, "failed": 1}, {"requests": 8, "seconds": 0.1}])
def test_promote_lets_nothing_pass_that_the_few_requests_speak_against(figures: dict[str, Any]) -> None:
    seen = quiet("Promote")
    for _ in range(4):
        seen = after(seen, decide(seen), nothing, **figures)
    seen = later(seen, 5)
    step = decide(seen).memory.step
    assert step is None or (step.index, step.verdict) == (0, "Inconclusive")


def test_synthetic_has_every_worker_run_golden_samples_once_the_hold_is_over_without_enough_requests() -> None:
    seen = quiet("Synthetic")
    told: list[set[int]] = []
    for _ in range(6):
        decision = decide(seen)
        told.append({s.synthetic for s in of(decision, Signal)})
        seen = after(seen, decision, nothing, requests=0)
    assert all(wanted <= {0} for wanted in told[:4])  # 15 s, which the step is held for
    assert told[-1] <= {150}
    assert decide(seen).memory.step.synthetic  # type: ignore[union-attr]
    signals = [s for wanted in told for s in wanted]
    assert 150 in signals
    assert decide(seen).memory.candidate is not None


def test_golden_samples_that_succeed_pass_the_step_and_are_named_in_its_sentence() -> None:
    seen = quiet("Synthetic")
    for _ in range(5):
        seen = after(seen, decide(seen), nothing, requests=0)
    assert seen.memory.step is not None
    assert seen.memory.step.synthetic
    seen = synthetic(busy(seen, requests=200))
    decision = decide(seen)
    step = decision.memory.step
    assert step is not None
    assert step.index == 1 or step.verdict == "Pass"
    assert "200 of the candidate's requests were golden samples" in step.sentence


def test_golden_samples_go_on_twice_as_many_each_time_while_they_prove_nothing() -> None:
    seen = canary(serving(A, **judged_by(noData="Synthetic", maxErrorRateIncrease=0.01)))  # which 268 prove
    told: list[int] = []
    for _ in range(20):
        decision = decide(seen)
        told += [s.synthetic for s in of(decision, Signal) if s.synthetic]
        if decision.memory.step is None or decision.memory.step.index:
            break
        seen = after(seen, decision, nothing, requests=told[-1] if told else 0)
    assert sorted(set(told)) == [150, 300]
    assert decision.memory.step is not None
    assert decision.memory.step.index == 1


def synthetic(seen: Scene) -> Scene:
    """All that was counted were golden samples."""
    for worker in seen.workers:
        assert worker.report is not None
        model = worker.report.models[MODEL.name]
        windows = {
            w: {d: replace(c, synthetic=c.ok) for d, c in engines.items()} for w, engines in model.windows.items()
        }
        report = replace(worker.report, models={MODEL.name: replace(model, windows=windows)})
        seen = with_worker(seen, worker.uid, report=report)
    return seen


def test_with_traffic_no_golden_sample_is_asked_for() -> None:
    seen = quiet("Synthetic")
    for _ in range(12):
        decision = decide(seen)
        assert {s.synthetic for s in of(decision, Signal)} <= {0}
        seen = after(seen, decision, nothing)


# ---------------------------------------------------------------------------------------------------------------
# what was counted, and what was mirrored
# ---------------------------------------------------------------------------------------------------------------


def test_G09_counters_that_begin_anew_start_the_step_again_and_lose_no_failure() -> None:
    seen = canary(serving(A))
    for _ in range(2):
        seen = after(seen, decide(seen), nothing)
    decision = decide(seen)
    seen = obey(seen, decision, seconds=0)
    window = seen.memory.window
    (member,) = members(seen)
    worker = next(w for w in seen.workers if w.uid == member)
    assert worker.report is not None
    model = worker.report.models[MODEL.name]
    lost = replace(worker.report, models={MODEL.name: replace(model, windows={window: {}})})
    decision = decide(later(with_worker(seen, member, report=lost), 5))
    step = decision.memory.step
    assert step is not None
    assert (step.held, step.verdict, decision.memory.window != window) == (0.0, "", True)
    assert decision.memory.candidate is not None


def test_G09_a_worker_that_is_not_heard_for_a_while_starts_nothing_again() -> None:
    seen = canary(serving(A))
    for _ in range(2):
        seen = after(seen, decide(seen), nothing)
    seen = obey(seen, decide(seen), seconds=0)
    (member,) = members(seen)
    heard = next(w.report for w in seen.workers if w.uid == member)
    decision = decide(later(silent(seen, member), 5))
    assert decision.memory.window == seen.memory.window
    back = later(with_worker(obey(seen, decision, seconds=0), member, report=heard, silence=""), 10)
    assert decide(back).memory.window == seen.memory.window


@pytest.mark.parametrize(("equal", "reason"), [(199, ""), (150, "AnswersDisagree")])
def test_answers_that_disagree_more_than_they_may_take_the_candidate_back(equal: int, reason: str) -> None:
    seen = canary(serving(A, **judged_by(minAgreement=0.95)))
    mirrored = ShadowCounts(200, 0, {}, {}, {"y": OutputAgreement(200, 200, equal, 200.0, 0.0, 0)})
    for uid in members(seen):
        worker = next(w for w in seen.workers if w.uid == uid)
        assert worker.report is not None
        model = worker.report.models[MODEL.name]
        digest = model.routes.candidate
        window = {seen.memory.window: {digest: AttemptCounts(shadow=mirrored)}}
        report = replace(worker.report, models={MODEL.name: replace(model, windows={**model.windows, **window})})
        seen = with_worker(seen, uid, report=report)
    decision = decide(later(seen, 5))
    assert (decision.situation.reason if decision.memory.candidate is None else "") == reason
    if reason:
        assert "75.00% of 200 mirrored answers agree in output y, limit 95.00%" in decision.situation.message


def test_another_revision_asks_under_its_own_key() -> None:
    seen = gated(BEGIN)
    (one,) = decide(asks_for(seen, B)).lookups
    (other,) = decide(asks_for(seen, C)).lookups
    assert one.key != other.key
