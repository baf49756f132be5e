"""Quantities as Kubernetes writes them."""

from __future__ import annotations

import re
from decimal import Decimal

_UNITS = {"": Decimal(1), "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "k": Decimal(1000)}
_UNITS |= {unit: Decimal(1000) ** (i + 2) for i, unit in enumerate("MGTPE")}
_UNITS |= {f"{unit}i": Decimal(1024) ** (i + 1) for i, unit in enumerate("KMGTPE")}
# The lengths are bounded: an exponent of nine digits would be a number of as many.
_NUMBER = r"[+-]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})"
_QUANTITY = re.compile(rf"({_NUMBER})(?:([eE][+-]?[0-9]{{1,2}})|([A-Za-z]{{0,2}}))")


def quantity(text: str) -> Decimal | None:
    """The number that a quantity such as 250m, 1.5Gi or 1e3 stands for; None if it is none. Grammar:
    kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity."""
    match = _QUANTITY.fullmatch(text)
    if match is None or (match[3] or "") not in _UNITS:
        return None
    return Decimal(match[1] + (match[2] or "")) * _UNITS[match[3] or ""]
