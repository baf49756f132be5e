"""Plots of the report as inline SVG: no script, no font, no file but the page itself."""

from __future__ import annotations

import math
from html import escape

from trtmodel_worker.builder.observed import LEAST_EXPONENT, MOST_EXPONENT, PER_DECADE, Change, ClassRow, ErrorSpread

WIDTH, HEIGHT = 640, 150
_LEFT, _BOTTOM = 8, 26


def errors(spread: ErrorSpread) -> str:
    """How many samples have which relative error. Bars are as high as the root of the count, so that a single bad
    sample among thousands is seen."""
    bars = [("bar", spread.exact, "exactly equal")]
    for i, count in enumerate(spread.counts):
        low = 10 ** (LEAST_EXPONENT + i / PER_DECADE)
        bars.append(("bar", count, f"{low:.2g} to {low * 10 ** (1 / PER_DECADE):.2g}"))
    bars.append(("bad", spread.broken, "no number"))
    step = (WIDTH - 2 * _LEFT) / len(bars)
    most = max(count for _, count, _ in bars) or 1
    drawn = []
    for i, (kind, count, what) in enumerate(bars):
        if count:
            height = max(2.0, math.sqrt(count / most) * (HEIGHT - _BOTTOM - 14))
            x, y = _LEFT + i * step, HEIGHT - _BOTTOM - height
            drawn.append(_bar(kind, x, y, step - 1, height, f"{what}: {count:,} samples"))
    for decade in range(LEAST_EXPONENT, MOST_EXPONENT + 1, 2):
        x = _LEFT + (1 + (decade - LEAST_EXPONENT) * PER_DECADE) * step
        drawn.append(_text(x, HEIGHT - 10, f"1e{decade}", "middle"))
        drawn.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{HEIGHT - _BOTTOM}" y2="{HEIGHT - _BOTTOM + 4}"/>')
    drawn.append(_text(_LEFT, HEIGHT - 10, "0", "start"))
    drawn.append(_text(WIDTH - _LEFT, HEIGHT - 10, "NaN", "end"))
    drawn.append(f'<line x1="{_LEFT}" x2="{WIDTH - _LEFT}" y1="{HEIGHT - _BOTTOM}" y2="{HEIGHT - _BOTTOM}"/>')
    return _svg(HEIGHT, f"relative errors of output {spread.output}", drawn)


def classes(rows: tuple[ClassRow, ...]) -> str:
    """Share of each class's samples that the engine answers as it should: the label's, or the reference's answer."""
    line, left = 16, 90
    drawn = []
    for i, row in enumerate(rows):
        y = i * line
        drawn.append(_text(left - 6, y + 12, str(row.number), "end"))
        width = WIDTH - left - 90
        before = 1.0 if row.reference_right is None else row.reference_right / row.samples
        after = (row.agree if row.engine_right is None else row.engine_right) / row.samples
        drawn.append(_bar("faint", left, y + 2, width * before, 11, f"reference {before:.1%} of {row.samples:,}"))
        kind = "bad" if after < before else "bar"
        drawn.append(_bar(kind, left, y + 5, width * after, 5, f"engine {after:.1%} of {row.samples:,}"))
        drawn.append(_text(WIDTH - 84, y + 12, f"{after - before:+.1%} of {row.samples:,}", "start"))
    return _svg(max(line, line * len(rows)), "classes", drawn)


def changes(found: tuple[Change, ...]) -> str:
    """Which class became which, as a matrix of the classes that occur."""
    before = sorted({change.reference for change in found})
    after = sorted({change.engine for change in found})
    cell = max(8, min(24, (WIDTH - 80) // max(1, len(after))))
    left, top = 60, 34
    most = max((change.samples for change in found), default=1)
    drawn = [_text(left, 12, "engine's answer", "start"), _text(0, top - 6, "original's", "start")]
    drawn += [_text(left + (i + 0.5) * cell, top - 6, str(c), "middle") for i, c in enumerate(after) if cell >= 16]
    drawn += [_text(left - 6, top + (i + 0.5) * cell + 4, str(c), "end") for i, c in enumerate(before)]
    for change in found:
        x, y = left + after.index(change.engine) * cell, top + before.index(change.reference) * cell
        shade = 0.25 + 0.75 * math.sqrt(change.samples / most)
        what = f"{change.reference} became {change.engine}: {change.samples:,} samples"
        drawn.append(_bar("bad", x, y, cell - 1, cell - 1, what, shade))
    return _svg(top + cell * max(1, len(before)), "changed answers", drawn)


def _bar(kind: str, x: float, y: float, width: float, height: float, what: str, shade: float = 1.0) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{height:.1f}"'
    return f'<rect class="{kind}" {place} opacity="{shade:.2f}"><title>{escape(what)}</title></rect>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: int, label: str, drawn: list[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'aria-label="{escape(label[:200], quote=True)}">{"".join(drawn)}</svg>'
    )
