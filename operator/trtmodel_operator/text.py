"""Text as status has it: bounded, and times as Kubernetes writes them."""

from __future__ import annotations

import datetime


def cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def timestamp(seconds: float) -> str:
    """RFC 3339 in whole seconds, which is how metav1.Time is stored, of seconds since the epoch."""
    return datetime.datetime.fromtimestamp(int(seconds), datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
