"""Rules that get the engines which do not exist yet: of a new revision, and of one that serves already.

One Job for each engine that is lacking, all of them at once. Which are lacking:

    a revision in the making    one for each target; and one for each load key that stable serves there
    one that serves, or tries   one for each load key that its workers report (another device, another driver's runtime,
                                another instruction set), and for a target that was added to the spec
    for another image           one for each target, by a Job of that image: it tells the load key of its runtime
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from trtmodel_contract.gate import Verdict, judge
from trtmodel_contract.jobs import BuildResult, Reason

from trtmodel_operator import facts, manifests, reasons
from trtmodel_operator.decide import builds, jobs, members
from trtmodel_operator.decide.turn import BUILT_KEPT, LATER, NEXT, Outcome, Turn, is_paused, roll_back
from trtmodel_operator.model import (
    Artifact,
    Built,
    DeleteJob,
    Deployed,
    Failure,
    JobKind,
    JobState,
    ObservedJob,
    ObservedWorker,
    Resolved,
    Situation,
    Stage,
    Target,
)

SOURCE_CHANGES = 3  # a source that changes under every build is not chased for ever
LOAD_KEYS = 8  # of one target: as many as status tells
NODES = 16  # that a build may go to
_ANSWERS = (reasons.BUILT, Reason.SOURCE_CHANGED.value)  # a Job's answer was taken, which is this pass's change


@dataclass(frozen=True)
class Need:
    """An engine that is lacking: for any node of the target, or for workers with this load key on these nodes.
    `image`: which the workers that lack it are made of, '' for those there are."""

    target: Target
    load_key: str = ""
    nodes: tuple[str, ...] = ()
    image: str = ""


# ---------------------------------------------------------------------------------------------------------------
# The rules
# ---------------------------------------------------------------------------------------------------------------


def build(turn: Turn) -> Outcome | None:
    """Every target has its engines of the revision, with figures of this data set: found in the bucket, or built."""
    resolved = jobs.known(turn) if builds.in_the_making(turn) else None
    if resolved is None:
        return None
    needs = _needs(turn)
    if not needs:
        return None
    if not turn.spec.tier.builds:
        return _not_staged(turn, resolved, needs)
    return _make(turn, resolved, needs)


def extend(turn: Turn) -> Outcome | None:
    """What serves, or is on trial, lacks an engine for some of its workers: it is built on their nodes, judged as any
    other and added, while the others serve on. A trial does not wait for it: its steps choose workers that can."""
    resolved, deployed = jobs.known(turn), _wanted_deployed(turn)
    needs = _needs(turn) if resolved is not None and deployed is not None else []
    if resolved is None or deployed is None or not needs:
        return None
    for need in needs:
        found = next((b for b in _built(turn) if _fits(need, b)), None)
        if found is not None and found.artifact.figures is not None:
            return _add(turn, deployed, found)
    outcome = _make(turn, resolved, needs) if turn.spec.tier.builds else _not_staged(turn, resolved, needs)
    keys = ", ".join(n.load_key for n in needs if n.load_key)
    on_trial = deployed is turn.memory.candidate and turn.memory.stable is not None
    if members.trial(turn.memory) is not None:  # of other workers: only what they lack themselves holds them up
        on_trial = not any(need.image for need in needs)
    if on_trial and not outcome.actions and outcome.situation.reason not in _ANSWERS:
        return None
    if not keys or outcome.situation.stage is not Stage.BUILDING:
        return outcome
    building = outcome.situation.reason == Stage.BUILDING.value
    message = f"{outcome.situation.message}; workers with load key {keys} wait for it: NoEngineForLoadKey"
    reason = reasons.NO_ENGINE_FOR_LOAD_KEY if building else outcome.situation.reason
    return replace(outcome, situation=replace(outcome.situation, reason=reason, message=message))


def engines_for(turn: Turn, stable: Deployed, image: str) -> Outcome | None:
    """What serves gets the engines that workers of another image need: None once it has them. (An image with the same
    runtime finds in the bucket what there is.)"""
    resolved = jobs.known(turn)
    if resolved is None:
        return None
    have = {(a.target, a.load_key) for a in stable.artifacts}
    for built in _built(turn):
        if built.image == image and (built.target, str(built.artifact.load_key)) not in have:
            return _add(turn, stable, built)
    needs = _needs_of(turn, image)
    return _make(turn, resolved, needs) if needs else None


def jobs_for(turn: Turn, image: str) -> tuple[str, ...]:
    """The names of the Jobs that build with this image."""
    resolved = jobs.known(turn)
    if resolved is None:
        return ()
    return tuple(jobs.build_name(turn, n.target, resolved, n.load_key, n.image) for n in _needs_of(turn, image))


def _needs_of(turn: Turn, image: str) -> list[Need]:
    """Targets for which no Job of this image has brought an engine."""
    brought = {b.target for b in _built(turn) if b.image == image}
    return [Need(target, image=image) for target in turn.spec.targets if target.name not in brought]


def _all_needs(turn: Turn) -> list[Need]:
    """Those of today's spec, and of the image that it asks for beside what serves."""
    memory, asked = turn.memory, turn.spec.serving.image or turn.memory.default_image
    needs = _needs(turn)
    if memory.platform is None or memory.stable is None or asked in ("", memory.platform.image):
        return needs
    if memory.stable.revision != builds.wanted_revision(turn) or memory.candidate is not None:
        return needs
    refused = builds.rejection(turn, manifests.platform(asked, turn.spec.serving.pod).hash)
    return needs if refused is not None else [*needs, *_needs_of(turn, asked)]


