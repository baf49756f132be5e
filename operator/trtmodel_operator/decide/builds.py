"""Rules from a spec to an engine that passed its gate: resolve, superseded, rejected, gate; `making` builds."""

from __future__ import annotations

from dataclasses import replace

from trtmodel_contract.gate import WORST_FIRST, GateVerdict, Verdict, judge
from trtmodel_contract.identity import LoadKey, short_hash
from trtmodel_contract.jobs import FoundArtifact, ResolveResult

from trtmodel_operator import facts, manifests, reasons
from trtmodel_operator.decide import gates, jobs, members
from trtmodel_operator.decide.turn import (
    BUILT_KEPT,
    LATER,
    NEXT,
    SOON,
    Outcome,
    Turn,
    drop_candidate,
    record,
    reject,
    roll_back,
    rolled_back,
    short_uid,
    steps_key,
    verification_key,
)
from trtmodel_operator.model import (
    Artifact,
    Built,
    Deployed,
    JobKind,
    JobState,
    Platform,
    Rejected,
    Resolved,
    Situation,
    Stage,
    StepMemory,
    Target,
)

# ---------------------------------------------------------------------------------------------------------------
# The rules
# ---------------------------------------------------------------------------------------------------------------


def resolve(turn: Turn) -> Outcome | None:
    """Today's fields were resolved: known is what the source is. Going back to the fields of stable asks no Job."""
    if not jobs.image(turn):
        message = "no image for Jobs and workers is known: set spec.serving.image, or the operator's worker image"
        return Outcome(Situation(Stage.STALLED, reasons.NO_WORKER_IMAGE, message))
    memory, key = turn.memory, jobs.resolve_key(turn)
    if memory.resolved is not None and memory.resolved.key == key:
        return None
    if memory.stable_resolved is not None and memory.stable_resolved.key == key:
        turn.remember(resolved=memory.stable_resolved)
        return None
    work = jobs.Work(
        jobs.resolve_name(turn), JobKind.RESOLVE, turn.spec.targets[0], jobs.resolve_task(turn), Stage.RESOLVING
    )
    done = jobs.done(turn, work, "the source is being resolved")
    if isinstance(done, Outcome):
        return done
    if done.state is JobState.FAILED:
        return jobs.failed(turn, done)
    result = done.result.resolve if done.result else None
    if result is None:
        return jobs.no_result(turn, done)
    found = _usable(turn, result)
    others = [b for b in memory.built if b.revision != result.revision]
    turn.remember(
        resolved=Resolved(key, result.source_sha256, result.revision, result.calibration_digest, result.dataset_digest),
        built=(*found, *others[: max(0, BUILT_KEPT - len(found))]),
        failure=None,
    )
    message = f"the source is {result.source_sha256[:12]}, the engine revision {result.revision}"
    return Outcome(Situation(Stage.RESOLVING, reasons.RESOLVED, message), NEXT)


def superseded(turn: Turn) -> Outcome | None:
    """The candidate is not what is asked for any more: A to B to A, or A to B to C in flight. Its workers return to
    stable at once. (With no stable it stays until its successor passed the gate: it may be all that serves.)"""
    candidate, stable, wanted = turn.memory.candidate, turn.memory.stable, wanted_revision(turn)
    if candidate is None or stable is None or candidate.revision == wanted or members.trial(turn.memory) is not None:
        return None
    back = wanted == stable.revision
    message = f"{candidate.revision} was superseded by {wanted}" + (", which is stable already" if back else "")
    drop_candidate(turn, reasons.SUPERSEDED, reasons.SUPERSEDED, message)
    return Outcome(Situation(Stage.PROMOTING if back else Stage.BUILDING, reasons.SUPERSEDED, message), NEXT)


def rejected(turn: Turn) -> Outcome | None:
    """The revision was tried and taken back, or failed its gate, under these very limits."""
    memory, wanted = turn.memory, wanted_revision(turn)
    entry = rejection(turn, wanted)
    if entry is None or (memory.stable is not None and memory.stable.revision == wanted):
        return None
    if members.trial(memory) is not None:
        return None  # of other workers, which its revision says nothing about
    if not entry.key:
        bind(turn, entry)
    if memory.candidate is not None and memory.candidate.revision == wanted:
        drop_candidate(turn, reasons.ROLLED_BACK, entry.reason, entry.message)
    return Outcome(_rejected_situation(turn, entry), None if facts.settled(turn.seen, memory.stable) else LATER)


