"""Lanes of TensorRT on a simulated GPU: streams, graphs, places, the spare, and what an error leads to."""

from __future__ import annotations

import gc
import json

import numpy as np
import pytest
from trt_world import NEW, OLD, World, X, Y, row_of
from trtmodel_contract.identity import Profile, ShapeRange
from trtmodel_worker.engines.base import (
    CannotLoad,
    DeviceLost,
    Elsewhere,
    InvalidInput,
    OutOfMemory,
    Recoverable,
    Sticky,
    allocate_anew,
)
from trtmodel_worker.engines.tensorrt.graphs import pattern
from trtmodel_worker.engines.tensorrt.runtime import TensorRtRuntime


@pytest.fixture(params=[OLD, NEW])
def world(request, monkeypatch):
    return World(monkeypatch, request.param)


@pytest.fixture
def old(monkeypatch):
    return World(monkeypatch, OLD)


@pytest.fixture
def new(monkeypatch):
    return World(monkeypatch, NEW)


def prepared(world, lanes=1, shapes=(1, 2), **behaviour):
    """An engine that serves, its lanes, and the memory that requests lie in."""
    engine = world.load(lanes, **behaviour)
    made = [engine.create_lane() for _ in range(lanes)]
    for rows in shapes:
        made[0].run(row_of(0, rows), allocate_anew)
        made[0].bind(row_of(0, rows), allocate_anew)
    memory = np.zeros(1 << 16, np.uint8)
    engine.serve_from(memoryview(memory))
    return engine, made, memory


def run_bound(lane, value):
    bound = lane.bind(row_of(value), allocate_anew)
    assert bound.run()
    return bound.outputs["y"]


def test_the_load_key_and_the_driver_are_the_devices(world):
    world.gpu.name = "NVIDIA H200 MIG 1g.18gb"
    key = TensorRtRuntime().load_key()
    assert (key.runtime, key.device, key.capability, key.mig) == ("TensorRT", "NVIDIA H200", "9.0", "1g.18gb")


def test_without_a_driver_tensorrt_is_not_touched(world):
    world.gpu.devices = 0
    with pytest.raises(DeviceLost, match=r"nvidia\.com/gpu"):
        world.load()


def test_inputs_outputs_and_their_types_are_those_of_the_engine(world):
    engine = world.load()
    assert [(s.name, s.datatype, s.shape) for s in (*engine.inputs, *engine.outputs)] == [
        ("x", "FP32", (-1, 4)), ("y", "FP32", (-1, 4))
    ]  # fmt: skip


def test_a_run_answers_in_the_callers_memory(world):
    lane = world.load().create_lane()
    places = {}

    def allocate(name, dtype, shape):
        places[name] = np.empty(shape, dtype)
        return places[name]

    found = lane.run(row_of(3, 2), allocate)
    assert found["y"] is places["y"]
    assert np.array_equal(found["y"], np.full((2, 4), 6, np.float32))


def test_what_is_bound_runs_again_with_new_contents_through_its_graph(world):
    _, (lane,), _ = prepared(world)
    inputs = row_of(1)
    bound = lane.bind(inputs, allocate_anew)
    launched, enqueued = world.gpu.launched, world.gpu.enqueued
    for value in (1, 5, 7):
        inputs["x"][...] = value
        assert bound.run()
        assert np.array_equal(bound.outputs["y"], np.full((1, 4), 2 * value, np.float32))
    assert (world.gpu.launched - launched, world.gpu.enqueued - enqueued) == (3, 0)


def test_shapes_that_were_captured_when_they_were_bound_were_run_then(world):
    lane = world.load().create_lane()
    assert lane.bind(row_of(1), allocate_anew).is_warm
    _, (serving,), _ = prepared(world, shapes=(1,))
    assert [serving.bind(row_of(1, rows), allocate_anew).is_warm for rows in (1, 2)] == [True, False]


def test_the_run_before_a_capture_is_of_zeros_and_not_of_what_lay_in_the_memory(world, monkeypatch):
    """An engine that looks up its inputs in a table would read anywhere."""
    seen = world.record_inputs(monkeypatch)
    world.load().create_lane().bind(row_of(1), allocate_anew)
    assert seen == [[[0.0] * 4]]


def test_a_graph_holds_no_copies(world):
    _, (lane,), _ = prepared(world)
    assert [len(graph.executable) for graph in lane._graphs.values()] == [1, 1]