def unwanted_jobs(turn: Turn) -> list[DeleteJob]:
    """Running Jobs whose answer nobody waits for any more. While the spec is being resolved a build goes on: it may
    turn out to be the wanted one."""
    if turn.seen.spec is None or is_paused(turn) or not jobs.image(turn):
        return []
    wanted = {jobs.resolve_name(turn)}
    resolved = jobs.known(turn)
    if resolved is None:
        wanted |= {j.name for j in turn.seen.jobs if j.kind is JobKind.BUILD}
    elif turn.spec.tier.builds:
        wanted |= {name for names in names_of_builds(turn).values() for name in names}
        # A worker that restarts reports nothing for a while: the build for its load key goes on.
        pinned, have = {j.load_key for j in turn.seen.jobs if j.load_key}, _have(turn)
        lacking = [(t, key) for t in turn.spec.targets for key in pinned if (t.name, key) not in have]
        images = {"", *(p.image for p in (members.trial(turn.memory),) if p is not None)}
        wanted |= {jobs.build_name(turn, target, resolved, key, image) for target, key in lacking for image in images}
    running = [j for j in turn.seen.jobs if j.state is JobState.RUNNING]
    return [DeleteJob(name) for name in sorted(j.name for j in running if j.name not in wanted)]


def names_of_builds(turn: Turn) -> dict[str, tuple[str, ...]]:
    """The Jobs that are asked for an engine now, by target."""
    if turn.seen.spec is None or not jobs.image(turn):
        return {}
    resolved = jobs.known(turn)
    found: dict[str, tuple[str, ...]] = {}
    for need in _all_needs(turn) if resolved is not None and turn.spec.tier.builds else ():
        assert resolved is not None
        name = jobs.build_name(turn, need.target, resolved, need.load_key, need.image)
        found[need.target.name] = (*found.get(need.target.name, ()), name)
    return found


# ---------------------------------------------------------------------------------------------------------------
# What is lacking
# ---------------------------------------------------------------------------------------------------------------


def _needs(turn: Turn) -> list[Need]:
    if _wanted_deployed(turn) is not None:
        return _lacking(turn, _have(turn), None)
    return _lacking(turn, _have(turn), turn.memory.stable) if builds.in_the_making(turn) else []


def _have(turn: Turn) -> set[tuple[str, str]]:
    """Target and load key of each engine of the wanted revision."""
    deployed = _wanted_deployed(turn)
    if deployed is not None:
        return {(a.target, a.load_key) for a in deployed.artifacts}
    return {(b.target, str(b.artifact.load_key)) for b in _built(turn)}


def _lacking(turn: Turn, have: Collection[tuple[str, str]], served: Deployed | None) -> list[Need]:
    """`served`: load keys that it has no engine for are not asked for. (A worker that nothing ever served holds up no
    new revision; its engine follows.)"""
    needs = []
    for target in turn.spec.targets:
        mine = {key for name, key in have if name == target.name}
        if not mine:
            needs.append(Need(target))  # where there is room: nodes of workers may be full of them
            continue
        reported: dict[str, list[ObservedWorker]] = {}
        for worker in facts.present(turn.seen, target.name):
            key = facts.load_key(worker)
            if key and not members.leaves(turn.memory, worker) and (not served or facts.digest_for(worker, served)):
                reported.setdefault(key, []).append(worker)
        for key in sorted(reported.keys() - mine)[: max(0, LOAD_KEYS - len(mine))]:
            nodes = tuple(sorted({w.node for w in reported[key]} - {""})[:NODES])
            needs.append(Need(target, key, nodes, _image_of(turn, reported[key])))
    return needs


