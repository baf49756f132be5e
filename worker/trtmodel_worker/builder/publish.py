"""Blobs first, then the manifest: whoever sees a manifest can load what it names."""

from __future__ import annotations

import datetime
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path

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
) -> tuple[str, Manifest]:
    """(digest, manifest) that all agree on: ours, or that of a Job that committed `number` first. The number must be
    from before the build began: Jobs that started together then compete for one. Raises StorageError."""
    manifest = Manifest(
        revision=task.revision,
        load_key=load_key,
        number=number,
        driver=driver,
        build=dict(built),
        source_sha256=task.source_sha256,
        plan=store.put_file(plan),
        inputs=tuple(tensor.spec() for tensor in graph.inputs),
        outputs=tuple(tensor.spec() for tensor in graph.outputs),
        profiles=task.engine.profiles,
        memory=MemoryNeed(device_bytes=0, host_bytes=proof.host_bytes),
        golden=tuple(Golden(store.put_file(plan.parent / g.file), g.rows, g.tolerances) for g in proof.golden),
        tools=_tools(),
        created_at=now(),
    )
    return store.commit(manifest)


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
