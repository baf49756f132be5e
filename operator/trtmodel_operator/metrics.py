"""Prometheus metrics of the operator. No label grows without bound: the only objects named are TRTModels, and their
series go when they go."""

from __future__ import annotations

import socket
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, start_http_server

from trtmodel_operator import reasons
from trtmodel_operator.model import Decision, Memory, Stage
from trtmodel_operator.ports import Key

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class OperatorMetrics:
    """Implements `ports.Metrics`, with a registry of its own, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        p = "trtmodel_operator_"
        self.reconciles = Counter(f"{p}reconcile", "Passes by result", ["result"], registry=r)
        self.seconds = Histogram(f"{p}reconcile_seconds", "Duration of a pass", buckets=_BUCKETS, registry=r)
        self.events = Counter(f"{p}events", "Watch events by kind", ["kind"], registry=r)
        self.api = Counter(f"{p}api_requests", "Calls to the Kubernetes API", ["verb", "resource", "code"], registry=r)
        self.builds = Counter(f"{p}builds", "Builds by result", ["result"], registry=r)
        self.swaps = Counter(f"{p}swaps", "Rollouts that ended, by result", ["result"], registry=r)
        self.rollbacks = Counter(f"{p}rollbacks", "Rollouts that were rolled back, by reason", ["reason"], registry=r)
        self.leader = Gauge(f"{p}leader", "1 if this replica leads", registry=r)
        self.lag = Gauge(f"{p}loop_lag_seconds", "How late the event loop was at its last beat", registry=r)
        self.stage = Gauge(
            f"{p}model_stage", "1 for the stage that a model is in", ["namespace", "name", "stage"], registry=r
        )
        self._active_builds = Gauge(f"{p}active_builds", "Builds that run or wait", ["state"], registry=r)
        self._queue_depth = Gauge(f"{p}queue_depth", "Models that wait for a pass", registry=r)
        self._queue_oldest = Gauge(f"{p}queue_oldest_seconds", "How long the first of them has waited", registry=r)
        self._following = Gauge(f"{p}followed_workers", "Workers with an open long poll", registry=r)
        self._info = Info(f"{p}build", "What this is", registry=r)
        self._stages: dict[Key, str] = {}

    def describe(self, version: str) -> None:
        self._info.info({"version": version})

    def watch(self, depth: Callable[[], float], oldest: Callable[[], float], following: Callable[[], float]) -> None:
        """Gauges that are read when they are scraped."""
        self._queue_depth.set_function(depth)
        self._queue_oldest.set_function(oldest)
        self._following.set_function(following)

    def serve(self, host: str, port: int) -> Callable[[], None]:
        """In a thread, so that it answers when the event loop does not. Returns what stops it. Raises OSError."""
        everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104 - Prometheus comes from outside
        server, thread = start_http_server(port, addr=host or everywhere, registry=self.registry)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join(timeout=5)

        return stop

    def called(self, verb: str, resource: str, code: str) -> None:
        self.api.labels(verb, resource, code).inc()

    def count_builds(self, running: int, waiting: int) -> None:
        """Over all models, as they were seen last."""
        self._active_builds.labels("running").set(running)
        self._active_builds.labels("waiting").set(waiting)

    def persisted(self, key: Key, before: Memory, decision: Decision) -> None:
        after = decision.memory
        known = {(b.revision, b.target) for b in before.built}
        self.builds.labels(reasons.BUILT).inc(sum((b.revision, b.target) not in known for b in after.built))
        if after.failure is not None and after.failure != before.failure:
            self.builds.labels(after.failure.reason).inc()
        for entry in after.history:
            if entry not in before.history:
                self.swaps.labels(entry.outcome).inc()
                if entry.outcome == reasons.ROLLED_BACK:
                    self.rollbacks.labels(entry.reason).inc()
        self._stands_at(key, decision.situation.stage)

    def forget(self, key: Key) -> None:
        if stage := self._stages.pop(key, None):
            self.stage.remove(*key, stage)

    def _stands_at(self, key: Key, stage: Stage) -> None:
        if self._stages.get(key) != stage.value:
            self.forget(key)
            self._stages[key] = stage.value
            self.stage.labels(*key, stage.value).set(1)
