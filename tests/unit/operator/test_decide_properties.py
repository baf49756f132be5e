"""Whatever was observed: total, deterministic, and true to its promises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from decide_scene import (
    MODEL,
    NOW,
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
    found,
    has_built,
    knows,
    later,
    made_up,
    new,
    obey,
    of,
    serving,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trtmodel_contract.control import EngineReport, EngineState, Fence, ModelReport, Role, Routes
from trtmodel_contract.jobs import BuildResult, JobResult, Reason, ResolveResult
from trtmodel_operator.conditions import events, status
from trtmodel_operator.decide import RULES
from trtmodel_operator.decide.commands import COMMANDS
from trtmodel_operator.decide.turn import Turn
from trtmodel_operator.model import (
    Answer,
    ApplyPointer,
    ApplyWorkload,
    Command,
    CreateJob,
    Decision,
    DeleteJob,
    Failure,
    HistoryEntry,
    JobKind,
    JobState,
    Memory,
    ObservedJob,
    ObservedPointer,
    ObservedWorkload,
    Platform,
    Rejected,
    Resolved,
    Signal,
    StepMemory,
)

REVISIONS = (A, B, C)
_LEFT = ObservedWorkload("magika-default-left", "default", "left", 2, "", "worker:0", pod="{}")
SCENES = (new(), knows(new(), A), has_built(new(), A), serving(A), asks_for(serving(A), B), canary(serving(A)))
SCENES = (*SCENES, canary(serving(A), index=1), canary(serving(A, replicas=1)), edited(serving(A), serving__replicas=0))
GATED = edited(
    serving(A),
    rollout__analysis={
        "interval": "5s",
        "minRequests": 150,
        "noData": "Promote",
        "minAgreement": 0.9,
        "prometheus": [{"name": "quality", "query": "avg(quality)", "min": 0.9}],
        "webhooks": [
            {"name": stage.lower(), "stage": stage, "url": "https://hooks/"} for stage in ("ConfirmPromotion", "Event")
        ],
    },
)
SCENES = (*SCENES, canary(GATED), edited(canary(GATED), rollout__steps=[{"workers": 1, "hold": "0s"}]))

OTHERS = edited(serving(A), serving__pod={"annotations": {"team": "b"}})  # other workers are asked for
TRIED = obey(OTHERS, decide(OTHERS))
assert TRIED.memory.step is not None
PLATFORM = TRIED.memory.step.platform
assert PLATFORM is not None
SCENES = (*SCENES, OTHERS, TRIED, edited(TRIED, serving__image="worker:2"), asks_for(TRIED, B))

PLANS = (
    [{"workers": 1, "hold": "15s", "weight": 10, "shadow": 50, "pause": True}, {"workers": "50%", "hold": "15s"}],
    [{"workers": 1, "hold": "0s", "weight": 0, "shadow": 5}, {"workers": "50%", "hold": "15s", "weight": 50}],
)

revisions = st.sampled_from(REVISIONS)
some_deployed = st.none() | revisions.map(deployed)
moments = st.floats(NOW - 4000, NOW + 4000)


@st.composite
def workers(draw: st.DrawFn, uid: str) -> Any:
    worker = booted(uid, ObservedPointer("p", draw(st.integers(0, 9)), "", deployed(draw(revisions))))
    engines = tuple(
        EngineReport(
            r,
            digest(r),
            draw(st.sampled_from(Role)),
            draw(st.sampled_from(EngineState)),
            deaths=draw(st.integers(0, 1)),
        )
        for r in draw(st.lists(revisions, unique=True))
    )
    routes = Routes(digest(draw(revisions)), draw(st.sampled_from(["", *map(digest, REVISIONS)])), 100)
    assert worker.report is not None
    report = replace(
        worker.report,
        fence=Fence(draw(st.sampled_from([MODEL.uid, "other"])), draw(st.integers(0, 9))),
        models=draw(st.sampled_from([{}, {MODEL.name: ModelReport(engines, routes, {"w1": {}})}])),
    )
    return replace(
        worker,
        report=draw(st.sampled_from([None, report, report])),
        ready=draw(st.booleans()),
        terminating=draw(st.booleans()),
        restarts=draw(st.integers(0, 2)),
        target=draw(st.sampled_from(["default", "default", "gone"])),
        platform=draw(st.sampled_from(["", "p", PLATFORM.hash])),
        trouble=draw(st.sampled_from(["", "", "Unschedulable", "CrashLoopBackOff"])),
    )


@st.composite
def job_results(draw: st.DrawFn) -> JobResult | None:
    revision = draw(revisions)
    artifact = draw(st.sampled_from([found(revision), replace(found(revision), figures=None)]))
    resolve = ResolveResult(
        digest("s"), 1, revision, "", digest("data"), (), (), draw(st.sampled_from([(), (artifact,)]))
    )
    build = BuildResult(revision, artifact, False, 1, 1.0, 1.0, "")
    result = JobResult(
        draw(st.sampled_from(Reason)), "m", draw(st.sampled_from([None, resolve])), draw(st.sampled_from([None, build]))
    )
    return draw(st.sampled_from([None, result]))


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    """A scene of ours with any of its facts replaced by others, also by ones that we never produce."""
    seen = draw(st.sampled_from(SCENES))
    if draw(st.booleans()):
        seen = replace(seen, workers=tuple(draw(workers(f"w{i}")) for i in range(draw(st.integers(0, 5)))))
    if draw(st.booleans()):
        first = decide(seen)
        names = [a.name for a in of(first, CreateJob)] + [j.name for j in seen.jobs] + ["stray"]
        jobs = [
            ObservedJob(
                name,
                draw(st.sampled_from(JobKind)),
                "default",
                draw(st.sampled_from(JobState)),
                draw(job_results()),
                draw(st.sampled_from(["", "Unschedulable"])),
            )
            for name in names
        ]
        seen = replace(seen, jobs=tuple(jobs))
    if draw(st.booleans()):
        keys = [*(lookup.key for lookup in decide(seen).lookups), "stray"]
        numbers, errors = st.none() | st.floats(), st.sampled_from(["", "down"])
        answers = [Answer(key, draw(moments), draw(numbers), draw(st.booleans()), draw(errors)) for key in keys]
        seen = replace(seen, answers=tuple(answers))
    if draw(st.booleans()):
        seen = replace(seen, memory=draw(memories(seen.memory)))
    if draw(st.booleans()):
        seen = edited(seen, serving__replicas=draw(st.integers(0, 5)), rollout__paused=draw(st.booleans()))
    if draw(st.booleans()):
        promotion = draw(st.sampled_from(["Automatic", "Manual"]))
        seen = edited(seen, rollout__steps=draw(st.sampled_from(PLANS)), rollout__promotion=promotion)
    verb = draw(st.sampled_from([*COMMANDS, ""]))
    return replace(
        seen,
        now=draw(moments),
        deleting=draw(st.sampled_from([False, False, False, True])),
        spec=draw(st.sampled_from([seen.spec, seen.spec, seen.spec, None])),
        command=draw(st.sampled_from([None, Command(verb, draw(st.sampled_from(["", A, B, C])), f"{verb}#1")])),
        pointers=draw(st.sampled_from([seen.pointers, (), tuple(replace(p, sequence=7) for p in seen.pointers)])),
        workloads=draw(
            st.sampled_from(
                [seen.workloads, (), (ObservedWorkload("x", "gone", "p", 1, ""),), (*seen.workloads, _LEFT)]
            )
        ),
        default_image=draw(st.sampled_from(["worker:1", ""])),
    )


@st.composite
def memories(draw: st.DrawFn, memory: Memory) -> Memory:
    step = StepMemory(
        draw(st.integers(0, 4)),
        draw(st.sampled_from(["", "x"])) or (memory.step.plan if memory.step else ""),
        NOW,
        routed=draw(st.booleans()),
        held=draw(st.floats(0, 100)),
        seen_at=draw(st.sampled_from([0.0, NOW])),
        fails=draw(st.integers(0, 2)),
        verdict=draw(st.sampled_from(["", "Pass", "Fail", "Inconclusive", "NoData"])),
        weight=draw(st.sampled_from([0, 10, 100])),
        shadow=draw(st.sampled_from([0, 50])),
        resumed=draw(st.booleans()),
        approved=draw(st.booleans()),
        back=draw(st.sampled_from([False, False, True])),
        platform=draw(st.sampled_from([None, None, PLATFORM])),
        tight=draw(st.booleans()),
    )
    past = HistoryEntry(C, "Promoted", "Promoted", "2026-01-01T00:00:00Z", engines=deployed(C).artifacts)
    key = memory.resolved.key if memory.resolved else ""
    return replace(
        memory,
        sequence=draw(st.integers(0, 9)),
        stable=draw(some_deployed),
        candidate=draw(some_deployed),
        standby=draw(some_deployed),
        step=draw(st.sampled_from([None, step])),
        resolved=draw(st.sampled_from([memory.resolved, None, Resolved(key, digest("s"), draw(revisions), "", "")])),
        failure=draw(st.sampled_from([None, Failure("stray", "JobFailed", "")])),
        rejected=draw(st.sampled_from([(), (Rejected(B, "", "TooSlow", ""),), memory.rejected])),
        platform=draw(
            st.sampled_from([memory.platform, None, Platform("worker:1", "p"), Platform("worker:1", "p", "{")])
        ),
        waited=draw(st.floats(0, 1000)),
        paused=draw(st.sampled_from(["", "", "pause#0"])),
        history=draw(st.sampled_from([(), (past,)])),
    )


def kinds(seen: Scene, decision: Decision) -> set[str]:
    """The kinds of change that a pass makes to what is rolled out. (A person's command moves the step beside them: the
    rules go on after it.)"""
    before, after = seen.memory, decision.memory
    found_kinds = set()
    if of(decision, CreateJob):
        found_kinds.add("job")
    if after.resolved != before.resolved and after.resolved != before.stable_resolved:
        found_kinds.add("resolved")
    elif len(after.built) > len(before.built):
        found_kinds.add("built")
    if after.stable != before.stable:
        found_kinds.add("stable")
    elif (after.candidate is None) != (before.candidate is None) or (
        after.candidate and before.candidate and after.candidate.revision != before.candidate.revision
    ):
        found_kinds.add("candidate")
    elif after.step is not None and before.step is not None:
        if after.step.index != before.step.index:
            found_kinds |= {"step"} if after.command == before.command else set()
        elif after.step.routed and not before.step.routed:
            found_kinds.add("route")
    return found_kinds


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(scenes())
def test_whatever_was_observed_there_is_one_decision_and_it_keeps_its_promises(seen: Scene) -> None:
    decision = decide(seen)
    assert decide(seen) == decision
    assert decision.rule in {rule.__name__ for rule in RULES} | {"settle"}
    assert decision.memory.sequence >= seen.memory.sequence
    assert seen.memory.stable is None or decision.memory.stable is not None
    assert len(kinds(seen, decision)) <= 1, kinds(seen, decision)
    assert decision.situation.reason
    assert decision.situation.message
    assert len(decision.memory.rejected) <= 10
    assert len(decision.memory.built) <= max(8, len(seen.memory.built))
    assert len({a.name for a in of(decision, CreateJob)} & {a.name for a in of(decision, DeleteJob)}) == 0
    signals = of(decision, Signal)
    assert len({s.uid for s in signals}) == len(signals)
    there = {pointer.name for pointer in seen.pointers}
    known = [isinstance(a, ApplyPointer) and a.workload in there for a in decision.actions]
    order = [0 if old else 1 if isinstance(a, Signal) else 2 for a, old in zip(decision.actions, known, strict=True)]
    assert order == sorted(order), "pointers that exist, then signals, then what the API server may refuse"
    places = list(enumerate(decision.actions))
    mounted = {a.name: at for at, a in places if isinstance(a, ApplyWorkload)}
    assert all(at < mounted.get(a.workload, len(places)) for at, a in places if isinstance(a, ApplyPointer))
    report = status(seen, decision, {})
    assert status(seen, decision, report) == report
    assert events(report, report) == []


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(scenes())
def test_before_the_last_preparation_never_every_worker_is_told_to_answer_with_the_candidate(seen: Scene) -> None:
    decision = decide(seen)
    present = [w for w in seen.workers if not w.terminating and w.target == "default"]
    step = decision.memory.step
    if seen.spec is None or step is None or decision.memory.stable is None or len(present) < 2:
        return
    if step.index < len(seen.spec.rollout.steps) and step.platform is None:
        assert len([s for s in of(decision, Signal) if s.candidate]) <= len(present) - 1


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(scenes(), st.data())
def test_each_rule_is_total_by_itself(seen: Scene, data: st.DataObject) -> None:
    rule = data.draw(st.sampled_from(RULES))
    needs_spec = RULES.index(rule) > [r.__name__ for r in RULES].index("spec_unreadable")
    if seen.spec is not None or not needs_spec:
        rule(Turn(seen, seen.memory))


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(scenes(), st.integers(0, 300))
def test_in_an_obedient_world_everything_comes_to_rest(seen: Scene, requests: int) -> None:
    """No two rules undo each other's work for ever. An obedient world has no workers where none are asked for."""
    seen = replace(seen, deleting=False)
    if seen.spec is not None and seen.spec.serving.replicas == 0:
        seen = replace(seen, workers=())
    for _ in range(150):
        decision = decide(seen)
        moves = [a for a in decision.actions if not isinstance(a, Signal)]
        patient = decision.requeue is None or decision.requeue > 10 or decision.rule == "first_rollout"
        patient |= decision.rule == "spec_unreadable"  # no look is taken; a trial's time to live is renewed meanwhile
        if decision.memory == seen.memory and not moves and patient:
            return
        if decision.rule in ("paused", "wait_for_person") and not moves and kinds(seen, decision) == set():
            return  # for a person; looks are taken meanwhile
        seen = later(made_up(obey(seen, decision, seconds=0)), 10)
        seen = busy(seen, requests=requests) if requests else seen
    raise AssertionError(f"{decision.rule}: {decision.situation}")
