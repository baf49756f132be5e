"""Resolve and check: what is the source, can it work, and which engines of it exist? Takes no GPU.

    fetch source -> sha256 as pinned? -> check against the runtime -> fetch and check data sets -> revision
      -> list the bucket, pin what lives

The cheap and the likely mistakes come first; the data sets, which may be large, after the model is known to be good.
"""

from __future__ import annotations

import logging

from trtmodel_contract.jobs import FoundArtifact, Reason, ResolveResult, ResolveTask

from trtmodel_worker.builder import check, pins
from trtmodel_worker.builder.dataset import DataSetFile
from trtmodel_worker.builder.sources import Place, revision_of, used_calibration
from trtmodel_worker.engines.building import Rejected
from trtmodel_worker.storage import ArtifactStore

log = logging.getLogger("trtmodel.job")


def resolve(task: ResolveTask, place: Place) -> ResolveResult:
    """Raises Rejected, StorageError."""
    source = place.source(task.source_uri)
    sha256 = source.digest
    if task.source_pin and task.source_pin != sha256:
        text = f"source {task.source_uri} has sha256 {sha256}, spec.source.sha256 is {task.source_pin}"
        raise Rejected(Reason.DIGEST_MISMATCH, f"{text}: correct the pin, or find out who changed the file")
    calibration = used_calibration(task.engine, task.calibration)
    graph = check.check(
        source.path,
        f"source {task.source_uri} ({source.size:,} bytes, sha256 {sha256[:12]})",
        place.cache,
        task.engine,
        task.verify_task,
        calibration.method if calibration else None,
    )
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


def _found(task: ResolveTask, place: Place, revision: str, dataset_digest: str) -> tuple[FoundArtifact, ...]:
    """Engines that workers can load. One that is damaged is left out: the build Job revokes it and builds anew."""
    store = ArtifactStore(task.storage, task.model.namespace, place.credentials_dir)
    listed = list(store.current(revision))
    pins.renew(store, task.cluster, task.model, task.keep, [digest for digest, _ in listed], revision)
    found = []
    for digest, manifest in listed:
        damage = store.missing(digest, manifest)
        if damage:
            log.warning("engine %s for %s does not count: %s", digest[:12], manifest.load_key, damage)
            continue
        figures = store.get_figures(digest, dataset_digest, task.verify_task, task.dataset.samples)
        found.append(FoundArtifact(manifest.load_key, digest, manifest.number, manifest.driver, figures))
    return tuple(found)
