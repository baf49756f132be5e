"""The Builder protocol: what the Jobs ask of a runtime that turns an ONNX file into a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trtmodel_contract.identity import EngineSettings
from trtmodel_contract.jobs import Reason
from trtmodel_contract.manifest import TensorSpec

from trtmodel_worker.engines.base import Array


class Rejected(Exception):
    """No retry can cure it: the input has to change. `reason` becomes the condition's, `message` names the way out."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


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
