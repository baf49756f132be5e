"""One lane of a host: a thread that takes one batch at a time from the front and runs it in the arena."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from trtmodel_contract.exitcodes import HostExit
from trtmodel_contract.manifest import TensorSpec

from trtmodel_worker.engines.base import (
    DTYPES,
    Array,
    DeviceLost,
    EngineError,
    InvalidInput,
    Lane,
    OutOfMemory,
    Recoverable,
    Sticky,
)
from trtmodel_worker.host.arena import ALIGNMENT, Arena, align
from trtmodel_worker.host.wire import (
    MAX_MESSAGE_BYTES,
    FailureClass,
    MessageError,
    answer_message,
    failure_message,
    parse_run,
)

log = logging.getLogger(__name__)


class OutputTooLarge(ValueError):
    """An output does not fit into the attempt's region."""


class Region:
    """Hands out memory of one attempt's output region, and nothing outside it. An output that is asked for again (its
    shape was foreseen wrongly) gets its old place if it fits there."""

    __slots__ = ("_arena", "_cursor", "_dtypes", "_end", "_sizes", "offsets")

    def __init__(self, arena: Arena, dtypes: dict[str, np.dtype[np.generic]], offset: int, size: int) -> None:
        self._arena = arena
        self._dtypes = dtypes
        self._cursor = offset
        self._end = offset + size
        self._sizes: dict[str, int] = {}
        self.offsets: dict[str, int] = {}

    def allocate(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        if dtype != self._dtypes.get(name):
            raise ValueError(f"output {name!r} came as {dtype}, the manifest says {self._dtypes.get(name)}")
        size = dtype.itemsize * math.prod(shape)
        if size <= self._sizes.get(name, -1):
            return self._arena.array(self.offsets[name], dtype, shape)
        if size > self._end - self._cursor:
            raise OutputTooLarge(
                f"output {name!r} of shape {list(shape)} needs {size} bytes where {self._end - self._cursor} are left: "
                "raise TRTMODEL_MAX_OUTPUT_BYTES or send a smaller batch"
            )
        self.offsets[name] = self._cursor
        self._sizes[name] = size
        array = self._arena.array(self._cursor, dtype, shape)
        self._cursor = align(self._cursor + size, ALIGNMENT)
        return array


class LaneServer:
    """Runs batches of one lane until the front hangs up. A poisoned or lost device ends the process at once: nothing
    of the device may be touched any more, and the exit code tells the front which it was."""

    def __init__(
        self,
        lane: Lane,
        channel: socket.socket,
        arena: Arena,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
    ) -> None:
        self._lane = lane
        self._channel = channel
        self._arena = arena
        self._inputs = [(s.name, DTYPES[s.datatype]) for s in inputs]
        self._ranks = [len(s.shape) for s in inputs]
        self._outputs = [s.name for s in outputs]
        self._dtypes = {s.name: DTYPES[s.datatype] for s in outputs}

    def run(self) -> None:
        receive, send = self._channel.recv, self._channel.send
        try:
            while data := receive(MAX_MESSAGE_BYTES):
                send(self._serve(data))
        except OSError:
            log.info("the front hung up")

    def _serve(self, data: bytes) -> bytes:
        try:
            generation, out_offset, out_bytes, given = parse_run(data, self._ranks)
        except MessageError:
            log.exception("the front and this host do not speak the same protocol")
            os._exit(HostExit.CANNOT_LOAD)
        region = Region(self._arena, self._dtypes, out_offset, out_bytes)
        inputs: dict[str, Array] = {}
        for (name, dtype), (offset, shape) in zip(self._inputs, given, strict=True):
            inputs[name] = array = self._arena.array(offset, dtype, shape)
            array.flags.writeable = False
        started = time.perf_counter_ns()
        failure, text = FailureClass.INTERNAL, ""
        try:
            outputs = self._lane.run(inputs, region.allocate)
            spent = time.perf_counter_ns() - started
            return answer_message(
                generation, spent, ((region.offsets[name], outputs[name].shape) for name in self._outputs)
            )
        except Sticky as e:
            _end(HostExit.STICKY_ERROR, e)
        except DeviceLost as e:
            _end(HostExit.DEVICE_LOST, e)
        except InvalidInput as e:
            failure, text = FailureClass.INVALID_INPUT, str(e)
        except OutOfMemory as e:
            failure, text = FailureClass.OUT_OF_MEMORY, str(e)
        except (Recoverable, EngineError) as e:
            failure, text = FailureClass.RECOVERABLE, str(e)
        except OutputTooLarge as e:
            failure, text = FailureClass.OUTPUT_TOO_LARGE, str(e)
        except Exception as e:
            log.exception("the engine broke its protocol")
            text = f"{type(e).__name__}: {e}"
        return failure_message(generation, failure, time.perf_counter_ns() - started, text)


def _end(code: HostExit, cause: EngineError) -> None:
    log.critical("%s: this process ends", cause)
    os._exit(code)