def gate(turn: Turn) -> Outcome | None:
    """The figures, judged with today's thresholds. Only an explicit Pass of every target makes a candidate; and what is
    on trial goes back if the limits were tightened since, so that it fails them."""
    if not in_the_making(turn):
        return _on_trial_and_failed(turn)
    revision, verdicts = wanted_revision(turn), [_judged(turn, target) for target in turn.spec.targets]
    for verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.NO_DATA):
        bad = next((v for v in verdicts if v.verdict is verdict), None)
        if bad is None:
            continue
        if verdict is Verdict.FAIL:
            return gate_failed(turn, bad.sentence)
        message = f"the gate of {revision} is inconclusive: {bad.sentence}. Raise verify.dataset.samples or the limit"
        return Outcome(Situation(Stage.GATE_INCONCLUSIVE, reasons.GATE_INCONCLUSIVE, message))
    return gates.confirm_rollout(turn, revision) or _make_candidate(turn, revision, verdicts)


# ---------------------------------------------------------------------------------------------------------------
# What other rules ask
# ---------------------------------------------------------------------------------------------------------------


def wanted_revision(turn: Turn) -> str:
    """The revision that today's spec means; '' while that is not known."""
    resolved = jobs.known(turn)
    return resolved.revision if resolved else ""


def revision_in_the_making(turn: Turn) -> str:
    """The revision that is being built or gated; '' if none is."""
    return wanted_revision(turn) if turn.seen.spec is not None and in_the_making(turn) else ""


def platform(turn: Turn) -> Platform | None:
    """What workers that are made today would be. Pinned when the first are made: a changed default changes nothing."""
    if turn.seen.spec is None or not jobs.image(turn):
        return None
    return manifests.platform(jobs.image(turn), turn.spec.serving.pod)


def gate_key(turn: Turn) -> str:
    """What figures must have been measured with to count today."""
    resolved = jobs.known(turn)
    return _gate_key(turn, resolved.dataset_digest if resolved else "")


# ---------------------------------------------------------------------------------------------------------------
# Engines and verdicts
# ---------------------------------------------------------------------------------------------------------------


def _gate_key(turn: Turn, dataset_digest: str) -> str:
    return short_hash(dataset_digest, turn.spec.verify.task.value, str(turn.spec.verify.samples))


def in_the_making(turn: Turn) -> bool:
    """The wanted revision is known and neither stable, nor on trial, nor rejected."""
    memory, wanted = turn.memory, wanted_revision(turn)
    there = [d.revision for d in (memory.stable, memory.candidate) if d is not None]
    return bool(wanted) and wanted not in there and rejection(turn, wanted) is None


def bind(turn: Turn, entry: Rejected) -> None:
    """To today's limits, under which it is read for the first time."""
    bound = replace(entry, key=verification_key(turn.seen.spec))
    turn.remember(rejected=tuple(bound if r is entry else r for r in turn.memory.rejected))


def rejection(turn: Turn, revision: str) -> Rejected | None:
    """One that was taken back while the spec could not be read holds for the first limits that are read again."""
    keys = ("", verification_key(turn.seen.spec))
    return next((r for r in turn.memory.rejected if r.revision == revision and r.key in keys), None)


def _rejected_situation(turn: Turn, entry: Rejected) -> Situation:
    if entry.reason == reasons.GATE_FAILED:
        return _gate_situation(turn, entry.revision, entry.message)
    stable = turn.memory.stable
    return rolled_back(entry.revision, stable.revision if stable else "", entry.reason, entry.message)


def _gate_situation(turn: Turn, revision: str, sentence: str) -> Situation:
    stable = turn.memory.stable
    back = f"{stable.revision} serves on" if stable else "nothing to roll back to: no revision was ever promoted"
    message = f"{revision} failed its accuracy gate: {sentence}. {back}; change the model, the engine or the limits"
    return Situation(Stage.GATE_FAILED, reasons.GATE_FAILED, message)


