"""A batch's bytes: what of which request lies where, and that nothing is read or written anywhere else."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trtmodel_contract.identity import Profile, ShapeRange
from trtmodel_contract.manifest import TensorSpec
from trtmodel_worker.front import assembly
from trtmodel_worker.front.assembly import CannotFill, OutputCheck, fill, parts
from trtmodel_worker.front.calls import Batch, Call, Unreadable
from trtmodel_worker.front.regions import NONE, SharedArena
from trtmodel_worker.host.arena import plan_layout
from trtmodel_worker.host.reading import read_into
from trtmodel_worker.host.wire import Answer, MessageError

patient = settings(max_examples=60, deadline=None, derandomize=True)
MOST = 16
INPUTS = (TensorSpec("a", "FP32", (-1, 3)), TensorSpec("b", "INT8", (-1, 5)))
OUTPUTS = (TensorSpec("y", "FP32", (-1, 3)), TensorSpec("z", "INT64", (-1, -1)))
PROFILES = (Profile({s.name: ShapeRange((1, s.shape[1]), (1, s.shape[1]), (MOST, s.shape[1])) for s in INPUTS}),)


@contextmanager
def arena(slots: int = 3) -> Iterator[SharedArena]:
    made = SharedArena(plan_layout(INPUTS, OUTPUTS, PROFILES, slots, 1024))
    try:
        yield made
    finally:
        made.memory.close()


def call(rows: int, seed: int) -> Call:
    random = np.random.default_rng(seed)
    a, b = random.random((rows, 3), np.float32), random.integers(-128, 127, (rows, 5), np.int8)
    made = Call(
        [(rows, 3), (rows, 5)],
        [memoryview(a.tobytes()), memoryview(b.tobytes())],
        9.0,
        lambda *_: None,
        lambda *_: None,
    )
    made.rows = rows
    return made


def batch(calls: list[Call], padded: int) -> Batch:
    nobody: Any = mock.Mock()
    rows = sum(c.rows for c in calls)
    return Batch(nobody, nobody, calls, [(padded, 3), (padded, 5)], rows, padded, "x")


sizes = st.lists(st.integers(1, 6), min_size=1, max_size=6).filter(lambda rows: sum(rows) <= MOST)


@patient
@given(sizes, st.integers(0, 5), st.integers(0, 2))
def test_rows_lie_side_by_side_the_first_one_fills_up_and_no_other_region_is_touched(
    rows: list[int], more: int, slot: int
) -> None:
    padded = min(MOST, sum(rows) + more)
    with arena() as shared:
        memory = np.frombuffer(shared.memory.map, np.uint8)
        memory[:] = 0xEE
        made = batch([call(n, i) for i, n in enumerate(rows)], padded)
        made.input_slot = slot
        fill(made, shared)
        written = np.zeros(len(memory), np.bool_)
        for index, (width, dtype) in enumerate(((3, np.float32), (5, np.int8))):
            at = made.places[index]
            size = padded * width * np.dtype(dtype).itemsize
            found = memory[at : at + size].view(dtype).reshape(padded, width)
            sent = np.concatenate([np.frombuffer(c.bodies[index], dtype).reshape(-1, width) for c in made.calls])
            assert np.array_equal(found[: sum(rows)], sent)
            assert np.array_equal(found[sum(rows) :], np.repeat(sent[:1], padded - sum(rows), axis=0))
            written[at : at + size] = True
        assert (memory[~written] == 0xEE).all()
        low = shared.layout.input_region(slot)
        assert not written[:low].any()
        assert not written[low + shared.layout.input_bytes :].any()
        del memory, found


@patient
@given(sizes, st.integers(0, 5))
def test_each_request_gets_its_own_rows_of_every_output_and_nothing_of_what_was_filled_up(
    rows: list[int], more: int
) -> None:
    padded = sum(rows) + more
    y = np.arange(padded * 3, dtype=np.float32).reshape(padded, 3)
    z = np.arange(padded * 7, dtype=np.int64).reshape(padded, 7)
    made = batch([call(n, i) for i, n in enumerate(rows)], padded)
    at = 0
    outputs = [((padded, 3), memoryview(y.tobytes())), ((padded, 7), memoryview(z.tobytes()))]
    for each, part in parts(made, outputs):
        end = at + each.rows
        assert [shape for shape, _ in part] == [(each.rows, 3), (each.rows, 7)]
        assert bytes(part[0][1]) == y[at:end].tobytes()
        assert bytes(part[1][1]) == z[at:end].tobytes()
        at = end
    assert at == sum(rows)


numbers = st.one_of(st.integers(-2, 20), st.integers(-(1 << 63), (1 << 63) - 1), st.sampled_from([1 << 31, 1 << 62]))


@patient
@given(
    st.lists(st.tuples(st.integers(-64, 20_000), st.lists(numbers, min_size=1, max_size=3)), min_size=2, max_size=2),
    st.integers(0, 2),
)
def test_whatever_a_host_says_of_its_outputs_nothing_outside_its_region_is_read(
    said: list[tuple[int, list[int]]], slot: int
) -> None:
    with arena() as shared:
        low = shared.layout.output_region(slot)
        answer = Answer(1, 1, tuple((low + offset, tuple(shape)) for offset, shape in said))
        try:
            outputs = OutputCheck(OUTPUTS, shared).outputs(answer, slot)
        except MessageError:
            return
        for (shape, view), spec, (offset, _) in zip(outputs, OUTPUTS, said, strict=True):
            itemsize = 4 if spec.datatype == "FP32" else 8
            assert len(view) == itemsize * int(np.prod(shape, dtype=object))
            assert 0 <= offset <= offset + len(view) <= shared.layout.output_bytes
            assert len(shape) == 2
            assert spec.shape[1] in (-1, shape[1])
            view.release()


@pytest.mark.parametrize(
    ("y", "z", "why"),
    [
        ((0, (2, 3)), (64, (2, 7)), ""),
        ((0, (2, 4)), (64, (2, 7)), "where [-1, 3] was expected"),
        ((0, (2,)), (64, (2, 7)), "where [-1, 3] was expected"),
        ((0, (-1, 3)), (64, (2, 7)), "where [-1, 3] was expected"),
        ((-1, (2, 3)), (64, (2, 7)), "outside its region"),
        ((0, (2, 3)), (1 << 40, (2, 7)), "outside its region"),
        ((0, (2, 3)), (64, (1 << 60, 1 << 60)), "outside its region"),
        ((0, (0, 3)), (0, (0, 0)), ""),
    ],
)
def test_outputs_that_a_host_may_name_and_others(y: Any, z: Any, why: str) -> None:
    with arena() as shared:
        low = shared.layout.output_region(1)
        answer = Answer(1, 1, ((low + y[0], y[1]), (low + z[0], z[1])))
        if why:
            with pytest.raises(MessageError, match=why.replace("[", r"\[").replace("]", r"\]")):
                OutputCheck(OUTPUTS, shared).outputs(answer, 1)
        else:
            for _, view in OutputCheck(OUTPUTS, shared).outputs(answer, 1):
                view.release()


def test_regions_are_given_out_once_and_come_back() -> None:
    with arena(3) as shared:
        inputs = [shared.take_input() for _ in range(4)]
        outputs = [shared.take_output() for _ in range(4)]
        for taken in (inputs, outputs):
            assert taken[3] == NONE
            assert sorted(taken[:3]) == [0, 1, 2]
        assert shared.in_use == 6
        shared.give_input(inputs[1])
        shared.give_output(outputs[0])
        assert (shared.take_input(), shared.take_output(), shared.in_use) == (inputs[1], outputs[0], 6)


class Lies(bytes):
    """Bytes that lie elsewhere."""

    def read_into(self, place: memoryview) -> None:
        place[:] = self

    def copy(self) -> memoryview:
        return memoryview(self)


class Gone(Lies):
    def read_into(self, place: memoryview) -> None:
        raise Unreadable("it is gone")


def elsewhere(made: Call, kind: type[Lies] = Lies) -> Call:
    made.bodies = [kind(bytes(body)) for body in made.bodies if isinstance(body, memoryview)]
    return made


def test_bytes_that_lie_elsewhere_fill_a_batch_as_those_that_came_with_the_request_do() -> None:
    with arena() as shared:
        filled = []
        for kind in (lambda c: c, elsewhere):
            made = batch([kind(call(n, i)) for i, n in enumerate((2, 1, 3))], 8)
            made.input_slot = 1
            fill(made, shared)
            region = shared.layout.input_region(1)
            filled.append((made.places, bytes(shared.memory.view[region : region + shared.layout.input_bytes])))
        assert filled[0] == filled[1]


class InFile(Lies):
    """Its bytes are in a file, too, from `at` on."""

    at = 3

    def __new__(cls, data: bytes) -> InFile:
        made = super().__new__(cls, data)
        made.file = tempfile.TemporaryFile()  # noqa: SIM115 - closed when nobody refers to it
        made.file.write(b"abc" + data)
        made.file.flush()
        return made

    file: Any

    @property
    def descriptor(self) -> int:
        return int(self.file.fileno())


@pytest.mark.parametrize("most", [1, 9, 200])
def test_what_is_left_to_a_host_to_read_makes_the_same_batch(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that fill up the batch, too, and as much as one message can tell of."""
    monkeypatch.setattr(assembly, "WORTH_BYTES", 1)
    monkeypatch.setattr(assembly, "MOST_READS", most)
    with arena() as shared:
        filled = []
        for kind in (lambda c: c, lambda c: elsewhere(c, InFile)):
            made = batch([kind(call(n, i)) for i, n in enumerate((2, 1, 3))], 8)
            made.input_slot = 1
            shared.memory.view[:] = bytes(shared.memory.size)
            fill(made, shared)
            for body, offset, place, size in made.reads:
                read_into(shared.memory.view[place : place + size], body.descriptor, body.at + offset)
            filled.append((made.places, bytes(shared.memory.view)))
        assert filled[0] == filled[1]
        assert len(made.reads) == {1: 0, 9: 5, 200: 10}[most]


def test_of_a_request_that_is_here_alone_only_what_is_very_large_is_left_to_a_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(assembly, "WORTH_BYTES", 1)
    monkeypatch.setattr(assembly, "ALONE_BYTES", 24)
    with arena() as shared:
        made = batch([elsewhere(call(2, 0), InFile)], 2)  # 24 and 10 bytes
        made.input_slot = 1
        fill(made, shared, alone=True)
        assert [size for *_, size in made.reads] == [24]


def test_a_request_whose_bytes_are_gone_is_named() -> None:
    with arena() as shared:
        calls = [call(1, 0), elsewhere(call(1, 1), Gone), call(1, 2)]
        made = batch(calls, 3)
        made.input_slot = 0
        with pytest.raises(CannotFill, match="it is gone") as refused:
            fill(made, shared)
        assert refused.value.call is calls[1]
        del refused  # its traceback refers to the arena


def test_a_request_is_known_again_wherever_its_bytes_lie() -> None:
    assert call(2, 5).digest() == elsewhere(call(2, 5)).digest()
