"""Writes docs/reference.md from the definition, and docs/conditions.md from what `trtmodel explain` says.

    python docs/generate.py

A test fails when a page is not what this makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from trtmodel_operator.cli import advice

HERE = Path(__file__).parent
DEFINITION = HERE.parent / "crds" / "trtmodel.yaml"
MADE = "<!-- Made by docs/generate.py: change its sources, and run it. -->"

Json = Mapping[str, Any]


def main() -> None:
    for name, text in pages().items():
        (HERE / name).write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """By file name."""
    return {"reference.md": reference(), "conditions.md": conditions()}


def reference() -> str:
    version = yaml.safe_load(DEFINITION.read_text(encoding="utf-8"))["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    spec, status = schema["properties"]["spec"], schema["properties"]["status"]
    lines = [
        "# Reference: TRTModel",
        "",
        MADE,
        "",
        f"`apiVersion: trtmodel.io/{version['name']}`, `kind: TRTModel`, short name `trtm`, namespaced.",
        _text(schema),
        "",
        "Durations are written as `1h30m`, `90s` or `2ms`. What a field does not allow is refused when the manifest is",
        "applied, with the way out in the message; `trtmodel lint` tells the same offline. A field that is *required*",
        "has no default.",
        "",
    ]
    for name, part in spec["properties"].items():
        required = " *Required.*" if name in spec.get("required", ()) else ""
        lines += [f"## spec.{name}", "", f"{_text(part)}{required}", ""]
        lines += _table(_rows(part, name))
    lines += ["## status", "", _text(status), "", *_table(_rows(status, ""))]
    return "\n".join(lines).rstrip() + "\n"


def conditions() -> str:
    lines = [
        "# Conditions and reasons",
        "",
        MADE,
        "",
        "What `kubectl describe trtmodel` and `kubectl trtmodel status` show. `trtmodel explain <name>` says it for",
        "one model. Scripts wait for conditions (`kubectl wait --for=condition=Ready`); the phase is for people.",
        "",
        "| condition | True means |",
        "|---|---|",
        *(f"| {name} | {_cell(means)} |" for name, means in advice.CONDITIONS.items()),
        "",
        "| phase | means |",
        "|---|---|",
        *(f"| {name} | {_cell(means)} |" for name, means in advice.PHASES.items()),
        "",
        "Each condition has a reason, one of these words, and a message with cause and way out. Other reasons",
        "are Kubernetes' own words for what stands in the way of a pod.",
        "",
    ]
    for title, section in advice.SECTIONS.items():
        lines += [f"## {title}", "", "| reason | means | what to do |", "|---|---|---|"]
        lines += [f"| {name} | {_cell(a.means)} | {_cell(a.todo)} |" for name, a in sorted(section.items())]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _rows(schema: Json, path: str) -> Iterator[tuple[str, Json, bool]]:
    """(path, schema, required) of everything below."""
    required = schema.get("required", ())
    for name, part in schema.get("properties", {}).items():
        at = f"{path}.{name}" if path else name
        yield at, part, name in required
        yield from _rows(part, at)
    for name, mark in (("items", "[]"), ("additionalProperties", "[name]")):
        part = schema.get(name)
        if isinstance(part, dict):
            yield from _rows(part, path + mark)


def _table(rows: Iterator[tuple[str, Json, bool]]) -> list[str]:
    found = [
        f"| `{path}` | {_type(part)} | {'*required*' if required else _default(part)} | {_cell(_text(part))} |"
        for path, part, required in rows
    ]
    return ["| field | type | default | meaning |", "|---|---|---|---|", *found, ""] if found else []


def _type(part: Json) -> str:
    if "enum" in part:
        return ", ".join(f"`{value}`" if value != "" else '`""`' for value in part["enum"])
    kind = str(part.get("type", "number or text" if part.get("x-kubernetes-int-or-string") else "object"))
    if kind == "array":
        inner = part.get("items", {})
        return f"list of {inner.get('type', 'text')}s"
    low, high = part.get("minimum"), part.get("maximum")
    if kind in ("integer", "number") and high is not None and abs(high) < 2**31 - 1:
        return (
            f"{kind}, {'above ' if part.get('exclusiveMinimum') else ''}{low if low is not None else '...'} to {high}"
        )
    return {"string": "text", "object": "object"}.get(kind, kind)


def _default(part: Json) -> str:
    value = part.get("default")
    if value is None or value in ({}, ""):
        return ""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
    return f"`{text}`"


def _text(part: Json) -> str:
    return " ".join(str(part.get("description", "")).split())


def _cell(text: str) -> str:
    """Markdown for a table; between backticks "<" is itself."""
    parts = text.replace("|", "\\|").split("`")
    return "`".join(part if n % 2 else part.replace("<", "&lt;") for n, part in enumerate(parts))


if __name__ == "__main__":
    main()
