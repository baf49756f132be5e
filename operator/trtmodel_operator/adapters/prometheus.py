"""One number from Prometheus, or the cause why there is none.

https://prometheus.io/docs/prometheus/latest/querying/api/: an instant query gives a scalar, a vector (none, one or many
series), a matrix or a string. Only one number can be compared with a bound.
"""

from __future__ import annotations

import json
import math
from typing import Any
from urllib.parse import urlencode

from trtmodel_operator.adapters.calls import CallError, Calls, shown

TIMEOUT = 10.0  # seconds
PATH = "/api/v1/query"


class Prometheus:
    """`default` is asked where a query names no address, '' for none."""

    def __init__(self, calls: Calls, default: str) -> None:
        self._calls = calls
        self._default = default

    async def ask(self, address: str, query: str) -> float:
        """Raises CallError."""
        server = address or self._default
        if not server:
            raise CallError("the query names no address, and the operator has none: set TRTMODEL_PROMETHEUS_ADDRESS")
        form = urlencode({"query": query, "timeout": f"{TIMEOUT:g}s"}).encode()
        headers = {"content-type": "application/x-www-form-urlencoded", "accept": "application/json"}
        status, body = await self._calls.post(server.rstrip("/") + PATH, form, headers, TIMEOUT)
        return number_in(status, body)


def number_in(status: int, body: bytes) -> float:
    """The one finite number of an answer. Raises CallError."""
    try:
        answer: Any = json.loads(body)
    except (ValueError, RecursionError) as e:
        raise CallError(f"the answer ({status}) is not JSON: {shown(body)}") from e
    if not isinstance(answer, dict) or status != 200 or answer.get("status") != "success":
        told = answer.get("error") if isinstance(answer, dict) else None
        raise CallError(f"Prometheus refused the query ({status}): {shown(str(told) if told else body)}")
    if answer.get("warnings"):
        raise CallError(f"Prometheus warns that the result is not whole: {shown(str(answer['warnings']))}")
    data = answer.get("data")
    kind, result = (data.get("resultType"), data.get("result")) if isinstance(data, dict) else (None, None)
    if kind == "vector" and isinstance(result, list):
        if not result:
            raise CallError("the query gives nothing: no series matches")
        if len(result) > 1:
            raise CallError(f"the query gives {len(result)} series where one number is needed: use sum() or max()")
        sample = result[0].get("value") if isinstance(result[0], dict) else None
    elif kind == "scalar":
        sample = result
    else:
        raise CallError(f"the query gives a {shown(str(kind))} where one number is needed")
    return _number(sample)


def _number(sample: object) -> float:
    """Of [time, "value"]. The value is a text: JSON has neither NaN nor infinities."""
    said = sample[1] if isinstance(sample, list) and len(sample) == 2 else None
    try:
        value = float(said if isinstance(said, str) else "")
    except ValueError as e:
        raise CallError(f"the query gives no number: {shown(str(sample))}") from e
    if not math.isfinite(value):
        raise CallError(f"the query gives {value}, which cannot be compared: had its divisor any samples?")
    return value
