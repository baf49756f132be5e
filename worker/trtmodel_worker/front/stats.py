"""Plain counters of one revision, written on the request's path and read by the metrics port."""

from __future__ import annotations

from bisect import bisect_left

from trtmodel_contract.control import OutputAgreement

# Geometric, from 0.1 ms to about two minutes: a model of 2 ms that becomes 4 ms is seen, and so is one of 20 s.
BOUNDS = tuple(1e-4 * 1.5**i for i in range(35))
ROWS = tuple(2**i for i in range(11))  # upper bounds of the sizes of batches that are told apart


class Histogram:
    """Counts per bucket of BOUNDS, the last one for everything longer."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, count so far), as Prometheus wants it."""
        so_far, pairs = 0, []
        for bound, count in zip((*BOUNDS, float("inf")), self.counts, strict=True):
            so_far += count
            pairs.append(("+Inf" if bound == float("inf") else f"{bound:.6g}", float(so_far)))
        return pairs


class RevisionStats:
    """What the engines of one revision did. `responses` by HTTP status; seconds from admission: waiting for a lane, in
    the engine, all of it. `batches` and `rows` that were dispatched, `sizes` counts batches by their rows (as ROWS),
    `padded_rows` that were added to fill a bucket, `splits` of a failed batch into its requests. The ladder: `retries`
    and those that were `denied` for want of budget, `hedges` and those that answered first, `replays` after a death,
    `probes` of idle lanes, lanes that a host rebuilt. As a shadow: requests of stable that were `mirrored`, dropped or
    failed, and the `agreement` with stable by output."""

    def __init__(self) -> None:
        self.responses: dict[int, int] = {}
        self.failures: dict[str, int] = {}
        self.queue = Histogram()
        self.compute = Histogram()
        self.total = Histogram()
        self.lane_hits = 0
        self.lane_waits = 0
        self.refused = 0
        self.timeouts = 0
        self.replays = 0
        self.deaths = 0
        self.fetch_seconds: float | None = None  # of the last time
        self.batches = 0
        self.sizes = [0] * (len(ROWS) + 1)
        self.rows = 0
        self.padded_rows = 0
        self.splits = 0
        self.retries = 0
        self.denied = 0
        self.hedges = 0
        self.hedge_wins = 0
        self.probes = 0
        self.probe_failures = 0
        self.rebuilt_lanes = 0
        self.mirrored = 0
        self.mirrors_dropped = 0
        self.mirrors_failed = 0
        self.agreement: dict[str, OutputAgreement] = {}

    def asked(self, *, waits: bool) -> None:
        self.lane_waits += waits
        self.lane_hits += not waits

    def observe(self, queue: float, compute: float, total: float) -> None:
        self.queue.observe(queue)
        self.compute.observe(compute)
        self.total.observe(total)

    def add_agreement(self, output: str, found: OutputAgreement) -> None:
        self.agreement[output] = found.plus(self.agreement.get(output, OutputAgreement()))

    def dispatched(self, rows: int, padded: int) -> None:
        """A batch of `rows` rows was given to a lane, with `padded` more."""
        self.batches += 1
        self.rows += rows
        self.padded_rows += padded
        self.sizes[min((rows - 1).bit_length(), len(ROWS))] += 1

    def count_response(self, status: int) -> None:
        self.responses[status] = self.responses.get(status, 0) + 1

    def count_failure(self, kind: str) -> None:
        self.failures[kind] = self.failures.get(kind, 0) + 1
