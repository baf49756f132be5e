"""Workers whose memory holds one engine: they leave service to change, and only while somebody else answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from decide_scene import MODEL, A, B, Scene, asks_for, busy, decide, edited, obey, of, serving, with_worker
from trtmodel_contract.control import (
    NOT_RESIDENT,
    EngineReport,
    EngineState,
    MemoryPolicy,
    MemoryReport,
    Role,
    Routes,
)
from trtmodel_operator.model import Decision, ObservedWorker, Signal
from trtmodel_operator.spec import parse_command

TWO = [{"workers": 2, "hold": "15s"}]


def resident(worker: ObservedWorker) -> EngineReport | None:
    assert worker.report is not None
    engines = worker.report.models[MODEL.name].engines
    return next((e for e in engines if e.state is EngineState.READY), None)


def tight(before: Scene, decision: Decision) -> Scene:
    """The world after the decision. A worker that is to answer with another engine than the one it holds is out of
    service for one pass, if it may; else it says that it lacks memory, and goes on answering."""
    seen = obey(before, decision)
    permitted = {s.uid: s.may_drain for s in of(decision, Signal)}
    for was in before.workers:
        now = next((w for w in seen.workers if w.uid == was.uid), None)
        if now is not None and (was.uid in permitted or not was.ready):
            seen = with_worker(seen, was.uid, **changed(was, now, permitted.get(was.uid, False)))
    return seen


def changed(was: ObservedWorker, now: ObservedWorker, may_drain: bool) -> dict[str, object]:
    assert now.report is not None
    model = now.report.models[MODEL.name]
    held = resident(was)
    wanted = next((e for e in model.engines if e.role is Role.CANDIDATE), model.engines[0])
    failed = held is not None and wanted.manifest_digest != held.manifest_digest and not may_drain
    leaves = held is not None and wanted.manifest_digest != held.manifest_digest and may_drain
    answers = None if leaves else held if failed else wanted
    engines = list(model.engines)
    if failed and held is not None and held.manifest_digest not in {e.manifest_digest for e in engines}:
        engines.append(held)  # nobody asks for it any more, but nothing else can answer
    shown = []
    for e in engines:
        if answers is not None and e.manifest_digest == answers.manifest_digest:
            shown.append(replace(e, state=EngineState.READY, reason=""))
        elif e is wanted:
            state = EngineState.FAILED if failed else EngineState.LOADING
            shown.append(replace(e, state=state, reason="NoMemory" if failed else ""))
        else:
            shown.append(replace(e, state=EngineState.FETCHING, reason=NOT_RESIDENT))
    routes = Routes("")
    if answers is not None:
        tries = answers.role is Role.CANDIDATE
        routes = Routes("", answers.manifest_digest, 100) if tries else Routes(answers.manifest_digest)
    models = {MODEL.name: replace(model, engines=tuple(shown), routes=routes)}
    return {"ready": not leaves, "report": replace(now.report, models=models)}


def serves_with(seen: Scene) -> list[str]:
    """The revision with which each worker answers, '' for one that is out of service."""
    found = [resident(w) if w.ready else None for w in seen.workers]
    return [e.revision if e is not None else "" for e in found]


def live(seen: Scene, until: Callable[[Scene, Decision], bool]) -> tuple[Scene, Decision, int]:
    """Pass after pass, under traffic, until then. Never is everybody out of service at once. The last figure is how
    many were out at most."""
    most = 0
    for _ in range(120):
        decision = decide(seen)
        if until(seen, decision):
            return seen, decision, most
        seen = busy(tight(seen, decision), seconds=0.008)
        out = serves_with(seen).count("")
        most = max(most, out)
        assert out < len(seen.workers), decision
    raise AssertionError(decision)


def settled_on(revision: str) -> Callable[[Scene, Decision], bool]:
    return lambda seen, decision: decision.rule == "settle" and set(serves_with(seen)) == {revision}


@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_a_rollout_changes_every_worker_while_others_answer(replicas: int) -> None:
    seen = asks_for(serving(A, replicas=replicas, rollout__memoryPolicy="Resource"), B)
    seen, decision, most = live(seen, settled_on(B))
    assert decision.memory.stable is not None
    assert decision.memory.stable.revision == B
    assert most >= 1  # this world did take workers out of service


@pytest.mark.parametrize("share", [1, "60%"])
def test_one_worker_after_the_other_leaves_service_however_large_the_step(share: int | str) -> None:
    steps = [{"workers": share, "hold": "15s"}]
    asked = asks_for(serving(A, replicas=5, rollout__memoryPolicy="Resource", rollout__steps=steps), B)
    seen, _, most = live(asked, settled_on(B))
    assert most == 1
    assert set(serves_with(seen)) == {B}


def says(seen: Scene, policy: MemoryPolicy) -> Scene:
    """What the workers' last decision on memory was."""
    for worker in seen.workers:
        assert worker.report is not None
        model = replace(worker.report.models[MODEL.name], memory=MemoryReport(policy, "", 1, 1))
        seen = with_worker(seen, worker.uid, report=replace(worker.report, models={MODEL.name: model}))
    return seen


@pytest.mark.parametrize(("said", "told"), [(MemoryPolicy.AVAILABILITY, 3), (MemoryPolicy.RESOURCE, 1)])
def test_with_policy_auto_the_workers_say_whether_memory_holds_one_engine(said: MemoryPolicy, told: int) -> None:
    steps = [{"workers": 3, "hold": "15s"}]
    seen = says(asks_for(serving(A, replicas=4, rollout__steps=steps), B), said)
    decision = decide(seen)
    assert len([s for s in of(decision, Signal) if len(s.engines) == 2]) == told


