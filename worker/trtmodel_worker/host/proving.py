"""Warm-up and self-test: what an engine must do before it may serve."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from trtmodel_contract.manifest import Golden, Manifest, TensorSpec

from trtmodel_worker.engines.base import DTYPES, Array, Lane, allocate_anew


class SelfTestFailed(Exception):
    """The engine answered something else than when it was built. The text names output, difference and tolerance."""


def warm_shapes(manifest: Manifest) -> list[dict[str, tuple[int, ...]]]:
    """The shapes that every lane runs before it serves, smallest first: first runs are slow (code is loaded, memory
    is reserved), and a request should not pay for that."""
    static = {spec.name: spec.shape for spec in manifest.inputs if -1 not in spec.shape}
    wanted: list[dict[str, tuple[int, ...]]] = []
    for kind in ("min", "opt", "max"):
        for profile in manifest.profiles:
            shapes = static | {name: getattr(bounds, kind) for name, bounds in profile.inputs.items()}
            if shapes not in wanted:
                wanted.append(shapes)
    return wanted or [static]


def warm(lane: Lane, manifest: Manifest) -> float:
    """Run every shape once and once more; the longest single run in seconds, leaving out each shape's first."""
    slowest = 0.0
    for shapes in warm_shapes(manifest):
        inputs = {s.name: np.zeros(shapes[s.name], DTYPES[s.datatype]) for s in manifest.inputs}
        lane.run(inputs, allocate_anew)
        started = time.perf_counter()
        lane.run(inputs, allocate_anew)
        slowest = max(slowest, time.perf_counter() - started)
    return slowest


def self_test(lanes: Sequence[Lane], manifest: Manifest, goldens: Sequence[bytes]) -> None:
    """Compare every lane with what the built engine answered. Raises SelfTestFailed."""
    if not manifest.golden:
        raise SelfTestFailed("the manifest names no golden samples, so nothing proves this engine: build it again")
    for golden, data in zip(manifest.golden, goldens, strict=True):
        inputs, expected = _read(golden, data, manifest)
        for number, lane in enumerate(lanes):
            try:
                outputs = lane.run(inputs, allocate_anew)
            except Exception as e:
                raise SelfTestFailed(f"lane {number} failed on golden sample {golden.blob.digest[:12]}: {e}") from e
            for fault in compare(expected, outputs, golden.tolerances, manifest.outputs):
                raise SelfTestFailed(f"lane {number}, golden sample {golden.blob.digest[:12]}: {fault}")


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
        elif want.dtype.kind == "b":
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


def _read(golden: Golden, data: bytes, manifest: Manifest) -> tuple[dict[str, Array], dict[str, Array]]:
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            inputs = {s.name: np.ascontiguousarray(arrays[f"i{i}"]) for i, s in enumerate(manifest.inputs)}
            outputs = {s.name: arrays[f"o{i}"] for i, s in enumerate(manifest.outputs)}
    except Exception as e:  # zipfile, zlib and numpy have a dozen errors of their own for damaged bytes
        raise SelfTestFailed(f"golden sample {golden.blob.digest[:12]} cannot be read: {e}") from e
    return inputs, outputs
