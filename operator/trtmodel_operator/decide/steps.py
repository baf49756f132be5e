"""Rules that lead a candidate to its workers, and the one for when nothing is left to do."""

from __future__ import annotations

from dataclasses import replace

from trtmodel_contract.gate import Verdict
from trtmodel_contract.identity import short_hash

from trtmodel_operator import facts, reasons
from trtmodel_operator.decide import fleet, platforms
from trtmodel_operator.decide.members import (
    PROMOTION,
    answers,
    awaited,
    budget_is_spent,
    holders,
    nobody_can_try,
    one_engine,
    passed,
    trial,
    unprepared,
)
from trtmodel_operator.decide.turn import LATER, SOON, Outcome, Turn, overdue, patience, record, steps_key
from trtmodel_operator.decide.workers import new_window
from trtmodel_operator.model import Deployed, ObservedWorker, Situation, Stage, StepMemory

_UNDECIDED = {Verdict.INCONCLUSIVE.value: reasons.INCONCLUSIVE, Verdict.FAIL.value: reasons.SLOW_LOOK}


def scaled_to_zero(turn: Turn) -> Outcome | None:
    """No worker is wanted: nothing can be proved, so nothing is promoted. Building and gating went on before this."""
    if turn.spec.serving.replicas > 0:
        return None
    message = "scaled to zero: nothing serves, and nothing is promoted until there are replicas"
    return Outcome(Situation(Stage.SCALED_TO_ZERO, reasons.SCALED_TO_ZERO, message, "scaled to zero"))


def first_rollout(turn: Turn) -> Outcome | None:
    """With nothing to compare with and nothing to go back to there are no steps: the boot pointer names the candidate,
    and it is promoted when every desired worker says that it serves it."""
    memory, candidate = turn.memory, turn.memory.candidate
    if memory.stable is not None or candidate is None:
        return None
    if facts.settled(turn.seen, candidate):
        _make_stable(turn, candidate)
        message = f"{candidate.revision} serves on every worker"
        return Outcome(Situation(Stage.SERVING, reasons.PROMOTED, message), SOON)
    message = f"{candidate.revision} is deployed for the first time: {_missing(turn, candidate)}"
    if memory.waited >= turn.spec.rollout.progress_deadline:
        return overdue(turn, message, "first rollout")
    return Outcome(Situation(Stage.DEPLOYING, reasons.DEPLOYING, message + patience(turn), "first rollout"), SOON)


def target_failed(turn: Turn) -> Outcome | None:
    """Some target went back alone, as `onTargetFailure: Hold` has it: the others stay where they are until a person
    decides. The looks at them go on. Who takes that target out of the spec has decided."""
    memory, candidate, step = turn.memory, turn.memory.candidate, turn.memory.step
    if memory.stable is None or candidate is None or step is None or not step.failed:
        return None
    named = {t.name for t in turn.spec.targets}
    if not step.failed.keys() <= named:
        step = replace(step, failed={name: why for name, why in step.failed.items() if name in named})
        turn.remember(step=step)
        if not step.failed:
            return None
    failed = "; ".join(f"{name}: {why}" for name, why in sorted(step.failed.items()))
    others = ", ".join(t.name for t in turn.spec.targets if t.name not in step.failed)
    message = (
        f"{candidate.revision} was taken back on target {failed}. Its workers serve {memory.stable.revision}, those of "
        f"{others} stay where they are: use the command retry to try it there again, abort to take it back everywhere, "
        "or change the spec"
    )
    members = holders(turn.seen, memory)
    return Outcome(Situation(Stage.STALLED, reasons.TARGET_FAILED, message, _summary(turn, members)))


def steps_edited(turn: Turn) -> Outcome | None:
    """Other steps than those that the rollout began with: it begins again with the first. The looks go on meanwhile,
    since some worker may answer with the candidate."""
    memory, key = turn.memory, steps_key(turn.spec)
    if memory.candidate is None or (memory.step is not None and memory.step.plan == key):
        return None
    before = memory.step or StepMemory(0, key, turn.seen.now)
    fresh = StepMemory(
        index=0,
        plan=key,
        began_at=turn.seen.now,
        restarts=before.restarts,
        deaths=before.deaths,
        seen_at=before.seen_at,
        baseline=before.baseline,
        weight=before.weight,
        shadow=before.shadow,
        platform=before.platform,
        tight=before.tight,
    )
    turn.remember(step=fresh)
    return Outcome(
        Situation(Stage.PREPARING, reasons.STEPS_CHANGED, "the steps were edited: the rollout begins again"), SOON
    )


