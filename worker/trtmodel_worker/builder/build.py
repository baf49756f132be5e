"""Build, prove and publish one engine on the node where this runs.

    engine there?   pin it, read its bytes -- damaged? --> revoke it, look again
      figures of this data set there? ------------------> verdict
      no            gate -------------------------------> verdict
    none there      build -> prove, gate, reload -> publish, pin -> verdict

An engine is published whatever the verdict: without the operator's signature no worker loads it, and thresholds that
change later need no new build. A Job that finds an engine has read every byte of it: what it answers, workers can load.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trtmodel_contract.gate import GateFigures, Verdict, judge
from trtmodel_contract.jobs import BuildResult, BuildTask, FoundArtifact, Reason
from trtmodel_contract.keeping import Cause, Revocation
from trtmodel_contract.manifest import Blob, Manifest

from trtmodel_worker.builder import check, child, pins, timing
from trtmodel_worker.builder.conclude import conclude
from trtmodel_worker.builder.publish import publish
from trtmodel_worker.builder.sources import Place, revision_of, used_calibration
from trtmodel_worker.builder.stages import Answer, GoldenAnswer, LocalData, Request
from trtmodel_worker.engines import registry
from trtmodel_worker.engines.building import Rejected
from trtmodel_worker.storage import ArtifactStore, Fetched, NotFound, StorageError

MOST_LOOKS = 16  # at engines of one revision, each damaged or revoked meanwhile: more is not bad luck
READS = 2  # of bytes that are not what they should be: the connection may be at fault

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Ended:
    """A build that came to a verdict."""

    reason: Reason
    message: str
    result: BuildResult


@dataclass(frozen=True)
class _Found:
    """An engine of the wanted revision for this machine, all its bytes read. `plan` is the local copy."""

    digest: str
    manifest: Manifest
    plan: Path


def build(task: BuildTask, place: Place, work: Path, progress: Progress) -> Ended:
    """Raises Rejected, StorageError, StageDied. `work` is an empty directory."""
    store = ArtifactStore(task.storage, task.model.namespace, place.credentials_dir)
    found, number = _look_up(task, store, work, progress)
    if found is not None:
        figures = _figures(task, store, found.digest)
        if figures is not None:
            progress(f"engine {found.digest[:12]} and its figures exist: nothing to do")
            return _ended(task, found.digest, found.manifest, figures, reused=True)
    request = _request(task, place, work, progress)
    if found is None:
        ended = _build_new(task, store, number, request, work, progress)
        if ended is not None:
            return ended
        progress("another Job published an engine first: that one counts")
        found, _ = _look_up(task, store, work, progress)
        if found is None:
            text = f"revision {task.revision}: the engine that another Job published first was revoked at once"
            raise StorageError(Reason.STORAGE_UNAVAILABLE, f"{text}: try again", transient=True)
    return _gate_only(task, store, found, request, work, progress)


def _look_up(task: BuildTask, store: ArtifactStore, work: Path, progress: Progress) -> tuple[_Found | None, int]:
    """(the engine to use, the number of a new one). A damaged engine is revoked, so that nobody waits for it again.
    What was read is looked up once more: another Job may have revoked it, and healed its files with one of its own."""
    load_key = registry.runtime(task.engine.runtime).load_key()
    read: _Found | None = None
    for _ in range(MOST_LOOKS):
        seen = store.look_up(task.revision, load_key)
        if seen.found is None:
            return None, seen.next_number
        digest, manifest = seen.found
        if read is not None and read.digest == digest:
            return read, seen.next_number
        pins.pin(store, task.cluster, task.model, [digest])
        damage = store.missing(digest, manifest)
        if not damage:
            try:
                read = _Found(digest, manifest, _read(store, work / "found", digest, manifest))
                continue
            except StorageError as e:
                if e.reason is not Reason.DIGEST_MISMATCH and not isinstance(e, NotFound):
                    raise
                damage = e.message
        progress(f"engine {digest[:12]} is damaged and is revoked: {damage}")
        store.revoke(task.revision, load_key, digest, Revocation(Cause.DAMAGED, damage))
    text = f"revision {task.revision}: engines are damaged or revoked one after another"
    raise StorageError(Reason.STORAGE_UNAVAILABLE, f"{text}: what changes the bytes in this bucket?", transient=True)


def _read(store: ArtifactStore, folder: Path, digest: str, manifest: Manifest) -> Path:
    """The plan; with it everything else that a worker would read. Into an empty folder: a good copy in the cache would
    say nothing about the bucket. Raises StorageError (DigestMismatch)."""
    plan, *_ = [
        _fetch(store, folder, blob)
        for blob in (manifest.plan, Blob(digest, 0), *(golden.blob for golden in manifest.golden))
    ]
    return plan


def _fetch(store: ArtifactStore, folder: Path, blob: Blob) -> Path:
    for _ in range(READS - 1):
        try:
            return store.fetch_blob(blob.digest, blob.size, folder)
        except StorageError as e:
            if e.reason is not Reason.DIGEST_MISMATCH:
                raise
    return store.fetch_blob(blob.digest, blob.size, folder)


def _build_new(
    task: BuildTask, store: ArtifactStore, number: int, request: Request, work: Path, progress: Progress
) -> Ended | None:
    """None: another Job was first."""
    runtime = registry.runtime(task.engine.runtime)
    load_key, driver = runtime.load_key(), runtime.driver()
    progress(f"building revision {task.revision} for {load_key}, number {number}")
    measured = timing.fetch(store, load_key, driver, work)
    started = time.monotonic()
    built = child.run("build", request, work)
    build_seconds = time.monotonic() - started
    timing.publish(store, load_key, driver, work, measured)
    progress(f"built in {build_seconds:.1f} s: proving")
    proof = child.run("prove", request, work)
    again = child.run("reload", request, work)
    proof = dataclasses.replace(proof, golden=_widest(proof.golden, again.golden))
    progress(f"gate took {proof.gate_seconds:.1f} s: publishing")
    assert built.built is not None
    published = publish(store, task, load_key, number, driver, request.graph, Path(request.plan), built.built, proof)
    if published is None:
        return None
    digest, manifest = published
    pins.pin(store, task.cluster, task.model, [digest])
    figures = _record(task, store, (digest, manifest), request, proof, work, progress)
    ended = _ended(task, digest, manifest, figures, reused=False)
    result = dataclasses.replace(ended.result, build_seconds=build_seconds, gate_seconds=proof.gate_seconds)
    return dataclasses.replace(ended, result=result)


def _gate_only(
    task: BuildTask, store: ArtifactStore, found: _Found, request: Request, work: Path, progress: Progress
) -> Ended:
    figures = _figures(task, store, found.digest)
    if figures is not None:
        return _ended(task, found.digest, found.manifest, figures, reused=True)
    progress(f"engine {found.digest[:12]} exists: running the gate on this data set only")
    proof = child.run("prove", dataclasses.replace(request, plan=str(found.plan)), work)
    figures = _record(task, store, (found.digest, found.manifest), request, proof, work, progress)
    ended = _ended(task, found.digest, found.manifest, figures, reused=True)
    result = dataclasses.replace(ended.result, gate_seconds=proof.gate_seconds)
    return dataclasses.replace(ended, result=result)


def _request(task: BuildTask, place: Place, work: Path, progress: Progress) -> Request:
    """Everything that stages need, fetched and known to be what was resolved. Raises Rejected (SourceChanged)."""
    progress("fetching source and data sets")
    source = place.source(task.source_uri, task.source_sha256)
    _require_unchanged("source", task.source_uri, source.digest, task.source_sha256)
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
    graph = check.check(task, source, work)
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


def _figures(task: BuildTask, store: ArtifactStore, digest: str) -> GateFigures | None:
    return store.get_figures(digest, task.dataset.digest, task.verify_task, task.dataset.samples)


def _record(
    task: BuildTask,
    store: ArtifactStore,
    engine: tuple[str, Manifest],
    request: Request,
    proof: Answer,
    work: Path,
    progress: Progress,
) -> GateFigures:
    """`engine`: digest and manifest of what was proven."""
    figures = conclude(task, store, *engine, request, proof, work, progress)
    return store.put_figures(figures, task.dataset.samples)


def _ended(task: BuildTask, digest: str, manifest: Manifest, figures: GateFigures, *, reused: bool) -> Ended:
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
