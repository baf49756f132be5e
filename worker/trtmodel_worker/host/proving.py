"""Self-test: an engine must answer what it answered when it was built."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from trtmodel_contract.manifest import Golden, Manifest, TensorSpec

from trtmodel_worker.engines.base import DTYPES, Array, DeviceLost, Lane, allocate_anew
from trtmodel_worker.host.pace import Pace


class SelfTestFailed(Exception):
    """The engine answered something else than when it was built. The text names output, difference and tolerance."""


@dataclass(frozen=True)
class Sample:
    """A golden sample, read. `name` is the beginning of its digest."""

    name: str
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    tolerances: Mapping[str, float]


def read_samples(manifest: Manifest, goldens: Sequence[bytes]) -> tuple[Sample, ...]:
    """Raises SelfTestFailed if there are none, or one cannot be read."""
    if not manifest.golden:
        raise SelfTestFailed("the manifest names no golden samples, so nothing proves this engine: build it again")
    return tuple(_read(golden, data, manifest) for golden, data in zip(manifest.golden, goldens, strict=True))


def self_test(
    lanes: Sequence[Lane], samples: Sequence[Sample], outputs: Sequence[TensorSpec], pace: Pace | None = None
) -> None:
    """Compare every lane with what the built engine answered. Raises SelfTestFailed, DeviceLost."""
    pace = pace or Pace()
    for sample in samples:
        for number, lane in enumerate(lanes):
            try:
                found, _ = pace.run(lane.run, sample.inputs, allocate_anew)
            except DeviceLost:
                raise
            except Exception as e:
                raise SelfTestFailed(f"lane {number} failed on golden sample {sample.name}: {e}") from e
            for fault in compare(sample.outputs, found, sample.tolerances, outputs):
                raise SelfTestFailed(f"lane {number}, golden sample {sample.name}: {fault}")


def compare(
    expected: Mapping[str, Array],
    found: Mapping[str, Array],
    tolerances: Mapping[str, float],
    outputs: Sequence[TensorSpec],
) -> Iterator[str]:
    """A sentence for each output that differs by more than its tolerance."""
    for spec in outputs:
        want, have, limit = expected[spec.name], found[spec.name], tolerances.get(spec.name, 0.0)
        if want.shape != have.shape or want.dtype != have.dtype:
            yield (
                f"output {spec.name!r} is {have.dtype}{list(have.shape)}, "
                f"it was {want.dtype}{list(want.shape)} when built"
            )
            continue
        if want.dtype.kind == "f":
            # NaN and infinities are equal only to themselves: a difference with them is NaN, and NaN > limit is False.
            same = (want == have) | (np.isnan(want) & np.isnan(have))
            wide, other = want.astype(np.float64), have.astype(np.float64)
            with np.errstate(invalid="ignore"):
                near = np.abs(wide - other) <= limit
            bad = ~(same | near)
        elif want.dtype.kind in "bO":
            bad = want != have
        else:
            low, high = np.minimum(want, have), np.maximum(want, have)
            bad = (high - low).astype(np.float64) > limit
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            yield (
                f"output {spec.name!r} at {list(at)} is {have[at]}, it was {want[at]} when built "
                f"(tolerance {limit:g}; {int(bad.sum())} of {bad.size} values differ)"
            )


def _read(golden: Golden, data: bytes, manifest: Manifest) -> Sample:
    name = golden.blob.digest[:12]
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            inputs = {s.name: _array(s, arrays[f"i{i}"]) for i, s in enumerate(manifest.inputs)}
            outputs = {s.name: _array(s, arrays[f"o{i}"]) for i, s in enumerate(manifest.outputs)}
    except Exception as e:  # zipfile, zlib and numpy have a dozen errors of their own for damaged bytes
        raise SelfTestFailed(f"golden sample {name} cannot be read: {e}") from e
    return Sample(name, inputs, outputs, golden.tolerances)


def _array(spec: TensorSpec, array: Array) -> Array:
    """Strings are kept in arrays of fixed width: others would be read by unpickling."""
    return array.astype(DTYPES["BYTES"]) if spec.datatype == "BYTES" else np.ascontiguousarray(array)
