"""A graph that is ready for less precision: each of its nodes can be reduced or kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from trtmodel_contract.identity import EngineSettings

from trtmodel_worker.engines.building import CalibrationData


class Reduced(Protocol):
    """Tensors of `prepared` and of what `write` writes have the same names, so that both can be compared value by
    value."""

    prepared: Path
    """The graph in FP32, with a name for each node."""
    nodes: tuple[str, ...]
    """Those that can be reduced, in the order of the graph."""
    kept: frozenset[str]
    """Those that keepPrecision keeps."""

    def write(self, keep: Collection[str], target: Path) -> Mapping[str, str]:
        """The graph with all nodes reduced but those in `keep`, and what was done, by name. Raises Rejected if nothing
        is left to reduce."""
        ...


@runtime_checkable
class ReducingBuilder(Protocol):
    """A builder that writes precision into the graph."""

    def reduced(
        self, source: Path, settings: EngineSettings, calibration: CalibrationData | None, folder: Path
    ) -> Reduced | None:
        """None if these settings reduce nothing. Files are written into `folder`. Raises Rejected."""
        ...
