"""Hosts prove themselves on an idle lane: from time to time, and when one request after the other fails on one."""

from __future__ import annotations

from trtmodel_worker.front import ladder
from trtmodel_worker.front.batching import Waiting
from trtmodel_worker.front.calls import Batch
from trtmodel_worker.front.lanes import Host, LanePort, Lanes, next_generation
from trtmodel_worker.front.stats import RevisionStats
from trtmodel_worker.host.wire import Answer, FailureClass, probe_message

_BROKEN = (FailureClass.RECOVERABLE, FailureClass.INTERNAL)  # what a host in order does not say again and again


class Probes:
    """Of one engine's hosts."""

    def __init__(self, lanes: Lanes, waiting: Waiting, stats: RevisionStats) -> None:
        self._lanes = lanes
        self._waiting = waiting
        self._stats = stats

    def look(self) -> None:
        """One idle lane of each host proves itself again, if nothing waits and, where there are others, another one is
        free meanwhile."""
        hosts: set[int] = set()
        fewest = min(2, self._lanes.living)
        for lane in list(self._lanes.free):
            if len(self._waiting) or len(self._lanes.free) < fewest or id(lane.host) in hosts:
                continue
            hosts.add(id(lane.host))
            self._probe(lane)

    def judge(self, host: Host, batch: Batch, answer: Answer) -> None:
        """A host on which one request after the other fails must prove itself. The same request again says nothing."""
        if answer.failure is None:
            host.failures = 0
        elif answer.failure in _BROKEN and not batch.calls[0].tries:
            host.failures += 1
            self.doubt(host)

    def doubt(self, host: Host) -> None:
        """After so many failures in a row its golden samples tell whether the host is broken, and replaced, or the
        requests are such: one client with bad ones must not end a host that serves the others well."""
        if host.failures >= ladder.MAX_FAILURES_IN_A_ROW:
            lane = next((lane for lane in self._lanes.free if lane.host is host), None)
            if lane is not None:
                host.failures = 0
                self._probe(lane)

    def _probe(self, lane: LanePort) -> None:
        generation = next_generation()
        if self._lanes.send(lane, probe_message(generation)):
            lane.probing = generation
            self._stats.probes += 1
