"""What the demo measured of each rollout, and the table at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Cell = float | int | str | None


@dataclass
class Result:
    """One rollout. Times are seconds since the epoch, None where it did not get so far; `flip` is in seconds.
    `before` and `during` are summaries of the traffic, None while there was none. `problems` is empty if it ended as
    it should."""

    name: str
    expected: str
    begin: float
    end: float | None = None
    built: float | None = None
    gated: float | None = None
    serving: float | None = None
    flip: float | None = None
    outcome: str = "unfinished"
    before: dict[str, Any] | None = None
    during: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)

    def after(self, moment: float | None) -> float | None:
        return None if moment is None else max(0.0, moment - self.begin)


COLUMNS = (
    "rollout", "ended as", "built", "gated", "serving", "done", "flip", "sent", "failed",
    "p50 before", "during", "p99 before", "during",
)  # fmt: skip


def row(result: Result) -> tuple[str, ...]:
    def figure(summary: dict[str, Any] | None, name: str, unit: str = "") -> str:
        return _cell(summary[name] if summary else None, unit)

    return (
        result.name,
        result.outcome,
        _cell(result.after(result.built), " s"),
        _cell(result.after(result.gated), " s"),
        _cell(result.after(result.serving), " s"),
        _cell(result.after(result.end), " s"),
        "-" if result.flip is None else f"{result.flip * 1e3:.3f} ms",
        figure(result.during, "sent"),
        figure(result.during, "failed"),
        figure(result.before, "p50", " ms"),
        figure(result.during, "p50", " ms"),
        figure(result.before, "p99", " ms"),
        figure(result.during, "p99", " ms"),
    )


def _cell(value: Cell, unit: str = "") -> str:
    if value is None:
        return "-"
    return f"{value:.1f}{unit}" if isinstance(value, float) else f"{value}{unit}"


def table(results: Sequence[Result]) -> str:
    rows = [COLUMNS, *(row(result) for result in results)]
    widths = [max(len(cells[i]) for cells in rows) for i in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in rows]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)
