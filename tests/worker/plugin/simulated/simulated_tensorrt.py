"""The module ``tensorrt`` for a simulated GPU. Its plans are those of the test runtime, with profiles in them; it
reports errors with the codes and texts that TensorRT was seen to use.

Version 8.6 and 10 differ where the worker has to tell them apart: how a context without memory is asked for, and how
it is given some.
"""

from __future__ import annotations

import ctypes
import enum
import json
import math
import types

import numpy as np
from simulated_gpu import poison

NUMPY = {
    "FP32": "FLOAT",
    "FP16": "HALF",
    "INT8": "INT8",
    "INT32": "INT32",
    "INT64": "INT64",
    "UINT8": "UINT8",
    "BOOL": "BOOL",
}
SCRATCH = 4096
NO_MEMORY = "[defaultAllocator.cpp::allocate::20] Error Code 1: Cuda Runtime (out of memory)"
NO_CONTEXT = "[executionContext.cpp::ExecutionContext::409] Error Code 2: OutOfMemory (no further information)"
NO_SCRATCH = "[virtualMemoryBuffer.cpp::resizePhysical::127] Error Code 2: OutOfMemory (no further information)"
NO_PLAN = "Error Code 1: Serialization (Serialization assertion plan->header.magicTag == rt::kPLAN_MAGIC_TAG failed.)"
REFUSED = "Error Code 4: Internal Error (Engine deserialization failed.)"
ILLEGAL = "Error Code 1: Cuda Runtime (an illegal memory access was encountered)"
CUTENSOR = "Error Code 1: CuTensor (Internal cuTensor permutate execute failed)"
CAPTURING = "Error Code 1: Cuda Runtime (operation not permitted when stream is capturing)"
NO_FIT = (
    "[shapeMachine.cpp::executeContinuation::864] Error Code 7: Internal Error (y: dimensions not compatible for "
    "elementwise. Instruction: CHECK_BROADCAST)"
)
USAGE = "Error Code 3: API Usage Error (Parameter check failed: "