def test_pinned_memory_is_read_and_written_directly_and_only_when_the_run_is_waited_for(world):
    _, (lane,), memory = prepared(world)
    x = memory[:16].view(np.float32).reshape(1, 4)
    y = memory[256:272].view(np.float32).reshape(1, 4)
    bound = lane.bind({"x": x}, lambda *_: y)
    x[...] = 4
    assert bound.run()
    assert np.array_equal(y, np.full((1, 4), 8, np.float32))
    assert world.gpu.pinned[0][1] == memory.nbytes


def test_a_shape_that_was_not_prepared_runs_without_a_graph_and_makes_nothing(world):
    _, (lane,), _ = prepared(world)
    contexts, graphs = world.gpu.contexts, world.gpu.graphs
    bound = lane.bind(row_of(3, 5), allocate_anew)
    assert bound.run()
    assert np.array_equal(bound.outputs["y"], np.full((5, 4), 6, np.float32))
    assert (world.gpu.contexts, world.gpu.graphs) == (contexts, graphs)


def test_runs_without_a_graph_set_their_shapes_each(world):
    _, (lane,), _ = prepared(world, shapes=())
    bounds = [lane.bind(row_of(rows, rows), allocate_anew) for rows in (2, 5)]
    for _ in range(2):
        for rows, bound in zip((2, 5), bounds, strict=True):
            assert bound.run()
            assert np.array_equal(bound.outputs["y"], np.full((rows, 4), 2 * rows, np.float32))


def test_a_graph_that_answers_something_else_is_not_used(world):
    world.gpu.lying_graphs = True
    _, (lane,), _ = prepared(world)
    assert lane.captured == ()
    assert world.gpu.graphs == 0
    assert np.array_equal(lane.run(row_of(3), allocate_anew)["y"], np.full((1, 4), 6, np.float32))


def test_a_graph_is_compared_before_it_serves(world):
    world.gpu.lying_graphs = True
    engine = world.load()
    lane = engine.create_lane()
    run_bound(lane, 3)
    engine.serve_from(memoryview(np.zeros(64, np.uint8)))
    assert lane.captured == ()
    assert np.array_equal(run_bound(lane, 3), np.full((1, 4), 6, np.float32))


def test_a_graph_that_later_captures_have_changed_is_given_up(world):
    engine = world.load()
    lane = engine.create_lane()
    run_bound(lane, 3)
    (graph,) = lane._graphs.values()
    graph.executable.clear()  # it computes nothing any more
    engine.serve_from(memoryview(np.zeros(64, np.uint8)))
    assert lane.captured == ()
    assert np.array_equal(run_bound(lane, 3), np.full((1, 4), 6, np.float32))


def test_what_computes_before_an_engine_serves_runs_in_pieces_with_rests_between(new):
    engine = new.load(2)
    lanes = [engine.create_lane() for _ in range(2)]
    for rows in (1, 2):
        lanes[0].bind(row_of(0, rows), allocate_anew)
    pieces = []

    def runs():
        return new.gpu.enqueued + new.gpu.launched

    def paced(work):
        before = runs()
        work()
        pieces.append(runs() - before)

    before = runs()
    engine.serve_from(memoryview(np.zeros(64, np.uint8)), paced)
    assert [len(lane.captured) for lane in lanes] == [2, 2]
    assert sum(pieces) == runs() - before > 0
    assert max(pieces) <= 4  # a capture or a proof of one shape, of one lane


def test_the_plain_answer_in_a_shape_is_computed_once_for_all_lanes(new):
    engine = new.load(3)
    lanes = [engine.create_lane() for _ in range(3)]
    lanes[0].bind(row_of(0), allocate_anew)
    enqueued, launched = new.gpu.enqueued, new.gpu.launched
    engine.serve_from(memoryview(np.zeros(64, np.uint8)))
    captured = 2 * 2  # by the other lanes: a run before the capture, and what is recorded
    assert (new.gpu.enqueued - enqueued, new.gpu.launched - launched) == (captured + 1, 3)


def test_a_graph_that_another_lane_does_not_agree_with_is_judged_by_its_own_lane(world):
    _, (lane,), _ = prepared(world)
    ((rows, *_), *_) = shapes = lane.captured[0]
    expected = lane.expect(shapes, pattern(lane._loaded.signature, shapes))
    expected.outputs[0][0] ^= 1
    lane.prove(shapes, expected)
    assert shapes in lane.captured
    world.gpu.lying_graphs = True
    lane._graphs[shapes].executable.clear()
    lane.prove(shapes, expected)
    assert shapes not in lane.captured
    assert np.array_equal(run_bound(lane, 3), np.full((rows, 4), 6, np.float32))


