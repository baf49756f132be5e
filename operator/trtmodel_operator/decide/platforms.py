"""Rules for another platform: workers of another image, or with other pod settings. Engines are swapped inside running
workers; a platform is what a worker is made of, so other workers come and the old ones go.

    spec asks ──► engines for its load key ──► trial: workers of it by the steps ──► promoted ──► the old ones leave
                        │ none, or bad            │ Fail, trouble, deadline, abort
                        └─────────────────────────┴──► rejected: back to as many old ones as are wanted

It is a rollout like any other: `memory.candidate` is named by the platform's hash and has stable's engines, and its
step says of which platform it is. So looks, holds, pauses, commands, webhooks and the deadline are those of an engine;
who is compared are the new workers with the old ones. `fleet` says how many there are of each. One change at a time: a
revision that is being made goes first, and one that comes in the middle takes the platform back until it is through.
"""

from __future__ import annotations

from dataclasses import replace

from trtmodel_operator import facts, manifests, reasons
from trtmodel_operator.decide import builds, fleet, gates, jobs, making
from trtmodel_operator.decide.members import MEMORY_AVAILABILITY, answers, holders, trial, unprepared
from trtmodel_operator.decide.turn import (
    LATER,
    NEXT,
    SOON,
    Outcome,
    Turn,
    drop_candidate,
    record,
    reject,
    rolled_back,
    steps_key,
)
from trtmodel_operator.model import Deployed, ObservedWorker, Platform, Situation, Stage, StepMemory

# A container that will not start however long one waits. (An image may appear in its registry, a Secret in its
# namespace, a node in the cluster: those are waited for until the deadline.)
HOPELESS = ("CrashLoopBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerError", "RunContainerError")

# ---------------------------------------------------------------------------------------------------------------
# The rules
# ---------------------------------------------------------------------------------------------------------------


def platform_pinned(turn: Turn) -> Outcome | None:
    """What workers are made of is remembered, whatever the spec or the operator's settings say later. Where nothing was
    ever promoted there is nothing to lose: today's is taken at once."""
    memory, platform = turn.memory, turn.memory.platform
    if platform is None:
        return None
    if not memory.default_image:
        asked = turn.spec.serving.image
        turn.remember(default_image=(turn.seen.default_image or platform.image) if asked else platform.image)
    if not platform.pod:
        told = next((w.pod for w in turn.seen.workloads if w.platform == platform.hash and w.pod), "")
        pod = told or manifests.platform(platform.image, turn.spec.serving.pod).pod
        turn.remember(platform=replace(platform, pod=pod))
    wanted = wanted_platform(turn)
    if memory.stable is None and wanted is not None and wanted.hash != platform.hash:
        turn.remember(platform=wanted)
    return None


def change_platform(turn: Turn) -> Outcome | None:
    """The spec asks for other workers than there are: the engines that they need first, then a trial. A revision that
    is being made goes before, and what is left of another platform has to be gone."""
    memory, wanted = turn.memory, pending(turn)
    if wanted is None or memory.stable is None or fleet.leaving(turn) or not turn.spec.serving.replicas:
        return None
    if _engines_come_first(turn, wanted):
        outcome = making.engines_for(turn, memory.stable, wanted.image)
        failure = turn.memory.failure
        if outcome is not None and outcome.situation.stage is Stage.GATE_FAILED:
            return _refuse(turn, wanted, reasons.GATE_FAILED, outcome.situation.message)
        if outcome is not None and failure is not None and failure.job in making.jobs_for(turn, wanted.image):
            return _refuse(turn, wanted, failure.reason, failure.message)
        if outcome is not None:
            return outcome
    return gates.confirm_rollout(turn, wanted.hash) or _begin(turn, memory.stable, wanted)


def platform_superseded(turn: Turn) -> Outcome | None:
    """The platform on trial is not asked for any more, or a revision is to be made, which goes first."""
    wanted, tried = wanted_platform(turn), trial(turn.memory)
    if tried is None or turn.memory.platform is None:
        return None
    if wanted is not None and wanted.hash != tried.hash:
        back = wanted.hash == turn.memory.platform.hash
        text = "its workers are those of before" if back else f"platform {wanted.hash} is asked for now"
    elif builds.in_the_making(turn):
        text = f"revision {builds.wanted_revision(turn)} goes first, and this is tried again after it"
    else:
        return None
    message = f"workers of image {tried.image} (platform {tried.hash}) were taken back: {text}"
    drop_candidate(turn, reasons.SUPERSEDED, reasons.SUPERSEDED, message)
    return Outcome(Situation(Stage.PROMOTING, reasons.SUPERSEDED, message), NEXT)


