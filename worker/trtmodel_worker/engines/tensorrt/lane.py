"""A lane of a TensorRT engine: one stream, one set of places on the device, contexts that take turns in them.

    inputs  --copy-->  places  --plain context or graph-->  places  --copy-->  outputs

Memory that is pinned (see TensorRtEngine.serve_from) is copied from and to directly; other memory goes through the
driver's own buffers, which is right as well, but slower.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Mapping, Sequence

from trtmodel_worker.engines.base import Allocate, Array, Elsewhere
from trtmodel_worker.engines.tensorrt import graphs
from trtmodel_worker.engines.tensorrt.contexts import Context, Workplace
from trtmodel_worker.engines.tensorrt.device import CudaError
from trtmodel_worker.engines.tensorrt.graphs import Expected, Graph, NotCaptured
from trtmodel_worker.engines.tensorrt.loaded import Loaded
from trtmodel_worker.engines.tensorrt.tensors import Shape, Shapes

log = logging.getLogger(__name__)
_MOST_GRAPHS = 32  # of a lane: each has a context, which takes host and device memory

Copy = tuple[int, int, int]
"""Destination, source, bytes."""


class TensorRtLane:
    """See the BindingLane and WakingLane protocols. While `preparing`, a shape that is bound is captured; later that
    would be on a request's way. Freed when nobody refers to it any more. Raises EngineError."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self.preparing = True
        self._place = Workplace(loaded)
        self._plain: list[Context] = []
        self._graphs: dict[Shapes, Graph] = {}
        self._plain_only: set[Shapes] = set()
        # Not at the end of the process, which frees everything by itself, and where CUDA may be half gone.
        weakref.finalize(self, _free, self._graphs, self._plain, self._place).atexit = False
        for number, bounds in enumerate(loaded.signature.profiles):
            context = Context(loaded, self._place, number)
            self._plain.append(context)
            context.use(bounds.high)  # every place gets the size that the greatest shape needs

    @property
    def captured(self) -> tuple[Shapes, ...]:
        return tuple(self._graphs)

    def run(self, inputs: Mapping[str, Array], allocate: Allocate) -> Mapping[str, Array]:
        """See the Lane protocol."""
        bound = self._bind(inputs, allocate)
        if bound is None:
            return self._run_unforeseen(inputs, allocate)
        bound.run()
        return bound.outputs

    def bind(self, inputs: Mapping[str, Array], allocate: Allocate) -> TensorRtBound | None:
        """See the BindingLane protocol."""
        if self.preparing:
            self.capture(self._loaded.signature.shapes(inputs))
        return self._bind(inputs, allocate)

    def wake(self) -> None:
        """See the WakingLane protocol. Each run writes its inputs anew."""
        if self._place.inputs:
            with contextlib.suppress(CudaError):
                self._place.stream.fill(self._place.inputs[0], 0, 1)

    def capture(self, shapes: Shapes) -> None:
        """Make a graph for these shapes, if one can be made. It is to be proved before it serves: with `prove`, once
        all are captured. (Each run beside traffic holds up requests, so none is made to prove it twice.)"""
        if shapes in self._graphs or shapes in self._plain_only:
            return
        profile = self._loaded.signature.profile(shapes)
        try:
            if len(self._graphs) >= _MOST_GRAPHS:
                raise NotCaptured(f"there are {_MOST_GRAPHS} graphs already")
            self._graphs[shapes] = graphs.capture(self._loaded, self._place, profile, shapes)
        except NotCaptured as e:
            self._plain_only.add(shapes)
            log.info("shapes %s run without a CUDA graph: %s", [list(shape) for shape in shapes], e)

    def expect(self, shapes: Shapes, inputs: list[Array]) -> Expected:
        """What the plain context answers to `inputs` in shapes that are captured."""
        plain = self._plain[self._loaded.signature.profile(shapes)]
        return graphs.expect(self._loaded, self._place, plain, shapes, self._graphs[shapes].sizes, inputs)

    def prove(self, shapes: Shapes, expected: Expected) -> None:
        """Compare a graph with what a lane expects, or else with what this one does, and drop it if it answers
        something else. Later captures may have changed it: so when all are there."""
        graph = self._graphs[shapes]
        try:
            try:
                graphs.prove(self._loaded, self._place, graph, expected)
            except NotCaptured:
                graphs.prove(self._loaded, self._place, graph, self.expect(shapes, expected.inputs))
        except NotCaptured as e:
            del self._graphs[shapes]
            graph.free()
            self._plain_only.add(shapes)
            log.warning("shapes %s run without their CUDA graph: %s", [list(shape) for shape in shapes], e)

    def _bind(self, inputs: Mapping[str, Array], allocate: Allocate) -> TensorRtBound | None:
        signature = self._loaded.signature
        shapes = signature.shapes(inputs)
        graph = self._graphs.get(shapes)
        plain = self._plain[signature.profile(shapes)]
        sizes: Mapping[str, Shape | None] = plain.use(shapes) if graph is None else graph.sizes
        if None in sizes.values():
            return None
        outputs = {
            tensor.name: allocate(tensor.name, tensor.dtype, sizes[tensor.name] or ()) for tensor in signature.outputs
        }
        addresses = plain.addresses if graph is None else graph.addresses
        out = [(array.ctypes.data, addresses[name], array.nbytes) for name, array in outputs.items()]
        return TensorRtBound(self, graph or plain, shapes, inputs, self._copies_in(inputs), out, outputs)

    def _copies_in(self, inputs: Mapping[str, Array]) -> list[Copy]:
        arrays = [inputs[tensor.name] for tensor in self._loaded.signature.inputs]
        return [
            (address, array.ctypes.data, array.nbytes)
            for address, array in zip(self._place.inputs, arrays, strict=True)
        ]

    @property
    def moved(self) -> int:
        """Changes when a place of an output did: copies from the old one would be of old outputs."""
        return self._place.moved

    def execute(self, runs: Graph | Context, shapes: Shapes, copies_in: list[Copy], copies_out: list[Copy]) -> None:
        """Copy in, run, copy out, wait."""
        stream = self._place.stream
        try:
            for device, host, size in copies_in:
                stream.copy_in(device, host, size)
            if isinstance(runs, Graph):
                stream.launch(runs.executable)
            else:
                runs.use(shapes)
                runs.enqueue()
            for host, device, size in copies_out:
                stream.copy_out(host, device, size)
            stream.wait()
        except CudaError as e:
            raise self._loaded.failure("the run failed", self._place.recorder, stream, e) from e

    def _run_unforeseen(self, inputs: Mapping[str, Array], allocate: Allocate) -> Mapping[str, Array]:
        """The outputs' shapes are known after the run only: wait, ask, then copy."""
        shapes = self._loaded.signature.shapes(inputs)
        plain = self._plain[self._loaded.signature.profile(shapes)]
        sizes = plain.use(shapes)
        self.execute(plain, shapes, self._copies_in(inputs), [])
        outputs: dict[str, Array] = {}
        copies = []
        for tensor in self._loaded.signature.outputs:
            known = sizes[tensor.name]
            address, shape = plain.produced(tensor.name) if known is None else (plain.addresses[tensor.name], known)
            array = outputs[tensor.name] = allocate(tensor.name, tensor.dtype, shape)
            copies.append((array.ctypes.data, address, array.nbytes))
        try:
            for host, device, size in copies:
                self._place.stream.copy_out(host, device, size)
            self._place.stream.wait()
        except CudaError as e:
            raise self._loaded.failure("the run failed", self._place.recorder, self._place.stream, e) from e
        return outputs


