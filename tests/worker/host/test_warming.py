"""Warm-up: which shapes are run, on which lanes, how fast, and what is measured."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from trtmodel_contract.identity import LoadKey, Profile, ShapeRange
from trtmodel_contract.manifest import Blob, Manifest, MemoryNeed, TensorSpec
from trtmodel_worker.engines.base import Allocate, Array
from trtmodel_worker.host import warming
from trtmodel_worker.host.pace import Pace
from trtmodel_worker.host.warming import batch_range, steps, warm, warm_once

X, IDS = TensorSpec("x", "FP32", (-1, 4)), TensorSpec("ids", "INT64", (-1, -1))
ROWS = Profile({"x": ShapeRange((1, 4), (4, 4), (8, 4))})


def manifest(inputs: tuple[TensorSpec, ...], *profiles: Profile) -> Manifest:
    return Manifest(
        "r", LoadKey("Test", "1", "cpu"), 1, "", {}, "0" * 64, Blob("1" * 64, 1), inputs, (X,), profiles,
        MemoryNeed(0, 0), (), {}, "2026-01-01T00:00:00Z",
    )  # fmt: skip


class RecordingLane:
    """Remembers the shapes that it ran, and where its outputs went."""

    def __init__(self) -> None:
        self.ran: list[tuple[tuple[int, ...], ...]] = []
        self.places: list[int] = []

    def run(self, inputs: Any, allocate: Allocate) -> dict[str, Array]:
        self.ran.append(tuple(array.shape for array in inputs.values()))
        out = allocate("y", np.dtype(np.float32), next(iter(inputs.values())).shape)
        self.places.append(out.ctypes.data)
        return {"y": out}


class VirtualPace(Pace):
    """Measures by a clock that the lanes advance."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def run(self, work: Any, *arguments: Any) -> tuple[Any, float]:
        before = self.now
        result = work(*arguments)
        return result, self.now - before


class CostlyLane(RecordingLane):
    """A run takes `fixed` seconds and `each` per row; the first of a shape `cold` more."""

    def __init__(self, pace: VirtualPace, fixed: float, each: float, cold: float) -> None:
        super().__init__()
        self.pace, self.fixed, self.each, self.cold = pace, fixed, each, cold

    def run(self, inputs: Any, allocate: Allocate) -> dict[str, Array]:
        rows = next(iter(inputs.values())).shape[0]
        known = ((rows, 4),) in self.ran
        self.pace.now += self.fixed + self.each * rows + (0 if known else self.cold)
        return super().run(inputs, allocate)


def warmed(fixed: float, each: float, colds: tuple[float, ...]) -> tuple[list[list[int]], dict[int, float]]:
    """Batch sizes that each lane ran, and what was measured."""
    pace = VirtualPace()
    lanes = [CostlyLane(pace, fixed, each, cold) for cold in colds]
    timings = warm(lanes, manifest((X,), ROWS), (8, 1, 2, 4, 16), pace)
    return [[shape[0][0] for shape in lane.ran] for lane in lanes], dict(timings.by_bucket)


def test_every_lane_runs_every_batch_size_and_the_first_lane_is_measured() -> None:
    ran, measured = warmed(fixed=0.001, each=0.001, colds=(0.05, 0.05, 0.05))
    sizes = [1, 2, 4, 8]  # 16 is beyond the profile
    assert ran[0] == [rows for rows in sizes for _ in range(3)]
    assert ran[1:] == [sizes, sizes]
    assert measured == pytest.approx({1: 0.002, 2: 0.003, 4: 0.005, 8: 0.009})


def test_a_lane_that_was_made_warm_by_the_first_one_runs_two_sizes_only() -> None:
    ran, _ = warmed(fixed=0.001, each=0.001, colds=(0.05, 0.0, 0.05))
    assert ran[1:] == [[1, 2], [1, 2, 4, 8]]