def _image_of(turn: Turn, workers: list[ObservedWorker]) -> str:
    """An engine is built with what will load it."""
    tried = members.trial(turn.memory)
    return tried.image if tried is not None and all(w.platform == tried.hash for w in workers) else ""


def _wanted_deployed(turn: Turn) -> Deployed | None:
    """Stable or candidate, if it is what today's spec means."""
    wanted = builds.wanted_revision(turn)
    there = (turn.memory.stable, turn.memory.candidate)
    return next((d for d in there if wanted and d is not None and d.revision == wanted), None)


def _built(turn: Turn) -> list[Built]:
    wanted, key = builds.wanted_revision(turn), builds.gate_key(turn)
    return [b for b in turn.memory.built if wanted and (b.revision, b.gate) == (wanted, key)]


def _fits(need: Need, built: Built) -> bool:
    return built.target == need.target.name and need.load_key in ("", str(built.artifact.load_key))


def _not_staged(turn: Turn, resolved: Resolved, needs: list[Need]) -> Outcome:
    """Tier Production builds nothing."""
    lacking = [f"{n.target.name} ({n.load_key})" if n.load_key else n.target.name for n in needs]
    message = (
        f"there is no engine of revision {resolved.revision} with figures of this data set for target "
        f"{', '.join(lacking)}, and tier {turn.spec.tier.name} builds none: build it in tier Staging in this "
        "namespace, or bring it here with `trtmodel cache copy`, then use the command refresh"
    )
    return Outcome(Situation(Stage.STALLED, reasons.NO_STAGED_ENGINE, message))


# ---------------------------------------------------------------------------------------------------------------
# Jobs and their answers
# ---------------------------------------------------------------------------------------------------------------


def _make(turn: Turn, resolved: Resolved, needs: list[Need]) -> Outcome:
    """Takes one answer, if there is one; else asks for all that is lacking. A Job that ended for good is told, and the
    others go on: what they bring need not be built again."""
    works = [(need, _work(turn, need, resolved)) for need in needs]
    failure = turn.memory.failure
    told = next((work for _, work in works if failure is not None and failure.job == work.name), None)
    for need, work in works:
        job = next((j for j in turn.seen.jobs if j.name == work.name), None)
        if job is None or work is told or job.state is JobState.RUNNING:
            continue
        if (built := _engine_of(job, resolved)) is not None:
            return _take(turn, need, job, built)
        if told is None:
            return _ended_without(turn, job, resolved)
    waiting = [jobs.done(turn, work, _words(need, resolved)) for need, work in works]
    outcomes = [o for o in waiting if isinstance(o, Outcome)]
    shown = min(outcomes, key=lambda o: (o.situation.stage is Stage.BUILDING, not o.situation.stuck))
    actions = tuple(action for outcome in outcomes for action in outcome.actions)
    return replace(shown, actions=actions, requeue=None if len(works) == 1 and told is not None else LATER)


def _work(turn: Turn, need: Need, resolved: Resolved) -> jobs.Work:
    name = jobs.build_name(turn, need.target, resolved, need.load_key, need.image)
    task = jobs.build_task(turn, resolved)
    return jobs.Work(name, JobKind.BUILD, need.target, task, Stage.BUILDING, need.load_key, need.nodes, need.image)


def _words(need: Need, resolved: Resolved) -> str:
    which = f", load key {need.load_key}," if need.load_key else ""
    image = f" with image {need.image}" if need.image else ""
    return f"{resolved.revision} is being built and gated for target {need.target.name}{which}{image}"


def _engine_of(job: ObservedJob, resolved: Resolved) -> BuildResult | None:
    """An engine of this revision with its figures. Also of a Job that judged them with limits of its own: today's are
    applied by the rule `gate`."""
    result = job.result
    built = result.build if result is not None else None
    judged = result is not None and result.reason in (Reason.DONE, Reason.GATE_FAILED, Reason.GATE_INCONCLUSIVE)
    if built is None or not judged or built.revision != resolved.revision or built.artifact.figures is None:
        return None
    passed = result is not None and result.reason is Reason.DONE
    return built if passed == (job.state is JobState.COMPLETE) else None


