"""May rows of different requests be run together? Only where no row sees another, and that is tried, not assumed.

    alone       a, b, c            each golden row by itself (repeated, where no profile allows fewer)
    together    c b a 2a 2b 2c 0   in another order, with strange rows after them
                0 2c 2b 2a a b c   and before them

What a row is answered must not differ by more than the golden sample's tolerance, or a thousandth of the row's greatest
value: another batch size is another order of additions, which no reload of an engine shows. Softmax over the batch,
statistics of a batch, quantisation by a batch's greatest value: all of them are found, since strange rows are smaller
and larger.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from trtmodel_contract.manifest import Manifest, TensorSpec

from trtmodel_worker.engines.base import (
    Array,
    DeviceLost,
    InvalidInput,
    Lane,
    OutOfMemory,
    Recoverable,
    allocate_anew,
)
from trtmodel_worker.host.pace import Pace
from trtmodel_worker.host.proving import Sample, SelfTestFailed, compare
from trtmodel_worker.host.warming import batch_range

_ROUNDING = 1e-3
_MOST_ROWS = 4  # golden rows that are tried
_MOST_TOGETHER = 8  # rows of a batch
_MOST_BYTES = 64 << 20  # of a batch's inputs, unless two rows are more

Rows = Mapping[str, Array]


class _Seen(Exception):
    """Rows must not be run together; the text says why."""


def why_not_batchable(lane: Lane, manifest: Manifest, samples: Sequence[Sample], pace: Pace) -> str:
    """'' if rows were seen not to depend on each other, otherwise a sentence. Raises SelfTestFailed if the engine broke
    down over it."""
    try:
        for kind, specs in (("input", manifest.inputs), ("output", manifest.outputs)):
            for spec in specs:
                if spec.datatype == "BYTES":
                    raise _Seen(f"{kind} {spec.name!r} holds strings, which are not run together")
                if spec.shape[:1] != (-1,):
                    raise _Seen(f"{kind} {spec.name!r} of shape {list(spec.shape)} has no free leading dimension")
        sample = max(samples, key=lambda sample: _count(sample.inputs))
        low, high = _allowed(manifest, sample.inputs)
        row_bytes = sum(array.nbytes for array in sample.inputs.values()) // max(1, _count(sample.inputs))
        most = min(_MOST_TOGETHER, _MOST_BYTES // max(1, row_bytes))
        _try(lane, manifest.outputs, sample, low, min(high, max(low, 2, most)), pace)
    except _Seen as e:
        return str(e)
    except (InvalidInput, Recoverable, OutOfMemory) as e:
        return f"the engine failed on golden rows in another order: {e}"
    except DeviceLost:
        raise
    except Exception as e:
        raise SelfTestFailed(f"the engine failed on golden rows in another order: {e}") from e
    return ""


def _try(lane: Lane, outputs: Sequence[TensorSpec], sample: Sample, low: int, size: int, pace: Pace) -> None:
    """Raises _Seen."""
    rows = list(_different(sample.inputs, size - 1))
    strange = [*(_strange(row) for row in rows), {name: np.zeros_like(array) for name, array in rows[0].items()}]
    others = (strange * size)[: size - len(rows)]
    alone = [_run(lane, outputs, [row] * low, pace) for row in rows]
    first = _run(lane, outputs, [*reversed(rows), *others], pace)
    last = _run(lane, outputs, [*reversed(others), *rows], pace)
    for i, one in enumerate(alone):
        for found, at in ((first, len(rows) - 1 - i), (last, len(others) + i)):
            for spec in outputs:
                want, have = one[spec.name][:1], found[spec.name][at : at + 1]
                limits = {spec.name: max(sample.tolerances.get(spec.name, 0.0), _rounding(want))}
                if any(compare({spec.name: want}, {spec.name: have}, limits, (spec,))):
                    raise _Seen(f"what output {spec.name!r} is for a row depends on the other rows of its batch")


def _rounding(row: Array) -> float:
    finite = np.abs(row[np.isfinite(row)].astype(np.float64)) if row.dtype.kind == "f" else np.empty(0)
    return _ROUNDING * float(finite.max(initial=0.0))


def _run(lane: Lane, outputs: Sequence[TensorSpec], rows: Sequence[Rows], pace: Pace) -> Rows:
    inputs = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    found, _ = pace.run(lane.run, inputs, allocate_anew)
    for spec in outputs:
        count = found[spec.name].shape[0]
        if count != len(rows):
            raise _Seen(f"output {spec.name!r} has {count} rows for a batch of {len(rows)}")
    return found


def _allowed(manifest: Manifest, inputs: Rows) -> tuple[int, int]:
    """Least and greatest batch size at the shape of these inputs. Raises _Seen if two rows are too many."""
    ranges = [
        batch_range(manifest.inputs, profile)
        for profile in manifest.profiles
        if all(
            low <= size <= high
            for name, bounds in profile.inputs.items()
            for low, size, high in zip(bounds.min[1:], inputs[name].shape[1:], bounds.max[1:], strict=True)
        )
    ]
    low, high = max(ranges, key=lambda bounds: bounds[1], default=(1, 0))
    if high < 2:
        raise _Seen("no profile allows two rows for all inputs at the shape of the golden samples")
    return low, high


def _count(inputs: Rows) -> int:
    """Rows that all inputs have."""
    return min(len(array) for array in inputs.values())


def _different(inputs: Rows, most: int) -> Iterator[Rows]:
    """The first rows, no two the same."""
    seen: set[bytes] = set()
    for i in range(_count(inputs)):
        row = {name: array[i] for name, array in inputs.items()}
        key = b"".join(array.tobytes() for array in row.values())
        if key not in seen and len(seen) < min(most, _MOST_ROWS):
            seen.add(key)
            yield row


def _strange(row: Rows) -> Rows:
    """A row of other values that the model takes as well: greater numbers; where numbers may be the places of a table,
    the same ones in another order."""
    with np.errstate(over="ignore"):
        return {
            name: array * array.dtype.type(2) if array.dtype.kind == "f" else array.ravel()[::-1].reshape(array.shape)
            for name, array in row.items()
        }
