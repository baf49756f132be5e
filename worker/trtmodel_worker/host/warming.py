"""Warm-up: every lane runs the shapes that it will be asked for before it serves, and one of them is measured.

First runs are slow (code is loaded, memory is reserved), and a request should not pay for that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from trtmodel_contract.identity import Profile
from trtmodel_contract.manifest import Manifest, TensorSpec

from trtmodel_worker.engines.base import DTYPES, Array, BindingLane, Bound, Lane, WarmBound
from trtmodel_worker.host.pace import Pace

_MOST_RUNS = 3  # that are measured of a batch size
_ALIKE = 1.15  # times the fastest run: then a run was held up by nothing, and there is no need for another
_LONG_SECONDS = 0.05  # of runs after the first of a batch size: then that is enough, since long runs vary less
_GAIN = 0.97  # of the time of a row: a batch size that needs more gains nothing
_WARM = 1.5  # times a warm run, and
_NOISE_SECONDS = 0.0005  # so much more: then a first run was no slower than another

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Timings:
    """Seconds. `slowest`: the longest run that was no first one. `by_bucket`: the fastest run at each batch size; of
    several profiles the slowest one's."""

    slowest: float
    by_bucket: Mapping[int, float]

    @property
    def best(self) -> int | None:
        """The smallest batch size within 10 % of the best rows per second, None if none was measured."""
        rates = {rows: rows / seconds for rows, seconds in self.by_bucket.items() if seconds > 0}
        return min((rows for rows, rate in rates.items() if rate >= 0.9 * max(rates.values())), default=None)


@dataclass(frozen=True)
class Step:
    """Shapes to run, and the batch size that they stand for, if they do. `own`: a profile names them."""

    shapes: Shapes
    bucket: int | None = None
    own: bool = True

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())


def warm(lanes: Sequence[Lane], manifest: Manifest, buckets: Sequence[int], pace: Pace) -> Timings:
    """Run every step on the first lane, the smallest first, and measure it; then on the others. Raises what the lanes
    raise."""
    slowest, fastest = 0.0, dict[int, float]()
    done: list[tuple[Step, float | None]] = []
    for step in steps(manifest, buckets):
        bucket = None if step.bucket is None or _pointless(fastest, step.bucket) else step.bucket
        if bucket is None and not step.own:
            continue
        first, later = _measure(Runner(lanes[0], step.shapes, manifest.inputs), bucket is not None, pace)
        slowest = max(slowest, *(later or [first]))
        done.append((step, min(later) if later else None))
        if bucket:
            fastest[bucket] = max(fastest.get(bucket, 0.0), min(later))
    for lane in lanes[1:]:
        _warm_as_the_first(lane, done, manifest, pace)
    return Timings(slowest, fastest)


def _pointless(fastest: Mapping[int, float], bucket: int) -> bool:
    """Whether the last two batch sizes below `bucket` gained nothing per row: then no larger one is formed, and its
    warm-up would only take time from what serves. The profiles' largest shapes are run all the same."""
    per_row = [seconds / rows for rows, seconds in sorted(fastest.items()) if rows < bucket]
    return len(per_row) > 2 and min(per_row[-2:]) > _GAIN * min(per_row[:-2])


def _warm_as_the_first(lane: Lane, done: Sequence[tuple[Step, float | None]], manifest: Manifest, pace: Pace) -> None:
    """Lanes of some runtimes share everything that the first one has made warm: two first runs in a row that are as
    fast as those of a warm lane show it, and the rest is left out. What ran when it was bound is not run again, but
    for the smallest step: shapes that nobody foresaw run unbound."""
    warm_already = 0
    for number, (step, usual) in enumerate(done):
        run = Runner(lane, step.shapes, manifest.inputs)
        if number == 0:
            _, first = pace.run(run.unbound)
        if run.binds:
            pace.run(run.bind)
        if number > 0:
            if run.is_warm:
                continue
            _, first = pace.run(run)
        warm = usual is not None and first <= _WARM * usual + _NOISE_SECONDS
        warm_already = warm_already + 1 if warm else 0
        if warm_already == 2:
            return


def best_step(manifest: Manifest, buckets: Sequence[int], timings: Timings) -> Step:
    """The shapes of the best batch size, or the smallest ones."""
    found = steps(manifest, buckets)
    return next((step for step in found if step.bucket and step.bucket == timings.best), found[0])


