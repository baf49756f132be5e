"""An engine in this process: what it answers, what a run costs, and what it does about lack of memory."""

from __future__ import annotations

import functools
import mmap
import os
import threading
import time
from pathlib import Path

import gpu_models
import gpu_serving
import numpy as np
import pytest
from gpu_bare import BareLoop
from gpu_serving import percentiles
from trtmodel_worker.builder import stages
from trtmodel_worker.devicememory import device_memory
from trtmodel_worker.engines.base import CannotLoad, InvalidInput, OutOfMemory, allocate_anew
from trtmodel_worker.engines.tensorrt import compat
from trtmodel_worker.engines.tensorrt.device import Cuda, CudaError, Stream
from trtmodel_worker.front.memory import MARGIN

pytestmark = pytest.mark.timeout(120)

SECONDS = 2.0
ROWS = (1, 4, 8, 16, 32)
COPIED_BYTES = (588 << 10, 16 * 588 << 10)


def cosine(a, b):
    a, b = a.ravel().astype(np.float64), b.ravel().astype(np.float64)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


@pytest.mark.parametrize("name", ["magika", "resnet"])
def test_an_engine_answers_what_onnx_runtime_answers(name, request, figures):
    import onnxruntime

    model, engine = request.getfixturevalue(name), request.getfixturevalue(f"{name}_engine")
    session = onnxruntime.InferenceSession(str(model.onnx), providers=["CPUExecutionProvider"])
    lane = engine.create_lane()
    found = {}
    for rows in (1, 8):
        inputs = model.sample(rows)
        mine = lane.run(inputs, allocate_anew)
        theirs = dict(zip([o.name for o in session.get_outputs()], session.run(None, inputs), strict=True))
        found[f"cosine_{rows}"] = min(cosine(mine[n], theirs[n]) for n in theirs)
    figures(**found)
    assert all(value > 0.999 for value in found.values()), found


class Pinned:
    """Memory as the host process has it: registered with CUDA by `serve_from`."""

    def __init__(self, size):
        self.map = mmap.mmap(-1, size)
        self.view = memoryview(self.map)
        self._at = 0

    def array(self, dtype, shape):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        array = np.ndarray(shape, dtype, buffer=self.map, offset=self._at)
        self._at += (size + 255) // 256 * 256
        return array

    def put(self, inputs):
        placed = {}
        for name, array in inputs.items():
            placed[name] = self.array(array.dtype, array.shape)
            placed[name][...] = array
        return placed

    def allocate(self, _name, dtype, shape):
        return self.array(dtype, shape)


def timed(run, seconds=SECONDS):
    """Latencies in ms."""
    for _ in range(20):
        run()
    took, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        run()
        took.append(1e3 * (time.perf_counter() - began))
    return np.array(took)


def together(runs, seconds=SECONDS):
    """Runs per second of all in threads of their own."""
    counts, end = [0] * len(runs), time.perf_counter() + seconds

    def work(i):
        while time.perf_counter() < end:
            runs[i]()
            counts[i] += 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return round(sum(counts) / seconds, 1)


@pytest.fixture(scope="module")
def served(resnet):
    """An engine as a host has it: four lanes, graphs, pinned memory."""
    engine = gpu_serving.load(resnet, lanes=4)
    lanes = [engine.create_lane() for _ in range(4)]
    began = time.perf_counter()
    for rows in ROWS:
        inputs = resnet.sample(rows)
        lanes[0].run(inputs, allocate_anew)
        lanes[0].bind(inputs, allocate_anew)
    captured = time.perf_counter() - began
    pinned = Pinned(512 << 20)
    began = time.perf_counter()
    engine.serve_from(pinned.view)
    return (
        engine,
        lanes,
        pinned,
        {"first_lane_s": round(captured, 3), "serve_from_s": round(time.perf_counter() - began, 3)},
    )


def test_every_shape_that_was_bound_has_a_graph_on_every_lane_that_answers_the_same(served, resnet, figures):
    _, lanes, _, seconds = served
    inputs = resnet.sample(4, seed=3)
    answers = [lane.run(inputs, allocate_anew)["logits"] for lane in lanes]
    figures(graphs=[len(lane.captured) for lane in lanes], **seconds)
    assert all(set(lane.captured) == {((rows, 3, 224, 224),) for rows in ROWS} for lane in lanes)
    assert all(np.array_equal(answers[0], other) for other in answers[1:])


