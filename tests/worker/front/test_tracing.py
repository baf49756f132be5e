"""Trace context: read as the W3C says, answered, and exported where somebody collects."""

from __future__ import annotations

import gzip
import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port
from protocol_harness import INFER, serve
from trtmodel_worker.front.tracing import Context, Tracing, read_context, recorder_of
from worker_harness import REVISION_1, Answer, WorkerProcess, eventually, fp32

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
VALID = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture(scope="module")
def doubler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    yield from serve(tmp_path_factory.mktemp("doubler"), {"factor": 2.0}, {})


def ask(worker: WorkerProcess, traceparent: str, shape: Any = (1, 4), **headers: str) -> Answer:
    return worker.infer(fp32([1.0] * 4, shape), traceparent=traceparent, **headers)


@pytest.mark.parametrize(
    ("traceparent", "flags"),
    [
        (VALID, 1), (f"00-{TRACE}-{PARENT}-00", 0), (f" {VALID} ", 1), (f"00-{TRACE}-{PARENT}-ff", 1),
        (f"cc-{TRACE}-{PARENT}-01", 1), (f"cc-{TRACE}-{PARENT}-01-more", 1),
        (f"00-{TRACE}-{PARENT}-01-more", None), (f"ff-{TRACE}-{PARENT}-01", None), (f"00-{TRACE}-{PARENT}", None),
        (f"00-{'0' * 32}-{PARENT}-01", None), (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{PARENT}-01", None), (f"00-{TRACE[1:]}-{PARENT}-01", None), ("", None), ("-", None),
        (f"0-{TRACE}-{PARENT}-01", None), (f"00-{TRACE}-{PARENT}-1", None), (f"00-{TRACE}-{PARENT}-0g", None),
        (f"cc-{TRACE}-{PARENT}-01more", None),
    ],
)  # fmt: skip
def test_a_trace_context_is_read_as_the_specification_says(traceparent: str, flags: int | None) -> None:
    expected = None if flags is None else Context(int(TRACE, 16), int(PARENT, 16), flags, "a=b")
    assert read_context({b"traceparent": traceparent.encode(), b"tracestate": b"a=b"}) == expected


def test_a_long_or_strange_state_harms_nothing() -> None:
    headers = {b"traceparent": VALID.encode()}
    long, strange = (read_context({**headers, b"tracestate": s}) for s in (b"a=" + b"b" * 600, b"\xff"))
    assert long is not None
    assert long.state == ""
    assert strange is not None


@pytest.mark.parametrize("flags", ["00", "01"])
def test_an_answer_is_of_the_requests_trace_and_has_a_span_of_its_own(doubler: WorkerProcess, flags: str) -> None:
    spans = set()
    for shape, status in ((1, 4), 200), ((1, 4), 200), ((1, 3), 400):
        answer = ask(doubler, f"00-{TRACE}-{PARENT}-{flags}", shape)
        assert answer.status == status
        found = re.fullmatch(rf"00-{TRACE}-([0-9a-f]{{16}})-{flags}", answer.headers["traceparent"])
        assert found is not None
        spans.add(found[1])
    assert len(spans - {PARENT, "0" * 16}) == 3


def test_who_sends_no_trace_or_nonsense_gets_none(doubler: WorkerProcess) -> None:
    assert "traceparent" not in doubler.infer(fp32([1.0] * 4, [1, 4])).headers
    for nonsense in ("", "x", VALID.replace("00-", "ff-"), VALID + "0"):
        answer = ask(doubler, nonsense)
        assert answer.status == 200
        assert "traceparent" not in answer.headers


def test_without_a_collector_nothing_is_recorded() -> None:
    assert recorder_of({}, "m") is None
    assert recorder_of({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, "m") is None
    Tracing(None).close()


class Collector:
    """Takes spans over HTTP, as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def named(self, span_id: str) -> Any:
        return next((s for s in self.spans if s.span_id.hex() == span_id), None)


def test_sampled_requests_are_exported_and_the_last_ones_also_when_the_worker_ends(tmp_path: Path) -> None:
    collector = Collector()
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.address, "OTEL_BSP_SCHEDULE_DELAY": "50"}
    for worker in serve(tmp_path, {"factor": 2.0}, environment):
        ask(worker, VALID.replace("-01", "-00"))
        worker.infer(fp32([1.0] * 4, [1, 4]))
        good, bad = ask(worker, VALID, tracestate="a=b"), ask(worker, VALID, (1, 3))
        ids = [a.headers["traceparent"].split("-")[2] for a in (good, bad)]
        eventually(lambda ids=ids: all(collector.named(i) for i in ids), "both spans have come")
        for span_id, status in zip(ids, (200, 400), strict=True):
            span = collector.named(span_id)
            assert (span.trace_id.hex(), span.parent_span_id.hex(), span.name) == (TRACE, PARENT, "infer m")
            values = {a.key: a.value.int_value or a.value.string_value for a in span.attributes}
            assert values == {"http.response.status_code": status, "trtmodel.revision": REVISION_1}
            assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
        assert collector.named(ids[0]).trace_state == "a=b"
        last = ask(worker, VALID).headers["traceparent"].split("-")[2]
    assert collector.named(last) is not None
    assert len(collector.spans) == 3, "what is not sampled is not recorded"
    collector.server.shutdown()


def test_a_collector_that_is_gone_delays_and_fails_nothing(tmp_path: Path) -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}", "OTEL_BSP_SCHEDULE_DELAY": "50"}
    for worker in serve(tmp_path, {"factor": 2.0}, environment):
        for _ in range(50):
            answer = ask(worker, VALID)
            assert (answer.status, "traceparent" in answer.headers) == (200, True)
        assert worker.post(INFER, b"{}", traceparent=VALID).status == 400