def test_an_engine_that_cannot_be_captured_runs_without_graphs(world, caplog):
    world.gpu.capturable = False
    with caplog.at_level("INFO"):
        _, (lane,), _ = prepared(world)
    assert lane.captured == ()
    assert "without a CUDA graph" in caplog.text
    assert np.array_equal(lane.run(row_of(3), allocate_anew)["y"], np.full((1, 4), 6, np.float32))


def test_every_lane_gets_the_graphs_of_the_first(world):
    _, lanes, _ = prepared(world, lanes=3)
    assert [set(lane.captured) for lane in lanes] == [{((1, 4),), ((2, 4),)}] * 3


def test_below_version_9_a_spare_takes_over_and_no_context_is_made_while_serving(old):
    engine, _, _ = prepared(old, lanes=2)
    contexts = old.gpu.contexts
    lane = engine.create_lane()
    assert old.gpu.contexts == contexts
    assert set(lane.captured) == {((1, 4),), ((2, 4),)}
    with pytest.raises(Recoverable, match="has to be replaced"):
        engine.create_lane()


def test_from_version_9_on_a_lane_is_made_anew_with_its_graphs(new):
    engine, _, _ = prepared(new, lanes=2)
    for _ in range(3):
        assert set(engine.create_lane().captured) == {((1, 4),), ((2, 4),)}


def test_a_lane_that_nobody_refers_to_gives_everything_back(new):
    _, lanes, _ = prepared(new, lanes=2)
    lanes.clear()
    gc.collect()
    assert (new.gpu.contexts, new.gpu.graphs, new.gpu.used(), len(new.gpu.streams)) == (0, 0, 0, 0)


ONLY_DATA_TELLS = {"mode": "nonzero", "outputs": [["y", "INT32", [2, -1]]]}


def ones(count, rows):
    x = np.zeros((rows, 4), np.float32)
    x.ravel()[:count] = 1
    return {"x": x}


def test_an_output_whose_shape_only_the_data_tells_is_answered_and_never_bound(new):
    lane = new.load(**ONLY_DATA_TELLS).create_lane()
    for count, rows in ((1, 1), (3, 1), (7, 3), (5, 3), (2, 1)):  # after a run the context tells that run's shape
        inputs = ones(count, rows)
        assert np.array_equal(lane.run(inputs, allocate_anew)["y"], np.stack(np.nonzero(inputs["x"])))
        assert lane.bind(inputs, allocate_anew) is None


def test_below_10_an_engine_with_such_an_output_is_not_loaded(old):
    with pytest.raises(CannotLoad, match=r"outputs \['y'\].*TensorRT 8\.6\.0.*ONNXRuntime"):
        old.load(**ONLY_DATA_TELLS).create_lane()


def test_an_output_of_which_two_shapes_are_told_is_not_answered(new):
    lane = new.load(**ONLY_DATA_TELLS).create_lane()
    lane.run(ones(3, 2), allocate_anew)
    new.gpu.tells = (2, 9)
    with pytest.raises(Recoverable, match=r"two shapes of output 'y', \[2, 3\] and \[2, 9\]"):
        lane.run(ones(3, 2), allocate_anew)


def test_the_tightest_profile_that_allows_the_shape_is_taken(world):
    lane = world.load(rows=((1, 32), (1, 2), (3, 4))).create_lane()
    choose = lane._loaded.signature.profile
    assert [choose(((rows, 4),)) for rows in (1, 3, 9)] == [1, 2, 0]
    for rows in (1, 3, 9):
        assert np.array_equal(lane.run(row_of(1, rows), allocate_anew)["y"], np.full((rows, 4), 2, np.float32))


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"x": np.zeros((9, 4), np.float32)}, "outside of every profile"),
        ({"x": np.zeros((1, 5), np.float32)}, "outside of every profile"),
        ({"x": np.zeros((1, 4), np.float64)}, "float64"),
        ({"z": np.zeros((1, 4), np.float32)}, "unknown inputs"),
        ({}, "missing inputs"),
        ({"x": np.zeros((4, 2), np.float32).T}, "C-contiguous"),
    ],
)
def test_what_the_engine_does_not_take_is_the_requests_fault(new, inputs, said):
    lane = new.load().create_lane()
    with pytest.raises(InvalidInput, match=said):
        lane.run(inputs, allocate_anew)


