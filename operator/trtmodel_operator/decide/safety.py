"""Rules that take a candidate back. They are asked before anything that goes forward, also while paused, while the spec
has already changed, and (where they need none) while the spec cannot be read."""

from __future__ import annotations

import re
from dataclasses import replace

from trtmodel_contract.control import DEVICE_LOST, AttemptCounts, EngineState
from trtmodel_contract.gate import WORST_FIRST, Verdict
from trtmodel_contract.identity import short_hash
from trtmodel_contract.jobs import Reason

from trtmodel_operator import analysis, facts, reasons
from trtmodel_operator.decide import builds, fleet, gates, platforms
from trtmodel_operator.decide.members import answers, awaited, dose, holders, nobody_can_try, routes, trial, tried_on
from trtmodel_operator.decide.turn import (
    MESSAGE_LENGTH,
    SOON,
    Outcome,
    Turn,
    interval,
    is_paused,
    roll_back,
    short_uid,
    watched,
)
from trtmodel_operator.decide.workers import new_window
from trtmodel_operator.model import AnalysisSpec, Check, Deployed, NoData, ObservedWorker, Situation, Stage, StepMemory
from trtmodel_operator.text import cut

# Faults of the environment say nothing about the engine. The worker tries again, and is waited for until the deadline.
# The last ones are the worker's own: keys that are not mounted yet, a pointer that is not, a process that cannot start,
# a storage that answers too slowly, a device or a driver that nothing can be loaded on any more.
ENVIRONMENT = {
    *(r.value for r in (Reason.STORAGE_UNAVAILABLE, Reason.ACCESS_DENIED, Reason.BUCKET_NOT_FOUND, Reason.NO_SPACE)),
    *("SignatureInvalid", "NotStarted", "HostNotStarted", "FetchTimeout", "StorageStuck", DEVICE_LOST),
}
_ROOM = "room, after "
_SECONDS = re.compile(r"[0-9]{1,12}\.[0-9]")
FAILING_LOOKS = 2  # at the latency: one may be a neighbour's doing


def cannot_be_held(turn: Turn) -> Outcome | None:
    """A worker says that it cannot load the candidate, or something died of it: an engine host, or the whole container
    of a worker that has it (a fat candidate gets the pod killed). Pods that are being deleted or were evicted died of
    something else, and a target that the spec names no more has no say. With no stable a dead host is only replaced:
    there is nothing to go back to."""
    candidate = turn.memory.candidate
    step = turn.memory.step if turn.memory.stable is not None else None
    if candidate is None:
        return None
    gone_back = step.failed if step is not None else {}
    named = {t.name for t in turn.seen.spec.targets} if turn.seen.spec else {w.target for w in turn.seen.workers}
    workers = [w for w in facts.present(turn.seen) if w.target in named and w.target not in gone_back]
    platform = trial(turn.memory)
    if platform is not None and turn.memory.stable is not None:
        # Workers of before say nothing about it; and of the engines stable may have got some since it began.
        workers, candidate = fleet.newcomers(turn), turn.memory.stable
        if (found := platforms.hopeless(turn)) is not None:
            return _fail(turn, *found)
    for worker in workers:
        engine = facts.engine(turn.seen, worker, facts.digest_for(worker, candidate))
        if engine is None or not _answers_us(turn, worker):
            continue
        if engine.state is EngineState.FAILED and engine.reason not in ENVIRONMENT:
            why = engine.message or engine.reason or "it gave no reason"
            return _fail(turn, worker.target, reasons.ENGINE_FAILED, f"worker {worker.pod} cannot hold it: {why}")
        if step is not None and engine.deaths > step.deaths.get(short_uid(worker), 0):
            why = f"an engine host of worker {worker.pod} died of it"
            return _fail(turn, worker.target, reasons.ENGINE_DIED, why)
    for worker in workers if step is not None else ():
        if _died(turn, worker):
            why = worker.death or worker.message or worker.trouble or "it gave no reason"
            text = f"the container of worker {worker.pod} died while it had it: {why}"
            return _fail(turn, worker.target, reasons.WORKER_DIED, text)
    return None


def _died(turn: Turn, worker: ObservedWorker) -> bool:
    """Its container did, since it was told to hold the candidate. (Told by the count of restarts, and not by when they
    were: nodes and operator need not agree on the time.) One of another platform was made for its trial."""
    step = turn.memory.step
    if step is None:
        return False
    had = 0 if step.platform is not None else step.restarts.get(short_uid(worker))
    return had is not None and worker.restarts > had