def prepare(turn: Turn) -> Outcome | None:
    """Every member of the step reports the candidate loaded, warm and self-tested; only then they are routed, under a
    new window. Another member (a replaced pod, another number of workers) means a fresh window."""
    memory, candidate, step = turn.memory, turn.memory.candidate, turn.memory.step
    if candidate is None or step is None:
        return None
    if nobody_can_try(turn.seen, memory):
        return _nobody_can_try(turn, candidate)
    members = holders(turn.seen, memory)
    last = step.index >= len(turn.spec.rollout.steps)
    identity = short_hash(*sorted(w.uid for w in members))
    if not last and step.routed and step.members == identity:
        return None
    missing, short = unprepared(turn.seen, memory)
    if members and not missing and not short:
        return None if last else _open_step(turn, candidate.revision, step, identity, members)
    if not last and step.routed:
        turn.remember(step=replace(step, routed=False, members="", held=0.0))
    if trial(memory) is not None:
        return _come(turn, candidate.revision, members)
    what = f"{candidate.revision} is being prepared on {facts.names(missing or members) or 'workers to come'}"
    why = why_unprepared(turn, candidate, missing, short)
    if memory.waited >= turn.spec.rollout.progress_deadline:
        # The rule `deadline_passed` left it: it is the environment's fault.
        return overdue(turn, what + why, _summary(turn, members), "it goes on when it can")
    message = what + why + patience(turn)
    return Outcome(Situation(Stage.PREPARING, reasons.PREPARING, message, _summary(turn, members)), SOON)


def _nobody_can_try(turn: Turn, candidate: Deployed) -> Outcome:
    """Targets and model were changed together, so that none of the workers to come can answer with stable."""
    stable = turn.memory.stable.revision if turn.memory.stable is not None else ""
    names = ", ".join(t.name for t in turn.spec.targets)
    message = (
        f"{candidate.revision} cannot be tried: {stable} has no engine for target {names}, so there is nothing that "
        "it could be compared with or go back to, and the workers of before serve on. Set the model back to what "
        f"{stable} is made of: when its engine serves on the new targets, change the model"
    )
    return Outcome(Situation(Stage.STALLED, reasons.NO_ENGINE_FOR_LOAD_KEY, message))


def _come(turn: Turn, name: str, members: list[ObservedWorker]) -> Outcome:
    """Workers of a platform on trial come, one after the other."""
    platforms.make_room(turn)
    reason, why = platforms.preparing(turn)
    serving = sum(answers(turn.seen, turn.memory, w) for w in members)
    what = f"workers of platform {name} come: {serving} of {len(members)} serve{why}"
    stage = Stage.PREPARING
    if turn.memory.waited >= turn.spec.rollout.progress_deadline:
        stage, reason = Stage.STALLED, reason or reasons.DEADLINE
    message = what + ("" if stage is Stage.STALLED else patience(turn))
    situation = Situation(stage, reason or reasons.PREPARING, message, _summary(turn, members), bool(reason))
    return Outcome(situation, LATER if reason else SOON)


def wait_for_person(turn: Turn) -> Outcome | None:
    """All that goes on by itself was done: the step has a pause, or a person promotes. The looks go on meanwhile, and
    the deadline does not."""
    candidate, step, what = turn.memory.candidate, turn.memory.step, awaited(turn)
    if candidate is None or step is None or not what:
        return None
    revision, sentence = candidate.revision, step.sentence or "without a figure"
    if what == PROMOTION:
        reason, command = reasons.AWAITING_PROMOTION, "promote"
        state = f"every step was passed ({sentence}), and every worker has {revision} ready"
        where = step.figures
    else:
        reason, command = reasons.STEP_PAUSED, "resume"
        state = f"step {step.index + 1} of {len(turn.spec.rollout.steps)} was passed ({sentence}), and pauses"
        where = _summary(turn, holders(turn.seen, turn.memory))
    message = f"{state}: use the command {command}@{revision} to go on, or abort@{revision} to go back"
    summary = ", ".join(filter(None, (f"waits for {command}", where)))
    return Outcome(Situation(Stage.PAUSED, reason, message, summary))


def advance(turn: Turn) -> Outcome | None:
    """The step was held for its time and the last look said Pass: the next one, or the last preparation."""
    memory, step = turn.memory, turn.memory.step
    if memory.candidate is None or step is None or not passed(turn):
        return None
    number, steps = step.index + 1, len(turn.spec.rollout.steps)
    go_on(turn, step)
    name = "all workers are being prepared" if number >= steps else f"step {number + 1} of {steps}"
    message = f"step {number} of {steps} was passed ({step.sentence}): {name}"
    return Outcome(
        Situation(Stage.PREPARING, reasons.STEP_PASSED, message, _summary(turn, holders(turn.seen, memory))), SOON
    )


