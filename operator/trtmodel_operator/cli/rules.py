"""CEL rules of a definition, evaluated offline by cel-python with the functions that Kubernetes adds.

A rule that cannot be evaluated here is left to the API server: linting must not refuse what the server accepts.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import re
from typing import Any

import celpy
from celpy import celtypes

from trtmodel_operator.fields import duration
from trtmodel_operator.units import quantity


def evaluate(expression: str, value: Any) -> Any:
    """The rule's answer for `self`. True where it cannot be evaluated."""
    try:
        return _program(expression).evaluate({"self": celpy.json_to_cel(value)})
    except (celpy.CELEvalError, celpy.CELParseError, ValueError, TypeError, KeyError):
        return True


@functools.cache
def _program(expression: str) -> Any:
    environment = celpy.Environment()
    return environment.program(environment.compile(expression), functions=FUNCTIONS)


def _is_quantity(text: Any) -> Any:
    return celtypes.BoolType(quantity(str(text)) is not None)


def _quantity(text: Any) -> Any:
    found = quantity(str(text))
    if found is None:
        raise ValueError(f"{text} is no quantity")
    return celtypes.DoubleType(float(found))


def _greater(one: Any, other: Any) -> Any:
    return celtypes.BoolType(one > other)


def _format(text: Any, values: Any) -> Any:
    found = iter(values)
    return celtypes.StringType(re.sub("%[ds]", lambda _: str(next(found)), str(text)))


def _duration(text: Any) -> Any:
    """Go's, of which the API uses h, m, s and ms."""
    return celtypes.DurationType(datetime.timedelta(seconds=duration(str(text), "duration")))


def _is_sorted(values: Any) -> Any:
    found = list(values)
    return celtypes.BoolType(all(a <= b for a, b in itertools.pairwise(found)))


FUNCTIONS: dict[str, Any] = {
    "isSorted": _is_sorted,
    "isQuantity": _is_quantity,
    "quantity": _quantity,
    "isGreaterThan": _greater,
    "format": _format,
    "duration": _duration,
}