def _fail(turn: Turn, target: str, reason: str, message: str) -> Outcome:
    """The candidate failed on one target: it goes back everywhere, or there alone."""
    spec, step = turn.seen.spec, turn.memory.step
    alone = spec is not None and spec.rollout.hold_on_target_failure and trial(turn.memory) is None
    if alone and spec is not None and step is not None and turn.memory.stable is not None and not step.back:
        failed = {**step.failed, target: cut(f"{reason}, {message}", MESSAGE_LENGTH)}
        if any(t.name not in failed for t in spec.targets):
            turn.remember(step=replace(step, failed=failed))
            text = f"it was taken back on target {target} alone: {message}"
            return Outcome(Situation(Stage.STALLED, reasons.TARGET_FAILED, text), SOON)
    where = f"target {target}: " if spec is not None and len(spec.targets) > 1 else ""
    return roll_back(turn, reason, where + message)


def analysis_says_no(turn: Turn) -> Outcome | None:
    """Looks at the figures, once an interval, as long as any worker may answer with the candidate. Too many errors, or
    answers that disagree, end it at once, their bounds being proof; too slow ends it at the second look in a row, a
    query of Prometheus at its second answer outside the bounds.

    Held time counts only while somebody watched, every member served the candidate, and nothing was paused. After a gap
    the figures are of unknown hours: a fresh window starts, and the whole hold with it.
    """
    memory, step, spec = turn.memory, turn.memory.step, turn.seen.spec
    if spec is None or step is None or not step.seen_at:
        return None
    if memory.stable is None or memory.candidate is None or not facts.present(turn.seen):
        return None
    now, every = turn.seen.now, interval(spec)
    if 0 <= now - step.seen_at < every:
        return None
    passed = watched(now, step.seen_at, every)
    if passed is None:
        gap = f"nobody watched for {now - step.seen_at:.0f} s"
        return _look_anew(turn, step, len(spec.rollout.steps) - 1, gap)
    looks = _looks(turn, memory.stable, memory.candidate, spec.rollout.analysis)
    if not looks:
        return None
    counts = bool(memory.waiting) and not is_paused(turn)  # for the deadline: something but a person is waited for
    look = min(looks.values(), key=lambda found: WORST_FIRST.index(found.verdict))
    checks = gates.checks(turn)
    routed = holders(turn.seen, memory, routed_only=True)
    serving = step.routed and all(answers(turn.seen, memory, w) for w in routed)
    who = short_hash(*sorted(w.uid for w in routed))
    counted = {f"{name}/{who}": found.requests for name, found in looks.items()}
    if serving and any(n < step.counted.get(name, 0) for name, n in counted.items()):
        # What they held is lost, and a failure may have been among it.
        turn.remember(waited=memory.waited + passed if counts else memory.waited, waited_at=now)
        return _look_anew(turn, step, len(spec.rollout.steps) - 1, "a worker's counters began anew")
    slow = [name for name, found in looks.items() if found.latency is Verdict.FAIL]
    again = [name for name in slow if name in step.slow]  # the same target: two slow ones in turn are two first looks
    fails = step.fails + 1 if again else 1 if slow else 0
    steps = spec.rollout.steps
    holding = serving and step.index < len(steps) and step.held < steps[step.index].hold
    lacking = spec.rollout.analysis.no_data is NoData.SYNTHETIC and serving and look.too_few
    turn.remember(
        waited=memory.waited + passed if counts and not holding else memory.waited,
        waited_at=now,
        step=replace(
            step,
            held=step.held + passed if serving and not is_paused(turn) else step.held,
            seen_at=now,
            fails=fails,
            slow=tuple(slow),
            verdict=analysis.worst(look.verdict, *gates.judged(checks)).value,
            figures=_short(look, checks),
            sentence=cut(
                "; ".join([look.sentence, *_unserved(turn, routed, look), *(c.sentence for c in checks)]),
                MESSAGE_LENGTH,
            ),
            checks=checks,
            counted=counted if serving else step.counted,
            synthetic=step.synthetic or (lacking and not holding),
        ),
    )
    for name, found in looks.items():
        if found.errors is Verdict.FAIL:
            return _fail(turn, name, reasons.ERROR_RATE, found.error_sentence)
        if found.agreement is Verdict.FAIL:
            return _fail(turn, name, reasons.DISAGREES, found.agreement_sentence)
        if fails >= FAILING_LOOKS and name in again:
            sentence = f"{found.latency_sentence}, at {FAILING_LOOKS} looks in a row"
            return _fail(turn, name, reasons.TOO_SLOW, sentence)
    outside = next((c for c in checks if c.fails >= analysis.FAILING_ANSWERS and c.verdict == Verdict.FAIL.value), None)
    if outside is not None:
        return roll_back(turn, reasons.METRIC, f"{outside.sentence}, in {outside.fails} answers in a row")
    return None


def _short(look: analysis.Look, checks: tuple[Check, ...]) -> str:
    return ", ".join([look.short, *(f"{c.name} {c.value:g}" for c in checks if c.value is not None)])


