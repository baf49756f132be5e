"""The table of values in the chart's README, made of the comments in values.yaml:

python tests/chart/values_table.py    writes it anew, after a value or its comment changed
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[2] / "charts" / "trtmodel-operator"
README = CHART / "README.md"
BEGIN, END = "<!-- values -->\n", "\n<!-- end of values -->"


@dataclass(frozen=True)
class Value:
    """`default` is as YAML has it, '' for a name that only holds others. `text` is the comment above, in one line."""

    path: str
    default: str
    text: str


def values() -> list[Value]:
    """Every value that stands on a line of its own, and names with a comment that hold others, in the file's order."""
    text = (CHART / "values.yaml").read_text()
    defaults = yaml.safe_load(text)
    found: list[Value] = []
    above: list[str] = []
    parents: list[tuple[int, str]] = []
    for line in text.splitlines():
        bare = line.strip()
        if bare.startswith("#"):
            above.append(bare.removeprefix("#").strip())
            continue
        if bare:
            depth, (name, _, inline) = len(line) - len(line.lstrip()), bare.partition(":")
            parents = [(d, n) for d, n in parents if d < depth] + [(depth, name)]
            path = [n for _, n in parents]
            if inline.strip():
                found.append(Value(".".join(path), json.dumps(_at(defaults, path)), " ".join(above)))
            elif above:
                found.append(Value(".".join(path), "", " ".join(above)))
        above = []
    return found


def table() -> str:
    rows = [f"| `{v.path}` | {v.default and f'`{v.default}`'} | {_cell(v.text)} |" for v in values()]
    return "\n".join(["| value | default | what |", "|---|---|---|", *rows])


def page(text: str) -> str:
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    assert begin, "the README has no place for the table"
    assert end, "the README has no end of the table"
    return f"{head}{BEGIN}{table()}{END}{tail}"


def _at(defaults: Any, path: list[str]) -> Any:
    for name in path:
        defaults = defaults[name]
    return defaults


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    README.write_text(page(README.read_text()))
