"""What the checker knows of an expression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Known:
    """A value that is known now: the module, a class of it, a member of an enumeration, an answer of the
    capabilities."""

    value: Any


@dataclass(frozen=True)
class Instance:
    """An object of one of the binding's classes."""

    cls: type


@dataclass(frozen=True)
class Method:
    cls: type
    name: str


@dataclass(frozen=True)
class Ours:
    """An object of a class of the package that is checked."""

    name: str


@dataclass(frozen=True)
class OurFunction:
    name: str


@dataclass(frozen=True)
class OurModule:
    name: str


@dataclass(frozen=True)
class Many:
    """A list, tuple of any length, or iterator of `item`."""

    item: Any


@dataclass(frozen=True)
class Fixed:
    """A tuple of these."""

    items: tuple[Any, ...]


@dataclass(frozen=True)
class Container:
    """A method of a list or mapping of `item`."""

    method: str
    item: Any


@dataclass(frozen=True)
class Either:
    options: tuple[Any, ...]


@dataclass(frozen=True)
class Plain:
    """A number, text or the like: nothing of TensorRT's."""


@dataclass(frozen=True)
class Foreign:
    """Of another library or package, and so is what it gives."""


PLAIN = Plain()
FOREIGN = Foreign()