@pytest.mark.parametrize(("mode", "said"), [("together", "enqueue failed"), ("untold", "no shape for inputs of")])
def test_inputs_whose_shapes_do_not_fit_each_other_are_the_requests_fault_each_time(world, mode, said):
    profiles = (Profile({name: ShapeRange((1, 4), (1, 4), (8, 4)) for name in "xz"}),)
    document = {
        "factor": 2, "mode": mode, "inputs": [X, ["z", "FP32", [-1, 4]]], "outputs": [Y],
        "profiles": [{name: [[1, 4], [1, 4], [8, 4]] for name in "xz"}],
    }  # fmt: skip
    lane = TensorRtRuntime().load(memoryview(json.dumps(document).encode()), profiles, 1).create_lane()
    z = np.zeros((3, 4), np.float32)
    for _ in range(2):
        with pytest.raises(InvalidInput, match=f"{said}.*shapeMachine"):
            lane.run({**row_of(1, 2), "z": z}, allocate_anew)
        assert np.array_equal(lane.run({**row_of(1, 3), "z": z}, allocate_anew)["y"], np.full((3, 4), 2, np.float32))


def test_without_memory_for_the_run_that_a_graph_is_made_of_the_shape_runs_without_one(world):
    lane = world.load().create_lane()
    before = world.gpu.contexts
    world.gpu.arm("memory")
    bound = lane.bind(row_of(3), allocate_anew)
    assert lane.captured == ()
    assert world.gpu.contexts == before
    assert bound.run()
    assert np.array_equal(bound.outputs["y"], np.full((1, 4), 6, np.float32))


@pytest.mark.parametrize("rows", [1, 5], ids=["graph", "plain"])
@pytest.mark.parametrize(
    ("what", "expected"),
    [("sticky", Sticky), ("lost", DeviceLost), ("recoverable", Recoverable), ("memory", OutOfMemory)],
)
def test_a_fault_of_the_device_is_classified(world, what, expected, rows):
    _, (lane,), _ = prepared(world)
    bound = lane.bind(row_of(1, rows), allocate_anew)
    world.gpu.arm(what)
    with pytest.raises(expected):
        bound.run()


@pytest.mark.parametrize("what", ["sticky", "lost"])
def test_after_the_device_is_lost_nothing_of_it_is_touched(world, what):
    engine, lanes, _ = prepared(world, lanes=2)
    world.gpu.arm(what)
    with pytest.raises((Sticky, DeviceLost)):
        lanes[0].run(row_of(1), allocate_anew)
    world.gpu.calls_after_poison.clear()
    lanes.clear()
    del engine
    gc.collect()
    assert world.gpu.calls_after_poison == []


def test_a_failure_that_says_nothing_is_judged_by_a_probe(world):
    """TensorRT returned False, and the stream had nothing to wait for."""
    lane = world.load().create_lane()
    world.gpu.sticky = 719
    assert type(lane._loaded.failure("enqueue failed", lane._place.recorder, None)) is Sticky


def test_another_lanes_fault_is_seen_by_whoever_waits_next(world):
    _, (first, second), _ = prepared(world, lanes=2)
    world.gpu.sticky = 700
    for lane in (first, second):
        with pytest.raises(Sticky, match="700"):
            lane.run(row_of(1), allocate_anew)


@pytest.mark.parametrize("what", ["recoverable", "memory"])
def test_after_a_fault_that_is_not_the_devices_end_the_lane_runs_on(world, what):
    _, (lane,), _ = prepared(world)
    world.gpu.arm(what)
    with pytest.raises((Recoverable, OutOfMemory)):
        lane.run(row_of(1, 5), allocate_anew)
    assert np.array_equal(lane.run(row_of(3, 5), allocate_anew)["y"], np.full((5, 4), 6, np.float32))


def test_an_internal_error_that_comes_again_ends_the_process(world):
    _, (lane,), _ = prepared(world)
    for expected in (Recoverable, Sticky):
        world.gpu.arm("internal")
        with pytest.raises(expected):
            lane.run(row_of(1, 5), allocate_anew)


def test_bytes_that_are_no_plan_cannot_be_loaded(world):
    with pytest.raises(CannotLoad, match="magicTag"):
        TensorRtRuntime().load(memoryview(b"\0" * 64), (), 1)


