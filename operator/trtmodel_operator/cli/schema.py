"""A structural schema, applied as the API server does it: defaults first, then unknown fields, types, bounds, rules.

The bounds are judged by jsonschema (OpenAPI 3.0 is its draft 4 as far as definitions use it). What Kubernetes adds is
here: defaults, strict fields, nullable, list maps and sets, int-or-string, and the CEL rules (see `rules`).
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import yaml

Json = dict[str, Any]
Rule = Callable[[str, Any], Any]

PRESERVE = "x-kubernetes-preserve-unknown-fields"
NULLABLE = "nullable"
REASONS = {"FieldValueForbidden": "Forbidden: ", "FieldValueRequired": "Required value: "}
_HERE = Path(__file__).parent
PLACES = (_HERE / "trtmodel.yaml", _HERE.parents[2] / "crds" / "trtmodel.yaml")  # of a wheel, of a checkout


@dataclass(frozen=True)
class Finding:
    """`path` is written as the API server does it: spec.targets[0].name."""

    path: str
    message: str


@functools.cache
def definition() -> Json:
    """The schema of TRTModel. Read it only."""
    file = next(place for place in PLACES if place.is_file())
    versions = yaml.safe_load(file.read_text(encoding="utf-8"))["spec"]["versions"]
    found: Json = next(v for v in versions if v["storage"])["schema"]["openAPIV3Schema"]
    return found


def completed(schema: Json, value: Any) -> Any:
    """A copy with the defaults filled in, nulls that mean absence removed."""
    if isinstance(value, Mapping):
        made = {k: v for k, v in value.items() if v is not None or _part(schema, k).get(NULLABLE)}
        for name, part in schema.get("properties", {}).items():
            if name not in made and "default" in part:
                made[name] = copy.deepcopy(part["default"])
        return {name: completed(_part(schema, name), item) for name, item in made.items()}
    if isinstance(value, list):
        return [completed(schema.get("items", {}), item) for item in value]
    return value


def unknown(schema: Json, value: Any, path: str = "") -> Iterator[Finding]:
    """Fields that the schema does not have, as strict field validation refuses them."""
    if isinstance(value, Mapping):
        closed = "properties" in schema and not schema.get(PRESERVE) and "additionalProperties" not in schema
        for name, item in value.items():
            at = _join(path, name, "properties" in schema)
            if closed and name not in schema["properties"]:
                yield Finding(at, f'unknown field "{at}"')
            else:
                yield from unknown(_part(schema, name), item, at)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from unknown(schema.get("items", {}), item, f"{path}[{i}]")


def bounds(schema: Json, value: Any) -> Iterator[Finding]:
    """Types, required fields, bounds."""
    validator = jsonschema.Draft4Validator(_without_rules(schema))
    for error in sorted(validator.iter_errors(value), key=lambda e: list(map(str, e.absolute_path))):
        at = _written(error.absolute_path)
        if error.validator == "required":  # one error for each that is missing, found by its own message
            missing = re.match(r"'(.*)' is a required property", error.message)
            yield Finding(_join(at, missing[1] if missing else "?", True), "Required value")
        else:
            yield Finding(at, _words(error))


def lists(schema: Json, value: Any, path: str = "") -> Iterator[Finding]:
    """Entries that are there twice."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from lists(_part(schema, name), item, _join(path, name, "properties" in schema))
    elif isinstance(value, list):
        keys = schema.get("x-kubernetes-list-map-keys", ())
        kind = schema.get("x-kubernetes-list-type")
        seen: list[Any] = []
        for i, item in enumerate(value):
            identity = [item.get(k) for k in keys] if keys and isinstance(item, Mapping) else item
            if kind in ("map", "set") and identity in seen:
                yield Finding(f"{path}[{i}]", f"Duplicate value: {identity!r}")
            seen.append(identity)
            yield from lists(schema.get("items", {}), item, f"{path}[{i}]")


def rules(schema: Json, value: Any, evaluate: Rule, path: str = "") -> Iterator[Finding]:
    """What the CEL rules refuse. Rules about a change (oldSelf) are asked of the API server only."""
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" in rule["rule"] or evaluate(rule["rule"], value):
            continue
        message = evaluate(rule["messageExpression"], value) if "messageExpression" in rule else rule.get("message")
        words = " ".join(str(message or rule["rule"]).split())
        yield Finding(path + rule.get("fieldPath", ""), REASONS.get(rule.get("reason", ""), "") + words)
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from rules(_part(schema, name), item, evaluate, _join(path, name, "properties" in schema))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from rules(schema.get("items", {}), item, evaluate, f"{path}[{i}]")


# ----------------------------------------------------------------------------------------------------------------


def _part(schema: Json, name: str) -> Json:
    found = schema.get("properties", {}).get(name)
    if found is None:
        found = schema.get("additionalProperties")
    return found if isinstance(found, dict) else {}


def _join(path: str, name: object, named: bool) -> str:
    if not named:
        return f"{path}[{name}]"
    return f"{path}.{name}" if path else str(name)


def _written(path: Sequence[Any]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _words(error: Any) -> str:
    """The cause in a line, in the words that the API server has for it where they are plainer."""
    match error.validator:
        case "enum":
            return f"{error.instance!r} is none of the supported values: {', '.join(map(repr, error.validator_value))}"
        case "maxItems":
            return f"Too many: at most {error.validator_value}"
        case "maxLength":
            return f"Too long: at most {error.validator_value} characters"
        case "minimum":
            what = "greater than" if error.schema.get("exclusiveMinimum") else "greater than or equal to"
            return f"{error.instance!r} should be {what} {error.validator_value}"
        case "maximum":
            return f"{error.instance!r} should be less than or equal to {error.validator_value}"
        case _:
            return " ".join(str(error.message).split())[:300]


@functools.cache
def _plain_schema() -> Json:
    return _stripped(definition())


def _without_rules(schema: Json) -> Json:
    return _plain_schema() if schema is definition() else _stripped(schema)


def _stripped(schema: Json) -> Json:
    """For jsonschema: a nullable type is a list of two, and a format is no promise."""
    made = {k: v for k, v in schema.items() if not k.startswith("x-kubernetes-") and k not in ("format", "default")}
    if "properties" in made:
        made["properties"] = {k: _stripped(v) for k, v in made["properties"].items()}
    for name in ("items", "additionalProperties"):
        if isinstance(made.get(name), dict):
            made[name] = _stripped(made[name])
    if made.pop(NULLABLE, False) and "type" in made:
        made["type"] = [made["type"], "null"]
    return made
