"""What a binding says of itself: pybind11 writes every signature into the docstring."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_LINE = re.compile(r"^\s*(?:\d+\. )?(\w+)?\((.*)\) -> (.+?)\s*$")


@dataclass(frozen=True)
class Parameter:
    name: str
    type: str
    optional: bool


@dataclass(frozen=True)
class Signature:
    """Without `self`."""

    parameters: tuple[Parameter, ...]
    returns: str

    def takes(self, count: int, keywords: set[str]) -> bool:
        names = [p.name for p in self.parameters]
        if count > len(names) or not keywords <= set(names[count:]):
            return False
        return all(p.optional or p.name in keywords for p in self.parameters[count:])


def signatures(thing: Any) -> list[Signature]:
    """All overloads of a function, method or constructor; empty if it does not say."""
    found = []
    for line in (thing.__doc__ or "").splitlines():
        match = _LINE.match(line)
        if match is None or match.group(2).startswith("*args"):
            continue
        parameters = [_parameter(text) for text in _split(match.group(2)) if text not in ("*", "/")]
        if parameters and parameters[0].name == "self":
            parameters = parameters[1:]
        found.append(Signature(tuple(parameters), match.group(3)))
    return found


def property_type(thing: property) -> str:
    """What reading it gives, as C++ or Python calls it; '' if it does not say."""
    found = signatures(thing.fget) if thing.fget is not None else []
    return found[0].returns if found else ""


def documented_callbacks(cls: type) -> dict[str, int]:
    """Methods that a class asks its heirs for, in the example of its docstring: name -> number of arguments."""
    found = re.findall(r"def (\w+)\(self(?:, ([^)]*))?\):", cls.__doc__ or "")
    return {name: len(_split(arguments)) for name, arguments in found if name != "__init__"}


def _parameter(text: str) -> Parameter:
    declared, _, default = text.partition(" = ")
    name, _, kind = declared.partition(": ")
    return Parameter(name.strip(), kind.strip(), bool(default))


def _split(text: str) -> list[str]:
    """At commas outside of brackets."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += character
    return [part.strip() for part in [*parts, current] if part.strip()]
