"""Who tries the candidate, with which share of the requests, and who may leave service to load it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection

from trtmodel_contract.control import EngineReport, EngineState, MemoryPolicy
from trtmodel_contract.gate import Verdict

from trtmodel_operator import facts
from trtmodel_operator.decide.turn import Turn, short_uid
from trtmodel_operator.model import Deployed, Memory, Observed, ObservedWorker, Platform

MEMORY_AVAILABILITY = MemoryPolicy.AVAILABILITY.value
MEMORY_AUTO = "Auto"
RESUMPTION, PROMOTION = "resumption", "promotion"


def count(workers: int | str, n: int) -> int:
    """How many of `n` workers try the candidate: at least one; of two or more, one at least keeps stable."""
    asked = math.ceil(int(workers[:-1]) * n / 100) if isinstance(workers, str) else workers
    return max(1, min(asked, max(1, n - 1)))


def trial(memory: Memory) -> Platform | None:
    """The platform on trial; None if there is none, or an engine is."""
    on_trial = memory.candidate is not None and memory.stable is not None and memory.step is not None
    return memory.step.platform if on_trial and memory.step is not None else None


def leaves(memory: Memory, worker: ObservedWorker) -> bool:
    """It is of a platform that was replaced or taken back: nothing is made for it any more."""
    if memory.platform is None:
        return False
    tried = trial(memory)
    return worker.platform not in ("", memory.platform.hash, tried.hash if tried is not None else "")


def share_of(seen: Observed, memory: Memory) -> int:
    """Of the workers of a target, how many should be of the platform on trial in the step in hand."""
    step, spec = memory.step, seen.spec
    if step is None or spec is None:
        return 0
    n, steps = spec.serving.replicas, spec.rollout.steps
    return n if step.index >= len(steps) else min(n, count(steps[step.index].workers, n))


def answers(seen: Observed, memory: Memory, worker: ObservedWorker) -> bool:
    """It answers as the step in hand has it: with the candidate in its share, or as a worker of another platform."""
    if trial(memory) is not None:
        return facts.serves(seen, worker, memory.stable)
    return facts.takes(seen, worker, facts.digest_for(worker, memory.candidate), *dose(seen, memory))


def holders(seen: Observed, memory: Memory, *, routed_only: bool = False) -> list[ObservedWorker]:
    """Workers that should have the candidate loaded: the members of the step, and in the last preparation all. With
    `routed_only`, those of them that should (or, in the last preparation, do) answer with it. Of a platform on trial
    those that are made of it."""
    candidate, step = memory.candidate, memory.step
    if candidate is None or step is None or memory.stable is None:
        return []
    if (platform := trial(memory)) is not None:
        named = {t.name for t in seen.spec.targets} if seen.spec is not None else {w.target for w in seen.workers}
        return [w for w in facts.present(seen) if w.platform == platform.hash and w.target in named]
    if seen.spec is None:  # how many is not known: those that have it keep it
        return [w for w in facts.present(seen) if facts.engine(seen, w, facts.digest_for(w, candidate)) is not None]
    steps = seen.spec.rollout.steps
    chosen: list[ObservedWorker] = []
    for target in seen.spec.targets:
        if target.name in step.failed:
            continue  # it went back alone
        workers = facts.present(seen, target.name)
        if not step.back:
            workers = [w for w in workers if takes_part(memory, w)]
        if step.back or step.index >= len(steps):
            chosen += [w for w in workers if not routed_only or routes(seen, w, candidate)]
        elif workers:
            workers.sort(key=lambda w: _rank(seen, w, candidate))
            chosen += workers[: count(steps[step.index].workers, len(workers))]
    return chosen


def unprepared(seen: Observed, memory: Memory) -> tuple[list[ObservedWorker], list[str]]:
    """Of those that should hold the candidate, the ones that do not report it loaded, warm and self-tested; and the
    targets that have too few workers: none, or in the last preparation fewer than are wanted. Of a platform on trial:
    those that do not serve, and targets that have not the step's share of them."""
    members, step, spec = holders(seen, memory), memory.step, seen.spec
    if step is None or spec is None:
        return members, []
    if trial(memory) is not None:
        least = share_of(seen, memory)
        lacking = [w for w in members if not facts.serves(seen, w, memory.stable)]
        return lacking, [t.name for t in spec.targets if sum(w.target == t.name for w in members) != least]
    missing = [w for w in members if not facts.holds(seen, w, facts.digest_for(w, memory.candidate))]
    least = spec.serving.replicas if step.back or step.index >= len(spec.rollout.steps) else 1
    counted = [w.target for w in members]
    if not step.back:
        counted += [w.target for w in facts.present(seen) if not takes_part(memory, w)]
    tried = [t.name for t in spec.targets if step.back or tried_on(seen, memory, t.name)]
    return missing, [name for name in tried if counted.count(name) < least]


