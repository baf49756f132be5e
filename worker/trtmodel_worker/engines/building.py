"""The Builder protocol: what the Jobs ask of a runtime that turns an ONNX file into a plan."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trtmodel_contract.identity import EngineSettings
from trtmodel_contract.jobs import Reason
from trtmodel_contract.manifest import TensorSpec

if TYPE_CHECKING:  # NumPy: Jobs that find everything done know of no array
    from trtmodel_worker.engines.base import Array


class Severity(str, enum.Enum):
    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a model, or odd about it. `message` is the cause, `way_out` what to do; `node`,
    `operator` and `domain` are those that it is about, '' if none."""

    severity: Severity
    reason: Reason
    message: str
    way_out: str = ""
    node: str = ""
    operator: str = ""
    domain: str = ""

    @property
    def text(self) -> str:
        return f"{self.message}: {self.way_out}" if self.way_out else self.message


class Rejected(Exception):
    """No retry can cure it: the input has to change. `reason` becomes the condition's, `message` names the way out.
    `findings` are all that are known, where there may be more than the one that `message` tells."""

    def __init__(self, reason: Reason, message: str, findings: tuple[Finding, ...] = ()) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.findings = findings or (Finding(Severity.ERROR, reason, message),)


@dataclass(frozen=True)
class GraphTensor:
    """An input or output as the graph states it: a dimension is a number, or the name of a free one ('?' if it has
    none)."""

    name: str
    datatype: str
    dims: tuple[int | str, ...]

    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.datatype, tuple(d if isinstance(d, int) else -1 for d in self.dims))


@dataclass(frozen=True)
class Graph:
    """What a runtime sees in an ONNX file that it can run."""

    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphTensor, ...]


@dataclass(frozen=True)
class CalibrationData:
    """`batches` yields inputs by name; read once, batch by batch, so that it need not fit into memory."""

    batches: Iterable[Mapping[str, Array]]
    method: str
    per_channel: bool


class Builder(Protocol):
    def inspect(self, source: Path) -> Graph:
        """Inputs and outputs of a file that this runtime can run. Raises Rejected, naming node, operator or type."""
        ...

    def require(self, settings: EngineSettings, calibration_method: str | None, quantized: bool) -> None:
        """Raises Rejected (PrecisionUnsupported) where this runtime on this machine lacks what is asked for.
        `quantized`: the graph carries Q/DQ nodes already."""
        ...

    def build(
        self, source: Path, settings: EngineSettings, calibration: CalibrationData | None, plan: Path
    ) -> Mapping[str, str]:
        """Write the plan. Returns what was done, by name, for the manifest. May take gigabytes and crash: called in a
        process of its own. Raises Rejected."""
        ...