def test_a_run_costs_what_a_bare_loop_costs(served, resnet, figures, bar):
    """By number of rows: bare graph with copies in it, our graph, our plain run; and memory that is not pinned."""
    engine, lanes, pinned, _ = served
    found = {}
    for rows in ROWS:
        inputs = resnet.sample(rows)
        bound = lanes[0].bind(pinned.put(inputs), pinned.allocate)
        other = lanes[0].bind(inputs, allocate_anew)
        shapes = ((rows, 3, 224, 224),)
        with BareLoop(engine, shapes) as bare:
            found[f"rows_{rows}"] = {
                "bare": percentiles(timed(bare.run, 1.0)),
                "graph": percentiles(timed(bound.run, 1.0)),
                "pageable": percentiles(timed(other.run, 0.5)),
            }
    spare = gpu_serving.load(resnet, 1)
    lane = spare.create_lane()
    lane.preparing = False
    plain = lane.bind(pinned.put(resnet.sample(1)), pinned.allocate)
    found["rows_1"]["plain"] = percentiles(timed(plain.run, 1.0))
    figures(**found)
    for rows in ROWS:
        each = found[f"rows_{rows}"]
        share = 100 * each["bare"]["p50_ms"] / each["graph"]["p50_ms"]
        bar(f"one lane in one process at bucket {rows} against the bare loop", share, 95, "%", least=True)
    assert found["rows_1"]["graph"]["p50_ms"] < found["rows_1"]["plain"]["p50_ms"]


def test_lanes_with_graphs_run_side_by_side(served, resnet, figures, bar):
    engine, lanes, pinned, _ = served
    runs = [lane.bind(pinned.put(resnet.sample(1, seed=i)), pinned.allocate).run for i, lane in enumerate(lanes)]
    found = {f"graphs_{n}": together(runs[:n]) for n in (1, 2, 4)}
    bares = [BareLoop(engine, ((1, 3, 224, 224),)) for _ in range(4)]
    found |= {f"bare_{n}": together([bare.run for bare in bares[:n]]) for n in (1, 4)}
    for bare in bares:
        bare.free()
    figures(per_second=found)
    share = 100 * found["graphs_4"] / found["bare_4"]
    bar("four lanes in one process against four bare loops", share, 95, "%", least=True)
    assert found["graphs_4"] > found["graphs_1"]


def test_a_lane_is_made_anew(served, figures):
    """Below version 9 the spare takes over at once, and there is none after it."""
    engine, lanes, _, _ = served
    began = time.perf_counter()
    lane = engine.create_lane()
    took = time.perf_counter() - began
    figures(milliseconds=round(1e3 * took, 3), graphs=len(lane.captured))
    assert set(lane.captured) == set(lanes[0].captured)
    began = time.perf_counter()
    del lane
    figures(freed_milliseconds=round(1e3 * (time.perf_counter() - began), 3))


def test_an_output_whose_shape_only_the_data_tells_is_answered_from_10_on_and_refused_before(figures, bar):
    model = gpu_models.nonzero()
    engine = gpu_serving.load(model)
    if not compat.capabilities(compat.load()).data_shaped_outputs:
        with pytest.raises(CannotLoad) as refused:
            engine.create_lane()
        figures(said=str(refused.value))
        bar("an output whose shape only the data tells is refused by the worker", 1, 1, least=True)
        return
    lane = engine.create_lane()
    for turn, rows in enumerate((1, 1, 3, 3, 1)):  # 8.6.0 gave the answer of an earlier run's shape here
        x = (model.sample(rows, seed=turn)["x"] > 0.5).astype(np.float32)
        found = lane.run({"x": x}, allocate_anew)["y"]
        assert np.array_equal(found, np.stack(np.nonzero(x)).astype(np.int32))
    assert lane.bind({"x": x}, allocate_anew) is None
    figures(shape=list(found.shape))


def test_inputs_whose_shapes_do_not_fit_each_other_are_the_requests_fault_and_harm_nothing(figures):
    lane = gpu_serving.load(gpu_models.sum_of_two()).create_lane()

    def ones(x, z):
        return {"x": np.ones((x, 16), np.float32), "z": np.ones((z, 16), np.float32)}

    for _ in range(2):  # an internal error that comes again would end the process
        with pytest.raises(InvalidInput) as seen:
            lane.run(ones(2, 3), allocate_anew)
        assert np.array_equal(lane.run(ones(3, 3), allocate_anew)["y"], np.full((3, 16), 2, np.float32))
    figures(said=str(seen.value)[:600])


