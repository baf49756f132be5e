"""Prometheus metrics of the operator (docs/metrics.md lists them). No label grows without bound: the only objects named
are TRTModels, and their series go when they go."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trtmodel_operator import conditions, reasons, targets
from trtmodel_operator.model import Decision, HistoryEntry, Memory, Observed
from trtmodel_operator.ports import Key

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_P = "trtmodel_operator_"

# A counter that is born with its first event shows no increase of it, so what is foreseen begins at 0.
_PASSES = ("done", "conflict", "error", "timeout", "bug")
_CALLS = ("ok", "conflict", "refused", "unauthorized", "unreachable")
_OUTCOMES = (reasons.PROMOTED, reasons.ROLLED_BACK, reasons.GATE_FAILED, reasons.ABORTED, reasons.SUPERSEDED)
_BACK = (
    reasons.ENGINE_FAILED,
    reasons.ENGINE_DIED,
    reasons.WORKER_DIED,
    reasons.ERROR_RATE,
    reasons.TOO_SLOW,
    reasons.DISAGREES,
    reasons.METRIC,
    reasons.DEADLINE,
    reasons.ROLLED_BACK_BY_COMMAND,
)
_BAD = {conditions.STALLED: ("True",), conditions.DEGRADED: ("True",), conditions.AVAILABLE: ("False", "Unknown")}
_WORKERS = {
    "desired": "desired",
    "ready": "ready",
    "onStable": "stable",
    "onCandidate": "candidate",
    "withStandby": "standby",
}


class OperatorMetrics:
    """Implements `ports.Metrics`, with a registry of its own, so that several can live in one process."""

    def __init__(self) -> None:
        # A second series for each counter, of which nobody here makes use.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = r = CollectorRegistry()
        self.reconciles = Counter(f"{_P}reconcile", "Passes over a TRTModel, by result", ["result"], registry=r)
        self.seconds = Histogram(f"{_P}reconcile_seconds", "Seconds that a pass took", buckets=_BUCKETS, registry=r)
        self.events = Counter(f"{_P}events", "Events that the watches delivered, by kind", ["kind"], registry=r)
        self.api = Counter(
            f"{_P}api_requests",
            "Calls to the Kubernetes API; code is an HTTP status, timeout or error",
            ["verb", "resource", "code"],
            registry=r,
        )
        self.calls = Counter(
            f"{_P}worker_requests",
            "Requests to workers' control ports; unauthorized: the worker did not accept the signature or the time",
            ["verb", "result"],
            registry=r,
        )
        self.builds = Counter(f"{_P}builds", "Engines built, and builds that failed for good", ["result"], registry=r)
        self.swaps = Counter(f"{_P}swaps", "Rollouts that ended, by outcome", ["result"], registry=r)
        self.rollbacks = Counter(f"{_P}rollbacks", "Rollouts that were rolled back, by reason", ["reason"], registry=r)
        self.leader = Gauge(f"{_P}leader", "1 if this replica leads", registry=r)
        self.lag = Gauge(f"{_P}loop_lag_seconds", "Seconds that the event loop was late at its last beat", registry=r)
        self._active_builds = Gauge(
            f"{_P}active_builds", "Builds that run, or wait for their turn", ["state"], registry=r
        )
        self._queue_depth = Gauge(f"{_P}queue_depth", "TRTModels that wait for a pass", registry=r)
        self._queue_oldest = Gauge(
            f"{_P}queue_oldest_seconds", "Seconds that the TRTModel has waited that waits longest", registry=r
        )
        self._following = Gauge(f"{_P}followed_workers", "Workers that tell their news by a long poll", registry=r)
        self._keys = Gauge(
            f"{_P}signing_keys", "Public keys that workers are told: 2 while the signing key is exchanged", registry=r
        )
        self._refused = Gauge(
            f"{_P}refused_kinds", "Kinds of objects that the API server does not let this replica read", registry=r
        )
        self._info = Info(f"{_P}build", "The operator's version", registry=r)
        self._models: dict[Key, _Model] = {}
        r.register(_Models(self._models))
        for counter, values in ((self.reconciles, _PASSES), (self.swaps, _OUTCOMES), (self.rollbacks, _BACK)):
            for value in values:
                counter.labels(value)
        self.builds.labels(reasons.BUILT)
        for verb in ("GET", "PUT"):
            for result in _CALLS:
                self.calls.labels(verb, result)

    def describe(self, version: str) -> None:
        self._info.info({"version": version})

    def watch(
        self,
        depth: Callable[[], float],
        oldest: Callable[[], float],
        following: Callable[[], float],
        keys: Callable[[], float],
    ) -> None:
        """Gauges that are read when they are scraped."""
        self._queue_depth.set_function(depth)
        self._queue_oldest.set_function(oldest)
        self._following.set_function(following)
        self._keys.set_function(keys)

    def watch_rights(self, refused: Callable[[], float]) -> None:
        """Of a replica that stands by, too: it lacks the same rights."""
        self._refused.set_function(refused)

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

    def asked_worker(self, verb: str, result: str) -> None:
        self.calls.labels(verb, result).inc()

    def count_builds(self, running: int, waiting: int) -> None:
        """Over all models, as they were seen last."""
        self._active_builds.labels("running").set(running)
        self._active_builds.labels("waiting").set(waiting)

    def persisted(self, key: Key, seen: Observed, decision: Decision, status: Mapping[str, object]) -> None:
        before, after = seen.memory, decision.memory
        known = {(b.revision, b.target) for b in before.built}
        self.builds.labels(reasons.BUILT).inc(sum((b.revision, b.target) not in known for b in after.built))
        if after.failure is not None and after.failure != before.failure:
            self.builds.labels(after.failure.reason).inc()
        for entry in after.history:
            if entry not in before.history:
                self.swaps.labels(entry.outcome).inc()
                if entry.outcome == reasons.ROLLED_BACK:
                    self.rollbacks.labels(entry.reason).inc()
        self._models[key] = _model(seen, decision, status)

    def forget(self, key: Key) -> None:
        self._models.pop(key, None)


@dataclass(frozen=True, slots=True)
class _Model:
    """What is shown of one TRTModel: labels after its own, and the value if it is not 1."""

    stage: str
    troubles: tuple[tuple[str, str], ...]
    workers: tuple[tuple[str, str, int], ...]
    missing: tuple[tuple[str, int], ...]
    revisions: tuple[tuple[str, str], ...]
    back: tuple[str, float] | None


class _Models(Collector):
    """Makes the series when they are asked for: of 5,000 models that costs less than to keep them."""

    def __init__(self, models: Mapping[Key, _Model]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        def family(name: str, text: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"{_P}model_{name}", text, labels=["namespace", "name", *labels])

        stage = family("stage", "1 for the stage that a TRTModel is in", "stage")
        trouble = family("trouble", "1 while Stalled or Degraded is True, or Available is not", "condition", "reason")
        workers = family("workers", "Workers of a target, as status counts them", "target", "state")
        missing = family("standby_missing", "Ready workers that do not hold the standby that there is", "target")
        revision = family("revision", "1 for the revisions that are stable and candidate", "role", "revision")
        back = family(
            "rolled_back_timestamp_seconds",
            "When the last rollout ended, if it was rolled back (seconds since the epoch)",
            "reason",
        )
        for key, model in dict(self._models).items():  # a copy: this runs in another thread
            stage.add_metric([*key, model.stage], 1)
            for condition, reason in model.troubles:
                trouble.add_metric([*key, condition, reason], 1)
            for target, state, count in model.workers:
                workers.add_metric([*key, target, state], count)
            for target, count in model.missing:
                missing.add_metric([*key, target], count)
            for role, found in model.revisions:
                revision.add_metric([*key, role, found], 1)
            if model.back is not None:
                back.add_metric([*key, model.back[0]], model.back[1])
        yield from (stage, trouble, workers, missing, revision, back)


def _model(seen: Observed, decision: Decision, status: Mapping[str, object]) -> _Model:
    memory = decision.memory
    counts = {str(t.get("name")): _counts(t.get("workers")) for t in targets.listed(status.get("targets"))}
    roles = (("stable", memory.stable), ("candidate", memory.candidate))
    return _Model(
        stage=decision.situation.stage.value,
        troubles=tuple(
            (str(c.get("type")), str(c.get("reason")))
            for c in targets.listed(status.get("conditions"))
            if c.get("status") in _BAD.get(str(c.get("type")), ())
        ),
        workers=tuple((name, state, n) for name, found in counts.items() for state, n in found.items()),
        missing=tuple((name, _missing(seen, memory, found)) for name, found in counts.items()),
        revisions=tuple((role, deployed.revision) for role, deployed in roles if deployed is not None),
        back=_back(memory.history[0]) if memory.history else None,
    )


def _counts(workers: object) -> dict[str, int]:
    found = workers if isinstance(workers, Mapping) else {}
    return {state: int(found.get(name) or 0) for name, state in _WORKERS.items()}


def _missing(seen: Observed, memory: Memory, workers: Mapping[str, int]) -> int:
    """Where the user wants one engine in memory at a time, no standby is what was asked for."""
    wanted = memory.standby is not None and not (seen.spec and seen.spec.rollout.memory_policy == "Resource")
    return max(0, workers["ready"] - workers["standby"]) if wanted else 0


def _back(newest: HistoryEntry) -> tuple[str, float] | None:
    if newest.outcome != reasons.ROLLED_BACK:
        return None
    try:
        return newest.reason, datetime.datetime.fromisoformat(newest.at).timestamp()
    except ValueError:  # a status that was written by another hand
        return newest.reason, 0.0
