"""How many workers of which platform run, for each target. Pure arithmetic on what was observed, so that an operator
that is killed at any point goes on from what it finds.

    no trial     main: all that are wanted at once. What is left of others leaves as main's workers serve.
    a trial      new ones come one by one, up to the share of the step; an old one leaves when a new one serves
    no room      ("tight") an old one leaves first, then a new one comes; never the last one that is ready

At each moment at least as many are ready as are promised; where there is no room for another one, one less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trtmodel_operator import facts, manifests
from trtmodel_operator.decide.members import share_of, trial
from trtmodel_operator.decide.turn import Turn, is_paused
from trtmodel_operator.model import ApplyWorkload, DeleteWorkload, ObservedWorker, ObservedWorkload, Platform, Target

UNSCHEDULABLE = "Unschedulable"


def workloads(turn: Turn) -> list[ApplyWorkload]:
    """The Deployments that should be there. Workers are made only for something to serve: after a first rollout that
    was taken back there are none."""
    spec, model = turn.seen.spec, turn.seen.model
    if spec is None or turn.memory.platform is None:
        return []
    return [
        ApplyWorkload(manifests.workload_name(model, target.name, platform.hash), target, platform, replicas)
        for target in spec.targets
        for platform, replicas in _shares(turn, target, turn.memory.platform)
    ]


def platforms(turn: Turn, target: str) -> list[Platform]:
    """Those that may have workers of this target: they need a pointer to boot from."""
    there = [turn.memory.platform, trial(turn.memory), *(_platform_of(w) for w in leaving(turn, target))]
    return [platform for platform in there if platform is not None]


def leaving(turn: Turn, target: str = "") -> list[ObservedWorkload]:
    """Deployments of platforms that are neither the one that serves nor on trial: of one that was replaced or taken
    back. With no `target` of all that the spec names."""
    memory, spec = turn.memory, turn.seen.spec
    if spec is None or memory.platform is None:
        return []
    names = {target} if target else {t.name for t in spec.targets}
    known = {p.hash for p in (memory.platform, trial(memory)) if p is not None}
    return [w for w in turn.seen.workloads if w.target in names and w.platform not in known]


def gone(turn: Turn) -> list[DeleteWorkload]:
    """What has left: no worker is wanted of it, and none is there but on its way out."""
    present = facts.present(turn.seen)
    return [
        DeleteWorkload(w.name)
        for w in leaving(turn)
        if not w.replicas and not any((p.target, p.platform) == (w.target, w.platform) for p in present)
    ]


def newcomers(turn: Turn, target: str = "") -> list[ObservedWorker]:
    """Workers of the platform on trial."""
    platform = trial(turn.memory)
    there = facts.present(turn.seen, target or None) if platform is not None else []
    return [w for w in there if platform is not None and w.platform == platform.hash]


def without_room(workers: Sequence[ObservedWorker]) -> list[ObservedWorker]:
    return [w for w in workers if w.trouble == UNSCHEDULABLE and not w.ready]


def _shares(turn: Turn, target: Target, main: Platform) -> Iterator[tuple[Platform, int]]:
    memory, spec = turn.memory, turn.spec
    wanted = spec.serving.replicas if memory.stable or memory.candidate else 0
    tried = trial(memory)
    if tried is None:
        yield main, wanted
    else:
        new, old = _exchange(turn, target, wanted, _replicas(turn, target, tried), _replicas(turn, target, main))
        yield main, old
        yield tried, new
    yield from _left(turn, target, wanted)


def _exchange(turn: Turn, target: Target, wanted: int, new: int, old: int) -> tuple[int, int]:
    """From so many new and old ones to how many there should be next."""
    if not wanted:
        return 0, 0
    step, workers = turn.memory.step, facts.present(turn.seen, target.name)
    fresh = newcomers(turn, target.name)
    uids = {w.uid for w in fresh}
    serving = sum(facts.serves(turn.seen, w, turn.memory.stable) for w in fresh)
    others = sum(w.ready for w in workers if w.uid not in uids)
    goal = share_of(turn.seen, turn.memory)
    if is_paused(turn):
        goal = min(goal, new)
    if step is not None and step.tight:
        spare = serving + others > 1 or turn.spec.rollout.allow_downtime
        if new < goal and serving >= new and (spare or new + old < wanted):
            new += 1
        elif new > goal and others >= old and spare and new + old >= wanted:
            new -= 1
        rest = max(0, wanted - new)
        return min(new, wanted), rest if rest >= old or spare or others < old else old
    coming = min(goal, max(new, serving + 1)) if new <= goal else max(goal, min(new, wanted - others))
    least = max(wanted - goal, 1)
    return coming, least if old <= least else max(least, min(old, wanted - serving))


def _left(turn: Turn, target: Target, wanted: int) -> Iterator[tuple[Platform, int]]:
    """Of the platforms that leave. They make up together what main's workers lack, so each counts only those that stay:
    where each counted the others', all went at once. One that is in trouble answers nobody and goes at once. Where
    main's workers find no room, one more leaves for them, but never the last that is ready."""
    workers, going = facts.present(turn.seen, target.name), leaving(turn, target.name)
    serving, hashes = turn.memory.stable or turn.memory.candidate, {w.platform for w in going}
    stay = [w for w in workers if w.platform not in hashes]
    lacking = wanted - sum(facts.serves(turn.seen, w, serving) for w in stay)
    spare = sum(w.ready for w in workers) > 1 and (lacking > 1 or any(w.ready for w in stay))
    if lacking > 0 and without_room(stay) and (spare or turn.spec.rollout.allow_downtime):
        lacking -= 1
    for workload in sorted(going, key=lambda w: w.name):
        mine = [w for w in workers if w.platform == workload.platform]
        keep = min(workload.replicas, max(0, lacking), sum(not w.trouble for w in mine))
        lacking -= min(keep, sum(facts.serves(turn.seen, w, serving) for w in mine))
        yield _platform_of(workload), keep


def _replicas(turn: Turn, target: Target, platform: Platform) -> int:
    return sum(w.replicas for w in turn.seen.workloads if (w.target, w.platform) == (target.name, platform.hash))


def _platform_of(workload: ObservedWorkload) -> Platform:
    return Platform(workload.image, workload.platform, workload.pod)
