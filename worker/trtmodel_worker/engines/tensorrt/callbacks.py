"""What TensorRT calls back: reports of errors, and places for outputs whose size only the data tells.

The classes need the module for their bases, so they are made when it is known. TensorRT keeps a reference to each
object that it is given for as long as the context lives: one per context and output, used again and again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from trtmodel_worker.engines.tensorrt.compat import Trt

_MOST_REPORTS = 32
_MOST_TEXT = 1000


class Recorder(Protocol):
    """Errors that TensorRT reported since they were cleared. Its calls that fail only return False or None."""

    def clear(self) -> None: ...

    def reported(self) -> tuple[tuple[str, str], ...]:
        """(name of the ErrorCodeTRT, text), oldest first."""
        ...


class OutputPlace(Protocol):
    """Where one output of unknown size went in the last run, and its shape."""

    address: int
    shape: tuple[int, ...] | None


@functools.cache
def _recorder_class(trt: Trt) -> Callable[[], Recorder]:
    class ErrorRecorder(trt.IErrorRecorder):  # type: ignore[misc]
        """TensorRT calls `get_num_errors`, its bound attribute is called `num_errors`: both have to be there."""

        def __init__(self) -> None:
            trt.IErrorRecorder.__init__(self)
            self._reports: list[tuple[Any, str]] = []
            self._overflowed = False

        def report_error(self, code: Any, desc: str) -> bool:
            if len(self._reports) < _MOST_REPORTS:
                self._reports.append((code, desc[:_MOST_TEXT]))
            else:
                self._overflowed = True
            return True

        def num_errors(self) -> int:
            return len(self._reports)

        def get_num_errors(self) -> int:
            return len(self._reports)

        def get_error_code(self, index: int) -> Any:
            return self._reports[index][0]

        def get_error_desc(self, index: int) -> str:
            return self._reports[index][1]

        def has_overflowed(self) -> bool:
            return self._overflowed

        def clear(self) -> None:
            self._reports.clear()
            self._overflowed = False

        def reported(self) -> tuple[tuple[str, str], ...]:
            return tuple((str(code.name), text) for code, text in self._reports)

    return ErrorRecorder


def recorder(trt: Trt) -> Recorder:
    return _recorder_class(trt)()


@functools.cache
def _place_class(trt: Trt) -> Callable[[Callable[[int], int]], OutputPlace]:
    class Place(trt.IOutputAllocator):  # type: ignore[misc]
        def __init__(self, reserve: Callable[[int], int]) -> None:
            trt.IOutputAllocator.__init__(self)
            self._reserve = reserve
            self.address = 0
            self.shape: tuple[int, ...] | None = None

        def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:  # noqa: ARG002
            """0 where there is no memory: then the run fails, and the device says why."""
            self.address = self._reserve(int(size))
            return self.address

        def reallocate_output_async(
            self, tensor_name: str, memory: int, size: int, alignment: int, stream: int  # noqa: ARG002
        ) -> int:  # fmt: skip
            return self.reallocate_output(tensor_name, memory, size, alignment)

        def notify_shape(self, tensor_name: str, shape: Any) -> None:  # noqa: ARG002
            self.shape = tuple(int(size) for size in shape)

    return Place


def output_place(trt: Trt, reserve: Callable[[int], int]) -> OutputPlace:
    """`reserve(bytes)` -> address of device memory, 0 if there is none."""
    return _place_class(trt)(reserve)
