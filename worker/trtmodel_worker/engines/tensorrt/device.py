"""The GPU as this worker uses it: a thin layer over ``cuda.bindings.runtime``, which is imported at first use.

cuda-python returns codes; here every call raises. Calls release the interpreter lock (cuda-bindings 13.0). One process
uses one device: the first that it sees, in the primary context, so that any thread may call.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ALIGNMENT = 256
"""Of device memory that TensorRT is given; ``cudaMalloc`` aligns to it."""
_PROBE_BYTES = 256
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


class CudaError(Exception):
    """A CUDA call failed. `code`: the number of its ``cudaError_t``, which never changes between versions."""

    def __init__(self, call: str, code: int, name: str, text: str) -> None:
        super().__init__(f"{call}: {name} ({code}): {text}")
        self.code = code


class NoCuda(Exception):
    """The cuda-python package is missing or cannot be used. The text names the way out."""


@dataclass(frozen=True)
class Identity:
    """Which device it is. `name` without its MIG part, which `mig` holds ('' where the device is not divided)."""

    name: str
    capability: str
    mig: str


class Cuda:
    """CUDA in this process. Raises NoCuda. `poisoned`: an error was seen that only a new process heals, so nothing of
    the device is touched any more, not even to free it."""

    def __init__(self) -> None:
        try:
            self.runtime: Any = importlib.import_module("cuda.bindings.runtime")
            self._utils: Any = importlib.import_module("cuda.bindings.utils")
        except ImportError as e:
            raise NoCuda(f"cuda-python cannot be imported ({e}): install cuda-bindings in this image") from e
        self.poisoned = False

    def call(self, function: str, *arguments: Any) -> Any:
        """What the call gives beside its status. Raises CudaError."""
        status, *values = getattr(self.runtime, function)(*arguments)
        if status:
            raise self.error(function, status)
        return values[0] if len(values) == 1 else tuple(values)

    def error(self, call: str, status: Any) -> CudaError:
        name, text = (getattr(self.runtime, f)(status)[1].decode() for f in ("cudaGetErrorName", "cudaGetErrorString"))
        return CudaError(call, int(status), name, text)

    def count(self) -> int:
        """Devices that this process may use. Raises CudaError where there is no driver."""
        return int(self.call("cudaGetDeviceCount"))

    def identity(self) -> Identity:
        """Raises CudaError. The name of a slice of a GPU ends with its profile: ``NVIDIA H200 MIG 1g.18gb``."""
        properties = self.call("cudaGetDeviceProperties", 0)
        name = properties.name.decode() if isinstance(properties.name, bytes) else str(properties.name)
        whole, _, mig = name.strip("\0 ").partition(" MIG ")
        return Identity(whole, f"{properties.major}.{properties.minor}", mig)

    def driver(self, file: Path = _DRIVER_FILE) -> str:
        """Version of the kernel's driver such as 580.95.05; where it is not told, the newest CUDA that it supports."""
        try:
            found = re.search(r"NVRM version:.*?\s(\d+\.[\d.]+)\s", file.read_text())
        except OSError:
            found = None
        if found:
            return found.group(1)
        version = int(self.call("cudaDriverGetVersion"))
        return f"cuda-{version // 1000}.{version % 1000 // 10}"

    def wait_by_sleeping(self) -> None:
        """Threads that wait for the device sleep instead of spinning: later by some microseconds, but a processor that
        spins is taken from the front. To be called before anything that needs the device. Raises CudaError."""
        self.call("cudaSetDeviceFlags", int(self.runtime.cudaDeviceScheduleBlockingSync))

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the device, whoever uses it. Raises CudaError."""
        free, total = self.call("cudaMemGetInfo")
        return int(free), int(total)

    def allocate(self, size: int) -> int:
        """Device memory: its address. Raises CudaError."""
        return int(self.call("cudaMalloc", max(size, ALIGNMENT)))

    def free(self, address: int) -> None:
        self.call("cudaFree", address)

    def register(self, address: int, size: int, *, read_only: bool = False) -> None:
        """Pin host memory, so that copies go to and from it directly, or only from it. It must stay mapped. Raises
        CudaError."""
        flags = int(self.runtime.cudaHostRegisterPortable)
        if read_only:
            flags |= int(self.runtime.cudaHostRegisterReadOnly)
        self.call("cudaHostRegister", address, size, flags)

    def unregister(self, address: int) -> None:
        """Raises CudaError."""
        self.call("cudaHostUnregister", address)

    def clear_error(self) -> None:
        """Forget the last error: CUDA reports some again with the next call, which has nothing to do with them."""
        self.runtime.cudaGetLastError()

    def probe(self) -> int:
        """0 if the device still works for this process, else the code that says why not.

        Not by ``cudaGetLastError``: it was seen to say "success" after an illegal address had cost the process its
        device, while creating a stream fails at once.
        """
        self.clear_error()
        try:
            stream = Stream(self)
            try:
                address = self.allocate(_PROBE_BYTES)
                self.call("cudaMemsetAsync", address, 0, _PROBE_BYTES, stream.native)
                stream.wait()
                self.free(address)
            finally:
                stream.destroy()
        except CudaError as e:
            return e.code
        return 0

    def handle(self, native: Any) -> int:
        """The address behind an object of cuda-python, as TensorRT wants it."""
        return int(self._utils.get_cuda_native_handle(native))


class Stream:
    """Work in order. Non-blocking: it does not wait for the default stream, nor that for it. Raises CudaError."""

    __slots__ = ("_copy", "_cuda", "_in", "_launch", "_out", "_wait", "handle", "native")

    def __init__(self, cuda: Cuda) -> None:
        runtime = cuda.runtime
        self._cuda = cuda
        self.native = cuda.call("cudaStreamCreateWithFlags", runtime.cudaStreamNonBlocking)
        self.handle = cuda.handle(self.native)
        self._copy, self._launch, self._wait = (
            runtime.cudaMemcpyAsync, runtime.cudaGraphLaunch, runtime.cudaStreamSynchronize,
        )  # fmt: skip
        self._in = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._out = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost

    def copy_in(self, device: int, host: int, size: int) -> None:
        """Host memory that is not pinned is read before this returns."""
        (status,) = self._copy(device, host, size, self._in, self.native)
        if status:
            raise self._cuda.error("cudaMemcpyAsync to the device", status)

    def copy_out(self, host: int, device: int, size: int) -> None:
        (status,) = self._copy(host, device, size, self._out, self.native)
        if status:
            raise self._cuda.error("cudaMemcpyAsync from the device", status)

    def launch(self, graph: Any) -> None:
        (status,) = self._launch(graph, self.native)
        if status:
            raise self._cuda.error("cudaGraphLaunch", status)

    def wait(self) -> None:
        """Until everything before has run. Errors of the kernels show here, and those of other streams' kernels."""
        (status,) = self._wait(self.native)
        if status:
            raise self._cuda.error("cudaStreamSynchronize", status)

    def fill(self, device: int, byte: int, size: int) -> None:
        self._cuda.call("cudaMemsetAsync", device, byte, size, self.native)

    def destroy(self) -> None:
        self._cuda.call("cudaStreamDestroy", self.native)