def watch(turn: Turn) -> Outcome | None:
    """The step is open: time passes and figures come in."""
    memory, step, steps = turn.memory, turn.memory.step, turn.spec.rollout.steps
    if memory.candidate is None or step is None or step.index >= len(steps):
        return None
    members = holders(turn.seen, memory)
    hold = steps[step.index].hold
    if step.held >= hold:
        state = f"held for its time, but the verdict is {step.verdict or Verdict.NO_DATA.value}{patience(turn)}"
        reason = _UNDECIDED.get(step.verdict, reasons.NO_TRAFFIC)
    else:
        state, reason = f"held {step.held:.0f} of {hold:g} s", reasons.HOLDING
    what = f"{memory.candidate.revision} {_doing(step)} {facts.names(members)}: {state}"
    figures = f"; {step.sentence}" if step.sentence else ""
    return Outcome(Situation(Stage.CANARY, reason, what + figures, _summary(turn, members)))


def promote(turn: Turn) -> Outcome | None:
    """Every desired worker has it ready, and a person has said so where one is asked: remember first, then the pointer,
    then the workers."""
    candidate, step = turn.memory.candidate, turn.memory.step
    if candidate is None or step is None:
        return None
    if trial(turn.memory) is not None:
        return platforms.promoted(turn)
    _make_stable(turn, candidate)
    message = f"{candidate.revision} is promoted: workers are being switched"
    return Outcome(Situation(Stage.PROMOTING, reasons.PROMOTED, message), SOON)


def settle(turn: Turn) -> Outcome:
    """Nothing to roll out: does everything serve what it should?"""
    memory, stable = turn.memory, turn.memory.stable
    if memory.failure is not None:
        turn.remember(failure=None)  # of a spec that is not asked for any more
    if stable is None:
        return Outcome(Situation(Stage.RESOLVING, reasons.WAITING, "nothing is deployed yet"), LATER)
    late = memory.waited >= turn.spec.rollout.progress_deadline
    if facts.settled(turn.seen, stable) and (left := fleet.leaving(turn)):
        message = f"{stable.revision} serves on every worker, and those of platform {left[0].platform} leave"
        if late:
            message += f", for longer than progressDeadline ({turn.spec.rollout.progress_deadline:g} s)"
            return Outcome(Situation(Stage.STALLED, reasons.DEADLINE, message, "old workers leave"), LATER)
        situation = Situation(Stage.PROMOTING, reasons.WORKERS_LEAVE, message + patience(turn), "old workers leave")
        return Outcome(situation, LATER)
    if facts.settled(turn.seen, stable):
        return Outcome(Situation(Stage.SERVING, reasons.SERVING, f"{stable.revision} serves on every worker"))
    message = f"{stable.revision} does not serve everywhere yet: {_missing(turn, stable)}"
    if late:
        return Outcome(Situation(Stage.STALLED, reasons.DEADLINE, message), LATER)
    return Outcome(Situation(Stage.PROMOTING, reasons.WORKERS_NOT_READY, message + patience(turn)), LATER)


def go_on(turn: Turn, step: StepMemory) -> None:
    """To the next step, or the last preparation. In that nobody new is routed, so window and figures go on; looks are
    taken all the time."""
    following = replace(step, index=step.index + 1, began_at=turn.seen.now, held=0.0, resumed=False)
    if following.index < len(turn.spec.rollout.steps):
        following = replace(following, routed=False, members="", verdict="")
    turn.remember(step=following)


def _open_step(turn: Turn, candidate: str, step: StepMemory, identity: str, members: list[ObservedWorker]) -> Outcome:
    memory, now, plan = turn.memory, turn.seen.now, turn.spec.rollout.steps[step.index]
    opened = replace(
        step,
        members=identity,
        routed=True,
        held=0.0,
        seen_at=now,
        fails=0,
        slow=(),
        baseline=step.baseline or memory.window,
        verdict="",
        figures="",
        sentence="",
        checks=(),
        counted={},
        synthetic=False,
        weight=plan.weight if trial(memory) is None else 100,  # a Service shares by workers
        shadow=plan.shadow if trial(memory) is None else 0,
    )
    turn.remember(step=opened, window=new_window(memory))
    if memory.waited >= turn.spec.rollout.progress_deadline:  # for the environment: the step has its own time
        turn.remember(waited=0.0)
    message = f"{candidate} is ready: from now on it {_doing(opened)} {facts.names(members)}"
    return Outcome(Situation(Stage.CANARY, reasons.ROUTING, message, _summary(turn, members)), SOON)


