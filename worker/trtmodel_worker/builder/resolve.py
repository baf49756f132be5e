"""Resolve and check: what is the source, can it work, and which engines of it exist? Takes no GPU.

    fetch source -> sha256 as pinned? -> an engine of it, proven on this data set, is in the bucket ---> done
      -> check against the runtime -> fetch and check data sets -> revision -> list the bucket, pin what lives

The cheap and the likely mistakes come first; the data sets, which may be large, after the model is known to be good. A
model that was built and proven with these settings needs no check: then neither ONNX nor NumPy is imported here.
"""

from __future__ import annotations

import logging

from trtmodel_contract.jobs import FoundArtifact, Reason, ResolveResult, ResolveTask
from trtmodel_contract.manifest import Manifest

from trtmodel_worker.builder import pins
from trtmodel_worker.builder.sources import Place, revision_of, used_calibration
from trtmodel_worker.engines.building import Rejected
from trtmodel_worker.storage import ArtifactStore, Source

log = logging.getLogger("trtmodel.job")


def resolve(task: ResolveTask, place: Place) -> ResolveResult:
    """Raises Rejected, StorageError."""
    source = place.source(task.source_uri)
    sha256 = source.digest
    if task.source_pin and task.source_pin != sha256:
        text = f"source {task.source_uri} has sha256 {sha256}, spec.source.sha256 is {task.source_pin}"
        raise Rejected(Reason.DIGEST_MISMATCH, f"{text}: correct the pin, or find out who changed the file")
    calibration = used_calibration(task.engine, task.calibration)
    if calibration is None:  # the revision is known before any data set is
        known = _known(task, place, source, revision_of(sha256, task.engine, None, ""))
        if known is not None:
            return known
    from trtmodel_worker.builder import check  # NumPy, as all that knows of arrays
    from trtmodel_worker.builder.dataset import DataSetFile

    graph = check.check(task, source, place.cache)
    dataset = place.dataset(task.dataset)
    opened = DataSetFile(dataset.path, task.dataset.uri, graph.inputs, task.engine.profiles)
    opened.check_labels(graph, task.verify_task)
    calibration_digest = ""
    if calibration is not None:
        fetched = place.calibration(calibration)
        DataSetFile(fetched.path, calibration.data.uri, graph.inputs, task.engine.profiles)
        calibration_digest = fetched.digest
    name = revision_of(sha256, task.engine, calibration, calibration_digest)
    return ResolveResult(
        source_sha256=sha256,
        source_bytes=source.size,
        revision=name,
        calibration_digest=calibration_digest,
        dataset_digest=dataset.digest,
        inputs=tuple(tensor.spec() for tensor in graph.inputs),
        outputs=tuple(tensor.spec() for tensor in graph.outputs),
        found=_found(task, place, name, dataset.digest),
    )


def _known(task: ResolveTask, place: Place, source: Source, revision: str) -> ResolveResult | None:
    """What there is to say of a model of which an engine was built and proven on this data set. None: it is not so."""
    store = ArtifactStore(task.storage, task.model.namespace, place.credentials_dir)
    listed = list(store.current(revision))
    if not listed:
        return None
    pins.renew(store, task.cluster, task.model, task.keep, [digest for digest, _ in listed], revision)
    dataset = place.dataset(task.dataset)
    found = _loadable(task, store, listed, dataset.digest)
    if not any(engine.figures for engine in found):
        return None
    _, manifest = listed[0]  # all are of one source
    return ResolveResult(
        source_sha256=source.digest,
        source_bytes=source.size,
        revision=revision,
        calibration_digest="",
        dataset_digest=dataset.digest,
        inputs=manifest.inputs,
        outputs=manifest.outputs,
        found=found,
    )


def _found(task: ResolveTask, place: Place, revision: str, dataset_digest: str) -> tuple[FoundArtifact, ...]:
    store = ArtifactStore(task.storage, task.model.namespace, place.credentials_dir)
    listed = list(store.current(revision))
    pins.renew(store, task.cluster, task.model, task.keep, [digest for digest, _ in listed], revision)
    return _loadable(task, store, listed, dataset_digest)


def _loadable(
    task: ResolveTask, store: ArtifactStore, listed: list[tuple[str, Manifest]], dataset_digest: str
) -> tuple[FoundArtifact, ...]:
    """Engines that workers can load. One that is damaged is left out: the build Job revokes it and builds anew."""
    found = []
    for digest, manifest in listed:
        damage = store.missing(digest, manifest)
        if damage:
            log.warning("engine %s for %s does not count: %s", digest[:12], manifest.load_key, damage)
            continue
        figures = store.get_figures(digest, dataset_digest, task.verify_task, task.dataset.samples)
        found.append(FoundArtifact(manifest.load_key, digest, manifest.number, manifest.driver, figures))
    return tuple(found)