def takes_part(memory: Memory, worker: ObservedWorker) -> bool:
    """Whether an engine may be tried on it. A worker that there is no engine of stable for (its target was added since,
    or it has another device) answers nobody: there is nothing to compare with or to go back to. It gets the revision
    when that is promoted, and holds up nothing until then."""
    mine = [a.load_key for a in memory.stable.artifacts if a.target == worker.target] if memory.stable else []
    key = facts.load_key(worker)
    return bool(mine) and (not key or key in mine)


def tried_on(seen: Observed, memory: Memory, target: str) -> bool:
    """Whether the workers of this target have a say in a trial."""
    if memory.stable is None or all(a.target != target for a in memory.stable.artifacts):
        return False
    workers = facts.present(seen, target)
    return not workers or any(takes_part(memory, w) for w in workers)


def nobody_can_try(seen: Observed, memory: Memory) -> bool:
    """Every target that the spec names is without an engine of stable."""
    on_trial = memory.candidate is not None and memory.stable is not None and memory.step is not None
    if not on_trial or memory.step is None or memory.step.back or trial(memory) is not None or seen.spec is None:
        return False
    return not any(tried_on(seen, memory, t.name) for t in seen.spec.targets)


def dose(seen: Observed, memory: Memory) -> tuple[int, int]:
    """Weight and shadow that the candidate has now: those of the step that was opened last. An edited plan takes weight
    away at once; more is given only when its step is opened."""
    step, spec = memory.step, seen.spec
    if step is None:
        return 0, 0
    if spec is None:
        return step.weight, step.shadow
    plan = spec.rollout.steps[min(step.index, len(spec.rollout.steps) - 1)]
    return min(step.weight, plan.weight), step.shadow


def passed(turn: Turn) -> bool:
    """The step in hand was held for its time, and the last look said Pass."""
    step, spec = turn.memory.step, turn.seen.spec
    if step is None or spec is None or not step.routed or step.index >= len(spec.rollout.steps):
        return False
    return step.held >= spec.rollout.steps[step.index].hold and step.verdict == Verdict.PASS.value


def awaited(turn: Turn) -> str:
    """What a person is waited for: RESUMPTION of a step with a pause, PROMOTION, or '' for nothing."""
    memory, step, spec = turn.memory, turn.memory.step, turn.seen.spec
    if step is None or spec is None or memory.candidate is None or memory.stable is None or step.back or step.failed:
        return ""
    if step.index < len(spec.rollout.steps):
        return RESUMPTION if spec.rollout.steps[step.index].pause and not step.resumed and passed(turn) else ""
    if not spec.rollout.manual or step.approved:
        return ""
    return "" if any(unprepared(turn.seen, memory)) else PROMOTION


def was_told(memory: Memory, worker: ObservedWorker) -> bool:
    """It was told to hold the candidate, at some time in this rollout, and has not said since that it let go of it."""
    return memory.step is not None and short_uid(worker) in memory.step.restarts


def _rank(seen: Observed, worker: ObservedWorker, candidate: Deployed) -> tuple[bool, bool, str]:
    """Those that already answer with the candidate stay; a pod that is not ready is not waited for if another is,
    unless it is at work on the candidate (where memory holds one engine, it leaves service for that); for the rest
    rendezvous hashing, so that the choice survives every restart without being written down."""
    draw = hashlib.sha256(f"{candidate.revision}/{worker.uid}".encode()).hexdigest()
    engine = facts.engine(seen, worker, facts.digest_for(worker, candidate))
    at_work = engine is not None and engine.state is not EngineState.FAILED
    return not routes(seen, worker, candidate), not (worker.ready or at_work), draw