class TensorRtBound:
    """See the FetchingBound and WarmBound protocols. Holds the arrays whose addresses are copied from and to."""

    __slots__ = (
        "_copies_in", "_copies_out", "_elsewhere", "_fetched", "_inputs", "_lane", "_moved", "_runs", "_shapes",
        "is_warm", "outputs",
    )  # fmt: skip

    def __init__(
        self,
        lane: TensorRtLane,
        runs: Graph | Context,
        shapes: Shapes,
        inputs: Mapping[str, Array],
        copies_in: list[Copy],
        copies_out: list[Copy],
        outputs: Mapping[str, Array],
    ) -> None:
        self._lane, self._runs, self._shapes, self._inputs = lane, runs, shapes, inputs
        self._copies_in, self._copies_out = copies_in, copies_out
        self._moved = lane.moved
        self._elsewhere: Sequence[Elsewhere] = ()  # of the last time: most often it is there again
        self._fetched: list[Copy] = copies_in
        self.is_warm = isinstance(runs, Graph)
        self.outputs = outputs

    def run(self) -> bool:
        return self._run(self._copies_in)

    def run_from(self, elsewhere: Sequence[Elsewhere]) -> bool:
        if elsewhere != self._elsewhere:
            self._fetched, self._elsewhere = _fetched(self._copies_in, elsewhere), elsewhere
        return self._run(self._fetched)

    def _run(self, copies_in: list[Copy]) -> bool:
        if self._lane.moved != self._moved and isinstance(self._runs, Context):
            return False
        self._lane.execute(self._runs, self._shapes, copies_in, self._copies_out)
        return True


def _fetched(copies: list[Copy], elsewhere: Sequence[Elsewhere]) -> list[Copy]:
    """`copies`, but for what lies elsewhere: that is copied from there."""
    found: list[Copy] = []
    left = len(elsewhere)
    for device, host, size in copies:
        at, end = host, host + size
        for place, address, length in sorted(piece for piece in elsewhere if host <= piece.place < end):
            left -= 1
            if not at <= place <= place + length <= end:
                raise ValueError(f"{length} bytes from elsewhere do not fit into their input")
            if at < place:
                found.append((device + at - host, at, place - at))
            found.append((device + place - host, address, length))
            at = place + length
        if at < end:
            found.append((device + at - host, at, end - at))
    if left:
        raise ValueError(f"{left} pieces from elsewhere belong to no input")
    return found


def _free(made: dict[Shapes, Graph], plain: list[Context], place: Workplace) -> None:
    """Graphs, then contexts, then memory. Nothing of it runs any more: a lane's run ends by waiting for its stream."""
    if place.is_lost:
        return
    try:
        for graph in made.values():
            graph.free()
        for context in plain:
            context.free()
        place.free()
    except CudaError as e:
        log.warning("what a lane held could not be freed: %s", e)
