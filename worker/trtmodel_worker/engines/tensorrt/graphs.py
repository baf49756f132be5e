"""CUDA graphs: the kernels of one run at one shape, launched at once. At batch size 1 that halves the latency.

A graph holds kernels only: requests lie elsewhere each time, so they are copied to and from fixed places around it. It
freezes shapes, addresses and scratch memory of its context, so each has a context of its own that nothing else touches.
What a graph answers is compared with what the plain context answers, bit for bit, before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from trtmodel_worker.engines.base import Array, OutOfMemory
from trtmodel_worker.engines.tensorrt.contexts import Context, Workplace
from trtmodel_worker.engines.tensorrt.device import CudaError
from trtmodel_worker.engines.tensorrt.errors import LOST_CODES, STICKY_CODES
from trtmodel_worker.engines.tensorrt.loaded import Loaded
from trtmodel_worker.engines.tensorrt.tensors import Shape, Shapes, Signature

_GARBAGE = 0xA5
_DRAWN = 8191  # a prime: rows of a batch differ


class NotCaptured(Exception):
    """This shape runs without a graph; the text says why."""


class Graph:
    """Made by `capture`. `executable` is what is launched."""

    def __init__(self, loaded: Loaded, context: Context, executable: Any, sizes: Mapping[str, Shape]) -> None:
        self._loaded = loaded
        self._context = context
        self.executable = executable
        self.sizes = sizes
        self.addresses = dict(context.addresses)

    def free(self) -> None:
        """Before its context."""
        if not self._loaded.cuda.poisoned:
            self._loaded.cuda.call("cudaGraphExecDestroy", self.executable)
            self._context.free()


def capture(loaded: Loaded, place: Workplace, profile: int, shapes: Shapes) -> Graph:
    """Raises NotCaptured, also where there is no memory for it; EngineError if the engine does not even run."""
    try:
        context = Context(loaded, place, profile)
    except OutOfMemory as e:
        raise NotCaptured(str(e)) from e
    try:
        sizes = {name: shape for name, shape in context.use(shapes).items() if shape is not None}
        if len(sizes) < len(loaded.signature.outputs):
            raise NotCaptured("only the data tells the shape of an output")
        context.enqueue()  # the first run after a change of shapes prepares things that cannot be captured
        _wait(loaded, place)
        return Graph(loaded, context, _record(loaded, place, context), sizes)
    except (NotCaptured, OutOfMemory) as e:
        context.free()
        raise NotCaptured(str(e)) from e


def _wait(loaded: Loaded, place: Workplace) -> None:
    try:
        place.stream.wait()
    except CudaError as e:
        raise loaded.failure("a run before the capture failed", place.recorder, place.stream, e) from e


def _record(loaded: Loaded, place: Workplace, context: Context) -> Any:
    """Other threads may call CUDA meanwhile: the mode is this thread's."""
    cuda, stream = loaded.cuda, place.stream.native
    mode = cuda.runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    recorded = None
    try:
        cuda.call("cudaStreamBeginCapture", stream, mode)
        enqueued = context.enqueue_quietly()
        recorded = cuda.call("cudaStreamEndCapture", stream)
        if not enqueued:
            raise NotCaptured(f"the engine cannot be enqueued while it is captured: {_said(place)}")
        return cuda.call("cudaGraphInstantiate", recorded, 0)
    except CudaError as e:
        if e.code in STICKY_CODES | LOST_CODES:
            raise loaded.failure("a graph could not be captured", place.recorder, None, e) from e
        raise NotCaptured(f"{e} {_said(place)}") from e
    finally:
        if not loaded.cuda.poisoned:
            place.recorder.clear()
            cuda.clear_error()
            if recorded is not None:
                cuda.call("cudaGraphDestroy", recorded)


def _said(place: Workplace) -> str:
    return "; ".join(text.strip() for _, text in place.recorder.reported())


class Expected(NamedTuple):
    """Inputs that tell runs apart, and the bytes of the plain context's outputs, in the signature's order."""

    inputs: list[Array]
    outputs: list[Array]


def expect(
    loaded: Loaded, place: Workplace, plain: Context, shapes: Shapes, sizes: Mapping[str, Shape], inputs: list[Array]
) -> Expected:
    """Of outputs of these `sizes`. What is in the lane's places is overwritten. Raises EngineError."""
    plain.use(shapes)
    return Expected(inputs, _outputs(loaded, place, inputs, plain.addresses, sizes, plain.enqueue))


def prove(loaded: Loaded, place: Workplace, graph: Graph, expected: Expected) -> None:
    """Raises NotCaptured if the graph answers something else, or EngineError. What is in the lane's places is
    overwritten."""
    found = _outputs(
        loaded, place, expected.inputs, graph.addresses, graph.sizes, lambda: place.stream.launch(graph.executable)
    )
    for tensor, want, have in zip(loaded.signature.outputs, expected.outputs, found, strict=True):
        different = int(np.count_nonzero(want != have))
        if different:
            text = f"{different} of {want.size} bytes of output {tensor.name!r} differ from a run without a graph"
            raise NotCaptured(text)


def _outputs(
    loaded: Loaded,
    place: Workplace,
    inputs: list[Array],
    addresses: Mapping[str, int],
    sizes: Mapping[str, Shape],
    start: Callable[[], None],
) -> list[Array]:
    stream, tensors = place.stream, loaded.signature.outputs
    try:
        for array, address in zip(inputs, place.inputs, strict=True):
            stream.copy_in(address, array.ctypes.data, array.nbytes)
        for tensor in tensors:
            stream.fill(addresses[tensor.name], _GARBAGE, tensor.bytes(sizes[tensor.name]))
        start()
        found = [np.empty(tensor.bytes(sizes[tensor.name]), np.uint8) for tensor in tensors]
        for tensor, array in zip(tensors, found, strict=True):
            stream.copy_out(array.ctypes.data, addresses[tensor.name], array.nbytes)
        stream.wait()
    except CudaError as e:
        raise loaded.failure("a graph could not be compared with the plain run", place.recorder, stream, e) from e
    return found


def pattern(signature: Signature, shapes: Shapes) -> list[Array]:
    """Inputs: numbers that tell runs apart, repeated: to draw millions takes longer than to run them. Whole
    ones stay small: they may be places in a table."""
    drawn = np.random.default_rng(7).standard_normal(_DRAWN)
    arrays: list[Array] = []
    for tensor, shape in zip(signature.inputs, shapes, strict=True):
        numbers = drawn if tensor.dtype.kind == "f" else drawn > 0
        arrays.append(np.resize(numbers.astype(tensor.dtype), shape))
    return arrays
