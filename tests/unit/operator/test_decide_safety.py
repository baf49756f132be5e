"""cannot_be_held, analysis_says_no, deadline_passed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decide_scene import (
    A,
    B,
    Scene,
    asks_for,
    booted,
    busy,
    canary,
    decide,
    digest,
    edited,
    has_built,
    later,
    members,
    new,
    obey,
    of,
    run,
    serving,
    silent,
    with_engine,
    with_worker,
    without,
)
from trtmodel_contract.control import EngineState
from trtmodel_operator.model import ApplyPointer, ApplyWorkload, Decision, Signal, Stage


def member(seen: Scene) -> str:
    return members(seen)[0]


def went_back(decision: Decision, reason: str) -> None:
    """The candidate is gone for good, and every worker is told so in the same pass, without pointer or Job."""
    assert decision.memory.candidate is None
    assert decision.memory.step is None
    assert decision.memory.stable is not None
    assert decision.memory.stable.revision == A
    assert (decision.situation.stage, decision.situation.reason) == (Stage.ROLLED_BACK, reason)
    assert (decision.memory.rejected[0].revision, decision.memory.rejected[0].reason) == (B, reason)
    assert (decision.memory.history[0].outcome, decision.memory.history[0].reason) == ("RolledBack", reason)
    signals = of(decision, Signal)
    assert signals
    assert {(s.stable, s.candidate) for s in signals} == {(digest(A), "")}
    assert not of(decision, ApplyPointer)
    assert f"{A} serves" in decision.situation.message


def looks(seen: Scene, n: int, **figures: float) -> tuple[Scene, Decision]:
    """The n-th look at these figures."""
    for _ in range(n - 1):
        seen = later(busy(seen, **figures), 5)  # type: ignore[arg-type]
        seen = obey(seen, decide(seen), seconds=0)
    seen = later(busy(seen, **figures), 5)  # type: ignore[arg-type]
    return seen, decide(seen)


# ---------------------------------------------------------------------------------------------------------------
# cannot be held
# ---------------------------------------------------------------------------------------------------------------


def test_a_worker_that_cannot_load_the_candidate_ends_it() -> None:
    seen = asks_for(serving(A), B)
    seen = obey(seen, decide(seen))
    uid = next(w.uid for w in seen.workers if any(e.revision == B for e in w.report.models["magika"].engines))  # type: ignore[union-attr]
    decision = decide(with_engine(seen, uid, B, state=EngineState.FAILED, reason="NoMemory", message="needs 3 GiB"))
    went_back(decision, "EngineFailed")
    assert "needs 3 GiB" in decision.situation.message


@pytest.mark.parametrize("reason", ["StorageUnavailable", "AccessDenied", "SignatureInvalid", "FetchTimeout"])
def test_a_fault_of_the_environment_is_waited_for(reason: str) -> None:
    seen = asks_for(serving(A), B)
    seen = obey(seen, decide(seen), loading=[B])
    uid = next(w.uid for w in seen.workers if any(e.revision == B for e in w.report.models["magika"].engines))  # type: ignore[union-attr]
    decision = decide(with_engine(seen, uid, B, state=EngineState.FAILED, reason=reason, message="S3 is down"))
    assert decision.rule == "prepare"
    assert "S3 is down" in decision.situation.message


def test_a_host_that_dies_of_the_candidate_ends_it() -> None:
    seen = canary(serving(A))
    went_back(decide(with_engine(seen, member(seen), B, deaths=1, state=EngineState.DOWN)), "EngineDied")


def test_deaths_before_its_trial_do_not_count_against_an_engine_that_was_stable_once() -> None:
    seen = serving(A)
    seen = replace(seen, memory=replace(seen.memory, standby=serving(B).memory.stable))
    seen, _ = run(seen, lambda _, d: not d.actions)
    for worker in seen.workers:
        seen = with_engine(seen, worker.uid, B, deaths=2)
    seen = canary(seen)
    assert decide(seen).memory.candidate is not None
    went_back(decide(with_engine(seen, member(seen), B, deaths=3)), "EngineDied")


def test_a_host_that_dies_of_stable_is_not_the_candidates_fault() -> None:
    seen = canary(serving(A))
    assert decide(with_engine(seen, "w0", A, deaths=3)).memory.candidate is not None


def test_a_member_whose_container_dies_ends_it() -> None:
    seen = canary(serving(A))
    dead = with_worker(seen, member(seen), restarts=1, ready=False, report=None)
    went_back(decide(dead), "WorkerDied")


def test_a_container_that_died_is_noticed_though_its_next_life_reports_before_the_kubelet_does() -> None:
    """Seen on a busy machine: another worker was tried meanwhile, and the candidate stayed."""
    seen = canary(serving(A))
    uid = member(seen)
    seen = with_worker(seen, uid, ready=False, report=None)
    for _ in range(3):
        seen = obey(seen, decide(seen))
    assert members(seen) != [uid]
    seen = with_worker(seen, uid, report=booted(uid, seen.pointers[0]).report)
    seen = replace(seen, memory=decide(seen).memory)
    went_back(decide(with_worker(seen, uid, ready=True, restarts=1)), "WorkerDied")


def test_a_worker_that_dies_while_it_loads_the_candidate_ends_it_before_another_is_tried() -> None:
    seen = asks_for(serving(A), B)
    decision = decide(seen)
    (uid,) = [s.uid for s in of(decision, Signal) if any(e.revision == B for e in s.engines)]
    seen = obey(seen, decision, loading=[B])
    dead = with_worker(
        seen,
        uid,
        restarts=1,
        ready=False,
        report=None,
        trouble="OOMKilled",
        message="too little",
    )
    decision = decide(dead)
    went_back(decision, "WorkerDied")
    assert "too little" in decision.situation.message


@pytest.mark.parametrize("who", ["another worker", "before the step", "being deleted"])
def test_a_container_that_died_of_something_else_does_not(who: str) -> None:
    before = serving(A)
    if who == "before the step":
        before = replace(before, workers=tuple(replace(w, restarts=2) for w in before.workers))
    seen = canary(before)
    uid = member(seen)
    if who == "another worker":
        other = next(w.uid for w in seen.workers if w.uid != uid)
        seen = with_worker(seen, other, restarts=1)
    elif who == "being deleted":
        seen = with_worker(seen, uid, restarts=1, terminating=True)
    assert decide(seen).memory.candidate is not None


def test_a_worker_that_let_go_of_the_candidate_may_die_of_anything() -> None:
    seen = canary(serving(A), index=1)
    both = members(seen)
    seen = edited(seen, rollout__steps=[{"workers": 1, "hold": "1m"}])
    for _ in range(4):
        seen = obey(seen, decide(seen))
    (dropped,) = set(both) - set(members(seen))
    assert seen.memory.step is not None
    assert len(seen.memory.step.restarts) == 1
    assert decide(with_worker(seen, dropped, restarts=1)).memory.candidate is not None


def test_an_old_report_of_an_earlier_trial_does_not_end_the_new_one() -> None:
    seen = canary(serving(A))
    seen = with_engine(seen, member(seen), B, state=EngineState.FAILED)
    report = next(w.report for w in seen.workers if w.uid == member(seen))
    assert report is not None
    stale = replace(report, fence=replace(report.fence, sequence=report.fence.sequence - 1))
    assert decide(with_worker(seen, member(seen), report=stale)).memory.candidate is not None


def test_an_engine_that_fails_while_all_are_prepared_ends_it_too() -> None:
    seen, decision = looks(canary(serving(A), index=1), 3)
    assert decision.rule == "advance"
    seen = obey(seen, decision)
    uid = next(w.uid for w in seen.workers if w.uid not in members(seen))
    went_back(decide(with_engine(seen, uid, B, state=EngineState.FAILED)), "EngineFailed")


def test_a_first_engine_that_cannot_be_loaded_leaves_no_pod_behind() -> None:
    seen = has_built(new(), A)
    seen = obey(seen, decide(seen))
    decision = decide(with_engine(seen, "w1", A, state=EngineState.FAILED, reason="Unservable", message="type STRING"))
    assert decision.situation.stage is Stage.ROLLED_BACK
    assert "nothing to roll back to" in decision.situation.message
    assert [w.replicas for w in of(decision, ApplyWorkload)] == [0]
    after = obey(seen, decision)
    assert decide(after).rule == "rejected"
    assert after.workers == ()
    better = decide(asks_for(after, B))
    assert [p.stable.revision for p in of(better, ApplyPointer)] == [B]
    assert [w.replicas for w in of(better, ApplyWorkload)] == [4]


# ---------------------------------------------------------------------------------------------------------------
# analysis
# ---------------------------------------------------------------------------------------------------------------


def test_too_many_errors_end_it_at_the_first_look_that_proves_them() -> None:
    _, decision = looks(canary(serving(A)), 1, failed=20)
    went_back(decision, "ErrorRateTooHigh")
    assert "20 of 200 requests failed on the candidate" in decision.situation.message


def test_a_candidate_that_is_too_slow_goes_back_at_the_second_look() -> None:
    seen = canary(serving(A))
    seen, first = looks(seen, 1, seconds=0.03)
    assert first.memory.candidate is not None
    assert first.memory.step is not None
    assert first.memory.step.fails == 1
    _, second = looks(obey(seen, first, seconds=0), 1, seconds=0.03)
    went_back(second, "TooSlow")
    assert "times the baseline's, limit 1.2" in second.situation.message


def test_one_slow_look_is_forgiven_by_the_next() -> None:
    seen = canary(serving(A))
    seen = replace(seen, memory=replace(seen.memory, step=replace(seen.memory.step, fails=1)))  # type: ignore[type-var]
    _, decision = looks(seen, 1)
    assert decision.memory.step is not None
    assert decision.memory.step.fails == 0


def test_figures_are_looked_at_once_an_interval_and_memory_is_written_no_oftener() -> None:
    seen = canary(serving(A))
    for wait in (0.5, 1.0, 4.9):
        assert decide(later(busy(seen), wait)).memory == seen.memory
    assert decide(later(busy(seen), 5)).memory != seen.memory


def test_held_time_counts_only_while_every_member_serves_the_candidate() -> None:
    seen = canary(serving(A))
    _, decision = looks(seen, 1)
    assert decision.memory.step is not None
    assert decision.memory.step.held == pytest.approx(5.0)
    _, decision = looks(silent(seen, member(seen)), 1)
    assert decision.memory.step is not None
    assert decision.memory.step.held == 0.0


def test_after_a_gap_in_which_nobody_watched_a_fresh_window_must_pass() -> None:
    seen, _ = looks(canary(serving(A)), 2)
    seen = obey(seen, decide(seen), seconds=0)
    assert seen.memory.step is not None
    assert seen.memory.step.held == pytest.approx(10.0)
    decision = decide(later(busy(seen), 31))
    assert decision.memory.step is not None
    assert decision.memory.step.held == 0.0
    assert decision.memory.window != seen.memory.window
    assert {s.window for s in of(decision, Signal)} == {decision.memory.window}
    assert decision.memory.candidate is not None


def test_a_clock_that_goes_back_counts_nothing() -> None:
    seen = canary(serving(A))
    decision = decide(later(busy(seen), -3600))
    assert decision.memory.step is not None
    assert decision.memory.step.held == 0.0


def test_the_candidate_is_watched_while_the_next_step_is_prepared() -> None:
    seen, decision = looks(canary(serving(A)), 3)
    assert decision.rule == "advance"
    seen = obey(seen, decision, loading=[B])
    assert decide(seen).rule == "prepare"
    _, decision = looks(seen, 1, failed=40)
    went_back(decision, "ErrorRateTooHigh")


def test_the_candidate_goes_back_also_while_paused_is_not_set_but_the_spec_has_changed() -> None:
    seen = canary(serving(A))
    seen = edited(seen, source__uri="s3://models/c.onnx")
    _, decision = looks(seen, 1, failed=20)
    went_back(decision, "ErrorRateTooHigh")


def test_a_changed_spec_that_is_not_resolved_yet_neither_advances_nor_promotes() -> None:
    seen, decision = looks(canary(serving(A)), 3)
    assert decision.rule == "advance"
    changed = edited(seen, source__uri="s3://models/c.onnx")
    decision = decide(changed)
    assert decision.rule == "resolve"
    assert decision.memory.candidate == seen.memory.candidate
    assert decision.memory.step is not None
    assert decision.memory.step.index == 0


def test_what_went_back_is_not_tried_again_until_verify_or_analysis_change() -> None:
    seen, decision = looks(canary(serving(A)), 1, failed=20)
    seen = obey(seen, decision)
    for _ in range(5):
        assert decide(seen).rule == "rejected"
        assert decide(seen).memory == seen.memory
        seen = later(seen, 60)
    assert decide(edited(seen, serving__replicas=5)).rule == "rejected"
    retried = decide(edited(seen, rollout__analysis={"maxErrorRateIncrease": 0.5}))
    assert retried.rule == "gate"
    assert retried.memory.candidate is not None


# ---------------------------------------------------------------------------------------------------------------
# deadline
# ---------------------------------------------------------------------------------------------------------------


def waits(seen: Scene, seconds: float, **figures: float) -> tuple[Scene, Decision]:
    """Passes, 10 s apart, until the candidate is gone or the time is over."""
    for _ in range(int(seconds / 10)):
        seen = later(busy(seen, **figures) if figures else seen, 10)  # type: ignore[arg-type]
        decision = decide(seen)
        if decision.memory.candidate is None:
            return seen, decision
        seen = obey(seen, decision, seconds=0)
    return seen, decide(seen)


def test_inconclusive_until_the_deadline_goes_back_and_never_forward() -> None:
    _, decision = waits(canary(serving(A)), 600, requests=1)
    went_back(decision, "ProgressDeadlineExceeded")
    assert "150 requests are the least" in decision.situation.message


def test_a_candidate_that_is_never_prepared_goes_back_at_the_deadline() -> None:
    seen = asks_for(serving(A), B)
    seen = obey(seen, decide(seen), loading=[B])
    for _ in range(60):
        seen = later(seen, 10)
        decision = decide(seen)
        if decision.memory.candidate is None:
            break
        seen = obey(seen, decision, seconds=0, loading=[B])
    went_back(decision, "ProgressDeadlineExceeded")


def test_a_hold_that_is_longer_than_the_deadline_is_no_lack_of_progress() -> None:
    seen = canary(serving(A, rollout__steps=[{"workers": 1, "hold": "1h"}]))
    _, decision = waits(seen, 900, requests=200)
    assert decision.memory.candidate is not None
    assert decision.memory.step is not None
    assert decision.memory.step.held > 800


def test_the_deadline_counts_only_time_in_which_somebody_watched() -> None:
    seen, _ = waits(canary(serving(A)), 60, requests=1)
    seen = obey(later(seen, 86_400), decide(later(seen, 86_400)), seconds=0)
    assert decide(seen).memory.candidate is not None
    assert decide(seen).memory.waited < 100


def test_the_deadline_starts_anew_with_every_step() -> None:
    seen, _ = waits(canary(serving(A)), 200, requests=1)
    assert seen.memory.waited > 100
    for _ in range(12):
        seen = later(busy(seen), 5)
        decision = decide(seen)
        seen = obey(seen, decision, seconds=0)
        if decision.rule == "advance":
            break
    assert decide(seen).memory.waited == 0


def test_a_canary_whose_workers_are_all_gone_goes_back_at_the_deadline() -> None:
    seen = canary(serving(A))
    for worker in seen.workers:
        seen = without(seen, worker.uid)
    _, decision = waits(seen, 600)
    assert decision.memory.candidate is None
    assert decision.memory.rejected[0].reason == "ProgressDeadlineExceeded"


def test_at_zero_replicas_no_deadline_runs() -> None:
    seen = edited(canary(serving(A)), serving__replicas=0)
    seen = obey(seen, decide(seen))
    _, decision = waits(seen, 900)
    assert decision.memory.candidate is not None
    assert decision.situation.stage is Stage.SCALED_TO_ZERO


def test_a_lost_worker_is_counted_for_once_and_not_written_for_ever() -> None:
    seen = without(serving(A), "w3")
    writes = 0
    for _ in range(100):
        seen = later(seen, 10)
        decision = decide(seen)
        writes += decision.memory != seen.memory
        seen = obey(seen, decision, seconds=0)
    assert writes < 35
