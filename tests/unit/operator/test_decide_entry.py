"""deleting, adopt_what_runs, take_command, spec_unreadable, paused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decide_scene import (
    A,
    B,
    C,
    Scene,
    asks_for,
    booted,
    busy,
    canary,
    decide,
    deployed,
    digest,
    edited,
    finished,
    has_built,
    knows,
    later,
    members,
    new,
    obey,
    of,
    promoted,
    resolve_result,
    run,
    serving,
    silent,
    with_worker,
)
from trtmodel_contract.control import Fence
from trtmodel_contract.jobs import JobResult, Reason
from trtmodel_operator.model import (
    ApplyPointer,
    ApplyWorkload,
    CreateJob,
    Decision,
    JobKind,
    Memory,
    Signal,
    Stage,
)
from trtmodel_operator.spec import parse_command


def commanded(seen: Scene, text: str) -> Scene:
    return replace(seen, command=parse_command(text))


def notice(decision: Decision) -> tuple[str, str]:
    (only,) = decision.notices
    return only.reason, only.message


# ---------------------------------------------------------------------------------------------------------------
# deletion
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scene", [new(), has_built(new(), A), serving(A), canary(serving(A))])
def test_a_model_that_is_being_deleted_gets_nothing_made_any_more(scene: Scene) -> None:
    decision = decide(replace(scene, deleting=True, workloads=(), pointers=(), jobs=()))
    assert (decision.rule, decision.actions, decision.memory) == ("deleting", (), scene.memory)


# ---------------------------------------------------------------------------------------------------------------
# lost status
# ---------------------------------------------------------------------------------------------------------------


def test_a_lost_status_is_made_up_from_the_pointer_and_never_by_a_first_rollout() -> None:
    seen = serving(A)
    lost = replace(seen, memory=Memory())
    decision = decide(lost)
    assert decision.rule == "adopt_what_runs"
    assert decision.memory.stable is not None
    assert decision.memory.stable.revision == A
    assert decision.memory.stable.artifacts[0].manifest_digest == digest(A)
    assert decision.memory.platform == seen.memory.platform
    assert decision.memory.sequence > seen.memory.sequence
    assert not of(decision, ApplyWorkload)
    assert not of(decision, CreateJob)


def test_without_a_pointer_it_is_made_up_from_what_most_workers_answer_with() -> None:
    seen = replace(serving(A), memory=Memory(), pointers=())
    decision = decide(seen)
    assert decision.memory.stable is not None
    assert decision.memory.stable.revision == A
    assert len(of(decision, ApplyPointer)) == 1


def test_a_worker_that_answers_with_something_else_is_outvoted() -> None:
    seen = replace(serving(A), memory=Memory(), pointers=())
    other = booted("w0", replace(serving(A).pointers[0], stable=deployed(B)))
    decision = decide(replace(seen, workers=(other, *seen.workers[1:])))
    assert decision.memory.stable is not None
    assert decision.memory.stable.revision == A
    assert [a.manifest_digest for a in decision.memory.stable.artifacts] == [digest(A)]


def test_a_standby_is_found_again_too() -> None:
    seen = serving(A)
    seen = replace(seen, memory=replace(seen.memory, standby=serving(B).memory.stable))
    seen, _ = run(seen, lambda _, d: not d.actions)
    decision = decide(replace(seen, memory=Memory()))
    assert decision.memory.standby is not None
    assert decision.memory.standby.revision == B


def test_a_canary_in_flight_when_status_was_lost_goes_back_to_stable_and_is_tried_anew() -> None:
    seen = replace(canary(serving(A)), memory=Memory())
    decision = decide(seen)
    assert {s.candidate for s in of(decision, Signal)} == {""}
    after = obey(seen, decision)
    after = has_built(after, B)
    assert decide(after).memory.candidate is not None
    assert decide(after).memory.stable == decision.memory.stable


def test_workers_of_a_namesake_with_another_uid_are_not_adopted() -> None:
    seen = replace(serving(A), memory=Memory(), pointers=(), workloads=())
    for worker in seen.workers:
        assert worker.report is not None
        seen = with_worker(seen, worker.uid, report=replace(worker.report, fence=Fence("another", 7)))
    assert decide(seen).rule == "resolve"


def test_a_fence_of_a_namesake_does_not_count_when_status_was_lost() -> None:
    seen = replace(serving(A), memory=Memory())
    worker = seen.workers[0]
    assert worker.report is not None
    seen = with_worker(seen, "w0", report=replace(worker.report, fence=Fence("another", 900)))
    assert decide(seen).memory.sequence < 100


def test_a_new_model_has_nothing_to_adopt() -> None:
    assert decide(new()).rule == "resolve"


def test_a_first_rollout_that_was_taken_back_is_not_adopted() -> None:
    seen = serving(A)
    memory = replace(seen.memory, stable=None, candidate=None)
    assert decide(replace(seen, memory=memory)).memory.stable is None


# ---------------------------------------------------------------------------------------------------------------
# commands
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["abort#1", f"abort@{B}#1"])
def test_abort_takes_the_candidate_back(text: str) -> None:
    decision = decide(commanded(canary(serving(A)), text))
    assert decision.memory.candidate is None
    assert (decision.situation.stage, decision.situation.reason) == (Stage.ROLLED_BACK, "Aborted")
    assert decision.memory.history[0].outcome == "Aborted"
    assert decision.memory.command == text
    assert notice(decision)[0] == "CommandTaken"
    assert {s.candidate for s in of(decision, Signal)} == {""}


def test_abort_ends_a_build() -> None:
    seen = knows(edited(serving(A), source__uri="s3://models/b.onnx"), B)
    seen = obey(seen, decide(seen))
    build = seen.jobs[-1].name
    decision = decide(commanded(seen, "abort#1"))
    assert (decision.rule, decision.situation.reason) == ("rejected", "Aborted")
    assert [a.name for a in decision.actions] == [build]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"abort@{C}#1", f"the revision on trial is {B}"),
        (f"promote@{C}#1", f"the revision on trial is {B}"),
        (f"skip-step@{C}#1", f"the revision on trial is {B}"),
        (f"pause@{C}#1", f"the revision under way is {B}"),
        ("resume#1", "nothing waits for it"),
        ("restart#1", "known are abort"),
        ("abort", "known are abort"),
        ("retry#1", "was not rejected, and no Job has failed"),
        (f"rollback@{B}#1", f"the revision to go back to is {A}"),
    ],
)
def test_a_stale_or_malformed_command_does_nothing_and_says_why(text: str, why: str) -> None:
    seen = canary(serving(A))
    decision = decide(commanded(seen, text))
    assert decision.memory == replace(seen.memory, command=text)
    assert decision.rule == "watch"
    reason, message = notice(decision)
    assert reason == "CommandIgnored"
    assert why in message


def test_abort_with_nothing_under_way_does_nothing() -> None:
    decision = decide(commanded(serving(A), "abort#1"))
    assert "no rollout is under way" in notice(decision)[1]
    assert decision.situation.stage is Stage.SERVING


@pytest.mark.parametrize("text", ["abort#1", "retry#1", "refresh#1", "rollback#1", "nonsense"])
def test_a_command_is_taken_once(text: str) -> None:
    seen = commanded(canary(serving(A)), text)
    seen = obey(seen, decide(seen))
    again = decide(seen)
    assert again.notices == ()
    assert again.memory.attempt == seen.memory.attempt
    assert again.memory.resolve_counter == seen.memory.resolve_counter


def test_rollback_takes_a_candidate_back() -> None:
    decision = decide(commanded(canary(serving(A)), f"rollback@{A}#1"))
    assert decision.memory.candidate is None
    assert decision.situation.reason == "RolledBackByCommand"


def test_rollback_without_a_candidate_flips_to_the_standby_and_stays_there() -> None:
    seen = promoted()
    decision = decide(commanded(seen, f"rollback@{A}#1"))
    assert decision.memory.stable is not None
    assert decision.memory.standby is not None
    assert (decision.memory.stable.revision, decision.memory.standby.revision) == (A, B)
    assert not of(decision, CreateJob)
    assert [p.stable.revision for p in of(decision, ApplyPointer)] == [A]
    assert {s.stable for s in of(decision, Signal)} == {digest(A)}
    after = decide(obey(commanded(seen, f"rollback@{A}#1"), decision))
    assert (after.rule, after.situation.stage) == ("rejected", Stage.ROLLED_BACK)
    assert after.memory.stable == decision.memory.stable


def test_rollback_with_no_standby_does_nothing() -> None:
    assert "nothing to go back to" in notice(decide(commanded(serving(A), "rollback#1")))[1]


def test_retry_makes_one_new_attempt_with_jobs_of_new_names() -> None:
    seen = finished(obey(new(), decide(new())), JobKind.RESOLVE, JobResult(Reason.ACCESS_DENIED, "no"))
    seen = obey(seen, decide(seen))
    decision = decide(commanded(seen, "retry#1"))
    (job,) = of(decision, CreateJob)
    assert job.name != seen.jobs[0].name
    assert decision.memory.failure is None
    failed = finished(
        obey(commanded(seen, "retry#1"), decision), JobKind.RESOLVE, JobResult(Reason.ACCESS_DENIED, "no")
    )
    failed = obey(failed, decide(failed))
    assert decide(failed).situation.reason == "AccessDenied"
    assert not of(decide(failed), CreateJob)


def test_retry_of_what_was_rolled_back_resolves_and_tries_again_without_a_build() -> None:
    seen = commanded(canary(serving(A)), "abort#1")
    seen = obey(seen, decide(seen))
    seen = commanded(seen, f"retry@{B}#2")
    decision = decide(seen)
    assert [j.kind for j in of(decision, CreateJob)] == [JobKind.RESOLVE]
    assert decision.memory.rejected == ()
    seen = finished(obey(seen, decision), JobKind.RESOLVE, resolve_result(B))
    assert decide(seen).memory.resolved is not None


def test_refresh_resolves_again_and_finds_nothing_new() -> None:
    seen = commanded(serving(A), "refresh#1")
    decision = decide(seen)
    assert [j.kind for j in of(decision, CreateJob)] == [JobKind.RESOLVE]
    seen = finished(obey(seen, decision), JobKind.RESOLVE, resolve_result(A))
    seen = obey(seen, decide(seen))
    assert decide(seen).situation.stage is Stage.SERVING


def test_refresh_finds_another_content_at_the_same_address() -> None:
    seen = commanded(serving(A), "refresh#1")
    seen = finished(obey(seen, decide(seen)), JobKind.RESOLVE, resolve_result(B))
    seen = obey(seen, decide(seen))
    assert decide(seen).rule == "build"


# ---------------------------------------------------------------------------------------------------------------
# unreadable and paused
# ---------------------------------------------------------------------------------------------------------------


def test_an_unreadable_spec_is_told_in_its_own_words_and_changes_nothing() -> None:
    seen = replace(serving(A), spec=None, spec_error="spec.source.uri is missing: it has no default")
    decision = decide(seen)
    assert (decision.situation.stage, decision.situation.message) == (Stage.INVALID, seen.spec_error)
    assert decision.memory.stable == seen.memory.stable
    assert not of(decision, ApplyWorkload)


def test_an_abort_is_heard_also_with_an_unreadable_spec() -> None:
    seen = replace(canary(serving(A)), spec=None, spec_error="spec: broken")
    assert decide(commanded(seen, "abort#1")).memory.candidate is None


def test_paused_holds_a_canary_where_it_is_and_renews_it() -> None:
    seen = edited(canary(serving(A)), rollout__paused=True)
    for _ in range(60):
        seen = later(busy(seen), 10)
        decision = decide(seen)
        assert (decision.rule, decision.situation.reason) == ("paused", "Paused")
        assert decision.memory.step is not None
        assert (decision.memory.step.index, decision.memory.step.routed, decision.memory.step.held) == (0, True, 0.0)
        assert decision.memory.waited == 0.0
        seen = obey(seen, decision, seconds=0)
    assert len(members(seen)) == 1
    assert {s.candidate for s in of(decide(seen), Signal)} == {digest(B)}


def test_after_a_pause_a_fresh_window_must_pass() -> None:
    seen = canary(serving(A))
    window = seen.memory.window
    seen = edited(seen, rollout__paused=True)
    seen = obey(later(seen, 600), decide(later(seen, 600)), seconds=0)
    seen = edited(seen, rollout__paused=False)
    decision = decide(seen)
    assert decision.memory.window != window
    assert decision.memory.candidate is not None


@pytest.mark.parametrize("scene", ["new", "edited", "candidate passed"])
def test_paused_starts_nothing(scene: str) -> None:
    seen = {
        "new": new(),
        "edited": edited(serving(A), source__uri="s3://models/b.onnx"),
        "candidate passed": asks_for(serving(A), B),
    }[scene]
    decision = decide(edited(seen, rollout__paused=True))
    assert decision.rule == "paused"
    assert not of(decision, CreateJob)
    assert decision.memory.candidate is None


def test_paused_with_nothing_to_do_is_as_ready_as_ever() -> None:
    seen = edited(serving(A), rollout__paused=True)
    assert decide(seen).situation.stage is Stage.SERVING


def test_paused_still_takes_a_broken_candidate_back() -> None:
    seen = edited(canary(serving(A)), rollout__paused=True)
    uid = members(seen)[0]
    seen = with_worker(seen, uid, restarts=1, report=None)
    assert decide(seen).memory.candidate is None


def test_a_silent_fleet_is_unknown_and_nothing_is_decided_about_it() -> None:
    seen = canary(serving(A))
    for worker in seen.workers:
        seen = silent(seen, worker.uid)
    decision = decide(later(seen, 5))
    assert decision.memory.candidate == seen.memory.candidate
    assert decision.memory.stable == seen.memory.stable
    assert not of(decision, Signal)