def _look_anew(turn: Turn, step: StepMemory, last: int, why: str) -> Outcome | None:
    """Figures are missing: nobody watched for a while, or they were lost. Also where every step was passed before, the
    last one is held again: what happened since is in no figures that were looked at. (A person who promoted it asked
    for no figures.)"""
    fresh = replace(
        step,
        held=0.0,
        seen_at=turn.seen.now,
        fails=0,
        slow=(),
        verdict="",
        figures="",
        sentence="",
        checks=(),
        counted={},
    )
    if step.index <= last or step.approved:
        turn.remember(step=fresh, window=new_window(turn.memory))
        return None
    again = replace(fresh, index=last, routed=False, members="", resumed=True)
    turn.remember(step=again, window=new_window(turn.memory))
    message = f"{why}: the last step is held again"
    return Outcome(Situation(Stage.PREPARING, reasons.PREPARING, message), SOON)


def deadline_passed(turn: Turn) -> Outcome | None:
    """Without a step passed for so long, the candidate goes back. Inconclusive is no success: it only waits here.

    Counts observed time, and none in which a hold runs (where looks are taken, they count it) or nothing is wanted.
    Without a stable there is nothing to go back to: the rule `first_rollout` says that it takes too long, and goes on.
    Nor is a candidate judged for faults of the environment that no request has met: `prepare` says that it takes too
    long, and goes on when they are over.
    """
    memory, spec = turn.memory, turn.seen.spec
    going_back = memory.step is not None and memory.step.back  # which no pause holds up
    if spec is None or (is_paused(turn) and not going_back):
        return None
    now, deadline, every = turn.seen.now, spec.rollout.progress_deadline, interval(spec)
    looks = memory.step is not None and memory.step.seen_at > 0 and bool(facts.present(turn.seen))
    word = _waiting_for(turn)
    held = _until_room_lacked(memory.waiting, word)
    if word and platforms.holds_for_room(turn):
        stood = held or 0.0
        if memory.waiting == word:
            stood = memory.waited + (0.0 if looks else watched(now, memory.waited_at, every) or 0.0)
        word = f"{_ROOM}{stood:.1f} s of {word}"
    if word != memory.waiting:
        turn.remember(waiting=word, waited=held or 0.0, waited_at=now if word else 0.0)
        return None
    if word and not looks and memory.waited < deadline and not 0 <= now - memory.waited_at < every:
        counted = watched(now, memory.waited_at, every) or 0.0
        turn.remember(waited=memory.waited + counted, waited_at=now)
    if not word or turn.memory.waited < deadline or memory.candidate is None or memory.stable is None:
        return None
    if _environment_alone(turn, memory.candidate):
        return None
    reason, seen_last = platforms.seen_last(turn) if trial(memory) is not None else ("", "")
    sentence = seen_last or (memory.step.sentence if memory.step else "")
    last = gates.unconfirmed(turn) or sentence or "not every worker was prepared"
    return roll_back(
        turn, reason or reasons.DEADLINE, f"no step was passed for {deadline:g} s; the last that was seen: {last}"
    )


def _until_room_lacked(waiting: str, word: str) -> float | None:
    """Where the clock of what is waited for stands while room lacks; None if `waiting` says no such thing. Begun anew
    each time, room that comes and goes (an autoscaler, say) would leave a trial without a deadline."""
    held = waiting.removeprefix(_ROOM).removesuffix(f" s of {word}")
    return float(held) if waiting == f"{_ROOM}{held} s of {word}" and _SECONDS.fullmatch(held) else None


def _environment_alone(turn: Turn, candidate: Deployed) -> bool:
    """No worker ever answered with it, and all that stands (or stood) in the way is no fault of it. Of a platform also
    late in its trial: a worker that has lost its place has not failed, and what the others do is still looked at."""
    step = turn.memory.step
    if trial(turn.memory) is not None:
        return platforms.holds_for_room(turn)
    members = holders(turn.seen, turn.memory)
    engines = [facts.engine(turn.seen, w, facts.digest_for(w, candidate)) for w in members]
    lacking = [e for e in engines if e is None or e.state is not EngineState.READY]
    failed = [e for e in lacking if e is not None and e.state is EngineState.FAILED and e.reason in ENVIRONMENT]
    return step is not None and not step.seen_at and bool(members) and len(failed) == len(lacking)


def _answers_us(turn: Turn, worker: ObservedWorker) -> bool:
    """Its report is about what we asked last, not about an earlier trial of the same engine."""
    fence = worker.report.fence if worker.report else None
    return fence is not None and (fence.uid, fence.sequence) == (turn.seen.model.uid, turn.memory.sequence)


