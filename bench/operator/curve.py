"""Draws what bench/operator/run.py saved: docs/scale.svg, and the table in docs/scale.md.

python bench/operator/curve.py bench/results/operator-2026-11-30-*.json
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"
BEGIN, END = "<!-- bench/operator/curve.py writes this -->", "<!-- to here -->"
WHAT = "From few models to thousands: seconds of a start and of a reaction to a change, CPU and memory at rest"
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 380, 230, 52, 40, 36
INK, LIMIT, LINE = "#444", "#c0392b", "#2464a8"

Result = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """`asked` is what must not be passed with the most models; None: nothing is asked, it is told for information."""

    title: str
    scenario: str
    figure: str
    unit: str
    asked: float | None
    digits: int = 1

    def told(self, value: float) -> str:
        return f"{value:,.{self.digits}f} {self.unit}".strip()

    def limit(self) -> str:
        if self.asked is None:
            return ""
        return f"< {self.asked:g} {self.unit}".strip() if self.asked else "0"


PANELS = (
    Row("Start until all are reconciled", "start", "seconds", "s", 60),
    Row("100 changes at once: write to first action, p95", "changes", "p95", "s", 1, 2),
    Row("At rest: CPU", "idle", "cpu", "% of a core", 5),
    Row("At rest: memory", "idle", "memory", "MiB", 400, 0),
)
ROWS = (
    *PANELS,
    Row("At rest: API requests per model in 5 minutes", "idle", "requests", "", 2, 2),
    Row("100 changes at once: write to first action, median", "changes", "p50", "s", None, 2),
    Row("The same: until all are promoted", "changes", "seconds", "s", None),
    Row("The same: operator's CPU for each", "changes", "milliseconds", "ms", None, 0),
    Row("The same: API requests for each", "changes", "requests", "", None, 0),
    Row("Memory after a storm of 1,000 changes", "storm", "memory", "MiB", 400, 0),
    Row("The leader is told to end amid 100 changes: until another leads", "handover", "sigterm", "s", 3),
    Row("It is killed", "handover", "sigkill", "s", 20),
    Row("It stands still, and wakes up when another leads", "handover", "sigstop", "s", 20),
    Row("In these three: changes lost", "handover", "lost", "", 0, 0),
    Row("In these three: Jobs or promotions done twice", "handover", "twice", "", 0, 0),
    Row("The leader is killed amid the storm: changes lost", "storm", "lost", "", 0, 0),
    Row("The same: done twice", "storm", "twice", "", 0, 0),
    Row("The API server is killed amid 100 changes, all is listed anew: changes lost", "relist", "lost", "", 0, 0),
    Row("The same: done twice", "relist", "twice", "", 0, 0),
)


def points(results: Sequence[Result], row: Row) -> list[tuple[int, float]]:
    found = [(r["models"], r["figures"].get(row.scenario, {}).get(row.figure)) for r in results]
    return sorted((models, float(value)) for models, value in found if value is not None)


def picture(results: Sequence[Result]) -> str:
    drawn = "".join(
        f'<g transform="translate({n % 2 * WIDTH},{n // 2 * HEIGHT})">{graph(panel, points(results, panel))}</g>'
        for n, panel in enumerate(PANELS)
    )
    size = f'viewBox="0 0 {2 * WIDTH} {(len(PANELS) + 1) // 2 * HEIGHT}"'
    style = f'{size} font-family="sans-serif" font-size="11"'
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {style}>{ground}{drawn}</svg>\n'


def graph(panel: Row, data: Sequence[tuple[int, float]]) -> str:
    """Models on a logarithmic axis, the figure from nought on a linear one."""
    if not data:
        return ""
    asked = panel.asked or 0.0
    most = max([asked, *(value for _, value in data)]) * 1.15
    first, last = math.log(data[0][0]), math.log(max(data[-1][0], data[0][0] * 2))

    def x(models: int) -> float:
        return LEFT + (math.log(models) - first) / (last - first) * (WIDTH - LEFT - 40)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / most * (HEIGHT - TOP - BOTTOM)

    def text(at_x: float, at_y: float, said: str, more: str = "") -> str:
        return f'<text x="{at_x:.0f}" y="{at_y:.0f}" fill="{INK}" {more}>{said}</text>'

    def rule(x1: float, y1: float, x2: float, y2: float, more: str) -> str:
        return f'<line x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" {more}/>'

    line = " ".join(f"{x(models):.0f},{y(value):.1f}" for models, value in data)
    parts = [
        text(LEFT, 22, panel.title, 'font-weight="bold"'),
        rule(LEFT, y(0), WIDTH - 20, y(0), f'stroke="{INK}"'),
        rule(LEFT, y(0), LEFT, TOP, f'stroke="{INK}"'),
        rule(LEFT, y(asked), WIDTH - 20, y(asked), f'stroke="{LIMIT}" stroke-dasharray="4 3"'),
        text(LEFT - 6, y(asked) + 4, f"{asked:g}", 'text-anchor="end"'),
        text(LEFT - 6, y(0) + 4, "0", 'text-anchor="end"'),
        text(LEFT - 6, TOP - 4, panel.unit, 'text-anchor="middle"'),
        f'<polyline points="{line}" fill="none" stroke="{LINE}" stroke-width="2"/>',
    ]
    for models, value in data:
        parts.append(f'<circle cx="{x(models):.0f}" cy="{y(value):.1f}" r="3" fill="{LINE}"/>')
        parts.append(
            text(max(x(models), LEFT + 18), y(value) - 8, f"{value:,.{panel.digits}f}", 'text-anchor="middle"')
        )
        parts.append(text(x(models), HEIGHT - BOTTOM + 15, f"{models:,}", 'text-anchor="middle"'))
    return "".join(parts)


def table(results: Sequence[Result]) -> str:
    ordered = sorted(results, key=lambda r: r["models"])
    head = ["", "asked", *(f"{r['models']:,} models" for r in ordered)]
    lines = [head, ["---"] * len(head)]
    for row in ROWS:
        found = dict(points(ordered, row))
        if found:
            cells = (row.told(found[r["models"]]) if r["models"] in found else "" for r in ordered)
            lines.append([row.title, row.limit(), *cells])
    last = ordered[-1]
    said = (
        f"Dashed in the picture: what is asked. {last['date']}, commit {last['commit']}, Kubernetes "
        f"{last['kubernetes']}, {last['machine']}, which all parts of the stand share."
    )
    return "\n".join([f"| {' | '.join(line)} |" for line in lines] + ["", said])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    results = [json.loads(file.read_text()) for file in parser.parse_args().results]
    (DOCS / "scale.svg").write_text(picture(results))
    page = DOCS / "scale.md"
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n![{WHAT}](scale.svg)\n\n{table(results)}\n{END}{after}")


if __name__ == "__main__":
    main()
