"""What the figures of a canary say: Pass, Fail, Inconclusive or NoData, with a sentence. Pure.

*Attempts* are counted by the engine that they were routed to, before a retry or a fallback could hide a failure; those
of mirrored requests are among them. `errors`, `latency`, `agreement` and `queries` say what is proof of what.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from trtmodel_contract.control import AttemptCounts
from trtmodel_contract.gate import WORST_FIRST, Verdict
from trtmodel_contract.histogram import merge

from trtmodel_operator.analysis.agreement import judge_agreement, total_shadow
from trtmodel_operator.analysis.errors import (
    attempts,
    difference_bounds,
    failures,
    judge_errors,
    least_proved,
    least_requests,
)
from trtmodel_operator.analysis.latency import exceedance, judge_latency
from trtmodel_operator.analysis.queries import FAILING_ANSWERS, judge_query
from trtmodel_operator.model import AnalysisSpec, NoData


@dataclass(frozen=True)
class Look:
    """One look at the figures. `sentence` says all of it, `error_sentence`, `latency_sentence` and
    `agreement_sentence` a part; `short` fits into a printed column. `too_few`: only requests, or what to
    compare them with, are lacking for a verdict."""

    verdict: Verdict
    errors: Verdict
    latency: Verdict
    requests: int
    sentence: str
    short: str
    error_sentence: str = ""
    latency_sentence: str = ""
    agreement: Verdict = Verdict.PASS
    agreement_sentence: str = ""
    too_few: bool = False


def total(counts: Iterable[AttemptCounts]) -> AttemptCounts:
    """The attempts of several workers together."""
    listed = list(counts)
    failed: dict[str, int] = {}
    buckets: dict[str, list[Mapping[int, int]]] = {}
    for c in listed:
        for kind, n in c.failed.items():
            failed[kind] = failed.get(kind, 0) + n
        for bucket, histogram in c.compute.items():
            buckets.setdefault(bucket, []).append(histogram)
    return AttemptCounts(
        ok=sum(c.ok for c in listed),
        failed=failed,
        abandoned=sum(c.abandoned for c in listed),
        compute={bucket: merge(histograms) for bucket, histograms in sorted(buckets.items())},
        shadow=total_shadow(c.shadow for c in listed),
        synthetic=sum(c.synthetic for c in listed),
    )


def look(candidate: AttemptCounts, baseline: AttemptCounts, limits: AnalysisSpec, against: str) -> Look:
    """`against` says in words what the baseline is."""
    tried = _mirrored_too(candidate)
    requests = attempts(tried)
    if requests == 0:
        text = f"no request has reached the candidate: NoTraffic (it is compared with {against})"
        none = Look(Verdict.NO_DATA, Verdict.NO_DATA, Verdict.NO_DATA, 0, text, "0 req", too_few=True)
        return _let_pass(none) if limits.no_data is NoData.PROMOTE else none
    errors, error_text, error_short = judge_errors(tried, baseline, limits)
    latency, latency_text, latency_short = judge_latency(tried.compute, baseline.compute, limits.max_latency_ratio)
    agreement, agreement_text = judge_agreement(candidate.shadow, limits.min_agreement)
    too_few = (requests < limits.min_requests or not attempts(baseline)) and errors is not Verdict.FAIL
    if requests < limits.min_requests:
        latency = Verdict.INCONCLUSIVE
    golden = [f"{candidate.synthetic:,} of the candidate's requests were golden samples"] if candidate.synthetic else []
    texts = [error_text, latency_text, *filter(None, [agreement_text]), *golden]
    found = Look(
        verdict=worst(errors, latency, agreement),
        errors=errors,
        latency=latency,
        requests=requests,
        sentence=f"{'; '.join(texts)}; compared with {against}",
        short=f"{requests:,} req, {error_short}, {latency_short}",
        error_sentence=f"{error_text}; compared with {against}",
        latency_sentence=f"{latency_text}; compared with {against}",
        agreement=agreement,
        agreement_sentence=agreement_text,
        too_few=too_few,
    )
    if not too_few or limits.no_data is not NoData.PROMOTE or failures(tried) or agreement is not Verdict.PASS:
        return found
    # The exceedance test is exact for any number of samples: a few that are all too slow are proof enough.
    slow = judge_latency(tried.compute, baseline.compute, limits.max_latency_ratio, least=1)[0] is Verdict.FAIL
    return found if slow else _let_pass(found)


def requests(counts: AttemptCounts) -> int:
    """All that came of it, mirrored ones too."""
    return attempts(_mirrored_too(counts))


def worst(*verdicts: Verdict) -> Verdict:
    return min(verdicts, key=WORST_FIRST.index)


def _let_pass(found: Look) -> Look:
    """noData Promote: too few requests came to prove anything, and what there is does not speak against it."""
    text = f"noData Promote lets it pass, though nothing is proved: {found.sentence}"
    return replace(found, verdict=Verdict.PASS, errors=Verdict.PASS, latency=Verdict.PASS, sentence=text)


def _mirrored_too(counts: AttemptCounts) -> AttemptCounts:
    """Mirrored requests are attempts of the candidate like any other, but that no client met them."""
    shadow = counts.shadow
    if shadow is None:
        return counts
    failed = {
        kind: counts.failed.get(kind, 0) + shadow.failed.get(kind, 0) for kind in {*counts.failed, *shadow.failed}
    }
    buckets = sorted({*counts.compute, *shadow.compute})
    compute = {b: merge((counts.compute.get(b, {}), shadow.compute.get(b, {}))) for b in buckets}
    return replace(counts, ok=counts.ok + shadow.mirrored, failed=failed, compute=compute)


__all__ = [
    "FAILING_ANSWERS",
    "Look",
    "difference_bounds",
    "exceedance",
    "judge_query",
    "least_proved",
    "least_requests",
    "look",
    "requests",
    "total",
    "worst",
]