def _make_stable(turn: Turn, candidate: Deployed) -> None:
    memory = turn.memory
    sentence = (memory.step.sentence or "every step was passed") if memory.step else "the first revision"
    if memory.step is not None and memory.step.approved:
        sentence = f"a person promoted it; {memory.step.sentence or 'no request had met it'}"
    record(turn, candidate.revision, reasons.PROMOTED, reasons.PROMOTED, sentence, candidate)
    kept = {candidate.revision, memory.stable.revision if memory.stable else ""}
    turn.remember(
        stable=candidate,
        standby=memory.stable,
        candidate=None,
        step=None,
        stable_resolved=memory.resolved,
        built=tuple(b for b in memory.built if b.revision in kept),
        failure=None,
        waiting="",
        waited=0.0,
        waited_at=0.0,
    )


def _summary(turn: Turn, members: list[ObservedWorker]) -> str:
    """The CANARY column."""
    step, steps = turn.memory.step, turn.spec.rollout.steps
    if step is None:
        return ""
    if trial(turn.memory) is not None:
        n = facts.desired(turn.seen)
        at = f"step {step.index + 1}/{len(steps)}" if step.index < len(steps) else "replacing all"
        where = f"{at} {sum(answers(turn.seen, turn.memory, w) for w in members)} of {n} workers are new"
        return f"{where}, {step.figures}" if step.figures else where
    n = len(facts.present(turn.seen))
    where = f"step {step.index + 1}/{len(steps)} {len(members)} of {n} workers"
    where += f" at {step.weight}%" if step.routed and 0 < step.weight < 100 else ""
    where += f", mirrors {step.shadow}%" if step.routed and step.shadow else ""
    if step.index >= len(steps):
        where = f"preparing all {n} workers"
    return f"{where}, {step.figures}" if step.figures else where


def _doing(step: StepMemory) -> str:
    """What the candidate does in this step, before the names of its workers."""
    answers = {0: [], 100: ["answers"]}.get(step.weight, [f"answers {step.weight} % of the requests"])
    mirrors = [f"mirrors {step.shadow} % of stable's answers"] if step.shadow else []
    return f"{' and '.join([*answers, *mirrors])} on"


def why_unprepared(turn: Turn, candidate: Deployed, missing: list[ObservedWorker], short: list[str]) -> str:
    """At the end of a message that says where it is being prepared."""
    if missing:
        return f": {_trouble(turn, missing, candidate)}"
    return f": workers of target {', '.join(short)} are missing" if short else ""


def _missing(turn: Turn, deployed: Deployed) -> str:
    """What stands between now and every worker serving `deployed`."""
    workers, wanted = facts.present(turn.seen), facts.desired(turn.seen)
    lacking = [w for w in workers if not facts.serves(turn.seen, w, deployed)]
    if lacking:
        return f"{len(workers) - len(lacking)} of {wanted} workers serve it; {_trouble(turn, lacking, deployed)}"
    troubled = next((w for w in turn.seen.workloads if w.trouble), None)
    reason = f": {troubled.message or troubled.trouble}" if troubled else ""
    return f"{len(workers)} of {wanted} workers are there{reason}"


def _trouble(turn: Turn, workers: list[ObservedWorker], deployed: Deployed) -> str:
    """What the first of them says, or what the cluster says about it."""
    worker = workers[0]
    engine = facts.engine(turn.seen, worker, facts.digest_for(worker, deployed))
    if worker.trouble:
        return f"{worker.pod}: {worker.trouble}" + (f", {worker.message}" if worker.message else "")
    if worker.report is None:
        return f"{worker.pod} is unknown: {worker.silence or 'it was not asked'}"
    if not facts.digest_for(worker, deployed):
        return f"{worker.pod} has no engine for its load key {worker.report.load_key}: NoEngineForLoadKey"
    if engine is None and worker.ready and one_engine(turn.seen) and budget_is_spent(turn.seen):
        ready = f"{sum(w.ready for w in facts.present(turn.seen))} of {facts.desired(turn.seen)} workers are ready"
        return f"{worker.pod} must leave service to load it, and {ready}: the disruption budget lets no other go"
    if engine is None:
        return f"{worker.pod} has not begun to load it"
    if engine.reason or engine.message:
        return f"{worker.pod}: {engine.state.value}, {engine.message or engine.reason}"
    return f"{worker.pod}: {engine.state.value}"
