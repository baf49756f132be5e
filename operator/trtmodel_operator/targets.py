"""What status says of each target, of finished rollouts and of replicas, and what conditions ask of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from trtmodel_contract.gate import WORST_FIRST, GateFigures, Verdict, judge

from trtmodel_operator import facts, reasons
from trtmodel_operator.model import (
    Artifact,
    Decision,
    Deployed,
    HistoryEntry,
    JobKind,
    JobState,
    Observed,
    ObservedJob,
    ObservedWorker,
    Platform,
    Target,
)
from trtmodel_operator.text import cut

Status = dict[str, object]

# What the definition allows. A status that breaks one of them is refused as a whole: nothing would be told any more.
MESSAGE_LENGTH = 1024
CHECK_LENGTH = 512
WORD_LENGTH = 32
NAME_LENGTH = 64
DIGEST_LENGTH = 71
DIGESTS = 16
LOAD_KEY_LENGTH = 256
JOB_LENGTH = 63
FIGURES = 32
SAMPLES = 1_000_000_000
ENGINES = 8
HISTORY = 20
_VERDICTS = {verdict.value for verdict in Verdict}
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


def target_status(seen: Observed, decision: Decision, target: Target) -> Status:
    found: Status = {"name": target.name, "workers": _workers(seen, decision, target)}
    known = engines(decision, target)
    if known:
        found["engines"] = [
            {
                "loadKey": cut(a.load_key, LOAD_KEY_LENGTH),
                "digest": cut(a.manifest_digest, DIGEST_LENGTH),
                **({"driver": cut(a.driver, NAME_LENGTH)} if a.driver else {}),
            }
            for a in known[:ENGINES]
        ]
    job = _job(seen, decision, target)
    if job:
        found["job"] = job
    judged = verdict(seen, decision, target)
    if judged is not None:
        outcome, sentence, figures = judged
        found["gate"] = {
            "verdict": outcome.value,
            "message": cut(sentence, MESSAGE_LENGTH),
            "samples": max(0, min(figures.samples, SAMPLES)),
            "figures": _figures(figures),
        }
    return found


def _workers(seen: Observed, decision: Decision, target: Target) -> Status:
    workers, memory = facts.present(seen, target.name), decision.memory
    serving = memory.stable or memory.candidate
    return {
        "desired": seen.spec.serving.replicas if seen.spec else 0,
        "ready": sum(w.ready for w in workers),
        "onStable": sum(facts.serves(seen, w, serving) and not on_candidate(seen, decision, w) for w in workers),
        "onCandidate": sum(on_candidate(seen, decision, w) for w in workers),
        "withStandby": sum(facts.holds(seen, w, facts.digest_for(w, memory.standby)) for w in workers),
    }


def _job(seen: Observed, decision: Decision, target: Target) -> Status:
    """The Job that runs for the target (a resolve Job runs for all), else the one that failed for good."""
    mine = decision.builds.get(target.name, ())
    running = [j for j in seen.jobs if j.state is JobState.RUNNING and (j.name in mine or j.kind is JobKind.RESOLVE)]
    if running:
        tries = seen.spec.build.retries + 1 if seen.spec else 1
        return _running(max(running, key=lambda j: (j.started_at or 0.0, j.name)), tries)
    failure = decision.memory.failure
    if failure is None or any(failure.job in names for name, names in decision.builds.items() if name != target.name):
        return {}
    return {
        "name": cut(failure.job, JOB_LENGTH),
        "stage": cut(failure.reason, WORD_LENGTH),
        "message": cut(failure.message, MESSAGE_LENGTH),
    }


def _running(job: ObservedJob, tries: int) -> Status:
    """What it says of itself; what stands in its way goes before that."""
    found: Status = {"name": cut(job.name, JOB_LENGTH), "stage": "Queued" if job.suspended else job.kind.value}
    words = (job.message or job.trouble) if job.trouble else ""
    if job.progress is not None:
        found["stage"] = job.progress.stage
        words = words or job.progress.message
        if job.progress.percent is not None:
            found["progress"] = job.progress.percent
    words = "; ".join(filter(None, (f"try {job.failures + 1} of {tries}" if job.failures else "", words)))
    return {**found, **({"message": cut(words, MESSAGE_LENGTH)} if words else {})}


def analysis_status(decision: Decision) -> Status:
    """What the last look said of the candidate; nothing while none is on trial."""
    candidate, step = decision.memory.candidate, decision.memory.step
    if candidate is None or step is None or step.verdict not in _VERDICTS:
        return {}
    found: Status = {
        "revision": cut(candidate.revision, NAME_LENGTH),
        "verdict": step.verdict,
        "message": cut(step.sentence, MESSAGE_LENGTH),
    }
    if step.checks:
        found["checks"] = [
            {
                "name": c.name,
                "verdict": c.verdict,
                **({"value": c.value} if c.value is not None else {}),
                "message": cut(c.sentence, CHECK_LENGTH),
            }
            for c in step.checks
            if c.verdict in _VERDICTS
        ]
    return found


def history_status(entry: HistoryEntry) -> Status:
    at = {"endedAt": entry.at} if _TIME.fullmatch(entry.at) else {}
    return {
        "revision": cut(entry.revision, NAME_LENGTH),
        "outcome": cut(entry.outcome, WORD_LENGTH),
        "reason": cut(entry.message or entry.reason, MESSAGE_LENGTH),
        **({"digests": [cut(d, DIGEST_LENGTH) for d in entry.digests[:DIGESTS]]} if entry.digests else {}),
        **at,
        **({"promotedAt": entry.at} if at and entry.outcome == reasons.PROMOTED else {}),
    }


def replicas(seen: Observed) -> int:
    """Workers that run and are wanted: an extra pod of a rolling replacement must not feed an autoscaler."""
    if seen.spec is None:
        return len(facts.present(seen))
    return sum(min(len(facts.present(seen, t.name)), seen.spec.serving.replicas) for t in seen.spec.targets)


def _figures(figures: GateFigures) -> dict[str, float]:
    found: dict[str, float | None] = {}
    top1 = figures.top1
    if top1 is not None:
        found["top1Disagreements"] = top1.disagreements
        found["referenceRight"] = top1.reference_right
        found["engineRight"] = top1.engine_right
    for name, output in sorted(figures.worst().outputs.items()):
        found[f"{name}.cosineMean"] = output.cosine_mean
        found[f"{name}.cosineWorst"] = output.cosine_worst
        found[f"{name}.relativeRmse"] = output.relative_rmse
        found[f"{name}.maxAbs"] = output.max_abs
    known = {name: float(value) for name, value in found.items() if value is not None and abs(value) < 1e15}
    return dict(list(known.items())[:FIGURES])


def targets(seen: Observed) -> Sequence[Target]:
    return seen.spec.targets if seen.spec else ()


def deployed(decision: Decision) -> list[Deployed]:
    """Candidate or stable, if it is of this generation's revision."""
    there = (decision.memory.candidate, decision.memory.stable)
    return [d for d in there if d is not None and d.revision == decision.wanted]


