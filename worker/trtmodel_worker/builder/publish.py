"""Blobs first, then the manifest: whoever sees a manifest can load what it names.

The collector may remove a blob of an earlier Job in the moment in which this one writes the same bytes again: what is
not there after the manifest is written once more.
"""

from __future__ import annotations

import datetime
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path

from trtmodel_contract.codec import dumps
from trtmodel_contract.identity import LoadKey
from trtmodel_contract.jobs import BuildTask
from trtmodel_contract.manifest import Golden, Manifest, MemoryNeed

from trtmodel_worker.builder.stages import Answer
from trtmodel_worker.engines.building import Graph
from trtmodel_worker.storage import ArtifactStore

_TOOLS = ("onnx", "onnxruntime", "numpy", "trtmodel")


def publish(
    store: ArtifactStore,
    task: BuildTask,
    load_key: LoadKey,
    number: int,
    driver: str,
    graph: Graph,
    plan: Path,
    built: Mapping[str, str],
    proof: Answer,
) -> tuple[str, Manifest] | None:
    """(digest, manifest), None if another Job committed `number` first. The number must be from before the build began:
    Jobs that started together then compete for one. Raises StorageError."""
    files = [plan, *(plan.parent / golden.file for golden in proof.golden)]
    blobs = [store.put_file(file) for file in files]
    manifest = Manifest(
        revision=task.revision,
        load_key=load_key,
        number=number,
        driver=driver,
        build=dict(built),
        source_sha256=task.source_sha256,
        plan=blobs[0],
        inputs=tuple(tensor.spec() for tensor in graph.inputs),
        outputs=tuple(tensor.spec() for tensor in graph.outputs),
        profiles=task.engine.profiles,
        memory=MemoryNeed(proof.device_bytes, proof.host_bytes, proof.lane_bytes),
        golden=tuple(
            Golden(blob, golden.rows, golden.tolerances) for blob, golden in zip(blobs[1:], proof.golden, strict=True)
        ),
        tools=_tools(),
        created_at=now(),
    )
    digest, _ = store.commit(manifest)
    if digest != manifest.digest():
        return None
    if store.missing(digest, manifest):
        for file in files:
            store.put_file(file)
        store.put_bytes(dumps(manifest))
    return digest, manifest


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _tools() -> dict[str, str]:
    found = {}
    for name in _TOOLS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # the package itself is copied into images, not installed
    return found
