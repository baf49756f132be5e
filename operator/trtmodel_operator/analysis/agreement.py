"""How well mirrored answers agree with stable's: per output, the worst one counts.

An output with a first place (several values, or whole numbers) agrees where that is the same. Any other (one measured
value) has no answer that is right or wrong: its figure is 1 minus the mean relative error. Rows that cannot be compared
do not agree in either.

The share is judged by Wilson's bounds over *requests*: rows of one request are not independent. Pass if the lower bound
at 95 % is above the limit, Fail if the upper one at 99.95 % is below it (see `errors`). Of a relative error no bounds
are known: it is compared as it is, once there are requests enough.
"""

from __future__ import annotations

from collections.abc import Iterable

from trtmodel_contract.control import OutputAgreement, ShadowCounts
from trtmodel_contract.gate import WORST_FIRST, Verdict
from trtmodel_contract.histogram import merge

from trtmodel_operator.analysis.errors import Z_95, Z_FAIL, wilson_bounds

LEAST_ERRORS = 300  # mirrored requests, before a mean relative error is judged


def total_shadow(counts: Iterable[ShadowCounts | None]) -> ShadowCounts | None:
    """Of several workers; None if none of them mirrors."""
    listed = [c for c in counts if c is not None]
    if not listed:
        return None
    failed: dict[str, int] = {}
    outputs: dict[str, OutputAgreement] = {}
    for c in listed:
        for kind, n in c.failed.items():
            failed[kind] = failed.get(kind, 0) + n
        for name, found in c.outputs.items():
            outputs[name] = found.plus(outputs.get(name, OutputAgreement()))
    buckets = sorted({bucket for c in listed for bucket in c.compute})
    return ShadowCounts(
        mirrored=sum(c.mirrored for c in listed),
        dropped=sum(c.dropped for c in listed),
        failed=failed,
        compute={bucket: merge(c.compute.get(bucket, {}) for c in listed) for bucket in buckets},
        outputs=outputs,
    )


def judge_agreement(shadow: ShadowCounts | None, limit: float | None) -> tuple[Verdict, str]:
    """The verdict, and what was seen in words ('' if nothing was mirrored). Without a limit it is Pass."""
    if shadow is None:
        return Verdict.PASS, ""
    judged = [_output(name, found, shadow.mirrored, limit) for name, found in sorted(shadow.outputs.items())]
    if not judged:
        text = f"no mirrored answer can be compared ({shadow.dropped:,} were dropped, since engines had work to do)"
        return (Verdict.PASS if limit is None else Verdict.INCONCLUSIVE), text
    verdict, _, text = min(judged, key=lambda one: (WORST_FIRST.index(one[0]), one[1]))
    return verdict, text


def _output(name: str, found: OutputAgreement, requests: int, limit: float | None) -> tuple[Verdict, float, str]:
    comparable = found.rows - found.incomparable
    ranked = found.ranked > 0 or comparable == 0
    if ranked:
        rows = max(found.ranked + found.incomparable, 1)
        share = min(1.0, max(0.0, found.top1_equal / rows))
        text = f"{share:.2%} of {requests:,} mirrored answers agree in output {name}"
    else:
        share = min(1.0, max(0.0, 1 - found.relative_error / max(found.rows, 1)))
        text = f"output {name} differs by {1 - share:.2%} in the mean of {requests:,} mirrored answers"
    if limit is None:
        return Verdict.PASS, share, text
    text += f", limit {limit:.2%}"
    if not ranked:
        if requests < LEAST_ERRORS:
            return Verdict.INCONCLUSIVE, share, text
        return (Verdict.PASS if share >= limit else Verdict.FAIL), share, text
    n = max(1, min(rows, requests))
    x = share * n
    if wilson_bounds(x, n, Z_95)[0] >= limit:
        return Verdict.PASS, share, text
    if wilson_bounds(x, n, Z_FAIL)[1] < limit:
        return Verdict.FAIL, share, text
    return Verdict.INCONCLUSIVE, share, text