def tensorrt_module(gpu):
    old = gpu.version.startswith("8.")
    trt = types.ModuleType("tensorrt")
    trt.__version__ = gpu.version
    names = [name for name in NUMPY.values() if not (old and name == "INT64")]
    trt.DataType = enum.Enum("DataType", names)
    trt.TensorIOMode = enum.Enum("TensorIOMode", ["INPUT", "OUTPUT"])
    trt.TensorLocation = enum.Enum("TensorLocation", ["DEVICE", "HOST"])
    trt.ErrorCodeTRT = enum.IntEnum(
        "ErrorCodeTRT",
        ["SUCCESS", "UNSPECIFIED_ERROR", "INTERNAL_ERROR", "INVALID_ARGUMENT", "INVALID_CONFIG", "FAILED_ALLOCATION",
         "FAILED_INITIALIZATION", "FAILED_EXECUTION", "FAILED_COMPUTATION", "INVALID_STATE", "UNSUPPORTED_STATE"],
        start=0,
    )  # fmt: skip
    code = trt.ErrorCodeTRT
    if not old:
        trt.ExecutionContextAllocationStrategy = enum.Enum("Strategy", ["STATIC", "ON_PROFILE_CHANGE", "USER_MANAGED"])

    class IErrorRecorder:
        pass

    class IOutputAllocator:
        pass

    class Logger:
        WARNING = 2

        def __init__(self, severity):
            pass

    class Reporter:
        error_recorder = None

        def report(self, number, text):
            if self.error_recorder is not None:
                self.error_recorder.report_error(number, text)

    class Runtime(Reporter):
        def __init__(self, logger):
            assert gpu.devices, "a real one ends the process here"

        def deserialize_cuda_engine(self, plan):
            try:
                behaviour = json.loads(bytes(plan))
            except ValueError:
                self.report(code.FAILED_EXECUTION, NO_PLAN)
                return None
            if behaviour.get("refuse"):
                self.report(code.INVALID_CONFIG, f"{REFUSED} {behaviour['refuse']}")
                return None
            if gpu.sticky:
                return None
            return ICudaEngine(behaviour)

    class ICudaEngine(Reporter):
        def __init__(self, behaviour):
            self.behaviour = behaviour
            self._inputs = {n: (d, tuple(s)) for n, d, s in behaviour["inputs"]}
            self._outputs = {n: (d, tuple(s)) for n, d, s in behaviour["outputs"]}
            self._all = {**self._inputs, **self._outputs}
            self.num_io_tensors = len(self._all)
            self.profiles = behaviour.get("profiles") or [{}]
            self.num_optimization_profiles = len(self.profiles)
            self.made = 0
            if old:
                self.device_memory_size = SCRATCH
                self.create_execution_context_without_device_memory = self._create
            else:
                self.device_memory_size_v2 = SCRATCH

        def get_tensor_name(self, index):
            return list(self._all)[index]

        def get_tensor_mode(self, name):
            return trt.TensorIOMode.INPUT if name in self._inputs else trt.TensorIOMode.OUTPUT

        def get_tensor_dtype(self, name):
            return trt.DataType[NUMPY[self._all[name][0]]]

        def get_tensor_location(self, name):
            return trt.TensorLocation.DEVICE

        def is_shape_inference_io(self, name):
            return False

        def get_tensor_shape(self, name):
            return self._all[name][1]

        def get_tensor_profile_shape(self, name, profile):
            return [tuple(shape) for shape in self.profiles[profile][name]]

        def create_execution_context(self, strategy):
            assert strategy is trt.ExecutionContextAllocationStrategy.USER_MANAGED
            return self._create()

        def _create(self):
            self.made += 1
            if gpu.sticky:
                self.report(code.UNSPECIFIED_ERROR, ILLEGAL)
                return None
            if self.made > self.behaviour.get("most_contexts", self.made):
                self.report(code.UNSPECIFIED_ERROR, NO_MEMORY)
                self.report(code.INTERNAL_ERROR, NO_CONTEXT)
                return None
            return IExecutionContext(self)

    class IExecutionContext(Reporter):
        def __init__(self, engine):
            gpu.contexts += 1
            self._engine = engine
            self._scratch = 0
            self._profile = None
            self._shapes, self._addresses, self._allocators = {}, {}, {}
            self._told = {}  # after a run a shape that only the data told is known, and stays so for other inputs: seen

        def __del__(self):
            gpu.contexts -= 1

        if old:

            @property
            def device_memory(self):
                raise AttributeError("write only")

            @device_memory.setter
            def device_memory(self, address):
                self._scratch = address
        else:

            def set_device_memory(self, address, size):
                assert size >= SCRATCH
                self._scratch = address

        def set_optimization_profile_async(self, profile, stream):
            assert stream in gpu.streams
            self._profile = profile
            self._shapes.clear()
            return True

        def set_input_shape(self, name, shape):
            low, _, high = (
                self._engine.get_tensor_profile_shape(name, self._profile)
                if -1 in self._engine._inputs[name][1]
                else [shape] * 3
            )
            if len(shape) != len(low) or not all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True)):
                text = f"{USAGE}Runtime dimension does not satisfy any optimization profile: {name})"
                self.report(code.INVALID_ARGUMENT, f"setInputShape: {text}")
                return False
            self._shapes[name] = tuple(shape)
            return True

        def get_tensor_shape(self, name):
            spec = self._engine._outputs[name][1]
            if self._engine.behaviour.get("mode") == "nonzero":
                return gpu.tells or self._told.get(name, spec)
            source = list(self._engine._inputs)[list(self._engine._outputs).index(name)]
            if self._engine.behaviour.get("mode") == "untold" and self._unfit:
                self.report(code.FAILED_EXECUTION, NO_FIT)
                raise ValueError("__len__() should return >= 0")  # as the bindings do for -1 dimensions
            if self._engine.behaviour.get("mode") == "mean":
                return (self._shapes[source][0], *spec[1:])
            return self._shapes[source]

        @property
        def _unfit(self):
            return len(set(self._shapes.values())) > 1

        def set_tensor_address(self, name, address):
            self._addresses[name] = address
            return bool(address)

        def set_output_allocator(self, name, allocator):
            self._allocators[name] = allocator
            return True

        def execute_async_v3(self, handle):
            stream = gpu.streams[handle]
            gpu.enqueued += 1
            engine = self._engine
            missing = engine._all.keys() - self._addresses.keys() - self._allocators.keys()
            assert self._scratch
            assert self._profile is not None
            assert len(self._shapes) == len(engine._inputs)
            if missing:
                self.report(code.INVALID_ARGUMENT, f"enqueueV3: {USAGE}Address is not set for {missing})")
                return False
            if engine.behaviour.get("mode") == "together" and self._unfit:
                self.report(code.FAILED_EXECUTION, NO_FIT)
                return False
            if gpu.sticky:
                self.report(code.UNSPECIFIED_ERROR, CUTENSOR)
                self.report(code.UNSPECIFIED_ERROR, ILLEGAL)
                return False
            if stream.capture is not None and not gpu.capturable:
                stream.invalid = True
                self.report(code.UNSPECIFIED_ERROR, CAPTURING)
                return False
            what = gpu.disarm() if stream.capture is None else None
            if what in REPORTS:
                for number, text in REPORTS[what]:
                    self.report(code[number], text)
                return False
            if what:
                stream.put(lambda: poison(gpu, what))
            lies = stream.capture is not None and gpu.lying_graphs
            stream.put(self._kernel(dict(self._shapes), dict(self._addresses), lies))
            return True

        def _kernel(self, shapes, addresses, lies):
            """What runs on the device: it knows the addresses and shapes of the moment it was enqueued."""
            engine = self._engine
            dtypes = {n: np.dtype(DTYPES[d]) for n, (d, _) in engine._all.items()}

            def run():
                for (source, shape), target in zip(shapes.items(), engine._outputs, strict=False):
                    array = view(gpu, addresses[source], dtypes[source], shape)
                    found = compute(engine.behaviour, array, engine._outputs[target][1]).astype(dtypes[target])
                    if target in self._allocators:
                        allocator = self._allocators[target]
                        place = allocator.reallocate_output(target, 0, found.nbytes, 256)
                        allocator.notify_shape(target, found.shape)
                        self._told[target] = found.shape
                    else:
                        place = addresses[target]
                    out = view(gpu, place, found.dtype, found.shape)
                    out[...] = found + found.dtype.type(1) if lies else found

            return run

    for made in (IErrorRecorder, IOutputAllocator, Logger, Runtime, ICudaEngine, IExecutionContext):
        setattr(trt, made.__name__, made)
    trt.BuilderFlag = enum.Enum("BuilderFlag", ["FP16", "INT8"] if gpu.version < "11" else ["REFIT"])
    for name in ("Builder", "IBuilderConfig", "OnnxParser", "ParserError"):  # asked for what they have
        setattr(trt, name, type(name, (), {}))
    return trt