def test_lack_of_memory_is_told_as_such_and_harms_nothing(magika, magika_engine, figures):
    cuda = Cuda()
    lane = magika_engine.create_lane()
    before = lane.run(magika.sample(1), allocate_anew)
    with pytest.raises(CudaError) as seen:
        cuda.allocate(1 << 46)
    assert seen.value.code == 2
    held, size = [], 1 << 36
    while size > 1 << 12:
        try:
            held.append(cuda.allocate(size))
        except CudaError:
            size //= 2
    try:
        with pytest.raises(OutOfMemory) as short:
            magika_engine.create_lane()
        after = lane.run(magika.sample(1), allocate_anew)
    finally:
        for address in held:
            cuda.free(address)
    figures(said=str(short.value)[:400])
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert magika_engine.create_lane().run(magika.sample(1), allocate_anew)


def test_each_further_lane_takes_of_the_device_what_was_measured_of_the_second(resnet, figures, bar):
    """As a builder measures it, for workers of any number of lanes."""
    engine = gpu_serving.load(resnet, lanes=6)
    held, two, each = stages.measured_lanes(engine, ROWS, resnet.sample, device_memory())
    found = {"two_lanes_mib": two >> 20, "lane_mib": each >> 20}
    more, took, _ = stages.measured_lanes(engine, ROWS, resnet.sample, device_memory())
    figures(**found, two_more_mib=took >> 20)
    assert len(held) == len(more) == 2
    bar("memory that two further lanes take, against what was measured of one", took / (2 * each), MARGIN, "x")


@pytest.fixture
def clients_file():
    """A file of /dev/shm as a client has one, larger than any input here."""
    path = Path("/dev/shm", f"{gpu_serving.SHM_PREFIX}copies-{os.getpid()}")
    path.write_bytes(os.urandom(max(COPIED_BYTES)))
    yield path
    path.unlink()


def test_what_a_copy_to_the_device_costs_by_where_it_lies(clients_file, figures, bar):
    """In memory of the driver's own, in the arena, in a client's file that was pinned (read only, or not), and read
    from that file into the arena first."""
    cuda = Cuda()
    stream, most = Stream(cuda), max(COPIED_BYTES)
    device, own = cuda.allocate(most), cuda.call("cudaMallocHost", most)
    arena = Pinned(most)
    arena_at = np.frombuffer(arena.map, np.uint8).ctypes.data
    cuda.register(arena_at, most)
    read_only = cuda.runtime.cudaDeviceAttr.cudaDevAttrHostRegisterReadOnlySupported
    found = {"read_only_supported": int(cuda.call("cudaDeviceGetAttribute", read_only, 0))}
    places = {"own": int(own), "arena": arena_at}
    descriptor = os.open(clients_file, os.O_RDWR)
    mapped = {}
    for name, protection in (("file", mmap.PROT_READ | mmap.PROT_WRITE), ("file, read only", mmap.PROT_READ)):
        mapped[name] = np.frombuffer(mmap.mmap(descriptor, most, mmap.MAP_SHARED, protection), np.uint8)
        began = time.perf_counter()
        try:
            cuda.register(mapped[name].ctypes.data, most, read_only=protection == mmap.PROT_READ)
        except CudaError as e:
            found[name] = str(e)
            cuda.clear_error()
            continue
        found[name] = {"pin_ms": round(1e3 * (time.perf_counter() - began), 2)}
        places[name] = mapped[name].ctypes.data

    def copy(address, size):
        stream.copy_in(device, address, size)
        stream.wait()

    def read_and_copy(size):
        os.preadv(descriptor, [memoryview(arena.map)[:size]], 0)
        copy(arena_at, size)

    for size in COPIED_BYTES:
        kinds = {name: functools.partial(copy, at, size) for name, at in places.items()}
        kinds["file, read into the arena first"] = functools.partial(read_and_copy, size)
        us = {name: round(1e3 * percentiles(timed(run, 0.3))["p50_ms"], 1) for name, run in kinds.items()}
        found[f"us_for_{size >> 10}_kib"] = us
        for name, figure in us.items():
            bar(f"copy of {size >> 10} KiB to the device, {name}, p50", figure, None, "us")
    for name in places.keys() & mapped.keys():
        began = time.perf_counter()
        cuda.unregister(mapped[name].ctypes.data)
        found[name]["unpin_ms"] = round(1e3 * (time.perf_counter() - began), 2)
    figures(**found)
    os.close(descriptor)


def test_the_first_run_of_a_warm_lane_is_as_fast_as_later_ones(served, resnet, figures, bar):
    _, lanes, pinned, _ = served
    time.sleep(1.0)  # what a request meets that comes after a pause
    run = lanes[3].bind(pinned.put(resnet.sample(1)), pinned.allocate).run
    began = time.perf_counter()
    run()
    first = 1e3 * (time.perf_counter() - began)
    steady = percentiles(timed(run, 0.5))
    figures(first_ms=round(first, 3), steady=steady)
    bar("first run of a warm lane after a pause of 1 s, against the steady p50", first / steady["p50_ms"], None, "x")
