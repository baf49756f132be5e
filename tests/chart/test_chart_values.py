"""Values, their comments, their schema and the README say the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml
from values_table import CHART, README, page, values

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())


def described(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every value that the schema knows by name, with what it says of it."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    if "properties" not in schema:
        yield path, schema
        return
    assert schema.get("additionalProperties") is False, f"{path} takes what it does not know"
    for name, child in schema["properties"].items():
        yield from described(child, f"{path}.{name}" if path else name)


def test_the_readme_has_the_table_of_values() -> None:
    text = README.read_text()
    assert page(text) == text, "write it anew: python tests/chart/values_table.py"


def test_every_value_is_explained() -> None:
    for value in values():
        assert value.text.endswith("."), f"{value.path} has no comment that ends as a sentence does: {value.text!r}"


def test_the_schema_knows_every_value_and_no_other() -> None:
    known = {path for path, _ in described(SCHEMA)} - {"global"}
    assert known == {value.path for value in values() if value.default}


def test_the_schema_says_of_every_value_what_it_may_be() -> None:
    for path, schema in described(SCHEMA):
        assert {"type", "enum"} & schema.keys(), f"{path} may be anything"
        if schema.get("type") == "string":
            assert "pattern" in schema or path == "priorityClassName", f"{path} may be any text"
        if schema.get("type") == "integer":
            assert {"minimum", "maximum"} <= schema.keys(), f"{path} has no bounds"