REPORTS = {
    "recoverable": [("UNSPECIFIED_ERROR", "[caskConvolution] Error Code 1: Cask (Cask convolution execution)")],
    "memory": [("UNSPECIFIED_ERROR", NO_MEMORY), ("INTERNAL_ERROR", NO_SCRATCH)],
    "internal": [
        ("INTERNAL_ERROR", "[executionContext.cpp::enqueueV3] Error Code 2: Internal Error (Assertion failed)")
    ],
}
DTYPES = {"FP32": "f4", "FP16": "f2", "INT8": "i1", "INT32": "i4", "INT64": "i8", "UINT8": "u1", "BOOL": "?"}


def view(gpu, address, dtype, shape):
    size = dtype.itemsize * math.prod(shape)
    assert gpu.holds(address, size), f"{size} bytes at {address:#x} are outside of device memory"
    return np.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype).reshape(shape)


def compute(behaviour, array, shape):
    mode = behaviour.get("mode")
    if mode == "mean":
        rows = array.reshape(len(array), -1).mean(axis=1)
        return np.broadcast_to(rows.reshape(-1, *[1] * (len(shape) - 1)), (len(array), *shape[1:]))
    if mode == "nonzero":
        return np.stack(np.nonzero(array))
    if mode == "inf":
        return np.full(array.shape, np.inf, array.dtype)
    if mode == "centred":
        return array - array.mean(axis=0, keepdims=True)
    if array.dtype == np.bool_:
        return np.logical_not(array)
    return array * array.dtype.type(behaviour.get("factor", 1))