def _take(turn: Turn, need: Need, job: ObservedJob, built: BuildResult) -> Outcome:
    entry = Built(built.revision, need.target.name, built.artifact, builds.gate_key(turn), need.image)
    same = (entry.revision, entry.target, entry.artifact.load_key)
    others = [b for b in turn.memory.built if (b.revision, b.target, b.artifact.load_key) != same]
    kept = [b for i, b in enumerate(others) if i < BUILT_KEPT - 1 or b.revision == entry.revision]
    turn.remember(built=(entry, *kept), failure=None, source_changes=0)
    pinned = turn.memory.pinned
    if turn.seen.cluster and job.made_by not in ("", turn.seen.model.name) and job.name not in pinned:
        # It pinned the engine for who made it. A resolve Job of our own finds it and pins it for us, too.
        there = {j.name for j in turn.seen.jobs}
        turn.remember(pinned=(*(name for name in pinned if name in there), job.name))
    found = str(built.artifact.load_key)
    if need.load_key not in ("", found):
        message = f"it was to build for workers with load key {need.load_key}, and ran where it is {found}"
        return jobs.remember_failure(turn, Failure(job.name, reasons.OTHER_LOAD_KEY, message))
    how = "found in the bucket" if built.reused else f"built in {built.build_seconds:.1f} s"
    message = f"{built.revision} was {how} for target {need.target.name}"
    return Outcome(Situation(Stage.BUILDING, reasons.BUILT, message), NEXT)


def _ended_without(turn: Turn, job: ObservedJob, resolved: Resolved) -> Outcome:
    """Only an explicit answer for this revision, with figures, counts."""
    reason, message = jobs.why(job)
    if job.state is JobState.FAILED:
        if reason == Reason.GATE_FAILED.value and builds.in_the_making(turn):
            return builds.gate_failed(turn, message)
        if reason == Reason.SOURCE_CHANGED.value and turn.memory.source_changes < SOURCE_CHANGES:
            counter, changes = turn.memory.resolve_counter + 1, turn.memory.source_changes + 1
            turn.remember(resolve_counter=counter, source_changes=changes)
            return Outcome(Situation(Stage.RESOLVING, reason, f"{message}: it is resolved again"), NEXT)
        return jobs.failed(turn, job)
    built = job.result.build if job.result is not None else None
    if built is not None and built.revision == resolved.revision and built.artifact.figures is None:
        message = "the engine was built but not verified: the Job brought no figures"
        return jobs.remember_failure(turn, Failure(job.name, reasons.VERIFICATION_MISSING, message))
    return jobs.no_result(turn, job)


def _add(turn: Turn, deployed: Deployed, built: Built) -> Outcome:
    """One more engine of what serves or is on trial, if it passes."""
    figures, key = built.artifact.figures, str(built.artifact.load_key)
    assert figures is not None
    judged = judge(figures, turn.spec.verify.thresholds)
    where = f"target {built.target}, load key {key}"
    if judged.verdict is not Verdict.PASS:
        on_trial = turn.memory.candidate is deployed and turn.memory.stable is not None
        if on_trial and judged.verdict is Verdict.FAIL:
            return roll_back(turn, reasons.GATE_FAILED, f"its engine for {where} failed the gate: {judged.sentence}")
        failed = judged.verdict is Verdict.FAIL
        reason = reasons.GATE_FAILED if failed else reasons.GATE_INCONCLUSIVE
        stage = Stage.GATE_FAILED if failed else Stage.GATE_INCONCLUSIVE
        message = f"the engine of {built.revision} for {where} is not used: {judged.sentence}. The others serve on"
        return Outcome(Situation(stage, reason, message), LATER)
    artifact = Artifact(built.target, key, built.artifact.manifest_digest, built.artifact.driver, judged.sentence)
    extended = replace(deployed, artifacts=(*deployed.artifacts, artifact))
    if turn.memory.candidate is deployed:
        turn.remember(candidate=extended, failure=None)
    else:
        turn.remember(stable=extended, failure=None)
    message = f"{built.revision} has an engine for {where} from now on"
    return Outcome(Situation(Stage.BUILDING, reasons.BUILT, message), NEXT)
