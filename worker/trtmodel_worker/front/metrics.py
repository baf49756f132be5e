"""Port 8082: what Prometheus reads. Nothing of a request becomes a label: series are bounded by the revisions held."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from trtmodel_contract.control import MemoryReport, OutputAgreement

from trtmodel_worker.front.endpoints import Endpoints
from trtmodel_worker.front.http import HttpServer
from trtmodel_worker.front.request import Refusal, Request
from trtmodel_worker.front.stats import ROWS, Histogram, RevisionStats
from trtmodel_worker.front.worker import Worker

_HEAD = f"content-type: {CONTENT_TYPE_LATEST}\r\n".encode()


class MetricsEndpoints:
    """The App of the metrics port."""

    def __init__(self, worker: Worker, endpoints: Endpoints, server: HttpServer) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        self._registry.register(WorkerCollector(worker, endpoints, server))

    def admit(self, request: Request, _length: int | None) -> int | Refusal:
        if request.path != b"/metrics":
            return Refusal(404, "this port has /metrics")
        if request.method not in (b"GET", b"HEAD"):
            return Refusal(405, "metrics are read with GET", b"allow: GET, HEAD\r\n")
        return 1024

    def handle(self, request: Request) -> None:
        request.respond(200, generate_latest(self._registry), _HEAD)


class WorkerCollector(Collector):
    def __init__(self, worker: Worker, endpoints: Endpoints, server: HttpServer) -> None:
        self._worker = worker
        self._endpoints = endpoints
        self._server = server

    def collect(self) -> Iterator[Metric]:
        yield from self._counters()
        yield from self._agreement()
        yield from self._memory()
        yield from self._latencies()
        yield from self._gauges()

    def _counters(self) -> Iterator[Metric]:
        responses = CounterMetricFamily(
            "trtmodel_responses", "Answers to inference requests", labels=["revision", "status"]
        )
        failures = CounterMetricFamily(
            "trtmodel_failed_attempts", "Attempts that failed in an engine host", labels=["revision", "reason"]
        )
        for revision, stats in self._worker.stats.items():
            for status, count in stats.responses.items():
                responses.add_metric([revision, str(status)], count)
            for reason, count in stats.failures.items():
                failures.add_metric([revision, reason], count)
        unrouted = CounterMetricFamily(
            "trtmodel_unrouted_responses", "Answers that no engine had a part in", labels=["status"]
        )
        for status, count in self._endpoints.unrouted.items():
            unrouted.add_metric([str(status)], count)
        untrusted = CounterMetricFamily(
            "trtmodel_untrusted", "Requests, pointers and engines whose signature was not accepted", labels=["what"]
        )
        for what, count in self._worker.untrusted.items():
            untrusted.add_metric([what], count)
        yield from (responses, failures, unrouted, untrusted)
        plain: tuple[tuple[str, str, Callable[[RevisionStats], int]], ...] = (
            ("lane_hits", "Requests that found a lane free", lambda s: s.lane_hits),
            ("lane_waits", "Requests that waited for a lane", lambda s: s.lane_waits),
            ("refused_requests", "Requests refused because the queue was full or too long", lambda s: s.refused),
            ("timeouts", "Requests that were not answered in time", lambda s: s.timeouts),
            ("replays", "Requests run again after a host died", lambda s: s.replays),
            ("host_deaths", "Engine hosts that ended unasked", lambda s: s.deaths),
            ("batches", "Batches given to a lane", lambda s: s.batches),
            ("rows", "Rows of requests in batches given to a lane", lambda s: s.rows),
            ("padded_rows", "Rows added to fill a bucket", lambda s: s.padded_rows),
            ("split_batches", "Failed batches that were run again request by request", lambda s: s.splits),
            ("retries", "Requests run again after a failure that may pass", lambda s: s.retries),
            ("retries_denied", "Retries that the budget did not allow any more", lambda s: s.denied),
            ("hedges", "Overdue batches that were also run elsewhere", lambda s: s.hedges),
            ("hedge_wins", "Hedges that answered first", lambda s: s.hedge_wins),
            ("probes", "Idle lanes that ran the golden samples again", lambda s: s.probes),
            ("probe_failures", "Probes that failed", lambda s: s.probe_failures),
            ("rebuilt_lanes", "Lanes that a host rebuilt after a failure", lambda s: s.rebuilt_lanes),
            ("mirrored_requests", "Requests of stable that this revision ran as well", lambda s: s.mirrored),
            ("mirrors_dropped", "Requests that were not mirrored as there was work to do", lambda s: s.mirrors_dropped),
            ("mirrors_failed", "Mirrored requests without an answer", lambda s: s.mirrors_failed),
        )
        for name, text, value in plain:
            family = CounterMetricFamily(f"trtmodel_{name}", text, labels=["revision"])
            for revision, stats in self._worker.stats.items():
                family.add_metric([revision], value(stats))
            yield family

    def _agreement(self) -> Iterator[Metric]:
        """Sums; means are these over the rows. Names of outputs are the model's, not the clients'."""
        parts: tuple[tuple[str, str, Callable[[OutputAgreement], float]], ...] = (
            ("rows", "Rows compared with stable's", lambda a: a.rows),
            ("ranked_rows", "Compared rows whose output has a first place", lambda a: a.ranked),
            ("top1_equal", "Compared rows whose first place is stable's", lambda a: a.top1_equal),
            ("relative_error_sum", "Sum of relative errors", lambda a: a.relative_error),
            ("incomparable_rows", "Rows where only one has numbers, or of another shape", lambda a: a.incomparable),
        )
        cosine = GaugeMetricFamily(  # a cosine may be negative, so the sum may fall
            "trtmodel_agreement_cosine_sum", "Sum of cosine similarities", labels=["revision", "output"]
        )
        found = [
            ([revision, output], agreement)
            for revision, stats in self._worker.stats.items()
            for output, agreement in stats.agreement.items()
        ]
        for name, text, part in parts:
            family = CounterMetricFamily(f"trtmodel_agreement_{name}", text, labels=["revision", "output"])
            for labels, agreement in found:
                family.add_metric(labels, part(agreement))
            yield family
        for labels, agreement in found:
            cosine.add_metric(labels, agreement.cosine)
        yield cosine

    def _memory(self) -> Iterator[Metric]:
        told = self._worker.swapper.room.report
        parts: tuple[tuple[str, str, Callable[[MemoryReport], int | None]], ...] = (
            ("memory_needed_bytes", "Host memory that the last prepared engine needs", lambda m: m.need_host_bytes),
            (
                "memory_free_bytes",
                "Host memory that was free for the last prepared engine",
                lambda m: m.free_host_bytes,
            ),
            (
                "device_memory_needed_bytes",
                "Device memory that the last prepared engine needs",
                lambda m: m.need_device_bytes,
            ),
            (
                "device_memory_free_bytes",
                "Device memory that was free for the last prepared engine",
                lambda m: m.free_device_bytes,
            ),
        )
        for name, text, part in parts:
            yield _gauge(name, text, part(told) if told is not None else None)
        loads = GaugeMetricFamily(
            "trtmodel_load_seconds", "Seconds until the engine was loaded, warm and self-tested", labels=["revision"]
        )
        seconds = {r.revision: r.load_seconds for r in self._worker.swapper.report() if r.load_seconds is not None}
        for revision, value in seconds.items():
            loads.add_metric([revision], value)
        fetches = GaugeMetricFamily(
            "trtmodel_fetch_seconds",
            "Seconds until all files of an engine were in the cache, when it was loaded last",
            labels=["revision"],
        )
        for revision, stats in self._worker.stats.items():
            if stats.fetch_seconds is not None:
                fetches.add_metric([revision], stats.fetch_seconds)
        yield from (loads, fetches)

    def _latencies(self) -> Iterator[Metric]:
        parts: tuple[tuple[str, str, Callable[[RevisionStats], Histogram]], ...] = (
            ("queue", "Seconds from admission until a lane took the request", lambda s: s.queue),
            ("compute", "Seconds in the engine", lambda s: s.compute),
            ("request", "Seconds from admission until the answer", lambda s: s.total),
        )
        for name, text, part in parts:
            family = HistogramMetricFamily(f"trtmodel_{name}_seconds", text, labels=["revision"])
            for revision, stats in self._worker.stats.items():
                histogram = part(stats)
                family.add_metric([revision], histogram.cumulative(), histogram.total)
            yield family
        sizes = HistogramMetricFamily(
            "trtmodel_batch_rows", "Rows of requests in a batch that a lane got", labels=["revision"]
        )
        for revision, stats in self._worker.stats.items():
            counts = list(itertools.accumulate(map(float, stats.sizes)))
            bounds = [*map(str, ROWS), "+Inf"]
            sizes.add_metric([revision], list(zip(bounds, counts, strict=True)), stats.rows)
        yield sizes

    def _gauges(self) -> Iterator[Metric]:
        worker = self._worker
        by_engine = {
            "lanes": GaugeMetricFamily("trtmodel_lanes", "Lanes that can take requests", labels=["revision"]),
            "busy": GaugeMetricFamily("trtmodel_lanes_busy", "Lanes at work", labels=["revision"]),
            "waiting": GaugeMetricFamily("trtmodel_queue_length", "Requests that wait for a lane", labels=["revision"]),
            "quarantined": GaugeMetricFamily(
                "trtmodel_quarantined_regions", "Regions of hosts that are ended but not reaped", labels=["revision"]
            ),
        }
        totals: dict[str, list[int]] = {}
        for engine in worker.router.loaded.values():  # two builds of one revision are one series
            scheduler = engine.scheduler
            held = totals.setdefault(engine.revision, [0] * len(by_engine))
            for i, value in enumerate((scheduler.lanes, scheduler.running, scheduler.waiting, scheduler.quarantined)):
                held[i] += value
        for revision, values in totals.items():
            for family, value in zip(by_engine.values(), values, strict=True):
                family.add_metric([revision], value)
        yield from by_engine.values()
        yield _gauge("ready", "1 while requests are wanted", float(worker.is_ready()))
        yield _gauge("staged_bytes", "Bytes of request bodies that are held", self._server.staged)
        yield _gauge("connections", "Open connections of clients", len(self._server.connections))
        yield _gauge("arena_bytes", "Bytes of shared memory for requests, at most", worker.arenas.total_bytes)
        yield _gauge("sequence", "Sequence of the desired state that is held", worker.held.sequence)
        flipped = worker.swapper.flipped
        yield _gauge("flip_seconds", "How long the last change of routes took", flipped.seconds if flipped else None)


def _gauge(name: str, text: str, value: float | None) -> Metric:
    """Without a sample where there is no value yet."""
    return GaugeMetricFamily(f"trtmodel_{name}", text, value=value)