def test_batch_sizes_beyond_those_that_gain_nothing_are_left_out_but_for_the_profiles_largest() -> None:
    ran, measured = warmed(fixed=0.0, each=0.008, colds=(0.05, 0.05))
    assert set(measured) == {1, 2, 4}
    assert ran[0][-1] == 8
    assert ran[1] == [1, 2, 4, 8]


def test_a_batch_size_that_takes_long_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "_LONG_SECONDS", 0.0)
    lane = RecordingLane()
    timings = warm([lane], manifest((X,), ROWS), (1, 4, 8), Pace())
    assert lane.ran == [((rows, 4),) for rows in (1, 4, 8) for _ in range(2)]
    assert set(timings.by_bucket) == {1, 4, 8}


def test_two_runs_after_the_first_that_take_about_the_same_are_enough() -> None:
    ran, measured = warmed(fixed=0.0, each=0.012, colds=(0.0, 0.0))
    assert [ran[0].count(rows) for rows in (1, 2, 4, 8)] == [3, 3, 3, 1]
    assert measured == pytest.approx({1: 0.012, 2: 0.024, 4: 0.048})


class UnevenPace(Pace):
    """Of each shape's runs the first ones take as many seconds as it is told, and all others one."""

    def __init__(self, *seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.runs = 0

    def run(self, work: Any, *arguments: Any) -> tuple[Any, float]:
        took = (*self.seconds, 1.0)[min(self.runs, len(self.seconds))]
        self.runs += 1
        return work(*arguments), 0.001 * took


@pytest.mark.parametrize(
    ("seconds", "runs", "fastest"),
    [((5, 2), 4, 1), ((5, 5), 4, 1), ((9, 2.2, 2), 3, 2), ((9, 6, 4, 2), 4, 2), ((90, 60), 2, 60)],
)
def test_runs_that_differ_are_measured_up_to_three_times_and_the_fastest_counts(
    seconds: tuple[float, ...], runs: int, fastest: float
) -> None:
    lane, pace = RecordingLane(), UnevenPace(*seconds)
    timings = warm([lane], manifest((X,), Profile({"x": ShapeRange((8, 4), (8, 4), (8, 4))})), (8,), pace)
    assert (len(lane.ran), timings.by_bucket) == (runs, {8: pytest.approx(0.001 * fastest)})


class Capturing(RecordingLane):
    """Runs shapes when they are bound, as a lane does that captures them."""

    def __init__(self, *, captures: bool = True) -> None:
        super().__init__()
        self.captures = captures
        self.captured: list[int] = []

    def bind(self, inputs: Any, allocate: Allocate) -> Any:
        if self.captures:
            self.captured.append(next(iter(inputs.values())).shape[0])
        return CapturedRun(self, inputs, allocate, self.captures)


class CapturedRun:
    def __init__(self, lane: Capturing, inputs: Any, allocate: Allocate, is_warm: bool) -> None:
        self.lane, self.inputs, self.allocate, self.is_warm = lane, inputs, allocate, is_warm
        self.outputs: dict[str, Array] = {}

    def run(self) -> bool:
        self.outputs = self.lane.run(self.inputs, self.allocate)
        return True


def test_what_ran_when_it_was_bound_is_not_run_again_but_where_it_is_measured_and_once_unbound() -> None:
    lanes = [Capturing(), Capturing(), Capturing(captures=False)]
    warm(lanes, manifest((X,), ROWS), (1, 8), VirtualPace())
    assert [lane.captured for lane in lanes] == [[1, 4, 8], [1, 4, 8], []]
    assert [len(lane.ran) for lane in lanes] == [6, 1, 2]


def test_what_is_measured_runs_at_places_that_stay() -> None:
    lane = RecordingLane()
    warm([lane], manifest((X,), ROWS), (8,), Pace())
    runs = [place for shape, place in zip(lane.ran, lane.places, strict=True) if shape == ((8, 4),)]
    assert len(set(runs)) == 1


def test_other_free_dimensions_are_at_their_best_size_and_once_at_the_least_and_the_greatest() -> None:
    profile = Profile({"ids": ShapeRange((1, 16), (4, 128), (8, 512))})
    found = [(step.shapes["ids"], step.bucket) for step in steps(manifest((IDS,), profile), (1, 4, 8))]
    assert sorted(found, key=lambda f: math.prod(f[0])) == found
    assert set(found) == {
        ((1, 16), None), ((1, 128), 1), ((4, 128), 4), ((8, 128), 8), ((8, 512), None),
    }  # fmt: skip


def test_of_several_profiles_a_batch_size_runs_in_each_that_allows_it() -> None:
    short = Profile({"ids": ShapeRange((1, 16), (4, 16), (32, 16))})
    long = Profile({"ids": ShapeRange((1, 512), (2, 512), (4, 512))})
    found = steps(manifest((IDS,), short, long), (2, 16))
    assert {step.shapes["ids"] for step in found if step.bucket == 2} == {(2, 16), (2, 512)}
    assert {step.shapes["ids"] for step in found if step.bucket == 16} == {(16, 16)}


@pytest.mark.parametrize("buckets", [(), (64,)])
def test_without_a_batch_size_that_fits_the_profiles_own_shapes_are_run(buckets: tuple[int, ...]) -> None:
    lane = RecordingLane()
    timings = warm([lane], manifest((X,), ROWS), buckets, Pace())
    assert lane.ran == [((rows, 4),) for rows in (1, 4, 8) for _ in range(2)]
    assert timings.by_bucket == {}
    assert timings.slowest > 0


@pytest.mark.parametrize(
    ("inputs", "profile"),
    [
        ((X, TensorSpec("w", "FP32", (3,))), ROWS),
        ((X, TensorSpec("w", "FP32", (3, -1))), Profile({**ROWS.inputs, "w": ShapeRange((3, 1), (3, 2), (3, 3))})),
        ((X, IDS), Profile({**ROWS.inputs, "ids": ShapeRange((2, 1), (8, 1), (16, 1))})),
    ],
)
def test_inputs_that_share_no_batch_are_run_at_the_profiles_own_shapes(
    inputs: tuple[TensorSpec, ...], profile: Profile
) -> None:
    low, high = batch_range(inputs, profile)
    assert low > high
    assert all(step.bucket is None for step in steps(manifest(inputs, profile), (1, 2, 4)))


def test_fixed_shapes_need_no_profile() -> None:
    lane = RecordingLane()
    warm([lane], manifest((TensorSpec("x", "FP32", (1, 4)),)), (1, 2), Pace())
    assert lane.ran == [((1, 4),)] * 2


def test_a_lane_that_is_made_anew_runs_the_smallest_shape() -> None:
    lane = RecordingLane()
    warm_once(lane, manifest((X,), ROWS))
    assert lane.ran == [((1, 4),)]


@pytest.mark.parametrize(("duty", "share"), [(0.2, 4.0), (0.5, 1.0), (0.01, 99.0), (0.0, 99.0)])
def test_beside_traffic_work_takes_no_more_than_its_share_of_the_time(duty: float, share: float) -> None:
    rests: list[float] = []
    pace = Pace(duty, rests.append)
    result, spent = pace.run(lambda a, b: sum(range(a)) + b, 10_000, 1)
    assert result == sum(range(10_000)) + 1
    assert rests == [pytest.approx(share * spent)]


def test_without_traffic_there_is_no_rest() -> None:
    rests: list[float] = []
    Pace(1.0, rests.append).run(lambda: None)
    assert rests == []


def test_each_run_of_a_warm_up_beside_traffic_is_followed_by_a_rest() -> None:
    rests: list[float] = []
    lanes = [RecordingLane(), RecordingLane()]
    warm(lanes, manifest((X,), ROWS), (1, 8), Pace(0.2, rests.append))
    assert len(rests) == sum(len(lane.ran) for lane in lanes)
