"""Load a plan and run it: one session, shared by all lanes (ONNX Runtime's Run is thread-safe), each lane with its own
binding, so that outputs land where the caller wants them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as status
from trtmodel_contract.identity import Profile
from trtmodel_contract.manifest import TensorSpec

from trtmodel_worker.engines.base import (
    DTYPES,
    Allocate,
    Array,
    CannotLoad,
    EngineError,
    InvalidInput,
    OutOfMemory,
    Recoverable,
)
from trtmodel_worker.engines.onnxruntime import plans

DATATYPES = {
    "tensor(float)": "FP32",
    "tensor(float16)": "FP16",
    "tensor(double)": "FP64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(bool)": "BOOL",
    "tensor(string)": "BYTES",
}
_INPUT_WORDS = ("out of data bounds", "INVALID_ARGUMENT")  # such as an id beyond an embedding's rows
UNPACKED_FROM = 1 << 30  # bytes of weights
_MOST_SEEN = 256  # shapes of a lane whose outputs' shapes are remembered
_ALLOCATION_WORDS = ("failed to allocate memory", "bad_alloc", "out of memory")

Shapes = tuple[tuple[int, ...], ...]


def session_options(threads: int, level: ort.GraphOptimizationLevel) -> ort.SessionOptions:
    """Options of every session here: sequential, no spinning (a spinning pool takes the CPU from its neighbours)."""
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.log_severity_level = 4  # errors are raised; printed too, one bad client fills the log
    return options


def unpacked_if_large(options: ort.SessionOptions, weight_bytes: int) -> None:
    """ONNX Runtime copies the weights of products into an order that is faster to read. For large ones memory counts
    more: with the copy a model of 3 GB would take 6."""
    if weight_bytes >= UNPACKED_FROM:
        options.add_session_config_entry("session.disable_prepacking", "1")


class OnnxEngine:
    """An optimised graph in this process. Raises CannotLoad."""

    def __init__(self, plan: memoryview, profiles: tuple[Profile, ...], threads: int) -> None:
        self._profiles = profiles
        self._weights: list[ort.OrtValue] = []
        options = session_options(threads, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
        try:
            contents = plans.read(plan)
            if contents is None:
                self._session = ort.InferenceSession(bytes(plan), options, providers=["CPUExecutionProvider"])
            else:
                self._weights = _given(options, contents)
                self._session = _session(options, contents)
        except Exception as e:
            raise CannotLoad(f"ONNX Runtime {ort.__version__} does not load the plan: {e}") from e
        self.inputs = tuple(_spec(node) for node in self._session.get_inputs())
        self.outputs = tuple(_spec(node) for node in self._session.get_outputs())

    def create_lane(self) -> OnnxLane:
        return OnnxLane(self._session, self._profiles, self._weights)


def _given(options: ort.SessionOptions, contents: plans.Contents) -> list[ort.OrtValue]:
    """The plan's weights as they lie there."""
    values = []
    for name, weight in contents.weights.items():
        values.append(ort.OrtValue.ortvalue_from_numpy(weight))
        options.add_initializer(name, values[-1])
    unpacked_if_large(options, sum(weight.nbytes for weight in contents.weights.values()))
    return values


def _session(options: ort.SessionOptions, contents: plans.Contents) -> ort.InferenceSession:
    # The file that the graph names must be there, though nothing is read from it (ONNX Runtime 1.32).
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / plans.PLACE).touch()
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
        return ort.InferenceSession(bytes(contents.graph), options, providers=["CPUExecutionProvider"])


