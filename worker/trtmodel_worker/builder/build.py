"""Build, prove and publish one engine on the node where this runs.

    figures there already? ------------------------------------> verdict
    engine there?   fetch its plan -------------> gate --------> verdict
    else            build -> prove, gate, reload -> publish ----> verdict

An engine is published whatever the verdict: without the operator's signature no worker loads it, and thresholds that
change later need no new build.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trtmodel_contract.gate import GateFigures, Verdict, judge
from trtmodel_contract.jobs import BuildResult, BuildTask, FoundArtifact, Reason
from trtmodel_contract.manifest import Manifest

from trtmodel_worker.builder import check, child
from trtmodel_worker.builder.publish import publish
from trtmodel_worker.builder.sources import Place, identity, revision_of, used_calibration
from trtmodel_worker.builder.stages import Answer, GoldenAnswer, LocalData, Request
from trtmodel_worker.engines import registry
from trtmodel_worker.engines.building import Rejected
from trtmodel_worker.storage import ArtifactStore, Fetched
from trtmodel_worker.storage.cache import digest_of

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Ended:
    """A build that came to a verdict."""

    reason: Reason
    message: str
    result: BuildResult


def build(task: BuildTask, place: Place, work: Path, progress: Progress) -> Ended:
    """Raises Rejected, StorageError, StageDied. `work` is an empty directory."""
    runtime = registry.runtime(task.engine.runtime)
    load_key = runtime.load_key()
    store = ArtifactStore(task.storage, task.model.namespace, place.credentials_dir)
    found = store.find(task.revision, load_key)
    if found is not None:
        figures = store.get_figures(found[0], task.dataset.digest, task.verify_task, task.dataset.samples)
        if figures is not None:
            progress(f"engine {found[0][:12]} and its figures exist: nothing to do")
            return _ended(task, found, figures, reused=True)
    request = _request(task, place, work, progress)
    if found is not None:
        return _gate_only(task, store, place, request, work, found, progress)
    return _build_new(task, store, place, request, work, progress)


def _build_new(
    task: BuildTask, store: ArtifactStore, place: Place, request: Request, work: Path, progress: Progress
) -> Ended:
    runtime = registry.runtime(task.engine.runtime)
    number = store.next_number(task.revision, runtime.load_key())
    progress(f"building revision {task.revision} for {runtime.load_key()}, number {number}")
    started = time.monotonic()
    built = child.run("build", request, work)
    build_seconds = time.monotonic() - started
    progress(f"built in {build_seconds:.1f} s: proving")
    proof = child.run("prove", request, work)
    again = child.run("reload", request, work)
    proof = dataclasses.replace(proof, golden=_widest(proof.golden, again.golden))
    progress(f"gate took {proof.gate_seconds:.1f} s: publishing")
    assert built.built is not None
    digest, manifest = publish(
        store,
        task,
        runtime.load_key(),
        number,
        runtime.driver(),
        request.graph,
        Path(request.plan),
        built.built,
        proof,
    )
    if manifest.plan.digest != digest_of(Path(request.plan))[0]:
        progress("another Job published this engine first: gating that one")
        return _gate_only(task, store, place, request, work, (digest, manifest), progress)
    figures = _record(task, store, digest, proof)
    ended = _ended(task, (digest, manifest), figures, reused=False)
    result = dataclasses.replace(ended.result, build_seconds=build_seconds, gate_seconds=proof.gate_seconds)
    return dataclasses.replace(ended, result=result)


def _gate_only(
    task: BuildTask,
    store: ArtifactStore,
    place: Place,
    request: Request,
    work: Path,
    found: tuple[str, Manifest],
    progress: Progress,
) -> Ended:
    digest, manifest = found
    progress(f"engine {digest[:12]} exists: running the gate on this data set only")
    plan = store.fetch_blob(manifest.plan.digest, manifest.plan.size, place.cache)
    proof = child.run("prove", dataclasses.replace(request, plan=str(plan)), work)
    ended = _ended(task, found, _record(task, store, digest, proof), reused=True)
    result = dataclasses.replace(ended.result, gate_seconds=proof.gate_seconds)
    return dataclasses.replace(ended, result=result)


def _request(task: BuildTask, place: Place, work: Path, progress: Progress) -> Request:
    """Everything that stages need, fetched and known to be what was resolved. Raises Rejected (SourceChanged)."""
    progress("fetching source and data sets")
    source = place.fetch("source", task.source_uri)
    _require_unchanged("source", task.source_uri, identity(source), task.source_sha256)
    dataset = place.dataset(task.dataset)
    _require_unchanged("verify.dataset", task.dataset.uri, dataset.digest, task.dataset.digest)
    calibration = used_calibration(task.engine, task.calibration)
    fetched: Fetched | None = None
    if calibration is not None:
        fetched = place.calibration(calibration)
        _require_unchanged("engine.calibration", calibration.data.uri, fetched.digest, calibration.data.digest)
    name = revision_of(task.source_sha256, task.engine, calibration, fetched.digest if fetched else "")
    if name != task.revision:
        text = (
            f"these settings make revision {name}, the task says {task.revision}: image and operator differ in version"
        )
        raise Rejected(Reason.INTERNAL, text)
    graph = check.check(
        source.path,
        f"source {task.source_uri}",
        registry.builder(task.engine.runtime),
        task.engine,
        task.verify_task,
        calibration.method if calibration else None,
    )
    return Request(
        source=str(source.path),
        plan=str(work / "plan"),
        folder=str(work),
        graph=graph,
        engine=task.engine,
        task=task.verify_task,
        dataset=LocalData(str(dataset.path), task.dataset),
        calibration=LocalData(str(fetched.path), calibration.data) if fetched and calibration else None,
        calibration_settings=calibration,
    )


def _require_unchanged(what: str, uri: str, found: str, resolved: str) -> None:
    if found != resolved:
        text = f"{what} {uri} has sha256 {found[:12]}, it was {resolved[:12]} when it was resolved: resolve again"
        raise Rejected(Reason.SOURCE_CHANGED, text)


def _record(task: BuildTask, store: ArtifactStore, digest: str, proof: Answer) -> GateFigures:
    assert proof.figures is not None
    figures = dataclasses.replace(proof.figures, manifest_digest=digest)
    store.put_figures(figures, task.dataset.samples)
    return figures


def _ended(task: BuildTask, found: tuple[str, Manifest], figures: GateFigures, *, reused: bool) -> Ended:
    digest, manifest = found
    verdict = judge(figures, task.thresholds)
    reason = {Verdict.PASS: Reason.DONE, Verdict.FAIL: Reason.GATE_FAILED}.get(
        verdict.verdict, Reason.GATE_INCONCLUSIVE
    )
    artifact = FoundArtifact(manifest.load_key, digest, manifest.number, manifest.driver, figures)
    result = BuildResult(task.revision, artifact, reused, manifest.plan.size, 0.0, 0.0, manifest.created_at)
    return Ended(reason, verdict.sentence, result)


def _widest(first: tuple[GoldenAnswer, ...], second: tuple[GoldenAnswer, ...]) -> tuple[GoldenAnswer, ...]:
    return tuple(
        dataclasses.replace(
            one, tolerances={name: max(limit, other.tolerances[name]) for name, limit in one.tolerances.items()}
        )
        for one, other in zip(first, second, strict=True)
    )
