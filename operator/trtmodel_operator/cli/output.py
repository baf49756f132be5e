"""How lines and tables reach the terminal: in colour and redrawn there, as plain text where the output is piped."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from trtmodel_operator.cli.look import Line, Mood


def is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def show(line: Line) -> None:
    """One tree."""
    if is_terminal():
        from rich.console import Console

        Console(no_color="NO_COLOR" in os.environ or None, highlight=False).print(rich_tree(line))
    else:
        print("\n".join(indented(line)))


def indented(line: Line, depth: int = 0) -> Iterator[str]:
    """Two spaces for each level: for logs, files and grep."""
    yield "  " * depth + line.text
    for below in line.below:
        yield from indented(below, depth + 1)


def rich_tree(line: Line) -> Any:
    """The same for a terminal."""
    from rich.text import Text
    from rich.tree import Tree

    def label(of: Line) -> Text:
        return Text(of.text, style=of.mood.value)  # Text, no markup: messages may hold brackets

    def grow(at: Tree, of: Line) -> None:
        for below in of.below:
            grow(at.add(label(below)), below)

    root = Tree(label(line), guide_style=Mood.FAINT.value)
    grow(root, line)
    return root


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as kubectl prints them; the last one is not padded."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def as_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=True)


def as_json_line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True)