def platform_taken_back(turn: Turn) -> Outcome | None:
    """The spec still asks for what was tried and taken back, under these very limits."""
    wanted = wanted_platform(turn)
    entry = builds.rejection(turn, wanted.hash) if wanted is not None else None
    if entry is None or turn.memory.platform is None or wanted is None or wanted.hash == turn.memory.platform.hash:
        return None
    if not entry.key:
        builds.bind(turn, entry)
    if turn.memory.stable is None or turn.memory.candidate is not None:
        return None
    settled = facts.settled(turn.seen, turn.memory.stable) and not fleet.leaving(turn)
    situation = rolled_back(entry.revision, turn.memory.stable.revision, entry.reason, entry.message)
    return Outcome(situation, None if settled else LATER)


# ---------------------------------------------------------------------------------------------------------------
# What other rules ask
# ---------------------------------------------------------------------------------------------------------------


def wanted_platform(turn: Turn) -> Platform | None:
    """What the spec asks for. An empty image is the operator's of when this model's platform was chosen."""
    if turn.seen.spec is None:
        return None
    pinned = turn.memory.platform.image if turn.memory.platform is not None else ""
    image = turn.spec.serving.image or turn.memory.default_image or pinned or turn.seen.default_image
    return manifests.platform(image, turn.spec.serving.pod) if image else None


def pending(turn: Turn) -> Platform | None:
    """The platform that is the next to be tried; None if there is none, or a revision goes first."""
    memory, wanted = turn.memory, wanted_platform(turn)
    if wanted is None or memory.platform is None or memory.stable is None or memory.candidate is not None:
        return None
    if wanted.hash == memory.platform.hash or builds.rejection(turn, wanted.hash) or builds.in_the_making(turn):
        return None
    return wanted


def hopeless(turn: Turn) -> tuple[str, str, str] | None:
    """Target, reason and message of a worker of the platform on trial that will never serve."""
    stable = turn.memory.stable
    for worker in fleet.newcomers(turn):
        if worker.trouble in HOPELESS:
            return worker.target, worker.trouble, f"worker {worker.pod} does not start: {worker.message}"
        key = facts.load_key(worker)
        unmade = stable is not None and builds.wanted_revision(turn) not in ("", stable.revision)
        if stable is not None and key and unmade and not facts.digest_for(worker, stable):
            message = (
                f"worker {worker.pod} loads engines for {key}, of which {stable.revision} has none, and the spec asks "
                "for another revision: set its source and engine back to stable's, change the workers, then the model"
            )
            return worker.target, reasons.NO_ENGINE_FOR_LOAD_KEY, message
    return None


def holds_for_room(turn: Turn) -> bool:
    """Nothing but room for another worker is lacking, and that is no fault of the platform: none of the old ones may
    leave first. Or one left, and still no node takes the new one, but workers like it found a place before, in the
    first step; if none ever did, they may ask for more than was freed, and the old one is wanted back."""
    step, members = turn.memory.step, holders(turn.seen, turn.memory)
    waiting = fleet.without_room(members)
    if trial(turn.memory) is None or step is None or (step.tight and not step.seen_at) or not waiting:
        return False
    return all(answers(turn.seen, turn.memory, w) or w in waiting for w in members)


def make_room(turn: Turn) -> None:
    """Asked by `prepare`. Without room for one more, an old worker leaves first, where the policy allows it."""
    step, spec = turn.memory.step, turn.spec
    allowed = spec.rollout.memory_policy != MEMORY_AVAILABILITY
    several = spec.serving.replicas > 1 or spec.rollout.allow_downtime
    if step is not None and holds_for_room(turn) and allowed and several:
        turn.remember(step=replace(step, tight=True))


def preparing(turn: Turn) -> tuple[str, str]:
    """What the new workers wait for: a reason, '' for none in particular, and the end of a sentence."""
    missing, short = unprepared(turn.seen, turn.memory)
    if holds_for_room(turn) and not _place_may_come(turn):
        worker = fleet.without_room(missing)[0]
        way_out = "add such a node, or set the spec back"
        if turn.memory.step is not None and not turn.memory.step.tight:
            alone = " (and allowDowntime, since there is only one)" if turn.spec.serving.replicas == 1 else ""
            way_out = f"use memoryPolicy Resource, which takes an old worker away first{alone}, {way_out}"
        return reasons.NO_ROOM, f": no node has room for another worker ({worker.message}): {way_out}"
    if missing:
        return "", f": {trouble(turn, missing[0])}"
    failing = next((w for w in turn.seen.workloads if w.trouble and _tried(turn, w.platform)), None)
    if failing is not None:
        return "", f": {failing.trouble}, {failing.message}"
    return "", f": workers of target {', '.join(short)} come and go" if short else ""


