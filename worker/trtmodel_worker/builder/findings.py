"""What a check found, and the words in which it is told. Imported by Jobs that hold no ONNX in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from trtmodel_contract.jobs import Reason

from trtmodel_worker.engines.building import Finding, Graph, Rejected, Severity

SHOWN = 5  # names that one message lists


@dataclass(frozen=True)
class Report:
    """`graph` is None if no runtime could read the model. `weight_bytes` counts those in other files, too."""

    SCHEMA: ClassVar[str] = "trtmodel.io/check-report/v1"

    findings: tuple[Finding, ...]
    graph: Graph | None = None
    quantized: bool = False
    ir_version: int = 0
    opsets: tuple[str, ...] = ()
    nodes: int = 0
    weight_bytes: int = 0
    peak_bytes: int = 0


def error(
    reason: Reason, message: str, way_out: str = "", node: str = "", operator: str = "", domain: str = ""
) -> Finding:
    return Finding(Severity.ERROR, reason, message, way_out, node, operator, domain)


def warning(
    reason: Reason, message: str, way_out: str = "", node: str = "", operator: str = "", domain: str = ""
) -> Finding:
    return Finding(Severity.WARNING, reason, message, way_out, node, operator, domain)


def listed(names: Sequence[object], most: int = SHOWN) -> str:
    """The first of many."""
    shown = ", ".join(repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def errors(findings: Sequence[Finding]) -> list[Finding]:
    return [f for f in findings if f.severity is Severity.ERROR]


def require(findings: Sequence[Finding]) -> None:
    """Raises Rejected if there is an error among them: the first, which is the most important one, with the number of
    the others."""
    wrong = errors(findings)
    if not wrong:
        return
    first, others = wrong[0], len(wrong) - 1
    more = f" (and {others} more error{'s' if others > 1 else ''}: `trtmodel check` lists all)" if others else ""
    raise Rejected(first.reason, first.text + more, tuple(findings))
