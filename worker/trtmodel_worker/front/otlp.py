"""Spans by the OpenTelemetry SDK. Imported only where spans are wanted: the SDK is an extra.

The SDK reads its settings (endpoint, headers, resource attributes, queue size) from the OTEL_* variables.
"""

from __future__ import annotations

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from trtmodel_worker.front.tracing import Context, End


class OtlpRecorder:
    """`processor`: where ended spans go; None for a collector at OTEL_EXPORTER_OTLP_ENDPOINT, over HTTP."""

    def __init__(self, model: str, processor: SpanProcessor | None = None) -> None:
        self._provider = provider = TracerProvider(
            resource=Resource.create({SERVICE_NAME: "trtmodel-worker", "trtmodel.model": model})
        )
        provider.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = provider.get_tracer("trtmodel")
        self._name = f"infer {model}"

    def close(self) -> None:
        self._provider.shutdown()

    def start(self, parent: Context) -> tuple[int, End]:
        state = TraceState.from_header([parent.state]) if parent.state else None
        above = SpanContext(parent.trace_id, parent.span_id, True, TraceFlags(parent.flags), state)
        context = set_span_in_context(NonRecordingSpan(above))
        span = self._tracer.start_span(self._name, context, SpanKind.SERVER)

        def end(status: int, revision: str) -> None:
            span.set_attribute("http.response.status_code", status)
            span.set_attribute("trtmodel.revision", revision)
            if status >= 500:
                span.set_status(StatusCode.ERROR)
            span.end()

        return span.get_span_context().span_id, end
