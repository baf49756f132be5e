"""Attempts, counted by the operator's window id and by engine: what the analysis of a rollout is made of."""

from __future__ import annotations

from collections.abc import Mapping

from trtmodel_contract.control import AttemptCounts, OutputAgreement, ShadowCounts
from trtmodel_contract.histogram import bucket_index

KEPT_WINDOWS = 4


class Counters:
    """Attempts of one engine in one window. Mutable, because it is written for every request."""

    __slots__ = ("_mirror", "abandoned", "compute", "failed", "ok", "synthetic")

    def __init__(self) -> None:
        self.ok = 0
        self.abandoned = 0
        self.synthetic = 0
        self.failed: dict[str, int] = {}
        self.compute: dict[str, dict[int, int]] = {}
        self._mirror: Mirror | None = None

    @property
    def attempts(self) -> int:
        return self.ok + self.abandoned + sum(self.failed.values())

    def mirror(self) -> Mirror:
        """What is counted of shadow requests, apart from all others."""
        if self._mirror is None:
            self._mirror = Mirror()
        return self._mirror

    def count_ok(self, bucket: str, seconds: float, attempts: int = 1) -> None:
        """`attempts` that ran together in `seconds`."""
        self.ok += attempts
        histogram = self.compute.get(bucket)
        if histogram is None:
            histogram = self.compute[bucket] = {}
        index = bucket_index(seconds)
        histogram[index] = histogram.get(index, 0) + attempts

    def count_failed(self, kind: str, attempts: int = 1) -> None:
        self.failed[kind] = self.failed.get(kind, 0) + attempts

    def snapshot(self) -> AttemptCounts:
        return AttemptCounts(
            ok=self.ok,
            failed=dict(self.failed),
            abandoned=self.abandoned,
            compute={bucket: dict(histogram) for bucket, histogram in self.compute.items()},
            shadow=self._mirror.snapshot() if self._mirror is not None else None,
            synthetic=self.synthetic,
        )


class Mirror:
    """Shadow requests of one candidate in one window. `attempts` are its engine's."""

    __slots__ = ("attempts", "dropped", "mirrored", "outputs")

    def __init__(self) -> None:
        self.attempts = Counters()
        self.mirrored = 0
        self.dropped = 0
        self.outputs: dict[str, OutputAgreement] = {}

    @property
    def failures(self) -> int:
        return sum(self.attempts.failed.values()) + self.attempts.abandoned

    def add(self, output: str, found: OutputAgreement) -> None:
        self.outputs[output] = found.plus(self.outputs.get(output, OutputAgreement()))

    def snapshot(self) -> ShadowCounts:
        attempts = self.attempts.snapshot()
        failed = dict(attempts.failed)
        if attempts.abandoned:
            failed["Abandoned"] = attempts.abandoned
        return ShadowCounts(self.mirrored, self.dropped, failed, attempts.compute, dict(self.outputs))


class Windows:
    """The newest windows, and the one that they are compared with. An attempt belongs to the window in which it was
    routed."""

    def __init__(self) -> None:
        self.current = ""
        self._windows: dict[str, dict[str, Counters]] = {self.current: {}}

    def roll(self, window: str, baseline: str = "") -> None:
        """Count into `window` from now on. A window that is still kept goes on where it was. `baseline` is kept beside
        the newest: with a single worker, candidates are compared with it, also after a fourth step."""
        counters = self._windows.pop(window, {})
        self._windows[window] = counters
        self.current = window
        others = [kept for kept in self._windows if not baseline or kept != baseline]
        for old in others[:-KEPT_WINDOWS]:
            del self._windows[old]

    def counters(self, digest: str) -> Counters:
        window = self._windows[self.current]
        counters = window.get(digest)
        if counters is None:
            counters = window[digest] = Counters()
        return counters

    def snapshot(self) -> Mapping[str, Mapping[str, AttemptCounts]]:
        return {
            window: {digest: counters.snapshot() for digest, counters in engines.items()}
            for window, engines in self._windows.items()
        }
