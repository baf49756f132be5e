"""Names by content: a thing whose inputs did not change is not built again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path


def files_below(root: Path) -> list[Path]:
    """Every file that decides a build, sorted: no byte code."""
    if root.is_file():
        return [root]
    return sorted(p for p in root.rglob("*") if p.is_file() and p.suffix != ".pyc")


def key(paths: Iterable[Path], *words: str, relative_to: Path) -> str:
    """12 hex digits over the names and bytes of all files below `paths`, and over `words`."""
    digest = hashlib.sha256()
    for word in words:
        digest.update(f"{len(word)}:{word}".encode())
    for path in paths:
        for file in files_below(path):
            data = file.read_bytes()
            name = str(file.relative_to(relative_to))
            digest.update(f"{len(name)}:{name}:{len(data)}:".encode() + data)
    return digest.hexdigest()[:12]
