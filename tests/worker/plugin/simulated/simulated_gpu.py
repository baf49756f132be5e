"""A GPU made of this process's memory, and ``cuda.bindings`` for it: enough of CUDA that wrong use shows.

What is put into a stream runs when somebody waits for it, in order, and not before: who forgets to wait reads old
bytes. Copies from memory that is not pinned are taken at once, and copies to it wait, as the driver does it. What a
kernel does wrong poisons the whole device for this process: every later call fails with the same code. Device memory is
filled with garbage when it is given, and reading or writing outside of it is an error.
"""

from __future__ import annotations

import ctypes
import enum
import threading
import types

TEXTS = {
    0: ("cudaSuccess", "no error"),
    1: ("cudaErrorInvalidValue", "invalid argument"),
    2: ("cudaErrorMemoryAllocation", "out of memory"),
    35: ("cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version"),
    46: ("cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"),
    100: ("cudaErrorNoDevice", "no CUDA-capable device is detected"),
    214: ("cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"),
    400: ("cudaErrorInvalidResourceHandle", "invalid resource handle"),
    700: ("cudaErrorIllegalAddress", "an illegal memory access was encountered"),
    701: ("cudaErrorLaunchOutOfResources", "too many resources requested for launch"),
    719: ("cudaErrorLaunchFailure", "unspecified launch failure"),
    801: ("cudaErrorNotSupported", "operation not supported"),
    900: ("cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"),
    901: ("cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"),
}
Status = enum.IntEnum("Status", {name: code for code, (name, _) in TEXTS.items()})
GARBAGE = 0xCD


class Stream:
    def __init__(self, gpu):
        self.gpu = gpu
        self.handle = id(self)
        self.work = []
        self.capture = None  # operations, while a graph is captured
        self.invalid = False

    def put(self, operation):
        (self.work if self.capture is None else self.capture).append(operation)

    def drain(self):
        while self.work and not self.gpu.sticky:
            self.work.pop(0)()


class Gpu:
    """`armed` (by thread): what goes wrong with the next run that this thread starts: see `arm`."""

    def __init__(self, total=1 << 30, devices=1, name="Simulated GPU", version="8.6.0"):
        self.total, self.devices, self.name = total, devices, name
        self.version = version
        self.sticky = 0
        self.pinned = []
        self.memory = {}
        self.streams = {}
        self.graphs = 0
        self.contexts = 0
        self.launched = 0
        self.enqueued = 0
        self.calls_after_poison = []
        self.capturable = True
        self.tells = None  # the shape that a context tells, whatever the run's was
        self.lying_graphs = False  # graphs that compute something else
        self.pins_read_only = True
        self._armed = threading.local()

    # -- what tests do

    def arm(self, what):
        """sticky, lost, recoverable, memory, internal: the next run started by this thread meets it."""
        self._armed.what = what

    def disarm(self):
        what, self._armed.what = getattr(self._armed, "what", None), None
        return what

    def used(self):
        return sum(len(buffer) for buffer in self.memory.values())

    # -- what the device does

    def holds(self, address, size):
        return any(start <= address and address + size <= start + len(b) for start, b in self.memory.items())

    def is_pinned(self, address, size):
        return any(start <= address and address + size <= start + n for start, n in self.pinned)