class OnnxLane:
    """Runs one batch at a time. Holds the weights, which ONNX Runtime does not: it would crash without them."""

    def __init__(
        self, session: ort.InferenceSession, profiles: tuple[Profile, ...], weights: Sequence[ort.OrtValue] = ()
    ) -> None:
        self._session, self._profiles, self._weights = session, profiles, weights
        self._inputs = {node.name: node.shape for node in session.get_inputs()}
        self._dtypes = {node.name: DTYPES[DATATYPES[node.type]] for node in session.get_inputs()}
        self._outputs = [(node.name, DTYPES[DATATYPES[node.type]], node.shape) for node in session.get_outputs()]
        # Strings have no fixed place: ONNX Runtime cannot bind them.
        dtypes = [*self._dtypes.values(), *(dtype for _, dtype, _ in self._outputs)]
        self._bindable = not any(dtype.hasobject for dtype in dtypes)
        self._foreseen = self._bindable
        self._seen: dict[Shapes, Shapes] = {}

    def run(self, inputs: Mapping[str, Array], allocate: Allocate) -> Mapping[str, Array]:
        """See the Lane protocol. `allocate` is called again for an output only if its shape was foreseen wrongly."""
        bound = self.bind(inputs, allocate)
        if bound is not None and bound.run():
            return bound.outputs
        return self._run_and_copy(inputs, allocate)

    def bind(self, inputs: Mapping[str, Array], allocate: Allocate) -> OnnxBound | None:
        """See the BindingLane protocol."""
        self._check(inputs)
        shapes = self._foresee(inputs) if self._foreseen else None
        if shapes is None:
            return None
        outputs = {
            name: allocate(name, dtype, shape) for (name, dtype, _), shape in zip(self._outputs, shapes, strict=True)
        }
        return OnnxBound(self, self._bound(inputs), inputs, outputs)

    def execute(self, binding: ort.IOBinding) -> bool:
        """Run what is bound. False if the outputs have other shapes than was foreseen: they depend on the data, and are
        never foreseen again."""
        try:
            self._session.run_with_iobinding(binding)
        except Exception as e:
            text = str(e)
            if "shape" in text.lower() and ("OrtValue" in text or "pre-allocated" in text or "preallocated" in text):
                self._foreseen = False
                return False
            raise classify(e) from e
        return True

    def _foresee(self, inputs: Mapping[str, Array]) -> Shapes | None:
        """The outputs' shapes as the graph states them: fixed, or named after a dimension of an input. Many exporters
        name none: then those of an earlier run of the same shapes."""
        named: dict[str, int] = {}
        for name, dimensions in self._inputs.items():
            named.update((d, n) for d, n in zip(dimensions, inputs[name].shape, strict=False) if isinstance(d, str))
        found = []
        for _, _, dimensions in self._outputs:
            sizes = [named.get(d) if isinstance(d, str) else d for d in dimensions]
            if not sizes or any(size is None for size in sizes):  # no sizes: one number, or a rank that is not known
                return self._seen.get(self._shapes(inputs))
            found.append(tuple(size for size in sizes if size is not None))
        return tuple(found)

    def _shapes(self, inputs: Mapping[str, Array]) -> Shapes:
        return tuple(inputs[name].shape for name in self._inputs)

    def _run_and_copy(self, inputs: Mapping[str, Array], allocate: Allocate) -> Mapping[str, Array]:
        try:
            values = self._run_bound(inputs) if self._bindable else self._session.run(None, dict(inputs))
        except Exception as e:
            raise classify(e) from e
        # ONNX Runtime takes a buffer of one element for an output of one, whatever shapes they have.
        if self._foreseen and all(value.size != 1 for value in values):
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen[self._shapes(inputs)] = tuple(value.shape for value in values)
        buffers = {}
        for (name, dtype, _), value in zip(self._outputs, values, strict=True):
            buffers[name] = allocate(name, dtype, value.shape)
            np.copyto(buffers[name], value, casting="no")
        return buffers

    def _run_bound(self, inputs: Mapping[str, Array]) -> list[Array]:
        binding = self._bound(inputs)
        for name, _, _ in self._outputs:
            binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding)
        return list(binding.copy_outputs_to_cpu())

    def _check(self, inputs: Mapping[str, Array]) -> None:
        """The caller has checked them; ONNX Runtime reports what slipped through as a failure of the engine."""
        unknown, missing = inputs.keys() - self._inputs.keys(), self._inputs.keys() - inputs.keys()
        if unknown or missing:
            text = f"unknown inputs {sorted(unknown)}" if unknown else f"missing inputs {sorted(missing)}"
            raise InvalidInput(f"{text}: the model has {sorted(self._inputs)}")
        for name, array in inputs.items():
            wanted = self._inputs[name]
            if array.dtype != self._dtypes[name]:
                raise InvalidInput(f"input {name!r} is {array.dtype}, the model takes {self._dtypes[name]}")
            if not array.flags.c_contiguous:  # only its address is given on
                raise InvalidInput(f"input {name!r} is not C-contiguous")
            fits = array.ndim == len(wanted) and all(
                not isinstance(want, int) or want == got for want, got in zip(wanted, array.shape, strict=True)
            )
            if not fits:
                raise InvalidInput(f"input {name!r} is of shape {list(array.shape)}, the model takes {wanted}")
        if self._profiles and not any(_within(inputs, profile) for profile in self._profiles):
            shapes = {name: list(array.shape) for name, array in inputs.items()}
            raise InvalidInput(f"shapes {shapes} are outside of every profile")

    def _bound(self, inputs: Mapping[str, Array]) -> ort.IOBinding:
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        return binding


class OnnxBound:
    """See the Bound protocol. Holds the arrays whose addresses are bound."""

    def __init__(
        self, lane: OnnxLane, binding: ort.IOBinding, inputs: Mapping[str, Array], outputs: Mapping[str, Array]
    ) -> None:
        self._lane, self._binding, self._inputs = lane, binding, inputs
        self.outputs = outputs
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def run(self) -> bool:
        return self._lane.execute(self._binding)


def _within(inputs: Mapping[str, Array], profile: Profile) -> bool:
    return all(
        low <= got <= high
        for name, allowed in profile.inputs.items()
        if name in inputs
        for low, got, high in zip(allowed.min, inputs[name].shape, allowed.max, strict=False)
    )


def classify(error: Exception) -> EngineError:
    """ONNX Runtime's exception as the class that decides what happens next."""
    text = str(error)
    if isinstance(error, MemoryError) or any(words in text.lower() for words in _ALLOCATION_WORDS):
        return OutOfMemory(text)
    if isinstance(error, status.InvalidArgument) or any(words in text for words in _INPUT_WORDS):
        return InvalidInput(text)
    return Recoverable(text)


def _spec(node: Any) -> TensorSpec:
    if node.type not in DATATYPES:
        raise CannotLoad(f"tensor {node.name!r} is of {node.type}, which this worker does not serve")
    shape = tuple(d if isinstance(d, int) else -1 for d in node.shape)
    return TensorSpec(node.name, DATATYPES[node.type], shape)
