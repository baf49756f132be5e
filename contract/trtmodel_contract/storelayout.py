"""Keys in the bucket. Everything of a namespace is under ``<prefix>/<namespace>/``: no tenant loads another's plan."""

from __future__ import annotations

from trtmodel_contract.identity import LoadKey, Storage, require_sha256, short_hash


def root(storage: Storage, namespace: str) -> str:
    return "/".join(part for part in (storage.prefix.strip("/"), namespace) if part)


def blob_key(root_key: str, digest: str) -> str:
    require_sha256("a blob's digest", digest)
    return f"{root_key}/blobs/sha256/{digest}"


def engine_prefix(root_key: str, revision: str, load_key: LoadKey | str = "") -> str:
    """Without a load key: the prefix of all engines of a revision."""
    tail = f"{load_key}/" if str(load_key) else ""
    return f"{root_key}/engines/{revision}/{tail}"


def manifest_key(root_key: str, revision: str, load_key: LoadKey | str, number: int) -> str:
    return f"{engine_prefix(root_key, revision, load_key)}{number}/manifest.json"


def revoked_key(root_key: str, revision: str, load_key: LoadKey | str, number: int) -> str:
    """Exists if this build must not be used any more. A bad plan is revoked, never overwritten."""
    return f"{engine_prefix(root_key, revision, load_key)}{number}/revoked"


def gate_key(root_key: str, manifest_digest: str, dataset_digest: str, task: str, samples: int, version: int) -> str:
    """Figures of one engine on one data set. Thresholds are not part of it: the verdict is computed each time."""
    return f"{root_key}/gates/{manifest_digest}/{short_hash(dataset_digest, task, str(samples), str(version))}.json"
