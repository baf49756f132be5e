"""Text as status has it: bounded, and times as Kubernetes writes them."""

from __future__ import annotations

import datetime

from trtmodel_contract.text import cut

__all__ = ["cut", "timestamp"]


def timestamp(seconds: float) -> str:
    """RFC 3339 in whole seconds, which is how metav1.Time is stored, of seconds since the epoch."""
    return datetime.datetime.fromtimestamp(int(seconds), datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
