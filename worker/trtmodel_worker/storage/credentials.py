"""Keys in files of a mounted Secret, read anew for each request, since the kubelet replaces them in place."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Keys:
    """`token` is there with temporary keys only."""

    access: str
    secret: str = field(repr=False)
    token: str = field(default="", repr=False)


def read(directory: Path | None) -> Keys | None:
    """None without AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY: then the pod's own identity is used, which boto3 finds
    and renews by itself."""
    if directory is None:
        return None
    access, secret, token = (
        _text(directory / name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    )
    return Keys(access, secret, token) if access and secret else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""