def cuda_modules(gpu):
    """{name: module} of cuda.bindings for this GPU."""
    runtime = types.ModuleType("cuda.bindings.runtime")

    def call(function, values=0):
        """Fails as a poisoned device does; else `function` gives a status, or (status, values ...)."""

        def wrapper(*arguments):
            if gpu.sticky:
                gpu.calls_after_poison.append(function.__name__)
                return (Status(gpu.sticky), *[None] * values)
            if gpu.devices == 0 and function.__name__ not in ("cudaGetErrorName", "cudaGetErrorString"):
                return (Status(35), *[None] * values)
            found = function(*arguments)
            return found if isinstance(found, tuple) else (Status(found),)

        setattr(runtime, function.__name__, wrapper)

    def cudaGetDeviceCount():
        return Status(0), gpu.devices

    def cudaGetDeviceProperties(device):
        return Status(0), types.SimpleNamespace(name=gpu.name.encode(), major=9, minor=0)

    def cudaDriverGetVersion():
        return Status(0), 13000

    def cudaSetDeviceFlags(flags):
        return 0

    def cudaMemGetInfo():
        return Status(0), gpu.total - gpu.used(), gpu.total

    def cudaMalloc(size):
        if gpu.used() + size > gpu.total:
            return Status(2), None
        buffer = (ctypes.c_ubyte * size)()
        address = ctypes.addressof(buffer)
        ctypes.memset(address, GARBAGE, size)
        gpu.memory[address] = buffer
        return Status(0), address

    def cudaFree(address):
        return 0 if gpu.memory.pop(address, None) is not None else 1

    def cudaHostRegister(address, size, flags):
        if flags & runtime.cudaHostRegisterReadOnly and not gpu.pins_read_only:
            return 801
        gpu.pinned.append((address, size))
        return 0

    def cudaHostUnregister(address):
        known = [each for each in gpu.pinned if each[0] == address]
        gpu.pinned = [each for each in gpu.pinned if each[0] != address]
        return 0 if known else 1

    def cudaStreamCreateWithFlags(flags):
        assert flags == runtime.cudaStreamNonBlocking
        stream = Stream(gpu)
        gpu.streams[stream.handle] = stream
        return Status(0), stream

    def cudaStreamDestroy(stream):
        return 0 if gpu.streams.pop(stream.handle, None) else 400

    def cudaStreamSynchronize(stream):
        if stream.capture is not None:
            stream.invalid = True
            return 900
        stream.drain()
        return gpu.sticky

    def cudaMemcpyAsync(to, source, size, kind, stream):
        device, host = (to, source) if kind == runtime.cudaMemcpyKind.cudaMemcpyHostToDevice else (source, to)
        if not gpu.holds(device, size):
            return 1
        if gpu.is_pinned(host, size):
            stream.put(lambda: ctypes.memmove(to, source, size))
        elif stream.capture is not None:
            stream.invalid = True
            return 900
        elif host == source:
            staged = ctypes.string_at(source, size)
            stream.put(lambda: ctypes.memmove(to, staged, size))
        else:
            stream.drain()
            if not gpu.sticky:
                ctypes.memmove(to, source, size)
        return gpu.sticky

    def cudaMemsetAsync(address, byte, size, stream):
        if not gpu.holds(address, size):
            return 1
        stream.put(lambda: ctypes.memset(address, byte, size))
        return 0

    def cudaStreamBeginCapture(stream, mode):
        assert mode == runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        stream.drain()
        stream.capture, stream.invalid = [], False
        return 0

    def cudaStreamEndCapture(stream):
        captured, stream.capture = stream.capture, None
        if stream.invalid:
            return Status(901), None
        return Status(0), list(captured)

    def cudaGraphInstantiate(graph, flags):
        gpu.graphs += 1
        return Status(0), list(graph)

    def cudaGraphDestroy(graph):
        return 0

    def cudaGraphExecDestroy(executable):
        gpu.graphs -= 1
        return 0

    def cudaGraphLaunch(executable, stream):
        what = gpu.disarm()
        failed = {"recoverable": 701, "internal": 701, "memory": 2}.get(what, 0)
        if failed:
            return failed
        gpu.launched += 1
        if what:
            stream.put(lambda: poison(gpu, what))
        for operation in executable:
            stream.put(operation)
        return 0

    def cudaGetLastError():
        return 0

    def cudaGetErrorName(status):
        return Status(0), TEXTS[int(status)][0].encode()

    def cudaGetErrorString(status):
        return Status(0), TEXTS[int(status)][1].encode()

    one = (
        cudaGetDeviceCount, cudaGetDeviceProperties, cudaDriverGetVersion, cudaMalloc, cudaStreamCreateWithFlags,
        cudaStreamEndCapture, cudaGraphInstantiate,
    )  # fmt: skip
    none = (
        cudaSetDeviceFlags, cudaFree, cudaHostRegister, cudaHostUnregister, cudaStreamDestroy, cudaStreamSynchronize,
        cudaMemcpyAsync, cudaMemsetAsync, cudaStreamBeginCapture, cudaGraphDestroy, cudaGraphExecDestroy,
        cudaGraphLaunch,
    )  # fmt: skip
    for function in one:
        call(function, 1)
    for function in none:
        call(function)
    call(cudaMemGetInfo, 2)
    runtime.cudaGetLastError = lambda: (Status(0),)  # it was seen to say so although the device was lost
    runtime.cudaGetErrorName, runtime.cudaGetErrorString = cudaGetErrorName, cudaGetErrorString
    runtime.cudaStreamNonBlocking, runtime.cudaHostRegisterPortable, runtime.cudaDeviceScheduleBlockingSync = 1, 1, 4
    runtime.cudaHostRegisterReadOnly = 8
    runtime.cudaMemcpyKind = enum.IntEnum("Kind", {"cudaMemcpyHostToDevice": 1, "cudaMemcpyDeviceToHost": 2})
    runtime.cudaStreamCaptureMode = enum.IntEnum("Mode", {"cudaStreamCaptureModeThreadLocal": 1})
    utils = types.ModuleType("cuda.bindings.utils")
    utils.get_cuda_native_handle = lambda stream: stream.handle
    names = {"cuda": types.ModuleType("cuda"), "cuda.bindings": types.ModuleType("cuda.bindings")}
    return {**names, "cuda.bindings.runtime": runtime, "cuda.bindings.utils": utils}


def poison(gpu, what):
    """What a kernel or the hardware did: seen by whoever waits next, on whatever stream."""
    gpu.sticky = {"sticky": 700, "lost": 214}[what]