def test_an_engine_with_other_profiles_than_the_manifest_cannot_be_loaded(world):
    plan = world.plan(rows=((1, 2), (1, 4)))

    with pytest.raises(CannotLoad, match="2 profiles, the manifest says 1"):
        TensorRtRuntime().load(memoryview(plan), (Profile({"x": ShapeRange((1, 4), (1, 4), (2, 4))}),), 1)


def test_without_memory_for_a_lane_that_is_said_and_what_was_taken_is_given_back(world):
    engine = world.load()
    world.gpu.total = 4300  # the scratch memory fits, the inputs do not
    with pytest.raises(OutOfMemory, match="no device memory for another lane"):
        engine.create_lane()
    assert world.gpu.used() == 0


def test_without_memory_for_a_context_of_a_graph_the_shape_runs_without_one(world):
    engine = world.load(most_contexts=1)
    lane = engine.create_lane()
    bound = lane.bind(row_of(3), allocate_anew)
    assert lane.captured == ()
    assert bound.run()
    assert np.array_equal(bound.outputs["y"], np.full((1, 4), 6, np.float32))


def test_without_memory_for_a_spare_the_engine_serves(old, caplog):
    engine = old.load(most_contexts=1)
    engine.create_lane()
    engine.serve_from(memoryview(np.zeros(64, np.uint8)))
    assert "no memory for a spare lane" in caplog.text
    with pytest.raises(Recoverable):
        engine.create_lane()


def test_memory_that_cannot_be_pinned_is_copied_by_the_driver(world, monkeypatch, caplog):
    import sys

    runtime = sys.modules["cuda.bindings.runtime"]
    from simulated_gpu import Status

    monkeypatch.setattr(runtime, "cudaHostRegister", lambda *_: (Status(1),))
    _, (lane,), memory = prepared(world)
    x = memory[:16].view(np.float32).reshape(1, 4)
    x[...] = 3
    assert np.array_equal(lane.run({"x": x}, allocate_anew)["y"], np.full((1, 4), 6, np.float32))
    assert "could not be pinned" in caplog.text


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "plain"])
def test_inputs_are_copied_from_where_they_lie(world, graph):
    world.gpu.capturable = graph
    engine, (lane,), memory = prepared(world, shapes=(1, 4))
    x = memory[:64].view(np.float32).reshape(4, 4)
    x[...] = np.arange(16).reshape(4, 4)
    clients = [np.full(4, value, np.float32) for value in (70.0, 80.0)]
    for each in clients:
        assert engine.pin(each.ctypes.data, each.nbytes)
    pieces = [
        Elsewhere(x.ctypes.data + row * 16, each.ctypes.data, 16) for row, each in zip((3, 1), clients, strict=True)
    ]
    bound = lane.bind({"x": x}, allocate_anew)
    assert bound.run_from(pieces)
    assert bound.outputs["y"][:, 0].tolist() == [0.0, 160.0, 16.0, 140.0]
    assert x[3].tolist() == [12, 13, 14, 15], "where it was bound is as it was"
    assert bound.run()
    assert bound.outputs["y"][:, 0].tolist() == [0.0, 8.0, 16.0, 24.0]


@pytest.mark.parametrize("size", [20, 17])
def test_nothing_is_copied_beyond_an_inputs_end(world, size):
    engine, (lane,), memory = prepared(world)
    x = memory[:16].view(np.float32).reshape(1, 4)
    client = np.zeros(8, np.float32)
    engine.pin(client.ctypes.data, client.nbytes)
    bound = lane.bind({"x": x}, allocate_anew)
    with pytest.raises(ValueError, match="do not fit"):
        bound.run_from([Elsewhere(x.ctypes.data, client.ctypes.data, size)])


def test_a_device_that_pins_nothing_that_is_read_only_says_so(world):
    world.gpu.pins_read_only = False
    engine, _, _ = prepared(world)
    assert not engine.pin(4096, 4096)


def test_what_was_pinned_is_let_go_of(world):
    engine, _, _ = prepared(world)
    before = list(world.gpu.pinned)
    assert engine.pin(4096, 4096)
    engine.unpin(4096)
    assert world.gpu.pinned == before
    world.gpu.sticky = 700
    engine._loaded.cuda.poisoned = True
    engine.unpin(4096)
    assert not engine.pin(4096, 4096)
    assert not world.gpu.calls_after_poison
