"""What every worker should hold and route, and how the world is brought there. Called at the end of every pass."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection
from dataclasses import replace

from trtmodel_contract.codec import canonical, encode
from trtmodel_contract.control import EngineState, Fence, Role
from trtmodel_contract.identity import Storage, short_hash

from trtmodel_operator import facts, manifests
from trtmodel_operator.decide import builds, jobs, making
from trtmodel_operator.decide.turn import Outcome, Turn, short_uid
from trtmodel_operator.model import (
    Action,
    ApplyPointer,
    ApplyWorkload,
    Decision,
    DeleteWorkload,
    Deployed,
    Memory,
    Observed,
    ObservedWorker,
    PlannedEngine,
    Signal,
)

MEMORY_AVAILABILITY = "Availability"


def new_window(memory: Memory) -> str:
    """An id that no worker has counted under: the window is part of what workers are told, so with the next pass the
    sequence has passed this number."""
    return f"w{memory.sequence + 1}"


# ---------------------------------------------------------------------------------------------------------------
# Who tries the candidate
# ---------------------------------------------------------------------------------------------------------------


def count(workers: int | str, n: int) -> int:
    """How many of `n` workers try the candidate: at least one; of two or more, one at least keeps stable."""
    asked = math.ceil(int(workers[:-1]) * n / 100) if isinstance(workers, str) else workers
    return max(1, min(asked, max(1, n - 1)))


def holders(seen: Observed, memory: Memory, *, routed_only: bool = False) -> list[ObservedWorker]:
    """Workers that should have the candidate loaded: the members of the step, and in the last preparation all. With
    `routed_only`, those of them that should (or, in the last preparation, do) answer with it."""
    candidate, step = memory.candidate, memory.step
    if candidate is None or step is None or memory.stable is None:
        return []
    if seen.spec is None:  # how many is not known: those that have it keep it
        return [w for w in facts.present(seen) if facts.engine(seen, w, facts.digest_for(w, candidate)) is not None]
    steps = seen.spec.rollout.steps
    chosen: list[ObservedWorker] = []
    for target in seen.spec.targets:
        if target.name in step.failed:
            continue  # it went back alone
        workers = facts.present(seen, target.name)
        if step.index >= len(steps):
            chosen += [w for w in workers if not routed_only or _routes(seen, w, candidate)]
        elif workers:
            workers.sort(key=lambda w: _rank(seen, w, candidate))
            chosen += workers[: count(steps[step.index].workers, len(workers))]
    return chosen


def was_told(memory: Memory, worker: ObservedWorker) -> bool:
    """It was told to hold the candidate, at some time in this rollout, and has not said since that it let go of it."""
    return memory.step is not None and short_uid(worker) in memory.step.told


def _rank(seen: Observed, worker: ObservedWorker, candidate: Deployed) -> tuple[bool, bool, str]:
    """Those that already answer with the candidate stay; a pod that is not ready is not waited for if another is,
    unless it is at work on the candidate (where memory holds one engine, it leaves service for that); for the rest
    rendezvous hashing, so that the choice survives every restart without being written down."""
    draw = hashlib.sha256(f"{candidate.revision}/{worker.uid}".encode()).hexdigest()
    engine = facts.engine(seen, worker, facts.digest_for(worker, candidate))
    at_work = engine is not None and engine.state is not EngineState.FAILED
    return not _routes(seen, worker, candidate), not (worker.ready or at_work), draw


def _routes(seen: Observed, worker: ObservedWorker, candidate: Deployed) -> bool:
    return facts.routes_candidate(seen, worker, facts.digest_for(worker, candidate))


def may_drain(seen: Observed, memory: Memory, trying: Collection[str]) -> set[str]:
    """Uids of the workers that may leave service to change engines, should memory hold only one: somebody ready is left
    that need not. `trying`: those that should hold the candidate. The members of a step may all, since another worker
    keeps stable; whoever is not among them goes back to stable, the last ones when the first serve it again.

    As long as a worker changes, its answer stays: a permission that goes while it is at work would stop it."""
    if seen.spec is None or seen.spec.rollout.memory_policy == MEMORY_AVAILABILITY:
        return set()
    workers, serving = facts.present(seen), memory.stable or memory.candidate
    back = [w for w in workers if w.uid not in trying and _answers_otherwise(seen, w, facts.digest_for(w, serving))]
    changing = {w.uid for w in back} | set(trying)
    if any(w.ready and (w.uid not in changing or _routes_to(seen, w, memory.candidate)) for w in workers):
        return changing if len(workers) > 1 else set()
    return {w.uid for w in back[1:]}


def _routes_to(seen: Observed, worker: ObservedWorker, deployed: Deployed | None) -> bool:
    return deployed is not None and _routes(seen, worker, deployed)


def _answers_otherwise(seen: Observed, worker: ObservedWorker, digest: str) -> bool:
    """It answers, and does not hold the engine that it should answer with."""
    report = facts.model_report(seen, worker)
    routes = report.routes if report is not None else None
    return routes is not None and bool(routes.stable or routes.candidate) and not facts.holds(seen, worker, digest)


# ---------------------------------------------------------------------------------------------------------------
# The plan
# ---------------------------------------------------------------------------------------------------------------


def settle_plan(turn: Turn, rule: str, outcome: Outcome) -> Decision:
    """Ends the pass: counts the fence on if what workers should do has changed, and adds every repair.

    Order of the effects: Jobs; the boot pointer before the Deployment that mounts it; signals last, so that a worker
    that restarts on a signal's way finds the pointer already there.
    """
    if outcome.halt:
        return _decision(turn, rule, outcome, list(outcome.actions))
    _remember_told(turn)
    pointers = _pointers(turn)
    trying = {w.uid for w in holders(turn.seen, turn.memory)}
    workers = facts.present(turn.seen)
    leaving = may_drain(turn.seen, turn.memory, trying)
    signals = {
        w.uid: replace(signal, may_drain=w.uid in leaving)
        for w in workers
        if (signal := _signal(turn, w, w.uid in trying)) is not None
    }
    _count_fence(turn, pointers, signals)
    actions: list[Action] = [*making.unwanted_jobs(turn), *outcome.actions]
    actions += [replace(p, sequence=turn.memory.sequence) for p in pointers if _pointer_differs(turn, p)]
    actions += [w for w in _workloads(turn) if _workload_differs(turn, w)]
    actions += _abandoned(turn)
    actions += [signals[w.uid] for w in workers if w.uid in signals and _must_hear(turn, w, signals[w.uid])]
    return _decision(turn, rule, outcome, actions)


def _decision(turn: Turn, rule: str, outcome: Outcome, actions: list[Action]) -> Decision:
    return Decision(
        rule=rule,
        memory=turn.memory,
        actions=tuple(actions),
        situation=outcome.situation,
        requeue=outcome.requeue,
        notices=tuple(turn.notices),
        wanted=builds.wanted_revision(turn),
        gate=builds.gate_key(turn) if turn.seen.spec else "",
        builds=making.names_of_builds(turn),
    )


def _remember_told(turn: Turn) -> None:
    """Before the signals go out: a worker whose container dies of the candidate can say nothing about it afterwards."""
    seen, memory, step = turn.seen, turn.memory, turn.memory.step
    if step is None or memory.candidate is None:
        return
    now = {short_uid(w) for w in holders(seen, memory)}
    for worker in facts.present(seen):
        freed = (
            worker.report is not None and facts.engine(seen, worker, facts.digest_for(worker, memory.candidate)) is None
        )
        if was_told(memory, worker) and not freed:
            now.add(short_uid(worker))
    if tuple(sorted(now)) != step.told:
        turn.remember(step=replace(step, told=tuple(sorted(now))))


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
    weight = 100 if route else 0
    baseline = memory.step.baseline if memory.step is not None else ""
    return Signal(
        worker.pod, worker.uid, worker.ip, tuple(engines), digest, route, weight, memory.window, baseline=baseline
    )


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
    """What each target's workers should boot from. A candidate is in it only while there is no stable."""
    memory, spec = turn.memory, turn.seen.spec
    serving = memory.stable or memory.candidate
    if spec is None or memory.platform is None or serving is None:
        return []
    standby = memory.standby if memory.stable else None
    return [
        ApplyPointer(name, t.name, 0, serving, standby, _storage(turn, name))
        for t in spec.targets
        for name in [manifests.workload_name(turn.seen.model, t.name, memory.platform.hash)]
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


def _workloads(turn: Turn) -> list[ApplyWorkload]:
    """Workers are made only for something to serve: after a first rollout that was taken back there are none."""
    memory, spec = turn.memory, turn.seen.spec
    if spec is None or memory.platform is None:
        return []
    replicas = spec.serving.replicas if memory.stable or memory.candidate else 0
    return [
        ApplyWorkload(
            manifests.workload_name(turn.seen.model, t.name, memory.platform.hash), t, memory.platform, replicas
        )
        for t in spec.targets
    ]


def _abandoned(turn: Turn) -> list[DeleteWorkload]:
    """Workers of targets that the spec names no more. They go once all others serve, so that renaming a target takes
    nobody's answer away."""
    seen, spec = turn.seen, turn.seen.spec
    if spec is None or not (spec.serving.replicas == 0 or facts.settled(seen, turn.memory.stable)):
        return []
    named = {t.name for t in spec.targets}
    return [DeleteWorkload(w.name) for w in seen.workloads if w.target not in named]


def _workload_differs(turn: Turn, wanted: ApplyWorkload) -> bool:
    seen, spec = turn.seen, turn.spec
    found = next((w for w in seen.workloads if w.name == wanted.name), None)
    if found is None:
        return bool(turn.memory.stable or turn.memory.candidate)
    if found.replicas != wanted.replicas or seen.service_fingerprint != manifests.service_fingerprint(seen.model, spec):
        return True
    return found.fingerprint != manifests.workload_fingerprint(seen.model, spec, wanted)
