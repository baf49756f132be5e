"""A run that comes again at the same places is prepared once. It must answer what an unprepared one would."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_models as models
import pytest
from onnx import TensorProto
from trtmodel_contract.identity import LoadKey, Profile, ShapeRange
from trtmodel_contract.manifest import Blob, Manifest, MemoryNeed
from trtmodel_worker.engines.registry import runtime
from trtmodel_worker.host import lanes
from trtmodel_worker.host.arena import Arena, plan_layout
from trtmodel_worker.host.wire import MAX_MESSAGE_BYTES, Answer, FailureClass, parse_answer, run_message

FLOAT = models.FLOAT


class Served:
    """One lane of a real engine, served by a thread, with the test as its front."""

    def __init__(self, path: Path, profile: Profile, slots: int = 4, spin_seconds: float = 0.0) -> None:
        engine = runtime("ONNXRuntime").load(memoryview(path.read_bytes()), (profile,), 1)
        self.manifest = Manifest(
            "r", LoadKey("ONNXRuntime", "1", "cpu"), 1, "", {}, "0" * 64, Blob("1" * 64, 1), engine.inputs,
            engine.outputs, (profile,), MemoryNeed(0, 0), (), {}, "2026-01-01T00:00:00Z",
        )  # fmt: skip
        self.layout = plan_layout(engine.inputs, engine.outputs, (profile,), slots, 4096)
        self.arena = Arena.create("test", self.layout.size)
        self.front, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.front.settimeout(30)
        maker = lanes.LaneMaker(engine, self.manifest)
        self.server = lanes.LaneServer(maker.make(), maker, channel, self.arena, self.manifest, (), spin_seconds)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        self.generation = 0

    def ask(self, array: np.ndarray, slot: int = 0, out: int = 0, *, soon: bool = False) -> Answer:
        self.generation += 1
        at = self.layout.input_region(slot)
        self.arena.array(at, array.dtype, array.shape)[...] = array
        region = self.layout.output_region(out)
        self.front.send(run_message(self.generation, region, self.layout.output_bytes, [at], [array.shape], soon))
        answer = parse_answer(self.front.recv(MAX_MESSAGE_BYTES), len(self.manifest.outputs))
        assert answer.generation == self.generation
        return answer

    def result(self, array: np.ndarray, slot: int = 0, out: int = 0, dtype: Any = np.float32) -> np.ndarray:
        answer = self.ask(array, slot, out)
        assert answer.failure is None, answer.text
        ((offset, shape),) = answer.outputs
        assert offset == self.layout.output_region(out)
        return self.arena.array(offset, np.dtype(dtype), shape).copy()

    def close(self) -> None:
        self.front.close()
        self.thread.join(30)
        assert not self.thread.is_alive()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Any]:
    made: list[Served] = []

    def serve(path: Path, profile: Profile) -> Served:
        made.append(Served(path, profile))
        return made[-1]

    yield serve
    for one in made:
        one.close()


def of_rows(width: int, most: int = 8) -> Profile:
    return Profile({"x": ShapeRange((1, width), (1, width), (most, width))})


def test_any_order_of_places_shapes_and_contents_is_answered_as_numpy_would(tmp_path: Path, served: Any) -> None:
    lane = served(models.square(tmp_path / "m"), of_rows(1))
    random = np.random.default_rng(5)
    for _ in range(400):
        rows, slot, out = (int(random.integers(low, high)) for low, high in ((1, 9), (0, 4), (0, 4)))
        x = random.normal(size=(rows, 1)).astype(np.float32)
        assert np.array_equal(lane.result(x, slot, out), x * x)


def test_what_was_prepared_is_bounded(tmp_path: Path, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_MOST_PREPARED", 5)
    lane = served(models.square(tmp_path / "m"), of_rows(1))
    for turn in range(3):
        for rows in range(1, 9):
            x = np.full((rows, 1), turn + rows, np.float32)
            assert np.array_equal(lane.result(x), x * x)
            assert len(lane.server._prepared) <= 5


def test_a_lane_that_looks_for_the_next_message_takes_it_and_sees_the_front_hang_up(tmp_path: Path) -> None:
    lane = Served(models.square(tmp_path / "m"), of_rows(1), spin_seconds=3600.0)
    x = np.full((1, 1), 3, np.float32)
    answers = [lane.ask(x, out=out, soon=True) for out in range(3)]
    assert [answer.failure for answer in answers] == [None] * 3
    lane.close()  # long before it would have given up


def test_a_shape_outside_of_the_profile_is_refused_each_time(tmp_path: Path, served: Any) -> None:
    lane = served(models.square(tmp_path / "m"), of_rows(1, 4))
    good, bad = np.ones((4, 1), np.float32), np.ones((5, 1), np.float32)
    for _ in range(3):
        assert lane.result(good).tolist() == [[1.0]] * 4
        assert lane.ask(bad).failure is FailureClass.INVALID_INPUT


def test_an_output_that_is_not_as_long_as_the_graph_says_has_its_real_length(tmp_path: Path, served: Any) -> None:
    """At first it is, so that the run is prepared; then it is not."""
    nodes = [models.node("NonZero", ["x"], ["z"]), models.node("Squeeze", ["z", "axis"], ["y"])]
    path = models.save(
        tmp_path / "m", nodes, [("x", FLOAT, ("n",))], [("y", TensorProto.INT64, ("n",))],
        {"axis": np.array([0], np.int64)},
    )  # fmt: skip
    lane = served(path, Profile({"x": ShapeRange((1,), (1,), (8,))}))
    for values, expected in (([1, 2, 3], [0, 1, 2]), ([4, 5, 6], [0, 1, 2]), ([0, 5, 0], [1]), ([1, 1, 0], [0, 1])):
        assert lane.result(np.array(values, np.float32), dtype=np.int64).tolist() == expected


def test_after_an_error_nothing_prepared_is_kept(tmp_path: Path, served: Any) -> None:
    """The lane is another one then."""
    nodes = [models.node("Reshape", ["x", "shape"], ["y"])]
    path = models.save(
        tmp_path / "m", nodes, [("x", FLOAT, ("n", 2))], [("y", FLOAT, ("n", 2))],
        {"shape": np.array([3, 2], np.int64)},
    )  # fmt: skip
    lane = served(path, Profile({"x": ShapeRange((3, 2), (3, 2), (8, 2))}))
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    for _ in range(2):
        assert np.array_equal(lane.result(x), x)
    before = lane.server._lane
    answer = lane.ask(np.ones((4, 2), np.float32))
    assert answer.failure is FailureClass.RECOVERABLE
    rested = parse_answer(lane.front.recv(MAX_MESSAGE_BYTES), 0)
    assert (rested.generation, rested.failure) == (0, None)
    assert lane.server._lane is not before
    assert lane.server._prepared == {}
    assert np.array_equal(lane.result(x), x)


def test_the_memory_of_the_front_is_not_written_beside_the_region(tmp_path: Path, served: Any) -> None:
    lane = served(models.square(tmp_path / "m"), of_rows(1))
    lane.result(np.full((8, 1), 3, np.float32), 0, 0)
    before = bytes(lane.arena.view)
    x = np.full((8, 1), 3, np.float32)
    lane.result(x, 0, 1)
    after = bytearray(lane.arena.view)
    region = lane.layout.output_region(1)
    after[region : region + x.nbytes] = bytes(x.nbytes)
    assert bytes(after) == before
