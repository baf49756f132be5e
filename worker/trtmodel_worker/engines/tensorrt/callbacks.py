"""What TensorRT calls: logger, error recorder, output allocator, progress monitor, calibrators.

TensorRT calls them from threads of its own. An exception in one is printed and lost, or ends the process, so none
raises. Each is made for a module that is only known at run time; what it does stands in a class that needs none.
"""

from __future__ import annotations

import collections
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from trtmodel_worker.engines.tensorrt.compat import Trt

log = logging.getLogger("trtmodel.tensorrt")

LAST_ERRORS = 32
RECORDED_ERRORS = 64
_LEVELS = {
    "INTERNAL_ERROR": logging.CRITICAL,
    "ERROR": logging.ERROR,
    "WARNING": logging.WARNING,
    "INFO": logging.INFO,
    "VERBOSE": logging.DEBUG,
}

Reallocate = Callable[[str, int, int, int], int]
"""``reallocate(tensor, current address, bytes, alignment)`` -> address, 0 if there is no memory."""
Notify = Callable[[str, tuple[int, ...]], None]
"""``notify(tensor, shape)``: known after the enqueue, before the data is there."""
NextBatch = Callable[[Sequence[str]], list[int] | None]
"""``next_batch(names)`` -> a device address for each, None at the end."""


class Messages:
    """What TensorRT said: into our log, the last errors kept for the message of whoever asked for the work."""

    def __init__(self) -> None:
        self.errors: collections.deque[str] = collections.deque(maxlen=LAST_ERRORS)
        self.listen: Callable[[str], None] | None = None

    def take(self, severity: str, text: str) -> None:
        level = _LEVELS.get(severity, logging.WARNING)
        if level >= logging.ERROR:
            self.errors.append(text)
        listen = self.listen
        if listen is not None:
            listen(text)
        log.log(level, "%s", text)


@functools.cache
def logger(trt: Trt) -> tuple[Any, Messages]:
    """The one logger of this process: TensorRT keeps a pointer to the first that it is given, for ever."""
    messages = Messages()

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            messages.take(severity.name, msg)

    return Logger(), messages


class Errors:
    """The errors of one call: pairs of the code's name and a text. Clear it before the call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[tuple[Any, str]] = []

    def add(self, code: Any, text: str) -> None:
        with self._lock:
            if len(self._all) < RECORDED_ERRORS:
                self._all.append((code, text))

    def clear(self) -> None:
        with self._lock:
            self._all.clear()

    def raw(self) -> list[tuple[Any, str]]:
        with self._lock:
            return list(self._all)

    def seen(self) -> list[tuple[str, str]]:
        """Such as ("FAILED_EXECUTION", "...")."""
        return [(code.name, text) for code, text in self.raw()]


def recorder(trt: Trt, errors: Errors) -> Any:
    """An IErrorRecorder that fills `errors`. One for each object that it is set on, for as long as that lives:
    TensorRT never lets go of one.

    TensorRT asks for `get_num_errors`, its binding for `num_errors`: there have to be both.
    """

    class Recorder(trt.IErrorRecorder):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IErrorRecorder.__init__(self)

        def get_num_errors(self) -> int:
            return len(errors.raw())

        num_errors = property(get_num_errors)

        def get_error_code(self, arg0: int) -> Any:
            found = errors.raw()
            return found[arg0][0] if arg0 < len(found) else trt.ErrorCodeTRT.SUCCESS

        def get_error_desc(self, arg0: int) -> str:
            found = errors.raw()
            return found[arg0][1] if arg0 < len(found) else ""

        def has_overflowed(self) -> bool:
            return len(errors.raw()) >= RECORDED_ERRORS

        def clear(self) -> None:
            errors.clear()

        def report_error(self, arg0: Any, arg1: str) -> bool:
            errors.add(arg0, arg1)
            return False  # "not fatal for the application": what to do is decided when the call returns

    return Recorder()


def output_allocator(trt: Trt, reallocate: Reallocate, notify: Notify) -> Any:
    """An IOutputAllocator. One for each context and output, for as long as the context lives (see `recorder`).

    From 10 TensorRT asks for memory in the order of a stream. The memory that is given is good on any stream.
    """

    class OutputAllocator(trt.IOutputAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)

        def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
            return reallocate(tensor_name, memory, size, alignment)

        def reallocate_output_async(
            self, tensor_name: str, memory: int, size: int, alignment: int, _stream: int
        ) -> int:
            return reallocate(tensor_name, memory, size, alignment)

        def notify_shape(self, tensor_name: str, shape: Any) -> None:
            notify(tensor_name, tuple(int(size) for size in shape))

    return OutputAllocator()


def progress_monitor(trt: Trt, phase: Callable[[str], None]) -> Any:
    """An IProgressMonitor that tells of each phase that starts outside of another one. A build is not cancelled
    through it, which 8.6 cannot: its process is ended."""

    class ProgressMonitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if not parent_phase:
                phase(f"{phase_name} ({num_steps} steps)")

        def step_complete(self, _phase_name: str, _step: int) -> bool:
            return True

        def phase_finish(self, _phase_name: str) -> None:
            pass

    return ProgressMonitor()


def calibrator(trt: Trt, method: str, rows: int, next_batch: NextBatch) -> Any:
    """An INT8 calibrator: `method` Entropy or MinMax. No cache is read or written: what a cache would spare is little
    beside the build, and a stale one is a wrong engine."""
    base = trt.IInt8MinMaxCalibrator if method == "MinMax" else trt.IInt8EntropyCalibrator2

    class Calibrator(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)

        def get_batch_size(self) -> int:
            return rows

        def get_batch(self, names: Sequence[str]) -> list[int] | None:
            return next_batch(names)

        def read_calibration_cache(self) -> bytes | None:
            return None

        def write_calibration_cache(self, cache: Any) -> None:
            pass

    return Calibrator()
