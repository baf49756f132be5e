"""Every phase that waits says what for and for how long, and none of them waits in silence for ever."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from decide_scene import (
    A,
    B,
    Scene,
    asks_for,
    busy,
    canary,
    decide,
    edited,
    knows,
    later,
    obey,
    of,
    promoted,
    serving,
    with_engine,
    with_worker,
)
from hypothesis import HealthCheck, given, settings
from test_decide_properties import scenes
from trtmodel_contract.control import EngineState
from trtmodel_operator import conditions, reasons
from trtmodel_operator.model import Answer, CreateJob, Decision, JobKind, JobState, ObservedJob, Signal, Stage
from trtmodel_operator.spec import parse_command

WAITING = (Stage.RESOLVING, Stage.BUILDING, Stage.DEPLOYING, Stage.PREPARING, Stage.CANARY, Stage.PROMOTING)
BOUND = re.compile(r"for \d+(\.\d+)? s\b|held \d+ of \d|takes \d+ s at most|longer than progressDeadline")
PERSON = re.compile(r"use the command|spec\.rollout\.paused|until there are replicas|until the command resume")
HOOK = {"name": "ok", "stage": "ConfirmRollout", "url": "https://hooks/"}


def condition(seen: Scene, decision: Decision, kind: str) -> dict[str, str]:
    found = conditions.status(seen, decision, {})["conditions"]
    return next(dict(c) for c in found if c["type"] == kind)  # type: ignore[attr-defined]


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(scenes())
def test_whatever_waits_says_for_how_long(seen: Scene) -> None:
    decision = decide(seen)
    moved = decision.memory != seen.memory or [a for a in decision.actions if not isinstance(a, Signal)]
    if moved or decision.situation.reason == reasons.WAITING:
        return  # something was done, and the next pass is a moment away; or nothing is there at all yet
    said = decision.situation.message
    if decision.situation.stage in WAITING:
        assert BOUND.search(said), f"{decision.rule}: {said}"
    if decision.situation.stage in (Stage.PAUSED, Stage.SCALED_TO_ZERO):
        assert PERSON.search(said), f"{decision.rule}: {said}"


def confirmed() -> Scene:
    """A revision passed its gate, and a webhook is to confirm its rollout."""
    return asks_for(edited(serving(A), rollout__analysis={"interval": "5s", "webhooks": [HOOK]}), B)


def asked(seen: Scene, says: str) -> Scene:
    """The webhooks were asked what this pass asks, and did not say yes."""
    return replace(seen, answers=tuple(Answer(q.key, seen.now, error=says) for q in decide(seen).lookups))


def test_a_rollout_that_nobody_confirms_is_stalled_after_the_deadline_and_asked_on() -> None:
    seen = confirmed()
    for _ in range(59):
        seen = asked(later(seen, 5), "it says no (503)")
        decision = decide(seen)
        assert (decision.situation.stage, decision.situation.reason) == (Stage.PREPARING, "AwaitingConfirmation")
        assert "for 300 s of watched time" in decision.situation.message
        seen = obey(seen, decision, seconds=0)
    for _ in range(4):
        seen = asked(later(seen, 5), "it says no (503)")
        decision = decide(seen)
        seen = obey(seen, decision, seconds=0)
    assert (decision.situation.stage, decision.situation.reason) == (Stage.STALLED, "ProgressDeadlineExceeded")
    assert "the webhook ok: it says no (503)" in decision.situation.message
    assert condition(seen, decision, "Stalled")["status"] == "True"
    assert condition(seen, decision, "Available")["status"] == "True"
    assert [q.url for q in decision.lookups] == ["https://hooks/"]  # type: ignore[union-attr]  # a webhook's question
    assert not of(decision, Signal)
    yes = replace(seen, answers=tuple(replace(a, yes=True, error="") for a in seen.answers))
    assert decide(yes).situation.reason == reasons.GATE_PASSED


def test_time_in_which_a_webhook_was_not_asked_does_not_count() -> None:
    seen = confirmed()
    seen = obey(seen, decide(seen), seconds=0)
    seen = later(seen, 3600)
    assert decide(asked(seen, "it says no (503)")).situation.stage is Stage.PREPARING


def test_old_workers_that_never_leave_are_told_after_the_deadline() -> None:
    """Their Deployment is scaled to nothing, and its controller does nothing about it."""
    others = edited(serving(A), serving__pod={"annotations": {"team": "b"}})
    seen = others
    for _ in range(60):
        decision = decide(seen)
        if decision.situation.reason == reasons.WORKERS_LEAVE:
            break
        seen = later(busy(obey(seen, decision, seconds=0)), 5)
    assert "for 300 s of watched time" in decision.situation.message
    for _ in range(70):
        seen = replace(later(seen, 5), memory=decide(seen).memory)
    decision = decide(seen)
    assert (decision.situation.stage, decision.situation.reason) == (Stage.STALLED, "ProgressDeadlineExceeded")
    assert condition(seen, decision, "Available")["status"] == "True"


def test_a_way_back_that_storage_holds_up_says_until_when_and_then_that_it_is_late() -> None:
    seen = canary(promoted(), "cccccccccc")
    while decide(seen).rule != "settle":
        seen = later(busy(obey(seen, decide(seen), seconds=0)), 5)
    seen = obey(replace(seen, command=parse_command(f"rollback@{A}#1")), decide(seen), seconds=0)
    decision = decide(seen)
    seen = obey(seen, decision, loading=[A])
    assert "stays" in decide(seen).situation.message or "every worker loads it" in decision.situation.message
    for worker in seen.workers:
        seen = with_engine(seen, worker.uid, A, state=EngineState.FAILED, reason="StorageUnavailable")
    said = set()
    for _ in range(80):
        decision = decide(seen)
        said.add((decision.situation.stage, decision.situation.reason))
        seen = later(replace(seen, memory=decision.memory), 5)
    assert said == {(Stage.PREPARING, "GoingBack"), (Stage.STALLED, "ProgressDeadlineExceeded")}
    assert decision.memory.candidate is not None
    assert "it goes on when it can, or use abort" in decision.situation.message


def waiting_build(**changes: object) -> Scene:
    seen = knows(edited(serving(A), source__uri="s3://models/b.onnx"), B)
    (build,) = of(decide(seen), CreateJob)
    job = ObservedJob(build.name, JobKind.BUILD, "default", JobState.RUNNING)
    return replace(seen, jobs=(*seen.jobs, replace(job, **changes)))  # type: ignore[arg-type]


def test_a_build_that_waits_for_its_turn_says_since_when_and_how_long_it_takes_then() -> None:
    said = decide(waiting_build(suspended=True, made_at=1_760_000_000.0)).situation.message
    assert "waits for its turn since 2025-10-09T08:53:20Z" in said
    assert "Once it begins it takes 3600 s at most" in said


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_C22_tries_that_failed_are_counted_in_status(failures: int) -> None:
    seen = waiting_build(failures=failures, trouble="OOMKilled" if failures else "", message="too little")
    decision = decide(seen)
    assert ("tries failed" in decision.situation.message) is (failures > 0)
    (target,) = conditions.status(seen, decision, {})["targets"]  # type: ignore[misc]
    said = target["job"].get("message", "")
    assert said.startswith(f"try {failures + 1} of 3; ") if failures else "try" not in said
    ended = replace(seen, jobs=(replace(seen.jobs[-1], state=JobState.FAILED, trouble="OOMKilled"),))
    told = decide(ended).situation.message
    assert (f"({failures} of 3 tries failed)" in told) is (failures > 1)


@pytest.mark.parametrize("hours", [-24, -1, 1, 24])
def test_a_node_whose_clock_is_wrong_hides_no_death_and_invents_none(hours: int) -> None:
    """Deaths are counted, not dated: what a kubelet's clock says is no part of what a pass sees."""
    before = serving(A)
    for worker in before.workers:
        before = with_worker(before, worker.uid, restarts=1)  # it died of something before the rollout
    seen = later(canary(before), hours * 3600)
    assert decide(seen).memory.candidate is not None
    (member,) = [w.uid for w in seen.workers if w.report and w.report.models["magika"].routes.candidate]
    decision = decide(with_worker(seen, member, restarts=2, death="the container worker ended with exit code 137"))
    assert decision.memory.candidate is None
    assert decision.situation.reason == "WorkerDied"
    assert "exit code 137" in decision.situation.message