def _waiting_for(turn: Turn) -> str:
    memory = turn.memory
    if turn.spec.serving.replicas == 0 or (memory.step is not None and memory.step.failed):
        return ""  # nothing is wanted, or a person is waited for
    if awaited(turn) or nobody_can_try(turn.seen, memory):
        return ""
    if memory.candidate is None:
        asked = builds.revision_in_the_making(turn) or platforms.hash_in_the_making(turn)
        if asked and gates.awaits_rollout(turn, asked):
            return gates.confirmation(asked)
        if memory.stable is None:
            return ""
        if facts.settled(turn.seen, memory.stable):
            return "workers that leave" if fleet.leaving(turn) else ""
        return f"workers of {memory.stable.revision}"
    if memory.stable is None:
        return f"first rollout of {memory.candidate.revision}"
    if trial(memory) is not None:  # one worker after the other: each that comes is a step forward
        made = sum(w.replicas for w in turn.seen.workloads if w.platform == memory.candidate.revision)
        return f"step {memory.step.index if memory.step else 0} of platform {memory.candidate.revision}, {made} workers"
    return f"step {memory.step.index if memory.step else 0} of {memory.candidate.revision}"


def _looks(turn: Turn, stable: Deployed, candidate: Deployed, limits: AnalysisSpec) -> dict[str, analysis.Look]:
    """The figures of each target that the candidate is still on."""
    failed = turn.memory.step.failed if turn.memory.step else {}
    names = [t.name for t in turn.spec.targets if t.name not in failed and tried_on(turn.seen, turn.memory, t.name)]
    return {name: _look_at(turn, facts.present(turn.seen, name), stable, candidate, limits) for name in names}


def _look_at(
    turn: Turn, workers: list[ObservedWorker], stable: Deployed, candidate: Deployed, limits: AnalysisSpec
) -> analysis.Look:
    """Against stable in the same window: in the same workers, where they answer with both; else in the target's other
    workers; else (a fleet of one) against what the workers counted before the rollout, and the golden samples that
    stable ran since."""
    if trial(turn.memory) is not None:
        return _look_at_newcomers(turn, workers, stable, limits)
    step, window = turn.memory.step or StepMemory(0, "", 0.0), turn.memory.window
    tried = analysis.total(_counts(turn, workers, window, candidate))
    usual = analysis.total(_counts(turn, workers, window, stable))
    against = "the stable workers in the same time"
    if dose(turn.seen, turn.memory)[0] < 100:
        both = [w for w in workers if routes(turn.seen, w, candidate)]
        usual = analysis.total(_counts(turn, both, window, stable))
        against = "stable in the same workers"
    elif len(workers) == 1:
        before = _counts(turn, workers, step.baseline, stable)
        usual = analysis.total([*before, usual] if step.synthetic else before)
        against = f"its own figures from before the rollout{' and golden samples since' if step.synthetic else ''}"
    return analysis.look(tried, usual, limits, against)


def _look_at_newcomers(
    turn: Turn, workers: list[ObservedWorker], stable: Deployed, limits: AnalysisSpec
) -> analysis.Look:
    """Workers of another platform against those of before in the same window: they answer with the same engine, or with
    one of the same revision. Where the only one had to make room there is nobody to compare with, and it is enough that
    none of its requests fails."""
    fresh = {w.uid for w in fleet.newcomers(turn)}
    tried = _counts(turn, [w for w in workers if w.uid in fresh], turn.memory.window, stable)
    old = [w for w in workers if w.uid not in fresh]
    usual = _counts(turn, old, turn.memory.window, stable)
    if not old and turn.memory.step is not None and turn.memory.step.tight and turn.spec.serving.replicas == 1:
        limits = replace(limits, no_data=NoData.PROMOTE)
    return analysis.look(analysis.total(tried), analysis.total(usual), limits, "the workers of before in the same time")


def _unserved(turn: Turn, routed: list[ObservedWorker], look: analysis.Look) -> list[str]:
    """Members that no request reached while others got some: figures of a step say nothing about these."""
    memory = turn.memory
    tried = memory.stable if trial(memory) is not None else memory.candidate
    if tried is None or not look.requests:
        return []
    quiet = [
        w for w in routed if not any(analysis.requests(counts) for counts in _counts(turn, [w], memory.window, tried))
    ]
    return [f"none of them met {facts.names(quiet)}"] if quiet else []


def _counts(turn: Turn, workers: list[ObservedWorker], window: str, deployed: Deployed) -> list[AttemptCounts]:
    found = []
    for worker in workers:
        report = facts.model_report(turn.seen, worker)
        counts = report.windows.get(window, {}).get(facts.digest_for(worker, deployed)) if report else None
        if counts is not None:
            found.append(counts)
    return found
