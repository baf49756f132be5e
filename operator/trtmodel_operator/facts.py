"""Questions that rules and conditions ask of what was observed. Pure; a worker that could not be asked is *unknown*."""

from __future__ import annotations

from collections.abc import Iterable

from trtmodel_contract.control import EngineReport, EngineState, ModelReport

from trtmodel_operator.model import Deployed, Observed, ObservedWorker


def present(seen: Observed, target: str | None = None) -> list[ObservedWorker]:
    """Workers that are not on their way out, in the order of their names; of all targets without `target`."""
    chosen = (w for w in seen.workers if not w.terminating and target in (None, w.target))
    return sorted(chosen, key=lambda w: (w.pod, w.uid))


def load_key(worker: ObservedWorker) -> str:
    """What the worker can load; '' while it has not told. (A report that names only the runtime comes from a front
    whose host has not looked at the machine yet: taken for a load key, it once had an engine built for no worker.)"""
    report = worker.report
    return str(report.load_key) if report is not None and report.load_key.known else ""


def digest_for(worker: ObservedWorker, deployed: Deployed | None) -> str:
    """The manifest digest of the engine of `deployed` that this worker can load; '' if there is none. A worker that
    has not told its load key yet can load the only one that there is."""
    if deployed is None:
        return ""
    mine = [a for a in deployed.artifacts if a.target == worker.target]
    key = load_key(worker)
    if not key:
        return mine[0].manifest_digest if len(mine) == 1 else ""
    return next((a.manifest_digest for a in mine if a.load_key == key), "")


def model_report(seen: Observed, worker: ObservedWorker) -> ModelReport | None:
    return None if worker.report is None else worker.report.models.get(seen.model.name)


def engine(seen: Observed, worker: ObservedWorker, digest: str) -> EngineReport | None:
    """What a worker says about the engine with this digest; None if it holds none or is unknown."""
    report = model_report(seen, worker)
    if report is None or not digest:
        return None
    return next((e for e in report.engines if e.manifest_digest == digest), None)


def holds(seen: Observed, worker: ObservedWorker, digest: str) -> bool:
    """The engine is loaded, warm and self-tested there."""
    found = engine(seen, worker, digest)
    return found is not None and found.state is EngineState.READY


def routes_candidate(seen: Observed, worker: ObservedWorker, digest: str) -> bool:
    report = model_report(seen, worker)
    return report is not None and bool(digest) and report.routes.candidate == digest


def takes(seen: Observed, worker: ObservedWorker, digest: str, weight: int, shadow: int) -> bool:
    """It answers with, and mirrors to, the candidate with this digest in these shares."""
    report = model_report(seen, worker)
    return (
        routes_candidate(seen, worker, digest)
        and report is not None
        and (report.routes.weight, report.routes.shadow) == (weight, shadow)
    )


def serves(seen: Observed, worker: ObservedWorker, deployed: Deployed | None) -> bool:
    """A ready worker whose own report says that this revision, and no candidate, answers its requests."""
    digest, report = digest_for(worker, deployed), model_report(seen, worker)
    return (
        worker.ready
        and bool(digest)
        and report is not None
        and report.routes.stable == digest
        and not report.routes.candidate
        and holds(seen, worker, digest)
    )


def desired(seen: Observed) -> int:
    """Workers that should run, over all targets; 0 without a readable spec."""
    return seen.spec.serving.replicas * len(seen.spec.targets) if seen.spec else 0


def settled(seen: Observed, deployed: Deployed | None) -> bool:
    """Every desired worker, at least one, is there and serves this revision by its own report."""
    if seen.spec is None or deployed is None or seen.spec.serving.replicas < 1:
        return False
    for target in seen.spec.targets:
        workers = present(seen, target.name)
        if len(workers) < seen.spec.serving.replicas or not all(serves(seen, w, deployed) for w in workers):
            return False
    return True


def names(workers: Iterable[ObservedWorker]) -> str:
    """A few names for a message."""
    listed = [w.pod for w in workers]
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