def trouble(turn: Turn, worker: ObservedWorker) -> str:
    if worker.trouble:
        return f"{worker.pod}: {worker.trouble}" + (f", {worker.message}" if worker.message else "")
    if worker.report is None:
        return f"{worker.pod} is unknown: {worker.silence or 'it was not asked'}"
    if not facts.digest_for(worker, turn.memory.stable):
        return f"{worker.pod} has no engine for its load key {worker.report.load_key}: NoEngineForLoadKey"
    return f"{worker.pod} does not serve yet"


def seen_last(turn: Turn) -> tuple[str, str]:
    """At the deadline: the reason that the cluster gives, '' if it gives none; and what was seen last."""
    missing, _ = unprepared(turn.seen, turn.memory)
    if missing:
        return missing[0].trouble, trouble(turn, missing[0])
    failing = next((w for w in turn.seen.workloads if w.trouble and _tried(turn, w.platform)), None)
    return (failing.trouble, failing.message) if failing is not None else ("", "")


def promoted(turn: Turn) -> Outcome:
    """All workers are wanted of this platform from now on, and the others leave."""
    memory, tried = turn.memory, trial(turn.memory)
    assert tried is not None
    assert memory.stable is not None
    known, step = jobs.known(turn), memory.step
    sentence = (step.sentence if step is not None else "") or "every step was passed"
    sentence = f"a person promoted it; {sentence}" if step is not None and step.approved else sentence
    record(turn, tried.hash, reasons.PROMOTED, reasons.PROMOTED, f"workers of image {tried.image}: {sentence}")
    turn.remember(
        platform=tried,
        default_image=turn.seen.default_image if turn.spec.serving.image else memory.default_image,
        stable=_of_keys_in_use(turn, memory.stable),
        candidate=None,
        step=None,
        rejected=tuple(r for r in memory.rejected if r.revision != tried.hash),
        waiting="",
        waited=0.0,
        waited_at=0.0,
    )
    if known is not None:  # asked with the image of before, which changes nothing about what a source is
        turn.remember(resolved=replace(known, key=jobs.resolve_key(turn)), stable_resolved=None)
    message = f"platform {tried.hash} is promoted: all workers are of image {tried.image}, and the old ones leave"
    return Outcome(Situation(Stage.PROMOTING, reasons.PROMOTED, message), SOON)


def hash_in_the_making(turn: Turn) -> str:
    """The platform that engines are made for, or that waits to be tried; '' if there is none."""
    wanted = pending(turn)
    return wanted.hash if wanted is not None else ""


# ---------------------------------------------------------------------------------------------------------------
# Pieces
# ---------------------------------------------------------------------------------------------------------------


def _begin(turn: Turn, stable: Deployed, wanted: Platform) -> Outcome:
    step = StepMemory(0, steps_key(turn.spec), turn.seen.now, platform=wanted)
    turn.remember(candidate=Deployed(wanted.hash, stable.artifacts), step=step, failure=None)
    message = f"workers of image {wanted.image} (platform {wanted.hash}) are tried beside those of before"
    return Outcome(Situation(Stage.PREPARING, reasons.PLATFORM_CHANGES, message), SOON)


def _refuse(turn: Turn, wanted: Platform, reason: str, message: str) -> Outcome:
    """Before any worker was made of it."""
    text = f"workers of image {wanted.image} would have no engine: {message}"
    record(turn, wanted.hash, reasons.ROLLED_BACK, reason, text)
    reject(turn, wanted.hash, reason, text)
    turn.remember(failure=None)
    stable = turn.memory.stable.revision if turn.memory.stable is not None else ""
    return Outcome(rolled_back(wanted.hash, stable, reason, text), SOON)


def _engines_come_first(turn: Turn, wanted: Platform) -> bool:
    """Another image may have another runtime. They can be built only while the spec means what serves."""
    memory = turn.memory
    changes = memory.platform is not None and wanted.image != memory.platform.image
    same = memory.stable is not None and builds.wanted_revision(turn) == memory.stable.revision
    return changes and same and turn.spec.tier.builds


def _place_may_come(turn: Turn) -> bool:
    """An old worker was told to leave. As long as it takes to go, and the scheduler to notice, nothing is amiss."""
    step = turn.memory.step
    return step is not None and step.tight and turn.memory.waited < turn.spec.rollout.progress_deadline


def _tried(turn: Turn, hash_: str) -> bool:
    tried = trial(turn.memory)
    return tried is not None and tried.hash == hash_


def _of_keys_in_use(turn: Turn, stable: Deployed) -> Deployed:
    """Without engines for load keys that no worker has any more: with each image there would be more of them. The old
    workers are still there, so one may go back to them without a build."""
    used = {(w.target, facts.load_key(w)) for w in facts.present(turn.seen)}
    named = {target for target, key in used if key}
    kept = tuple(a for a in stable.artifacts if (a.target, a.load_key) in used or a.target not in named)
    return replace(stable, artifacts=kept)