def _on_trial_and_failed(turn: Turn) -> Outcome | None:
    candidate, wanted = turn.memory.candidate, wanted_revision(turn)
    if candidate is None or turn.memory.stable is None or not wanted or candidate.revision != wanted:
        return None
    verdicts = [_judged(turn, target) for target in turn.spec.targets]
    bad = next((v for v in verdicts if v.verdict is Verdict.FAIL), None)
    return roll_back(turn, reasons.GATE_FAILED, f"by today's limits: {bad.sentence}") if bad is not None else None


def gate_failed(turn: Turn, sentence: str) -> Outcome:
    revision = wanted_revision(turn)
    record(turn, revision, reasons.GATE_FAILED, reasons.GATE_FAILED, sentence)
    reject(turn, revision, reasons.GATE_FAILED, sentence)
    return Outcome(_gate_situation(turn, revision, sentence))


def _usable(turn: Turn, result: ResolveResult) -> list[Built]:
    """Engines that resolve found: with figures of this data set, and for a load key that the target's workers report,
    or the only one that there is for its GPU. Where none is built, all of them: each worker takes the one that fits."""
    key = _gate_key(turn, result.dataset_digest)
    usable = []
    for target in turn.spec.targets:
        keys = {str(f.load_key) for f in result.found if _is_of(f.load_key, target)}
        workers = facts.present(turn.seen, target.name)
        reported = {facts.load_key(w) for w in workers} - {""}
        wanted = reported or (keys if len(keys) == 1 or not turn.spec.tier.builds else set())
        for load_key in sorted(wanted & keys):
            newest = max((f for f in result.found if str(f.load_key) == load_key), key=lambda f: f.number)
            if newest.figures is not None:
                usable.append(Built(result.revision, target.name, newest, key))
    return usable


def _is_of(key: LoadKey, target: Target) -> bool:
    """The GPU feature discovery's label is the device's name with dashes, and the profile of a slice behind it."""
    device = key.device.replace(" ", "-")
    return target.gpu in ("", device, f"{device}-MIG-{key.mig}")


def _built(turn: Turn, target: Target) -> list[FoundArtifact] | None:
    revision, key = wanted_revision(turn), gate_key(turn)
    found = [b for b in turn.memory.built if (b.revision, b.target, b.gate) == (revision, target.name, key)]
    return [b.artifact for b in found] or None


def _judged(turn: Turn, target: Target) -> GateVerdict:
    """The worst verdict of the target's engines."""
    none = GateVerdict(Verdict.NO_DATA, f"there is no verified engine for target {target.name}")
    verdicts = [judge(f.figures, turn.spec.verify.thresholds) for f in _built(turn, target) or () if f.figures]
    return min(verdicts, key=lambda v: WORST_FIRST.index(v.verdict), default=none)


def _make_candidate(turn: Turn, revision: str, verdicts: list[GateVerdict]) -> Outcome:
    memory, spec = turn.memory, turn.spec
    artifacts = tuple(
        Artifact(target.name, str(f.load_key), f.manifest_digest, f.driver, verdict.sentence)
        for target, verdict in zip(spec.targets, verdicts, strict=True)
        for f in _built(turn, target) or ()
    )
    if memory.candidate is not None:  # a first rollout whose spec changed on the way
        drop_candidate(
            turn, reasons.SUPERSEDED, reasons.SUPERSEDED, f"{memory.candidate.revision} was superseded by {revision}"
        )
    first, candidate = memory.stable is None, Deployed(revision, artifacts)
    turn.remember(
        candidate=candidate,
        step=None if first else StepMemory(0, steps_key(spec), turn.seen.now, deaths=deaths(turn, candidate)),
        failure=None,
        platform=memory.platform or platform(turn),
        window=memory.window or f"w{memory.sequence + 1}",
    )
    message = f"{revision} passed its gate: {verdicts[0].sentence}"
    return Outcome(Situation(Stage.DEPLOYING if first else Stage.PREPARING, reasons.GATE_PASSED, message), SOON)


def deaths(turn: Turn, candidate: Deployed) -> dict[str, int]:
    """What its engines went through before, where they are resident: it was stable once, or on trial."""
    found = {}
    for worker in facts.present(turn.seen):
        engine = facts.engine(turn.seen, worker, facts.digest_for(worker, candidate))
        if engine is not None and engine.deaths:
            found[short_uid(worker)] = engine.deaths
    return found