def routes(seen: Observed, worker: ObservedWorker, candidate: Deployed) -> bool:
    return facts.routes_candidate(seen, worker, facts.digest_for(worker, candidate))


def in_turn(seen: Observed, memory: Memory) -> set[str]:
    """Uids of those that are told to hold the candidate. Where memory holds one engine, to load it is to leave service:
    then it is one worker after the other, never the last one that is ready, and none that is while another is not."""
    if trial(memory) is not None:
        return set()  # nobody changes engines: other workers come
    members = holders(seen, memory)
    workers = facts.present(seen)
    if not one_engine(seen) or len(workers) < 2:
        return {w.uid for w in members}
    begun = [w for w in members if was_told(memory, w) or _engine_of(seen, w, memory.candidate) is not None]
    turns = {w.uid for w in begun}
    at_work = [w for w in begun if not (w.ready and facts.holds(seen, w, facts.digest_for(w, memory.candidate)))]
    may = [w for w in members if w.uid not in turns and w.report and any(o.ready and o is not w for o in workers)]
    if budget_is_spent(seen):
        may = [w for w in may if not w.ready]
    if may and not at_work:
        turns.add(min(may, key=lambda w: not w.ready).uid)
    return turns


def budget_is_spent(seen: Observed) -> bool:
    """Of all workers that are wanted one is not ready: an eviction would be refused now by their PodDisruptionBudget,
    and so is leaving service to change engines, unless the spec allows downtime."""
    if seen.spec is None or seen.spec.rollout.allow_downtime:
        return False
    return sum(w.ready for w in facts.present(seen)) < facts.desired(seen)


def one_engine(seen: Observed) -> bool:
    """By the policy; or by what the first worker said that tried to hold two."""
    policy = seen.spec.rollout.memory_policy if seen.spec is not None else MEMORY_AVAILABILITY
    if policy != MEMORY_AUTO:
        return policy == MemoryPolicy.RESOURCE.value
    reports = (facts.model_report(seen, w) for w in facts.present(seen))
    return any(r is not None and r.memory is not None and r.memory.policy is MemoryPolicy.RESOURCE for r in reports)


def _engine_of(seen: Observed, worker: ObservedWorker, deployed: Deployed | None) -> EngineReport | None:
    return facts.engine(seen, worker, facts.digest_for(worker, deployed))


def may_drain(seen: Observed, memory: Memory, trying: Collection[str]) -> set[str]:
    """Uids of the workers that may leave service to change engines, should memory hold only one: somebody ready is left
    that need not. `trying`: those that are told to hold the candidate (see `in_turn`). Whoever is not among them goes
    back to stable at once, since what is taken back must not go on answering; the last ones when the first serve stable
    again. Where the trial only goes on with fewer, they go one after the other.

    As long as a worker changes, its answer stays: a permission that goes while it is at work would stop it."""
    if seen.spec is None or seen.spec.rollout.memory_policy == MEMORY_AVAILABILITY:
        return set()
    workers, serving = facts.present(seen), memory.stable or memory.candidate
    back = [w for w in workers if w.uid not in trying and _answers_otherwise(seen, w, facts.digest_for(w, serving))]
    if memory.candidate is not None and memory.stable is not None:
        leaving = [w for w in back if not w.ready]
        back = leaving or ([] if budget_is_spent(seen) else back[:1])
    changing = {w.uid for w in back} | set(trying)
    if any(w.ready and (w.uid not in changing or _routes_to(seen, w, memory.candidate)) for w in workers):
        return changing if len(workers) > 1 else set()
    return {w.uid for w in back[1:]}


def _routes_to(seen: Observed, worker: ObservedWorker, deployed: Deployed | None) -> bool:
    return deployed is not None and routes(seen, worker, deployed)


def _answers_otherwise(seen: Observed, worker: ObservedWorker, digest: str) -> bool:
    """It answers, and does not hold the engine that it should answer with."""
    report = facts.model_report(seen, worker)
    routes = report.routes if report is not None else None
    return routes is not None and bool(routes.stable or routes.candidate) and not facts.holds(seen, worker, digest)
