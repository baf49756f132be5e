"""What a Job says of itself while it runs: one document over HTTP on a port of its pod, for status.

It is read by the operator and by people (`kubectl port-forward`), decides nothing, and holds nothing secret.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

PROGRESS_PORT = 8083
PROGRESS_PATH = "/progress"
STAGE_LENGTH = 32  # characters
MESSAGE_LENGTH = 512


@dataclass(frozen=True)
class JobProgress:
    """`stage` is one word, `message` what was said last. `percent` counts the stages that are behind, not time, and is
    None where the Job has none. `since` is when the stage began (seconds since the epoch, the Job's clock)."""

    SCHEMA: ClassVar[str] = "trtmodel.io/progress/v1"

    stage: str
    message: str
    since: float
    percent: int | None = None
