"""The statistics extension: counters of a revision as Triton's clients read them. Durations are in nanoseconds, since
this process began."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trtmodel_worker.front.engine import Engine
from trtmodel_worker.front.stats import Histogram, RevisionStats

_NONE = {"count": 0, "ns": 0}


def statistics(model: str, engines: Sequence[Engine]) -> dict[str, Any]:
    """Two builds of one revision are one entry: they count together."""
    by_revision = {engine.revision: engine.stats for engine in engines}
    return {"model_stats": [_entry(model, revision, stats) for revision, stats in by_revision.items()]}


def _entry(model: str, revision: str, stats: RevisionStats) -> dict[str, Any]:
    total = _duration(stats.total)
    copied = {"count": total["count"], "ns": 0}  # copies to and from the engine are within compute_infer
    return {
        "name": model,
        "version": revision,
        "last_inference": 0,
        "inference_count": stats.rows,
        "execution_count": stats.batches,
        "inference_stats": {
            "success": total,
            "fail": {"count": sum(n for status, n in stats.responses.items() if status != 200), "ns": 0},
            "queue": _duration(stats.queue),
            "compute_input": copied,
            "compute_infer": _duration(stats.compute),
            "compute_output": copied,
            "cache_hit": _NONE,
            "cache_miss": _NONE,
        },
        "batch_stats": [],
    }


def _duration(histogram: Histogram) -> dict[str, int]:
    return {"count": sum(histogram.counts), "ns": int(histogram.total * 1e9)}
