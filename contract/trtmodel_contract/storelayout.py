"""Keys in the bucket. Everything of a namespace is under ``<prefix>/<namespace>/``: no tenant loads another's plan.

A store may be a file system, and a cache is one: names that would lead out of their place raise ValueError.
"""

from __future__ import annotations

import re

from trtmodel_contract.identity import LoadKey, Storage, require_sha256, short_hash

_SEGMENT = re.compile(r"[A-Za-z0-9._-]+")


def root(storage: Storage, namespace: str) -> str:
    prefix = [part for part in storage.prefix.split("/") if part]
    return "/".join(_segment("a part of the prefix or the namespace", part) for part in (*prefix, namespace))


def blob_key(root_key: str, digest: str) -> str:
    require_sha256("a blob's digest", digest)
    return f"{root_key}/blobs/sha256/{digest}"


def engine_prefix(root_key: str, revision: str, load_key: LoadKey | str = "") -> str:
    """Without a load key: the prefix of all engines of a revision."""
    tail = "" if load_key == "" else f"{_segment('the load key', str(load_key))}/"
    return f"{root_key}/engines/{_segment('the revision', revision)}/{tail}"


def manifest_key(root_key: str, revision: str, load_key: LoadKey | str, number: int) -> str:
    return f"{_build(root_key, revision, load_key, number)}/manifest.json"


def revoked_key(root_key: str, revision: str, load_key: LoadKey | str, number: int) -> str:
    """Exists if this build must not be used any more. A bad plan is revoked, never overwritten."""
    return f"{_build(root_key, revision, load_key, number)}/revoked"


def gate_key(root_key: str, manifest_digest: str, dataset_digest: str, task: str, samples: int, version: int) -> str:
    """Figures of one engine on one data set. Thresholds are not part of it: the verdict is computed each time."""
    require_sha256("a manifest's digest", manifest_digest)
    return f"{root_key}/gates/{manifest_digest}/{short_hash(dataset_digest, task, str(samples), str(version))}.json"


def _build(root_key: str, revision: str, load_key: LoadKey | str, number: int) -> str:
    if not str(load_key):
        raise ValueError("a build has a load key")
    return f"{engine_prefix(root_key, revision, load_key)}{number:d}"


def _segment(name: str, value: str) -> str:
    if value in (".", "..") or not _SEGMENT.fullmatch(value):
        raise ValueError(f"{name} must be one name of letters, digits, '.', '_' and '-', not {value[:80]!r}")
    return value
