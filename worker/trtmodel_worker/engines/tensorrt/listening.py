"""What TensorRT says and asks for while it works: its logger, the progress of a build, batches to calibrate with.

TensorRT calls from threads of its own. An exception in a callback is printed and lost, or ends the process, so none
raises. The classes need the module for their bases, so they are made when it is known.
"""

from __future__ import annotations

import collections
import functools
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from trtmodel_worker.engines.tensorrt.compat import Trt, capabilities

log = logging.getLogger("trtmodel.tensorrt")

LAST_ERRORS = 32
_LEVELS = {
    "INTERNAL_ERROR": logging.CRITICAL,
    "ERROR": logging.ERROR,
    "WARNING": logging.WARNING,
    "INFO": logging.INFO,
    "VERBOSE": logging.DEBUG,
}

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


def progress_monitor(trt: Trt, phase: Callable[[str], None]) -> Any:
    """An IProgressMonitor that tells of each phase that starts outside of another one. A build is not cancelled
    through it, which 8.6 cannot: its process is ended."""
    assert capabilities(trt).progress_monitor

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
    assert capabilities(trt).calibrators
    base: Any = trt.IInt8MinMaxCalibrator if method == "MinMax" else trt.IInt8EntropyCalibrator2

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


_PHASES = (
    ("parsing done, optimising the graph", re.compile(r"Graph optimization time|Original: \d+ layers", re.IGNORECASE)),
    ("timing kernels", re.compile(r"Autotuning format combination|Timing Runner", re.IGNORECASE)),
    ("calibrating", re.compile(r"Starting Calibration|Calibrated batch", re.IGNORECASE)),
    ("generating the engine", re.compile(r"Engine generation completed|Formats and tactics selection completed")),
)


class Phases:
    """Phases of a build, told from its log, for versions that have no progress monitor. Each is told once."""

    def __init__(self, phase: Callable[[str], None]) -> None:
        self._phase = phase
        self._left = dict(_PHASES)

    def take(self, text: str) -> None:
        for name, pattern in self._left.items():
            if pattern.search(text):
                del self._left[name]
                self._phase(name)
                return
