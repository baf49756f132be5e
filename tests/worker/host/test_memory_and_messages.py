"""The arena and the messages on a lane: what one process may do to another through them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trtmodel_contract.identity import LoadKey, Profile, ShapeRange
from trtmodel_contract.manifest import Blob, Golden, Manifest, MemoryNeed, TensorSpec
from trtmodel_worker.front.regions import NONE, SharedArena
from trtmodel_worker.host.arena import Arena, Layout, Unservable, plan_layout, sealed_bytes, sealed_copy
from trtmodel_worker.host.lanes import OutputTooLarge, Region
from trtmodel_worker.host.proving import SelfTestFailed, compare, read_samples
from trtmodel_worker.host.wire import (
    FailureClass,
    MessageError,
    answer_message,
    failure_message,
    is_followed_soon,
    is_probe,
    parse_answer,
    parse_generation,
    parse_run,
    probe_message,
    rested_message,
    run_message,
)

X = TensorSpec("x", "FP32", (-1, 3))
Y = TensorSpec("y", "FP32", (-1, 5))
PROFILES = (Profile({"x": ShapeRange((1, 3), (2, 3), (7, 3))}),)
shapes = st.lists(st.integers(0, 2**40), max_size=6).map(tuple)


def test_the_memory_file_can_neither_shrink_nor_grow() -> None:
    arena = Arena.create("t", 8192)
    for size in (4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    arena.close()


def test_a_sealed_copy_cannot_be_written_any_more() -> None:
    for fd in (sealed_bytes("t", b"plan"), sealed_copy("t", sealed_bytes("s", b"plan and more"), 4)):
        assert os.pread(fd, 100, 0) == b"plan"
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"other", 0)
    with pytest.raises(EOFError):
        sealed_copy("t", sealed_bytes("s", b"short"), 100)


def test_regions_do_not_overlap_and_hold_the_largest_batch() -> None:
    layout = plan_layout((X, TensorSpec("z", "INT8", (3,))), (Y,), PROFILES, 4, 1000)
    assert layout.input_offsets[1] >= 7 * 3 * 4
    assert layout.output_bytes >= 7 * 5 * 4
    starts = [layout.input_region(i) for i in range(4)] + [layout.output_region(i) for i in range(4)]
    sizes = [layout.input_bytes] * 4 + [layout.output_bytes] * 4
    ends = [a + b for a, b in zip(starts, sizes, strict=True)]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert ends[-1] == layout.size


@pytest.mark.parametrize(
    "inputs",
    [(TensorSpec("b", "BF16", (1,)),), (TensorSpec("w", "FP32", (-1, 3)),), (TensorSpec("x", "FP32", (-1,)),)],
)
def test_what_cannot_be_laid_out_is_refused(inputs: tuple[TensorSpec, ...]) -> None:
    with pytest.raises(Unservable):
        plan_layout(inputs, (), PROFILES, 1, 1000)


def test_an_attempts_outputs_stay_within_its_region() -> None:
    arena = Arena.create("t", 8192)
    region = Region(arena, {"y": np.dtype(np.float32), "z": np.dtype(np.int8)}, 4096, 64)
    array = region.allocate("y", np.dtype(np.float32), (4, 4))
    array[...] = 1
    assert not any(arena.view[:4096])
    with pytest.raises(OutputTooLarge):
        region.allocate("z", np.dtype(np.int8), (1,))
    with pytest.raises(ValueError, match="manifest"):
        Region(arena, {"y": np.dtype(np.float32)}, 0, 64).allocate("y", np.dtype(np.float64), (1,))


def test_a_region_is_handed_out_once() -> None:
    arena = SharedArena(Layout((0,), 4096, 4096, 3))
    taken = [arena.take_input() for _ in range(4)]
    assert sorted(taken) == [NONE, 0, 1, 2]
    arena.give_input(taken[1])
    assert arena.take_input() == taken[1]
    assert arena.in_use == 3


@given(
    st.integers(0, 2**60),
    st.lists(st.tuples(st.integers(0, 2**40), shapes), min_size=1, max_size=5),
    st.booleans(),
)
def test_a_run_message_is_read_as_it_was_written(
    generation: int, inputs: list[tuple[int, tuple[int, ...]]], soon: bool
) -> None:
    data = run_message(generation, 5, 6, [o for o, _ in inputs], [s for _, s in inputs], soon)
    assert parse_run(data, [len(s) for _, s in inputs]) == (generation, 5, 6, inputs)
    assert parse_generation(data) == generation
    assert is_followed_soon(data) is soon


@given(st.integers(0, 2**60), st.lists(st.tuples(st.integers(0, 2**40), shapes), max_size=5))
def test_an_answer_is_read_as_it_was_written(generation: int, outputs: list[tuple[int, tuple[int, ...]]]) -> None:
    answer = parse_answer(answer_message(generation, 77, outputs), len(outputs))
    assert (answer.generation, answer.nanoseconds, answer.failure) == (generation, 77, None)
    assert list(answer.outputs) == outputs


@given(st.sampled_from(FailureClass), st.text(max_size=3000))
def test_a_failure_is_read_as_it_was_written(kind: FailureClass, text: str) -> None:
    answer = parse_answer(failure_message(3, kind, 9, text), 1)
    assert (answer.generation, answer.failure) == (3, kind)
    assert text.encode()[:1900].decode(errors="ignore") in answer.text


@given(st.binary(max_size=400), st.integers(0, 3))
def test_no_bytes_make_the_reader_of_answers_fail_in_another_way(data: bytes, outputs: int) -> None:
    try:
        answer = parse_answer(data, outputs)
    except MessageError:
        return
    assert answer.failure is not None or len(answer.outputs) == outputs


@pytest.mark.parametrize(
    ("found", "differs"),
    [
        ([1.0, 2.0], False), ([1.0005, 2.0], False), ([1.1, 2.0], True), ([np.nan, 2.0], True), ([np.inf, 2.0], True),
        ([1.0, 2.0, 3.0], True),
    ],
)  # fmt: skip
def test_the_self_test_finds_what_differs_by_more_than_the_tolerance(found: list[float], differs: bool) -> None:
    spec = (TensorSpec("y", "FP32", (-1,)),)
    expected = {"y": np.array([1.0, 2.0], np.float32)}
    assert bool(list(compare(expected, {"y": np.array(found, np.float32)}, {"y": 1e-3}, spec))) is differs


def test_a_nan_is_expected_only_where_the_built_engine_gave_one() -> None:
    spec = (TensorSpec("y", "FP32", (-1,)),)
    nan = {"y": np.array([np.nan, np.inf], np.float32)}
    assert not list(compare(nan, nan, {"y": 1e-3}, spec))
    assert list(compare(nan, {"y": np.array([0, np.inf], np.float32)}, {"y": 1e-3}, spec))
    assert list(compare(nan, {"y": np.array([np.nan, -np.inf], np.float32)}, {"y": 1e-3}, spec))


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.bool_])
def test_whole_numbers_and_booleans_are_compared_exactly_by_default(dtype: type) -> None:
    spec = (TensorSpec("y", "UINT8", (-1,)),)
    zero, one = {"y": np.array([0, 1], dtype)}, {"y": np.array([1, 1], dtype)}
    assert not list(compare(zero, zero, {}, spec))
    assert list(compare(zero, one, {}, spec))
    assert list(compare(one, zero, {}, spec))


@pytest.mark.parametrize("damage", [b"PK\x03\x04 and no more", b"", b"\x93NUMPY\x01\x00", b"\x80\x04."])
def test_a_golden_sample_that_cannot_be_read_is_a_failed_self_test_and_no_crash(damage: bytes) -> None:
    spec = TensorSpec("x", "FP32", (1,))
    golden = Golden(Blob("0" * 64, len(damage)), 1, {})
    manifest = Manifest(
        "r", LoadKey("Test", "1", "cpu"), 1, "", {}, "0" * 64, Blob("1" * 64, 1), (spec,), (spec,), (),
        MemoryNeed(0, 0), (golden,), {}, "2026-01-01T00:00:00Z",
    )  # fmt: skip
    with pytest.raises(SelfTestFailed, match="cannot be read"):
        read_samples(manifest, [damage])


def test_an_arena_that_cannot_be_mapped_leaves_no_descriptor() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for size in (1 << 60, 0):
        with pytest.raises((OSError, ValueError)):
            Arena.create("t", size)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_probe_is_no_run_and_a_run_no_probe() -> None:
    assert is_probe(probe_message(7))
    assert parse_generation(probe_message(7)) == 7
    assert not is_probe(run_message(7, 4096, 64, [0], [(1, 4)]))
    assert not is_probe(run_message(7, 0, 4096, [], []))
    answer = parse_answer(answer_message(7, 5, ()), 0)
    assert (answer.generation, answer.nanoseconds, answer.failure, answer.outputs) == (7, 5, None, ())


def test_a_lane_that_rested_says_so_as_an_answer_to_nothing() -> None:
    rested = parse_answer(rested_message(9), 0)
    assert (rested.generation, rested.nanoseconds, rested.failure) == (0, 9, None)