def test_F15_failed_rollouts_do_not_push_what_one_may_go_back_to_out_of_the_history() -> None:
    """With a history of three, and three that failed since: the good one is still in it, with its engines."""
    seen = edited(promoted(), rollout__historyLimit=3)
    for i in range(3):
        seen = replace(canary(seen, f"{i:010}"), command=parse_command(f"abort#{i}"))
        seen = obey(seen, decide(seen))
    history = seen.memory.history
    assert [h.outcome for h in history] == ["Aborted", "Aborted", "Promoted"]
    assert (history[0].revision, history[-1].revision) == ("0000000002", B)
    assert history[-1].engines


def test_the_newest_rollout_is_always_in_the_history() -> None:
    seen = edited(promoted(), rollout__historyLimit=1)
    seen = replace(canary(seen, "cccccccccc"), command=parse_command("abort#1"))
    assert [h.outcome for h in decide(seen).memory.history] == ["Aborted"]


def test_members_that_no_request_reached_are_named_beside_the_figures_of_the_others() -> None:
    seen = canary(serving(A), index=1)
    one, other = [w for w in seen.workers if w.report and w.report.models["magika"].routes.candidate]
    kept = other.report
    seen = later(busy(seen, requests=200), 5)
    quiet = with_worker(seen, other.uid, report=kept)
    step = decide(quiet).memory.step
    assert step is not None
    assert f"none of them met {other.pod}" in step.sentence
    assert one.pod not in step.sentence
    heard = decide(seen).memory.step
    assert heard is not None
    assert "none of them" not in heard.sentence


@pytest.mark.parametrize(("interval", "away"), [("5s", 60), ("1m", 200), ("10m", 1500)])
def test_an_absence_counts_for_no_deadline_however_long_the_interval_is(interval: str, away: float) -> None:
    plan = {"interval": interval, "minRequests": 150}
    seen = canary(serving(A, rollout__progressDeadline="20m", rollout__analysis=plan))
    every = {"5s": 5, "1m": 60, "10m": 600}[interval]
    seen = obey(later(seen, every), decide(later(seen, every)), seconds=0)
    waited = seen.memory.waited
    decision = decide(later(seen, every + away))
    assert decision.memory.candidate is not None
    assert decision.memory.waited == waited


@pytest.mark.parametrize("policy", ["Hold", "Promote"])
def test_without_enough_requests_golden_samples_run_only_where_the_policy_says_so(policy: str) -> None:
    seen = canary(serving(A, rollout__analysis={"interval": "5s", "minRequests": 150, "noData": policy}))
    for _ in range(12):
        decision = decide(seen)
        assert {s.synthetic for s in of(decision, Signal)} <= {0}
        assert decision.memory.step is None or not decision.memory.step.synthetic
        seen = later(busy(obey(seen, decision, seconds=0), requests=2), 5)
