"""The models that are rolled out: each with its own gain, so that an answer tells which one gave it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from e2e import sources

GOOD_ONES = 48
BAD_GAIN = 1000
OUTLIER = 2.0**18  # times a hidden value of 1 it is past the 65,504 where FP16 ends
EVERY = 4
OUTLIERS, PAGE = "outliers", "page"
Row = Any


def write(folder: Path) -> None:
    """g1.onnx ... with gain 1 ..., outliers.onnx (the same answers as gain 1000 in FP32, none in FP16), page.onnx
    (which is no model), eval.npz."""
    for gain in range(1, GOOD_ONES + 1):
        onnx.save(sources.tiny(f"chaos-{gain}", gain=float(gain)), folder / f"g{gain}.onnx")
    onnx.save(_outliers(), folder / f"{OUTLIERS}.onnx")
    (folder / f"{PAGE}.onnx").write_text("<html><body>502 Bad Gateway</body></html>")
    x = sources.samples()
    np.savez(folder / "eval.npz", x=x, labels=sources.scores(x).argmax(axis=1))


def rows() -> list[tuple[list[float], Row]]:
    """What is asked, and what gain 1 answers."""
    x = sources.samples(32)
    return [(row.tolist(), scores) for row, scores in zip(x, sources.scores(x), strict=True)]


def gain_of(scores: list[float], expected: Row) -> int:
    """Which model gave this answer; 0 for an answer that none of them gives."""
    found = np.asarray(scores, np.float64)
    if found.shape != expected.shape or not np.isfinite(found).all():
        return 0
    gain = round(float(found @ expected / (expected @ expected)))
    return gain if np.allclose(found, gain * expected, rtol=1e-2, atol=1e-2 * max(1, abs(gain))) else 0


def _outliers() -> onnx.ModelProto:
    model = sources.tiny("chaos-outliers", gain=float(BAD_GAIN))
    weights = {t.name: t for t in model.graph.initializer}
    first, second = (numpy_helper.to_array(weights[name]).copy() for name in ("first", "second"))
    first[:, ::EVERY] *= np.float32(OUTLIER)
    second[::EVERY] /= np.float32(OUTLIER)
    weights["first"].CopyFrom(numpy_helper.from_array(first, "first"))
    weights["second"].CopyFrom(numpy_helper.from_array(second, "second"))
    return model