def test_who_is_not_ready_yet_is_waited_for_before_the_next_leaves() -> None:
    asked = asks_for(serving(A, replicas=3, rollout__memoryPolicy="Resource", rollout__steps=TWO), B)
    seen, _, _ = live(asked, lambda now, _: serves_with(now).count(B) == 1)
    (first,) = [w for w in seen.workers if serves_with(seen)[seen.workers.index(w)] == B]
    starting = with_worker(seen, first.uid, ready=False)
    before = [s.uid for s in of(decide(starting), Signal) if s.may_drain]
    assert before == [first.uid]
    after = [s.uid for s in of(decide(seen), Signal) if s.may_drain]
    assert len(after) == 2
    assert first.uid in after


def test_the_last_ready_worker_never_leaves() -> None:
    seen = asks_for(serving(A, replicas=3, rollout__memoryPolicy="Resource", rollout__steps=TWO), B)
    for worker in seen.workers[1:]:
        seen = with_worker(seen, worker.uid, ready=False)
    decision = decide(seen)
    told = {s.uid: s for s in of(decision, Signal)}.get(seen.workers[0].uid)
    assert told is None or not (told.may_drain or any(e.role is Role.CANDIDATE for e in told.engines))
    assert [s.uid for s in of(decision, Signal) if s.may_drain]  # another one does


def test_a_plan_that_is_edited_to_fewer_workers_takes_the_others_back_one_after_the_other() -> None:
    asked = asks_for(serving(A, replicas=5, rollout__memoryPolicy="Resource"), B)
    seen, _, _ = live(asked, lambda now, _: set(serves_with(now)) == {B} and now.memory.candidate is not None)
    fewer = edited(seen, rollout__steps=[{"workers": 1, "hold": "1h"}])
    seen, decision, most = live(fewer, lambda now, _: serves_with(now).count(A) == 4)
    assert decision.memory.candidate is not None
    assert most == 1


def one_is_lost(allow_downtime: bool) -> Scene:
    """Of five workers one is not ready for a reason of its own."""
    plan = {"rollout__memoryPolicy": "Resource", "rollout__allowDowntime": allow_downtime}
    seen = asks_for(serving(A, replicas=5, **plan), B)
    return with_worker(seen, seen.workers[0].uid, ready=False)


def leave(seen: Scene, passes: int = 12) -> tuple[set[str], str]:
    """Who of the ready workers is told to leave service, and what is said at the end."""
    told: set[str] = set()
    for _ in range(passes):
        decision = decide(seen)
        told |= {s.uid for s in of(decision, Signal) if s.may_drain}
        lost = seen.workers[0].uid
        seen = with_worker(obey(seen, decision), lost, ready=False)
    return told - {lost}, decision.situation.message


def test_while_a_worker_is_lost_no_other_one_leaves_as_no_eviction_would_be_allowed_and_the_message_says_so() -> None:
    told, message = leave(one_is_lost(allow_downtime=False))
    assert told == set()
    assert "4 of 5 workers are ready: the disruption budget lets no other go" in message


def test_where_downtime_is_allowed_a_lost_worker_holds_up_no_other() -> None:
    told, _ = leave(one_is_lost(allow_downtime=True))
    assert told


def test_when_the_lost_worker_is_back_the_rollout_goes_on_to_its_end() -> None:
    seen = one_is_lost(allow_downtime=False)
    for _ in range(5):
        seen = with_worker(obey(seen, decide(seen)), seen.workers[0].uid, ready=False)
    seen = with_worker(seen, seen.workers[0].uid, ready=True)
    seen, _, most = live(seen, settled_on(B))
    assert most == 1


@pytest.mark.parametrize("replicas", [2, 3, 5])
@pytest.mark.parametrize("everybody", [False, True], ids=["from a canary", "from everywhere"])
def test_all_come_back_to_stable_while_others_answer(replicas: int, everybody: bool) -> None:
    asked = asks_for(serving(A, replicas=replicas, rollout__memoryPolicy="Resource"), B)
    wanted = {B} if everybody else {A, B}
    seen, _, _ = live(asked, lambda now, _: set(serves_with(now)) == wanted and now.memory.candidate is not None)
    aborted = replace(seen, command=parse_command("abort#1"))
    seen, decision, _ = live(aborted, lambda now, _: set(serves_with(now)) == {A})
    assert decision.memory.candidate is None


def test_the_only_worker_is_not_taken_out_of_service() -> None:
    seen = asks_for(serving(A, replicas=1, rollout__memoryPolicy="Resource"), B)
    seen, _, most = live(seen, lambda _, d: "cannot hold it" in d.situation.message)
    assert most == 0
    assert serves_with(seen) == [A]


def test_with_policy_availability_nobody_is_told_to_leave() -> None:
    seen = asks_for(serving(A, replicas=3, rollout__memoryPolicy="Availability"), B)
    for _ in range(20):
        decision = decide(seen)
        assert not any(s.may_drain for s in of(decision, Signal))
        seen = obey(seen, decision)
    assert seen.memory.candidate is not None


def test_the_only_worker_that_is_ready_is_not_told_to_change_even_where_downtime_is_allowed() -> None:
    seen = serving(A, replicas=2, rollout__memoryPolicy="Resource", rollout__allowDowntime=True)
    seen = asks_for(seen, B)
    one, other = seen.workers
    alone = with_worker(seen, other.uid, ready=False, report=None, silence="connection refused")
    assert not [s for s in of(decide(alone), Signal) if any(e.revision == B for e in s.engines)]
    both = of(decide(seen), Signal)
    assert len([s for s in both if any(e.revision == B for e in s.engines)]) == 1
    assert one.ready
