"""A lane's device memory, and execution contexts that run in it one at a time."""

from __future__ import annotations

from collections.abc import Mapping

from trtmodel_worker.engines.base import CannotLoad, EngineError
from trtmodel_worker.engines.tensorrt import callbacks, compat, messages
from trtmodel_worker.engines.tensorrt.compat import IExecutionContext
from trtmodel_worker.engines.tensorrt.device import CudaError, Stream
from trtmodel_worker.engines.tensorrt.loaded import Loaded
from trtmodel_worker.engines.tensorrt.tensors import Shape, Shapes


class Workplace:
    """Stream, scratch memory, and a place for each input and output. Raises EngineError.

    An output's place grows if more is asked for than any profile's greatest shape needs. The old one is kept until
    everything is freed, for a graph writes there; `moved` counts how often that was.
    """

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._cuda = loaded.cuda
        self._held: list[int] = []
        self.moved = 0
        self.recorder = callbacks.recorder(loaded.trt)
        self._outputs: dict[str, tuple[int, int]] = {}
        self.stream: Stream
        try:
            self.stream = Stream(self._cuda)
            self.scratch_bytes = compat.scratch_bytes(loaded.trt, loaded.engine)
            self.scratch = self._reserve(self.scratch_bytes)
            signature = loaded.signature
            self.inputs = [self._zeros(signature.input_bytes(i)) for i in range(len(signature.inputs))]
        except CudaError as e:
            failure = loaded.failure("no device memory for another lane", self.recorder, None, e)
            if not self.is_lost:
                self.free()
            raise failure from e

    def output(self, name: str, size: int) -> int:
        """The place of an output, with at least `size` bytes. Raises CudaError."""
        address, held = self._outputs.get(name, (0, -1))
        if held < size:
            address = self._reserve(size)
            self._outputs[name] = (address, size)
            self.moved += 1
        return address

    @property
    def is_lost(self) -> bool:
        """The process has lost the device: nothing is to be touched, not even to free it."""
        return self._cuda.poisoned

    def free(self) -> None:
        """Nothing of it may run any more. Raises CudaError."""
        for address in self._held:
            self._cuda.free(address)
        self._held.clear()
        if hasattr(self, "stream"):
            self.stream.destroy()

    def _zeros(self, size: int) -> int:
        """A graph's first run is of what lies there: places in a table that are none would cost the process its
        device."""
        address = self._reserve(size)
        self.stream.fill(address, 0, size)
        return address

    def _reserve(self, size: int) -> int:
        address = self._cuda.allocate(size)
        self._held.append(address)
        return address