def warm_once(lane: Lane, manifest: Manifest) -> None:
    """Run the smallest shapes. Raises what the lane raises."""
    Runner(lane, steps(manifest, ())[0].shapes, manifest.inputs)()


def steps(manifest: Manifest, buckets: Sequence[int]) -> list[Step]:
    """Least, best and greatest shapes of each profile, and each batch size that a profile allows with its best other
    dimensions. Smallest first."""
    static = {spec.name: spec.shape for spec in manifest.inputs if -1 not in spec.shape}
    own: list[Shapes] = [
        {**static, **{name: getattr(bounds, kind) for name, bounds in profile.inputs.items()}}
        for kind in ("min", "opt", "max")
        for profile in manifest.profiles
    ]
    found: list[Step] = []
    for profile in manifest.profiles:
        low, high = batch_range(manifest.inputs, profile)
        for rows in (rows for rows in sorted(set(buckets)) if low <= rows <= high):
            shapes = {**static, **{name: (rows, *bounds.opt[1:]) for name, bounds in profile.inputs.items()}}
            found.append(Step(shapes, rows, shapes in own))
    known = [step.shapes for step in found]
    for mine in own:
        if mine not in known:
            known.append(mine)
            found.append(Step(mine))
    return sorted(found, key=lambda step: step.elements) or [Step(static)]


def batch_range(inputs: Sequence[TensorSpec], profile: Profile) -> tuple[int, int]:
    """Least and greatest batch size that a profile allows; (1, 0), which allows none, if its inputs have no leading
    dimension in common."""
    if not all(spec.shape[:1] == (-1,) and spec.name in profile.inputs for spec in inputs):
        return 1, 0
    ranges = {(profile.inputs[s.name].min[0], profile.inputs[s.name].max[0]) for s in inputs}
    return ranges.pop() if len(ranges) == 1 else (1, 0)


class Runner:
    """Runs zeros of `shapes` as the lane runs a batch when it serves: at places that stay."""

    def __init__(self, lane: Lane, shapes: Shapes, inputs: Sequence[TensorSpec]) -> None:
        self._lane = lane
        self.binds = isinstance(lane, BindingLane)
        self._zeros = {spec.name: _zeros(spec, shapes[spec.name]) for spec in inputs}
        self._places: dict[str, Array] = {}
        self._bound: Bound | None = None

    @property
    def is_warm(self) -> bool:
        """To bind it was to run it."""
        return isinstance(self._bound, WarmBound) and self._bound.is_warm

    def bind(self) -> None:
        """Let the lane make what it makes for shapes that come often."""
        if isinstance(self._lane, BindingLane):
            self._bound = self._lane.bind(self._zeros, self._allocate)

    def __call__(self) -> None:
        if self._bound is None:
            self.bind()
        if self._bound is None or not self._bound.run():
            self._bound = None
            self.unbound()

    def unbound(self) -> None:
        self._lane.run(self._zeros, self._allocate)

    def _allocate(self, name: str, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> Array:
        if name not in self._places or self._places[name].shape != shape:
            self._places[name] = np.empty(shape, dtype)
        return self._places[name]


def _measure(run: Runner, measured: bool, pace: Pace) -> tuple[float, list[float]]:
    """Seconds of the first run, and of those that tell how long a run takes: until two of them took about the same,
    since beside traffic each run holds up requests of others. The first is among them if it was warm. Of a shape that
    is not `measured` there is one after the first, or none if it takes long."""
    if run.binds:
        pace.run(run.bind)
    warm = run.is_warm
    first = pace.run(run)[1]
    times = [first] if warm and measured else list[float]()
    if not measured and first > _LONG_SECONDS:
        return first, times
    most = _MOST_RUNS if measured else 1
    while len(times) < most and not _alike(times) and (not times or sum(times) <= _LONG_SECONDS):
        times.append(pace.run(run)[1])
    return first, times


def _alike(times: Sequence[float]) -> bool:
    return len(times) > 1 and sorted(times)[1] <= _ALIKE * min(times)


def _zeros(spec: TensorSpec, shape: tuple[int, ...]) -> Array:
    dtype = DTYPES[spec.datatype]
    return np.full(shape, "" if dtype.hasobject else 0, dtype)  # written, so that no run waits for the kernel's pages
