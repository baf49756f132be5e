"""How near one engine's output is to another's: sums over rows, as the contract's `OutputAgreement` defines them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from trtmodel_contract.control import OutputAgreement
from trtmodel_contract.manifest import TensorSpec

from trtmodel_worker.engines.base import DTYPES, Array
from trtmodel_worker.front.calls import Shape

BUDGET_BYTES = 64 * 1024  # of all outputs of one request: comparing them takes about 0.5 ms of the loop
MOST_OUTPUTS = 16
_MOST_RELATIVE_ERROR = 1000.0


class Sample:
    """The first rows of each output of one answer, as many as are compared. Holds copies."""

    def __init__(self, specs: Sequence[TensorSpec], outputs: Sequence[tuple[Shape, memoryview]]) -> None:
        self._taken: list[tuple[int, TensorSpec, Shape, int, bytes]] = []
        left = BUDGET_BYTES
        for i, (spec, (shape, view)) in enumerate(zip(specs, outputs, strict=True)):
            if spec.datatype == "BYTES" or not shape or not view.nbytes or len(self._taken) == MOST_OUTPUTS:
                continue
            each = view.nbytes // shape[0]
            rows = min(shape[0], left // each)
            if rows:
                left -= rows * each
                self._taken.append((i, spec, shape, rows, bytes(view[: rows * each])))

    def compare(self, outputs: Sequence[tuple[Shape, memoryview]]) -> dict[str, OutputAgreement]:
        """Another engine's answer to the same request, by the output's name."""
        found = {}
        for i, spec, shape, rows, expected in self._taken:
            other, view = outputs[i]
            if other != shape:
                found[spec.name] = _nothing_equal(rows)
                continue
            dtype = DTYPES[spec.datatype]
            one = np.frombuffer(expected, dtype).reshape(rows, -1)
            found[spec.name] = agreement(one, np.frombuffer(view[: len(expected)], dtype).reshape(rows, -1))
        return found


def agreement(stable: Array, candidate: Array) -> OutputAgreement:
    """Of two arrays [rows, values]. NaN and infinity are equal to themselves."""
    rows, width = stable.shape
    whole = stable.dtype.kind in "iub"
    first = stable.argmax(axis=1) == candidate.argmax(axis=1) if width > 1 else (stable == candidate)[:, 0]
    ranked = width > 1 or whole
    a, b = stable.astype(np.float64), candidate.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    if not finite.all():
        same = ~finite & ((a == b) | (np.isnan(a) & np.isnan(b)))
        a[same] = b[same] = 0.0
        comparable = (finite | same).all(axis=1)
        a, b, first = a[comparable], b[comparable], first[comparable]
    scale = np.maximum(np.abs(a).max(axis=1, initial=0.0), np.abs(b).max(axis=1, initial=0.0))
    scale[scale == 0.0] = 1.0  # squares of large values would be infinite, those of small ones nothing
    a, b = a / scale[:, None], b / scale[:, None]
    norm_a, norm_b = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
    both = norm_a * norm_b
    cosine = np.divide((a * b).sum(axis=1), both, out=np.zeros_like(both), where=both > 0.0)
    cosine[(norm_a == 0.0) & (norm_b == 0.0)] = 1.0
    difference = np.linalg.norm(a - b, axis=1)
    error = np.divide(difference, norm_a, out=np.where(difference > 0.0, 1.0, 0.0), where=norm_a > 0.0)
    found = OutputAgreement(
        rows=len(a),
        ranked=len(a) if ranked else 0,
        top1_equal=int(first.sum()) if ranked else 0,
        cosine=float(np.clip(cosine, -1.0, 1.0).sum()),
        relative_error=float(np.minimum(error, _MOST_RELATIVE_ERROR).sum()),
    )
    return found.plus(_nothing_equal(rows - len(a), ranked=ranked))


def _nothing_equal(rows: int, *, ranked: bool = True) -> OutputAgreement:
    return OutputAgreement(rows, rows if ranked else 0, 0, 0.0, float(rows), rows)
