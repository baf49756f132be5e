"""Configuration files and manifests: templates of manifests/, filled in."""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import Path

from .settings import HERE


def filled(name: str, values: Mapping[str, str]) -> str:
    """A file of manifests/ with its ${NAMES} filled in. Raises KeyError for a name without a value."""
    return string.Template((HERE / "manifests" / name).read_text()).substitute(values)


def put(path: Path, text: str) -> None:
    """Write only if changed: kube-proxy exits when its configuration file is written to."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
