"""Reading fields: every one with its default, its bounds, and an error that names it.

`Node` is a value at a path. It raises SpecError and nothing else, whatever an object holds.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping

from trtmodel_operator.units import quantity

_DURATION = re.compile(r"([0-9]{1,6}(ms|h|m|s))+")
_DURATION_PART = re.compile(r"([0-9]{1,6})(ms|h|m|s)")
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


class SpecError(ValueError):
    """The spec cannot be used. The text names the field, what is there, and what would be right."""


def duration(text: object, where: str) -> float:
    """Seconds of a duration such as 1h30m, 90s or 500ms. Raises SpecError."""
    if not isinstance(text, str) or not _DURATION.fullmatch(text):
        raise SpecError(f"{where}: {shown(text)} is not a duration: give one such as 500ms, 90s or 1h30m")
    return sum(int(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(text))


def size(text: object, where: str) -> int:
    """Bytes of a size such as 512Mi or 1G, rounded up as Kubernetes does. Raises SpecError."""
    written = isinstance(text, (str, int)) and not isinstance(text, bool)
    found = quantity(str(text)) if written else None
    if found is None or found <= 0:
        raise SpecError(f"{where}: {shown(text)} is not a size: give one such as 512Mi or 1Gi")
    return math.ceil(found)


class Node:
    """A value at a path. It is an object only if it is read as one; a field that is absent or null has its default."""

    def __init__(self, raw: object, path: str) -> None:
        self.raw = raw
        self.path = path

    @property
    def value(self) -> Mapping[str, object]:
        if not isinstance(self.raw, Mapping):
            raise SpecError(f"{self.path}: expected an object, found {shown(self.raw)}")
        return self.raw

    def child(self, name: str) -> Node:
        value = self.value.get(name)
        return Node({} if value is None else value, f"{self.path}.{name}")

    def optional(self, name: str) -> Node | None:
        return None if self.value.get(name) is None else self.child(name)

    def items(self, name: str) -> list[Node]:
        value = self.value.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise SpecError(f"{self.path}.{name}: expected a list, found {shown(value)}")
        return [Node(item, f"{self.path}.{name}[{i}]") for i, item in enumerate(value)]

    def text(self, name: str, default: str = "", *, required: bool = False) -> str:
        value = self.value.get(name)
        if value is None or value == "":
            if required:
                raise SpecError(f"{self.path}.{name} is missing: it has no default")
            return default
        return Node(value, f"{self.path}.{name}").as_text()

    def choice(self, name: str, allowed: tuple[str, ...], default: str = "") -> str:
        value = self.text(name, default, required=not default)
        if value not in allowed:
            raise SpecError(f"{self.path}.{name}: {shown(value)} is not one of {', '.join(allowed)}")
        return value

    def texts(self, name: str) -> Mapping[str, str]:
        child = self.child(name)
        return {key: Node(value, f"{child.path}.{key}").as_text() for key, value in child.value.items()}

    def boolean(self, name: str, default: bool) -> bool:
        value = self.value.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise SpecError(f"{self.path}.{name}: expected true or false, found {shown(value)}")
        return value

    def integer(self, name: str, default: int | None, low: int, high: int | None = None) -> int | None:
        value = self.value.get(name)
        if value is None:
            return default
        number = Node(value, f"{self.path}.{name}").as_integer()
        if number < low or (high is not None and number > high):
            bounds = f"from {low} on" if high is None else f"from {low} to {high}"
            raise SpecError(f"{self.path}.{name}: {shown(number)} is out of range: give a whole number {bounds}")
        return number

    def whole(self, name: str, default: int, low: int, high: int | None = None) -> int:
        value = self.integer(name, default, low, high)
        return default if value is None else value

    def port(self, name: str, default: int) -> int:
        return self.whole(name, default, 1, 65535)

    def number(self, name: str, default: float) -> float:
        value = self.value.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e15:
            raise SpecError(f"{self.path}.{name}: {shown(value)} is not a number from 0 on")
        return float(value)

    def bound(self, name: str) -> float | None:
        """A number of either sign; None where there is none."""
        value = self.value.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e15 <= value <= 1e15:
            raise SpecError(f"{self.path}.{name}: {shown(value)} is not a number from -1e15 to 1e15")
        return float(value)

    def seconds(self, name: str, default: str, low: float = 0.0) -> float:
        value = self.value.get(name)
        found = duration(default if value is None else value, f"{self.path}.{name}")
        if found < low:
            raise SpecError(f"{self.path}.{name}: {shown(value)} is too short: give at least {low:g}s")
        return found

    def as_text(self) -> str:
        if not isinstance(self.raw, str):
            raise SpecError(f"{self.path}: expected text, found {shown(self.raw)}")
        return self.raw

    def as_integer(self) -> int:
        if isinstance(self.raw, bool) or not isinstance(self.raw, int):
            raise SpecError(f"{self.path}: expected a whole number, found {shown(self.raw)}")
        return self.raw


KINDS: Mapping[type, str] = {Mapping: "an object", str: "text", list: "a list"}


def shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
