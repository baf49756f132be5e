"""Whether what a worker reports can be true at all.

A worker runs what a tenant gave it, and its words decide about rollouts. One that says what cannot be (minus five
requests, a fence beyond every number that was ever given) is unknown, as if it had not answered: no figure of it is
added to the others', and it cannot drive the operator's own sequence to its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trtmodel_contract.control import AttemptCounts, ModelReport, Report, ShadowCounts
from trtmodel_contract.histogram import LAST_INDEX

from trtmodel_operator.model import SEQUENCE_MOST

LARGEST = 2**52  # of any count: half of what JSON numbers are exact up to


def implausible(report: Report) -> str:
    """The first thing that cannot be, in words; '' if there is none."""
    return next(_impossible(report), "")


def _impossible(report: Report) -> Iterator[str]:
    sequences = {"sequence": report.fence.sequence, "pointerSequence": report.pointer_sequence}
    yield from _out_of_range(sequences, SEQUENCE_MOST)
    for model in report.models.values():
        yield from _of_model(model)


def _of_model(model: ModelReport) -> Iterator[str]:
    for engine in model.engines:
        yield from _out_of_range({"deaths": engine.deaths})
    yield from _out_of_range({"weight": model.routes.weight, "shadow": model.routes.shadow}, 100)
    for counts in (c for window in model.windows.values() for c in window.values()):
        yield from _of_attempts(counts)


def _of_attempts(counts: AttemptCounts) -> Iterator[str]:
    yield from _out_of_range({"ok": counts.ok, "abandoned": counts.abandoned, "synthetic": counts.synthetic})
    yield from _out_of_range(counts.failed)
    yield from _of_times(counts.compute)
    if counts.shadow is not None:
        yield from _of_shadow(counts.shadow)


def _of_shadow(shadow: ShadowCounts) -> Iterator[str]:
    yield from _out_of_range({"mirrored": shadow.mirrored, "dropped": shadow.dropped})
    yield from _out_of_range(shadow.failed)
    yield from _of_times(shadow.compute)
    for found in shadow.outputs.values():
        rows = {"rows": found.rows, "ranked": found.ranked, "top1Equal": found.top1_equal}
        yield from _out_of_range({**rows, "incomparable": found.incomparable})
        if not abs(found.relative_error) <= LARGEST or not abs(found.cosine) <= LARGEST:
            yield f"sums of {found.relative_error:g} and {found.cosine:g} over {found.rows} rows"


def _of_times(compute: Mapping[str, Mapping[int, int]]) -> Iterator[str]:
    for histogram in compute.values():
        if histogram and not 0 <= min(histogram) <= max(histogram) <= LAST_INDEX:
            yield f"buckets of times from {min(histogram)} to {max(histogram)}"
        if histogram and not 0 <= min(histogram.values()) <= max(histogram.values()) <= LARGEST:
            yield f"times that were counted from {min(histogram.values())} to {max(histogram.values())}"


def _out_of_range(numbers: Mapping[str, int], most: int = LARGEST) -> Iterator[str]:
    for name, number in numbers.items():
        if not 0 <= number <= most:
            yield f"{name} is {number}"[:80]