class Context:
    """An execution context at one profile. Making one takes milliseconds, and below version 9 stops all threads.
    `shapes`: of the inputs, as set last. `addresses`: where the outputs of known shape then are. Raises EngineError."""

    def __init__(self, loaded: Loaded, place: Workplace, profile: int) -> None:
        self._loaded = loaded
        self._place = place
        self.profile = profile
        self.shapes: Shapes | None = None
        self.addresses: dict[str, int] = {}
        self._sizes: Mapping[str, Shape | None] = {}
        self._places: dict[str, callbacks.OutputPlace] = {}
        self._context: IExecutionContext = self._make()

    def _make(self) -> IExecutionContext:
        loaded, place = self._loaded, self._place
        with loaded.lock:
            loaded.recorder.clear()
            context: IExecutionContext = compat.create_context_without_memory(loaded.trt, loaded.engine)
            if context is None:
                raise loaded.failure("no execution context could be made", loaded.recorder, place.stream)
            context.error_recorder = place.recorder
            place.recorder.clear()
            compat.give_memory(loaded.trt, context, place.scratch, place.scratch_bytes)
            chosen = context.set_optimization_profile_async(self.profile, place.stream.handle)
            if not chosen:
                text = (
                    f"profile {self.profile} could not be chosen (an engine for several contexts needs shared profiles)"
                )
                raise loaded.failure(text, place.recorder, place.stream)
            for tensor, address in zip(loaded.signature.inputs, place.inputs, strict=True):
                context.set_tensor_address(tensor.name, address)
        self._wait()
        return context

    def use(self, shapes: Shapes) -> Mapping[str, Shape | None]:
        """Set the inputs' shapes. The outputs' shapes by name; None where only the data tells. Raises CannotLoad if
        this TensorRT does not answer such an output reliably."""
        if shapes == self.shapes:
            return self._sizes
        context: IExecutionContext = self._context
        self.shapes = None
        self._place.recorder.clear()
        signature = self._loaded.signature
        for tensor, shape in zip(signature.inputs, shapes, strict=True):
            if not context.set_input_shape(tensor.name, shape):
                raise self._failure(f"input {tensor.name!r} cannot be of shape {list(shape)}")
        sizes: dict[str, Shape | None] = {}
        for tensor in signature.outputs:
            # Not asked again once it is known: after a run the context tells that run's shape, for other inputs too.
            if tensor.name in self._places:
                sizes[tensor.name] = None
                continue
            found = self._shape(tensor.name)
            if -1 in found:
                sizes[tensor.name] = None
                self._give_place(tensor.name)
                continue
            sizes[tensor.name] = found
            try:
                address = self._place.output(tensor.name, tensor.bytes(found))
            except CudaError as e:
                raise self._failure(f"no device memory for output {tensor.name!r} of shape {list(found)}", e) from e
            if not context.set_tensor_address(tensor.name, address):
                raise self._failure(f"output {tensor.name!r} cannot be placed")
            self.addresses[tensor.name] = address
        self.shapes, self._sizes = shapes, sizes
        return sizes

    def enqueue(self) -> None:
        """Start a run with what is in the inputs' places."""
        for place in self._places.values():
            place.shape = None  # what was told of an earlier run is never this one's answer
        if not self._context.execute_async_v3(self._place.stream.handle):
            raise self._failure("enqueue failed")

    def enqueue_quietly(self) -> bool:
        """As `enqueue`, while a graph is being captured: to fail is no fault there."""
        return bool(self._context.execute_async_v3(self._place.stream.handle))

    def produced(self, name: str) -> tuple[int, Shape]:
        """Address and shape of an output whose shape only the data told, after the run. It was told once, and is asked
        for once more: an answer in another run's shape would look like any other answer."""
        place = self._places[name]
        if place.shape is None:
            raise self._failure(f"TensorRT did not tell the shape of output {name!r}")
        asked = self._shape(name)
        if -1 not in asked and asked != place.shape:
            text = f"TensorRT tells two shapes of output {name!r}, {list(place.shape)} and {list(asked)}"
            raise self._failure(f"{text}: none of them is answered")
        return place.address, place.shape

    def free(self) -> None:
        with self._loaded.lock:
            del self._context

    def _shape(self, name: str) -> Shape:
        """Of an output. Where the inputs' shapes do not fit each other there is none: -1 dimensions, whose tuple the
        bindings cannot make."""
        try:
            return tuple(int(size) for size in self._context.get_tensor_shape(name))
        except ValueError as e:
            raise self._failure(f"output {name!r} has no shape for inputs of these shapes") from e

    def _give_place(self, name: str) -> None:
        caps = compat.capabilities(self._loaded.trt)
        if not caps.data_shaped_outputs:
            raise CannotLoad(messages.data_shaped([name], caps.version))

        def reserve(size: int) -> int:
            try:
                return self._place.output(name, size)
            except CudaError:
                return 0

        self._places[name] = callbacks.output_place(self._loaded.trt, reserve)
        if not self._context.set_output_allocator(name, self._places[name]):
            raise self._failure(f"output {name!r} cannot be placed")

    def _wait(self) -> None:
        try:
            self._place.stream.wait()
        except CudaError as e:
            raise self._failure("a context could not be made ready", e) from e

    def _failure(self, what: str, error: CudaError | None = None) -> EngineError:
        return self._loaded.failure(what, self._place.recorder, self._place.stream, error)
