"""Paths of the HTTP port, taken apart."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import unquote_to_bytes


class Path(NamedTuple):
    """`action`: what is asked for, '' if nothing is at this path; of `model`, and of `revision` if that is not ''.
    `name`: of a shared memory region, '' for all of them."""

    action: str
    model: str = ""
    revision: str = ""
    name: str = ""


POSTED = frozenset(("infer", "repository-index", "repository-change", "memory-register", "memory-unregister"))
"""Actions that are asked for with POST; all others are read with GET."""

_NOTHING = Path("")
_FIXED = {
    ("openapi.json",): Path("openapi"),
    ("v2",): Path("server"),
    ("v2", "health", "live"): Path("live"),
    ("v2", "health", "ready"): Path("ready"),
    ("v2", "models", "stats"): Path("stats"),
    ("v2", "repository", "index"): Path("repository-index"),
    ("v2", "systemsharedmemory", "status"): Path("memory-status"),
    ("v2", "systemsharedmemory", "unregister"): Path("memory-unregister"),
}
_OF_MODEL = {
    (): "model",
    ("ready",): "model-ready",
    ("infer",): "infer",
    ("config",): "config",
    ("stats",): "stats",
}
_OF_REGION = {"status": "memory-status", "register": "memory-register", "unregister": "memory-unregister"}


def parse_path(path: bytes, model: str) -> Path:
    """`path` as sent, without the query. `model`: the one that is served here; should its name be `stats`, its
    metadata are at the path that otherwise has all models' statistics."""
    try:
        parts = tuple(unquote_to_bytes(part).decode() for part in path.strip(b"/").split(b"/"))
    except UnicodeDecodeError:
        return _NOTHING
    fixed = _FIXED.get(parts)
    if fixed is not None and not (fixed.action == "stats" and model == "stats"):
        return fixed
    match parts:
        case ("v2", "models", name, "versions", revision, *rest) if name and revision:
            return _of_model(name, revision, tuple(rest))
        case ("v2", "models", name, *rest) if name:
            return _of_model(name, "", tuple(rest))
        case ("v2", "repository", "models", name, "load" | "unload") if name:
            return Path("repository-change", name)
        case ("v2", "systemsharedmemory", "region", region, action) if region and action in _OF_REGION:
            return Path(_OF_REGION[action], name=region)
    return _NOTHING


def _of_model(name: str, revision: str, rest: tuple[str, ...]) -> Path:
    action = _OF_MODEL.get(rest)
    return Path(action, name, revision) if action else _NOTHING
