"""Keys in the bucket. Everything of a namespace is under ``<prefix>/<namespace>/``: no tenant loads another's plan.

A store may be a file system, and a cache is one: names that would lead out of their place raise ValueError.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trtmodel_contract.identity import LoadKey, Storage, require_sha256, short_hash

_SEGMENT = re.compile(r"[A-Za-z0-9._-]+")
_BUILD = re.compile(r"(?P<revision>[^/]+)/(?P<load_key>[^/]+)/(?P<number>[0-9]{1,18})/(?P<file>manifest\.json|revoked)")


def root(storage: Storage, namespace: str) -> str:
    prefix = [part for part in storage.prefix.split("/") if part]
    return "/".join(_segment("a part of the prefix or the namespace", part) for part in (*prefix, namespace))


def blobs_prefix(root_key: str) -> str:
    return f"{root_key}/blobs/sha256/"


def blob_key(root_key: str, digest: str) -> str:
    require_sha256("a blob's digest", digest)
    return f"{blobs_prefix(root_key)}{digest}"


def trash_prefix(root_key: str) -> str:
    """Blobs that the collector removes, until it knows that no Job has published them again."""
    return f"{root_key}/trash/"


def engines_prefix(root_key: str) -> str:
    """Of every engine of the namespace."""
    return f"{root_key}/engines/"


def engine_prefix(root_key: str, revision: str, load_key: LoadKey | str = "") -> str:
    """Without a load key: the prefix of all engines of a revision."""
    tail = "" if load_key == "" else f"{_segment('the load key', str(load_key))}/"
    return f"{engines_prefix(root_key)}{_segment('the revision', revision)}/{tail}"


@dataclass(frozen=True)
class BuildKey:
    """What a key under ``engines/`` says. `marker`: it is the one that revokes the build."""

    revision: str
    load_key: str
    number: int
    marker: bool


def parse_build(root_key: str, key: str) -> BuildKey | None:
    """None for a key that is neither a manifest nor the marker that revokes one."""
    prefix = engines_prefix(root_key)
    match = _BUILD.fullmatch(key.removeprefix(prefix)) if key.startswith(prefix) else None
    if match is None:
        return None
    return BuildKey(match["revision"], match["load_key"], int(match["number"]), match["file"] == "revoked")


def manifest_key(root_key: str, revision: str, load_key: LoadKey | str, number: int) -> str:
    return f"{_build(root_key, revision, load_key, number)}/manifest.json"


def revoked_key(root_key: str, revision: str, load_key: LoadKey | str, number: int) -> str:
    """Exists if this build must not be used any more. A bad plan is revoked, never overwritten."""
    return f"{_build(root_key, revision, load_key, number)}/revoked"


def gates_prefix(root_key: str, manifest_digest: str = "") -> str:
    """Of the figures of one engine, or of all."""
    if manifest_digest:
        require_sha256("a manifest's digest", manifest_digest)
    return f"{root_key}/gates/{manifest_digest}{'/' if manifest_digest else ''}"


def gate_key(root_key: str, manifest_digest: str, dataset_digest: str, task: str, samples: int, version: int) -> str:
    """Figures of one engine on one data set. Thresholds are not part of it: the verdict is computed each time."""
    require_sha256("a manifest's digest", manifest_digest)
    name = short_hash(dataset_digest, task, str(samples), str(version))
    return f"{gates_prefix(root_key, manifest_digest)}{name}.json"


def pins_prefix(root_key: str, cluster: str = "", model_uid: str = "") -> str:
    """Of the pins of all clusters, of one, or of one model in it."""
    parts = [part for part in (cluster, model_uid) if part]
    return "/".join((root_key, "pins", *(_segment("a cluster's or a model's uid", part) for part in parts), ""))


def pin_key(root_key: str, cluster: str, model_uid: str, name: str) -> str:
    """`name` is used once and never again: a pin is not changed, so that nobody removes what was just renewed."""
    if not cluster or not model_uid:
        raise ValueError("a pin belongs to a cluster and a model")
    return f"{pins_prefix(root_key, cluster, model_uid)}{_segment('the name of a pin', name)}.json"


def leaving_key(root_key: str, cluster: str, model_uid: str) -> str:
    """Tells that the model is being deleted, and its artifacts with it: others that go, too, do not mind its pins."""
    return f"{leaving_prefix(root_key)}{_segment('a cluster', cluster)}/{_segment('a uid', model_uid)}"


def leaving_prefix(root_key: str) -> str:
    return f"{root_key}/leaving/"


def timing_prefix(root_key: str, runtime: str = "", version: str = "", device: str = "") -> str:
    """Of the timing caches that builds on one kind of device with one version of a runtime share, or of all."""
    parts = [re.sub(r"[^A-Za-z0-9.]+", "-", part) for part in (f"{runtime}-{version}", device)] if runtime else []
    return "/".join((root_key, "timing", *(_segment("a runtime or device", part) for part in parts), ""))


def _build(root_key: str, revision: str, load_key: LoadKey | str, number: int) -> str:
    if not str(load_key):
        raise ValueError("a build has a load key")
    return f"{engine_prefix(root_key, revision, load_key)}{number:d}"


def _segment(name: str, value: str) -> str:
    if value in (".", "..") or not _SEGMENT.fullmatch(value):
        raise ValueError(f"{name} must be one name of letters, digits, '.', '_' and '-', not {value[:80]!r}")
    return value
