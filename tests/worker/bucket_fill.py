"""Engines of a few bytes in a bucket that is a directory: for tests of collecting, copying and listing."""

from __future__ import annotations

import os
from pathlib import Path

from trtmodel_contract import storelayout as layout
from trtmodel_contract.gate import GateFigures, OutputFigures, Task
from trtmodel_contract.identity import LoadKey, ModelRef, Storage
from trtmodel_contract.manifest import Golden, Manifest, MemoryNeed
from trtmodel_worker.storage import ArtifactStore

KEY = LoadKey("Test", "1", "cpu")
MODEL = ModelRef("ml", "test", "uid-1")
LONG_AGO = 1_600_000_000


def open_bucket(folder: Path, bucket: str = "engines", namespace: str = "ml") -> ArtifactStore:
    (folder / bucket).mkdir(exist_ok=True)
    return ArtifactStore(Storage(bucket, endpoint=f"file://{folder}"), namespace, None)


def publish(store: ArtifactStore, revision: str = "0123456789", plan: bytes = b"plan", key: LoadKey = KEY) -> str:
    """The digest of a new engine with two golden samples and figures."""
    golden = tuple(Golden(store.put_bytes(b"golden %d" % rows), rows, {"y": 0.1}) for rows in (1, 4))
    manifest = Manifest(
        revision=revision,
        load_key=key,
        number=store.look_up(revision, key).next_number,
        driver="",
        build={},
        source_sha256="0" * 64,
        plan=store.put_bytes(plan),
        inputs=(),
        outputs=(),
        profiles=(),
        memory=MemoryNeed(0, 1),
        golden=golden,
        tools={},
        created_at="2026-01-01T00:00:00Z",
    )
    digest, _ = store.commit(manifest)
    store.put_figures(figures(digest), samples=100)
    return digest


def figures(digest: str) -> GateFigures:
    return GateFigures(digest, "3" * 64, Task.RAW, 90, False, {"y": OutputFigures(1.0, 1.0, 0.0, 0.0, 0, False)})


def age(folder: Path, seconds: float = LONG_AGO) -> None:
    """Everything in the directory was written then."""
    for path in folder.rglob("*"):
        os.utime(path, (seconds, seconds))


def keys(store: ArtifactStore, prefix: str = "") -> list[str]:
    return sorted(key.removeprefix(f"{store.root}/") for key in store.objects.list(f"{store.root}/{prefix}"))


def revoked(store: ArtifactStore, revision: str = "0123456789") -> list[bool]:
    return [build.revoked for build in store.builds(revision)]


def plan_path(folder: Path, store: ArtifactStore, digest: str, bucket: str = "engines") -> Path:
    return folder / bucket / layout.blob_key(store.root, store.get_manifest(digest).plan.digest)
