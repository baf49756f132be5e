"""What a check is asked: the document that its process reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trtmodel_contract.gate import Task
from trtmodel_contract.identity import EngineSettings


@dataclass(frozen=True)
class Wanted:
    """What the model is to be built with and verified as. `calibration_method` is None without calibration."""

    engine: EngineSettings
    task: Task
    calibration_method: str | None = None


@dataclass(frozen=True)
class Request:
    """`folder` is an empty directory. Without `wanted` only the model itself is examined."""

    SCHEMA: ClassVar[str] = "trtmodel.io/check-request/v1"

    source: str
    what: str
    runtime: str
    folder: str
    wanted: Wanted | None = None
