"""What every worker should hold and route, and how the world is brought there. Called at the end of every pass."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from trtmodel_contract.codec import canonical, encode
from trtmodel_contract.control import Fence, Role
from trtmodel_contract.gate import Verdict
from trtmodel_contract.identity import Storage, short_hash

from trtmodel_operator import facts, manifests
from trtmodel_operator.decide import builds, farewell, fleet, gates, jobs, making
from trtmodel_operator.decide.members import dose, holders, in_turn, may_drain, was_told
from trtmodel_operator.decide.turn import RENEW, Outcome, Turn, interval, short_uid
from trtmodel_operator.model import (
    Action,
    ApplyPointer,
    ApplyService,
    ApplyWorkload,
    Decision,
    DeleteWorkload,
    Deployed,
    Memory,
    ObservedWorker,
    ObservedWorkload,
    PlannedEngine,
    Signal,
)


def new_window(memory: Memory) -> str:
    """An id that no worker has counted under: the window is part of what workers are told, so with the next pass the
    sequence has passed this number."""
    return f"w{memory.sequence + 1}"


# ---------------------------------------------------------------------------------------------------------------
# The plan
# ---------------------------------------------------------------------------------------------------------------


def settle_plan(turn: Turn, rule: str, outcome: Outcome) -> Decision:
    """Ends the pass: counts the fence on if what workers should do has changed, adds every repair, and sees to it that
    a trial is looked at again in time.

    Order of the effects: boot pointers that are there already, so that a worker that restarts on a signal's way finds
    the newest; signals, so that nothing new that the API server refuses (a ConfigMap, a Deployment, a Job) holds up a
    way back; then the rest, the finalizer before the Jobs that it is for, a pointer before what mounts it.
    """
    if outcome.halt:
        return _decision(turn, rule, outcome, list(outcome.actions))
    pointers = _pointers(turn)
    trying = in_turn(turn.seen, turn.memory)
    _remember_told(turn, trying)
    workers = facts.present(turn.seen)
    leaving = may_drain(turn.seen, turn.memory, trying)
    signals = {
        w.uid: replace(signal, may_drain=w.uid in leaving)
        for w in workers
        if (signal := _signal(turn, w, w.uid in trying)) is not None
    }
    _count_fence(turn, pointers, signals)
    written = [replace(p, sequence=turn.memory.sequence) for p in pointers if _pointer_differs(turn, p)]
    there = {p.name for p in turn.seen.pointers}
    actions: list[Action] = [p for p in written if p.workload in there]
    actions += [signals[w.uid] for w in workers if w.uid in signals and _must_hear(turn, w, signals[w.uid])]
    actions += [*farewell.guard(turn), *making.unwanted_jobs(turn), *outcome.actions]
    actions += [p for p in written if p.workload not in there]
    actions += [*_workloads(turn), *_abandoned(turn), *fleet.gone(turn)]
    return _decision(turn, rule, outcome, actions)


def _decision(turn: Turn, rule: str, outcome: Outcome, actions: list[Action]) -> Decision:
    return Decision(
        rule=rule,
        memory=turn.memory,
        actions=tuple(actions),
        situation=outcome.situation,
        requeue=_due(turn, outcome),
        notices=tuple(turn.notices),
        wanted=builds.wanted_revision(turn),
        gate=builds.gate_key(turn) if turn.seen.spec else "",
        builds=making.names_of_builds(turn),
        lookups=gates.lookups(turn),
    )


def _due(turn: Turn, outcome: Outcome) -> float | None:
    """Whatever else the model waits for, and be it for ever (a Job that failed for good): a trial has looks, a time to
    live and a deadline, which count only while somebody watches."""
    memory = turn.memory
    if outcome.halt or memory.candidate is None or memory.stable is None or not facts.present(turn.seen):
        return outcome.requeue
    look = min(interval(turn.seen.spec), RENEW)
    return look if outcome.requeue is None else min(outcome.requeue, look)


def _remember_told(turn: Turn, trying: Collection[str]) -> None:
    """Before the signals go out: a worker whose container dies of the candidate can say nothing about it afterwards."""
    seen, memory, step = turn.seen, turn.memory, turn.memory.step
    if step is None or memory.candidate is None:
        return
    now = {w.uid for w in holders(seen, memory) if w.uid in trying}
    for worker in facts.present(seen):
        if was_told(memory, worker) and not _let_go(turn, worker, memory.candidate):
            now.add(worker.uid)
    told = {short_uid(w): w.restarts for w in facts.present(seen) if w.uid in now}
    restarts = {uid: step.restarts.get(uid, had) for uid, had in sorted(told.items())}
    if restarts != step.restarts:
        turn.remember(step=replace(step, restarts=restarts))


def _let_go(turn: Turn, worker: ObservedWorker, candidate: Deployed) -> bool:
    """It holds the candidate no more since it was told so. One that has heard nothing but its boot pointer has begun
    anew: its container may have died of the candidate, though the kubelet has not said so yet."""
    report = worker.report
    if report is None or report.fence.sequence <= report.pointer_sequence:
        return False
    return facts.engine(turn.seen, worker, facts.digest_for(worker, candidate)) is None


def _count_fence(turn: Turn, pointers: list[ApplyPointer], signals: dict[str, Signal]) -> None:
    """Equal sequence, equal content: another plan counts on. A worker or pointer that is ahead of the memory (status
    came from a backup) is overtaken."""
    memory = turn.memory
    plan = short_hash(
        canonical(
            {
                "keys": list(turn.seen.key_ids),  # signatures are part of what a worker compares
                "pointers": [encode(replace(p, sequence=0)) for p in pointers],
                "workers": {uid: encode(signal) for uid, signal in signals.items()},
            }
        ).decode()
    )
    uid = turn.seen.model.uid
    held = [w.report.fence.sequence for w in turn.seen.workers if w.report is not None and w.report.fence.uid == uid]
    ahead = max([*held, *(p.sequence for p in turn.seen.pointers)], default=0)
    if ahead > memory.sequence:
        turn.remember(sequence=ahead + 1, plan=plan)
    elif plan != memory.plan and (pointers or signals or memory.plan):
        turn.remember(sequence=memory.sequence + 1, plan=plan)


def _signal(turn: Turn, worker: ObservedWorker, tries: bool) -> Signal | None:
    """What the worker should hold and route; `tries`: with the candidate. None if nothing can be asked of it: it is
    unknown, or there is no engine for its load key."""
    memory = turn.memory
    serving = memory.stable or memory.candidate
    digest = facts.digest_for(worker, serving)
    if worker.report is None or not worker.ip or serving is None or not digest:
        return None
    engines = [PlannedEngine(Role.STABLE, serving.revision, digest)]
    second, role = memory.standby, Role.STANDBY
    route = ""
    if tries:
        # The standby makes room: two engines at a time.
        second, role = memory.candidate, Role.CANDIDATE
        route = _route(turn, worker)
    other = facts.digest_for(worker, second)
    if second is not None and other and other != digest:
        engines.append(PlannedEngine(role, second.revision, other))
    weight, shadow = dose(turn.seen, memory) if route else (0, 0)
    return Signal(
        pod=worker.pod,
        uid=worker.uid,
        ip=worker.ip,
        engines=tuple(engines),
        stable=digest,
        candidate=route,
        weight=weight,
        window=memory.window,
        baseline=memory.step.baseline if memory.step is not None else "",
        shadow=shadow,
        synthetic=_synthetic(turn),
    )


def _synthetic(turn: Turn) -> int:
    """How many requests each routed engine should have in this window, golden samples included; 0: all come by
    themselves. Where as many as `minRequests` prove nothing either way, twice as many are asked for, and so on: no
    others would come."""
    step, spec = turn.memory.step, turn.seen.spec
    if spec is None or step is None or not step.synthetic:
        return 0
    wanted = spec.rollout.analysis.min_requests
    open_ = step.verdict == Verdict.INCONCLUSIVE.value and all(c.verdict == Verdict.PASS.value for c in step.checks)
    while open_ and wanted <= max(step.counted.values(), default=0):
        wanted *= 2
    return wanted


def _route(turn: Turn, worker: ObservedWorker) -> str:
    """The candidate's digest if this worker should answer with it: it does already, or it is prepared and the step is
    open. Each is routed by itself, when it is ready."""
    seen, memory = turn.seen, turn.memory
    digest = facts.digest_for(worker, memory.candidate)
    if facts.routes_candidate(seen, worker, digest):
        return digest
    step, spec = memory.step, seen.spec
    opened = step is not None and spec is not None and step.routed and step.index < len(spec.rollout.steps)
    return digest if opened and facts.holds(seen, worker, digest) else ""


def _must_hear(turn: Turn, worker: ObservedWorker, signal: Signal) -> bool:
    """It holds another fence than ours; or it has the candidate, whose time to live each pass renews; or its container
    restarted and booted from a pointer of the same sequence, which says nothing of the window."""
    assert worker.report is not None
    if worker.report.fence != Fence(turn.seen.model.uid, turn.memory.sequence):
        return True
    if any(e.role is Role.CANDIDATE for e in signal.engines):
        return True
    report = facts.model_report(turn.seen, worker)
    return turn.memory.step is not None and report is not None and turn.memory.window not in report.windows


# ---------------------------------------------------------------------------------------------------------------
# Pointers and Deployments
# ---------------------------------------------------------------------------------------------------------------


def _pointers(turn: Turn) -> list[ApplyPointer]:
    """What each target's workers should boot from, of whatever platform. A candidate is in it only while there is no
    stable."""
    memory, spec = turn.memory, turn.seen.spec
    serving = memory.stable or memory.candidate
    if spec is None or memory.platform is None or serving is None:
        return []
    standby = memory.standby if memory.stable else None
    return [
        ApplyPointer(name, t.name, 0, serving, standby, _storage(turn, name))
        for t in spec.targets
        for platform in fleet.platforms(turn, t.name)
        for name in [manifests.workload_name(turn.seen.model, t.name, platform.hash)]
    ]


def _storage(turn: Turn, pointer: str) -> Storage:
    """Where today's spec says once a Job has been there; until then where the pointer says that lies there: a worker
    that is replaced must not boot from an address that nobody has reached yet."""
    found = next((p.storage for p in turn.seen.pointers if p.name == pointer), None)
    return turn.spec.storage if found is None or jobs.known(turn) is not None else found


def _pointer_differs(turn: Turn, wanted: ApplyPointer) -> bool:
    """Its content, or who signed it, or the public keys beside it."""
    seen = turn.seen
    found = next((p for p in seen.pointers if p.name == wanted.workload), None)
    if found is None or found.content != manifests.wanted_content(seen.model, wanted):
        return True
    if seen.published_key_ids is not None and set(seen.published_key_ids) != set(seen.key_ids):
        return True
    return bool(seen.key_ids) and set(found.key_ids) != set(seen.key_ids[:1])  # the first is the one that signs


def _abandoned(turn: Turn) -> list[DeleteWorkload]:
    """Workers of targets that the spec names no more. They go once all others serve, so that renaming a target takes
    nobody's answer away."""
    seen, spec = turn.seen, turn.seen.spec
    if spec is None or not (spec.serving.replicas == 0 or facts.settled(seen, turn.memory.stable)):
        return []
    named = {t.name for t in spec.targets}
    return [DeleteWorkload(w.name) for w in seen.workloads if w.target not in named]


def _workloads(turn: Turn) -> list[ApplyService | ApplyWorkload]:
    """What is missing or differs. The Service by itself: nothing about it is a reason to write a Deployment."""
    seen, serving = turn.seen, bool(turn.memory.stable or turn.memory.candidate)
    there = {w.name: w for w in seen.workloads}
    wanted = [w for w in fleet.workloads(turn) if serving or w.name in there]
    changes = [change for w in wanted if (change := _change(turn, there.get(w.name), w)) is not None]
    if wanted and seen.service_fingerprint != manifests.service_fingerprint(seen.model, turn.spec):
        return [ApplyService(), *changes]
    return list(changes)


def _change(turn: Turn, found: ObservedWorkload | None, wanted: ApplyWorkload) -> ApplyWorkload | None:
    """All of it where people chose something else than it was made of; only its replicas where they differ alone, and
    where nobody knows any more what it was made of."""
    if found is None:
        return wanted
    known = bool(wanted.platform.pod)
    if known and found.fingerprint != manifests.workload_fingerprint(turn.seen.model, turn.spec, wanted):
        return wanted
    return replace(wanted, only_replicas=True) if found.replicas != wanted.replicas else None
