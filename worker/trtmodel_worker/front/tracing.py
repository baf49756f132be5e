"""W3C trace context, and spans for OpenTelemetry.

A request that carries a valid `traceparent` is answered with one: the same trace, and the id of what this worker did.
One without is not traced and pays nothing. If the trace is sampled, the OpenTelemetry SDK is installed (the extra
`tracing`) and OTEL_EXPORTER_OTLP_ENDPOINT is set, that is also recorded as a span and exported, in a thread of the SDK
and through its bounded queue: a collector that is slow or gone loses spans and delays nothing.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

log = logging.getLogger(__name__)
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_FORM = re.compile(rb"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
CLIENT_GONE = 499  # the status of a request that nobody waited for, as nginx counts it
_SAMPLED = 1
_MOST_STATE = 512  # the length that the specification wants to be passed on
_RANDOM = random.SystemRandom()


@dataclass(frozen=True)
class Context:
    """Where a request comes from, as its headers say."""

    trace_id: int
    span_id: int
    flags: int
    state: str = ""

    @property
    def sampled(self) -> bool:
        return bool(self.flags & _SAMPLED)


End = Callable[[int, str], None]
"""Ends a span: the answer's HTTP status, and the revision that answered."""


class Recorder(Protocol):
    def start(self, parent: Context) -> tuple[int, End]:
        """Begin a span below `parent`: its id, and how to end it."""
        ...

    def close(self) -> None:
        """Export what is left. May wait for the collector."""
        ...


class Span:
    """`header`: the line that the answer gets."""

    __slots__ = ("_end", "header")

    def __init__(self, header: bytes, end: End | None) -> None:
        self.header = header
        self._end = end

    def end(self, status: int, revision: str) -> None:
        if self._end is not None:
            self._end(status, revision)


class Tracing:
    def __init__(self, recorder: Recorder | None = None) -> None:
        self._recorder = recorder

    def begin(self, headers: Mapping[bytes, bytes]) -> Span | None:
        """The span of a request that has a `traceparent`; None if it makes no sense."""
        context = read_context(headers)
        if context is None:
            return None
        end: End | None = None
        if self._recorder is not None and context.sampled:
            span_id, end = self._recorder.start(context)
        else:
            span_id = _RANDOM.randrange(1, 1 << 64)
        return Span(b"traceparent: 00-%032x-%016x-%02x\r\n" % (context.trace_id, span_id, context.flags), end)

    def close(self) -> None:
        """Blocks while the last spans are exported."""
        if self._recorder is not None:
            self._recorder.close()


def read_context(headers: Mapping[bytes, bytes]) -> Context | None:
    """What `traceparent` and `tracestate` say. A version that is not known is read as far as it is like version 00."""
    found = _FORM.fullmatch(headers.get(b"traceparent", b"").strip())
    if found is None or (found[1] == b"00" and found[5] is not None):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    if not trace_id or not span_id:
        return None
    state = headers.get(b"tracestate", b"")
    text = state.decode("ascii", "replace") if len(state) <= _MOST_STATE else ""
    return Context(trace_id, span_id, int(found[4], 16) & _SAMPLED, text)


def recorder_of(environment: Mapping[str, str], model: str) -> Recorder | None:
    """The one that exports to OTEL_EXPORTER_OTLP_ENDPOINT; None if that is not set, or nothing is installed that
    could."""
    if not environment.get(ENDPOINT):
        return None
    try:
        from trtmodel_worker.front.otlp import OtlpRecorder
    except ImportError as e:
        log.warning("%s is set, but no spans are exported: %s. Install the extra `tracing`", ENDPOINT, e)
        return None
    return OtlpRecorder(model)