def engines(decision: Decision, target: Target) -> list[Artifact]:
    """Engines of this generation's revision."""
    for there in deployed(decision):
        return [a for a in there.artifacts if a.target == target.name]
    return [
        Artifact(b.target, str(b.artifact.load_key), b.artifact.manifest_digest, b.artifact.driver)
        for b in decision.memory.built
        if (b.revision, b.target) == (decision.wanted, target.name)
    ]


def verdict(seen: Observed, decision: Decision, target: Target) -> tuple[Verdict, str, GateFigures] | None:
    """The worst of the target's engines on today's data set."""
    if seen.spec is None or not decision.wanted:
        return None
    found = []
    for built in decision.memory.built:
        same = (built.revision, built.target, built.gate) == (decision.wanted, target.name, decision.gate)
        if same and built.artifact.figures is not None:
            judged = judge(built.artifact.figures, seen.spec.verify.thresholds)
            found.append((judged.verdict, judged.sentence, built.artifact.figures))
    return min(found, key=lambda v: WORST_FIRST.index(v[0])) if found else None


def on_candidate(seen: Observed, decision: Decision, worker: ObservedWorker) -> bool:
    """It answers as what is on trial: with the candidate's engine, or as a worker of another platform."""
    if (platform := platform_on_trial(decision)) is not None:
        return worker.platform == platform.hash and facts.serves(seen, worker, decision.memory.stable)
    digest = facts.digest_for(worker, decision.memory.candidate)
    return facts.routes_candidate(seen, worker, digest) and facts.holds(seen, worker, digest)


def serves(seen: Observed, worker: ObservedWorker) -> bool:
    """A ready worker that answers with an engine that passed the gate, whichever it is."""
    report = facts.model_report(seen, worker)
    if not worker.ready or report is None:
        return False
    alone = (
        report.routes.weight == 100 or not report.routes.stable
    )  # else stable answers as well, or whatever is mirrored
    routed = report.routes.candidate if report.routes.candidate and alone else report.routes.stable
    return facts.holds(seen, worker, routed)


def platform_on_trial(decision: Decision) -> Platform | None:
    step = decision.memory.step
    return step.platform if decision.memory.candidate is not None and step is not None else None


def as_planned(seen: Observed, decision: Decision, worker: ObservedWorker) -> bool:
    memory = decision.memory
    return facts.serves(seen, worker, memory.stable or memory.candidate) or on_candidate(seen, decision, worker)


def listed(value: object) -> list[Mapping[str, object]]:
    return [v for v in value if isinstance(v, Mapping)] if isinstance(value, Sequence) else []
