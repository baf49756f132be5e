"""Rules about whether there is anything to decide at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from trtmodel_operator import facts, reasons
from trtmodel_operator.decide import builds, platforms
from trtmodel_operator.decide.turn import NEXT, Outcome, Turn, is_paused
from trtmodel_operator.model import Artifact, Deployed, Notice, ObservedPointer, Platform, Situation, Stage


def adopt_what_runs(turn: Turn) -> Outcome | None:
    """Status was lost (a restored object, a careless hand) and yet there are pointers or workers: what they serve is
    stable. Never a first rollout over running workers. A command that stands there was taken before, for all that is
    known: a rollback that was taken twice would be a way forward. But what was paused stays so."""
    if turn.memory.sequence > 0:
        return None
    command = turn.seen.command
    newest_first = sorted(turn.seen.pointers, key=lambda p: (-p.sequence, p.name))
    stable = _from_pointers([(p, p.stable) for p in newest_first]) or _from_reports(turn)
    if stable is None:
        return None
    standby = _from_pointers([(p, p.standby) for p in newest_first])
    platform = _platform_that_serves(turn)
    turn.remember(
        stable=stable,
        standby=standby if standby and standby.revision != stable.revision else None,
        platform=platform or builds.platform(turn),
        window=f"w{_highest_sequence(turn) + 1}",
        sequence=_highest_sequence(turn),
        command=command.text if command else "",
        paused=command.text if command and command.verb == "pause" else "",
    )
    message = f"status was lost: {stable.revision} is taken as stable, as boot pointers and workers have it"
    turn.notices.append(Notice(reasons.ADOPTED, message, warning=True))
    return Outcome(Situation(Stage.SERVING, reasons.ADOPTED, message), NEXT)


def spec_unreadable(turn: Turn) -> Outcome | None:
    """Nothing goes forward, and what serves goes on serving."""
    if turn.seen.spec is not None:
        return None
    return Outcome(Situation(Stage.INVALID, reasons.INVALID_SPEC, turn.seen.spec_error or "the spec cannot be read"))


def paused(turn: Turn) -> Outcome | None:
    """Paused stops what goes forward; looks, rollback and repair were asked before, and with nothing to do it is not
    told."""
    if not is_paused(turn):
        return None
    making = builds.in_the_making(turn) or platforms.pending(turn) is not None
    if builds.wanted_revision(turn) and turn.memory.candidate is None and not making:
        return None  # it serves, or was rejected
    message = "the rollout is paused: set spec.rollout.paused to false to go on"
    if turn.memory.paused and not turn.spec.rollout.paused:
        message = f"the rollout was paused by the command {turn.memory.paused}: use the command resume to go on"
    return Outcome(Situation(Stage.PAUSED, reasons.PAUSED, message, "paused"))


def _platform_that_serves(turn: Turn) -> Platform | None:
    """The one with the most workers that are ready. Of two that have as many it is not the one that the spec asks for:
    that one was on trial, and is tried anew."""
    names, asked = {p.name for p in turn.seen.pointers}, platforms.wanted_platform(turn)
    ready = Counter(w.platform for w in facts.present(turn.seen) if w.ready)
    found = [w for w in turn.seen.workloads if w.image]
    best = min(
        found,
        key=lambda w: (-ready[w.platform], asked is not None and w.platform == asked.hash, w.name not in names, w.name),
        default=None,
    )
    return Platform(best.image, best.platform, best.pod) if best is not None else None


def _from_pointers(entries: Sequence[tuple[ObservedPointer, Deployed | None]]) -> Deployed | None:
    """The revision of the newest pointer, with its engines in all pointers that name it."""
    found = [deployed for _, deployed in entries if deployed is not None and deployed.artifacts]
    if not found:
        return None
    revision = found[0].revision
    engines = {(a.target, a.load_key): a for d in reversed(found) if d.revision == revision for a in d.artifacts}
    return Deployed(revision, tuple(engines[key] for key in sorted(engines)))


def _from_reports(turn: Turn) -> Deployed | None:
    """The revision that most workers answer with."""
    served: list[tuple[str, Artifact]] = []
    for worker in facts.present(turn.seen):
        report = facts.model_report(turn.seen, worker)
        if report is None or worker.report is None or worker.report.fence.uid != turn.seen.model.uid:
            continue
        engine = facts.engine(turn.seen, worker, report.routes.stable)
        if engine is not None:
            artifact = Artifact(
                worker.target, str(worker.report.load_key), engine.manifest_digest, worker.report.driver
            )
            served.append((engine.revision, artifact))
    if not served:
        return None
    revision = max(Counter(r for r, _ in served).items(), key=lambda item: (item[1], item[0]))[0]
    engines = {(a.target, a.load_key): a for r, a in served if r == revision}
    return Deployed(revision, tuple(engines[key] for key in sorted(engines)))


def _highest_sequence(turn: Turn) -> int:
    reports = [w.report.fence for w in turn.seen.workers if w.report is not None]
    held = [fence.sequence for fence in reports if fence.uid == turn.seen.model.uid]
    return max([*held, *(p.sequence for p in turn.seen.pointers), 1])
