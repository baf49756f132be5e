"""One lane of a host: a thread that takes one batch at a time from the front and runs it in the arena."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np
from trtmodel_contract.exitcodes import HostExit
from trtmodel_contract.manifest import Manifest

from trtmodel_worker.engines.base import (
    DTYPES,
    Array,
    BindingLane,
    Bound,
    DeviceLost,
    Elsewhere,
    Engine,
    EngineError,
    FetchingBound,
    InvalidInput,
    Lane,
    OutOfMemory,
    PinningEngine,
    ServingEngine,
    Sticky,
    WakingLane,
    allocate_anew,
)
from trtmodel_worker.host import reading, strings
from trtmodel_worker.host.arena import ALIGNMENT, MAX_BYTES_TENSOR, Arena, align
from trtmodel_worker.host.pace import Pace
from trtmodel_worker.host.proving import Sample, compare
from trtmodel_worker.host.sharing import LEAST_BYTES, Shared, SharedFile, can_pin
from trtmodel_worker.host.warming import warm_once
from trtmodel_worker.host.wire import (
    MAX_MESSAGE_BYTES,
    WAKE,
    FailureClass,
    MessageError,
    answer_message,
    failure_message,
    has_reads,
    is_followed_soon,
    is_probe,
    parse_file,
    parse_generation,
    parse_run,
    rested_message,
    run_bytes,
)

log = logging.getLogger(__name__)
_MOST_PREPARED = 512  # shapes x input regions x output regions: a server of few shapes needs some dozens
_REBUILDS = 2

Places = tuple[tuple[int, tuple[int, ...]], ...]
"""Offset in the arena and shape of each output."""


class OutputTooLarge(ValueError):
    """An output does not fit into the attempt's region."""


class WrongOutput(Exception):
    """A probe was answered something else than when the engine was built."""


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
        """Raises OutputTooLarge, and ValueError for another dtype than the manifest's. Strings come to their place
        later, by `place`."""
        if dtype != self._dtypes.get(name):
            raise ValueError(f"output {name!r} came as {dtype}, the manifest says {self._dtypes.get(name)}")
        if dtype.hasobject:
            return np.empty(shape, dtype)
        self._take(name, shape, dtype.itemsize * math.prod(shape))
        return self._arena.array(self.offsets[name], dtype, shape)

    def place(self, name: str, array: Array) -> tuple[int, tuple[int, ...]]:
        """Where the output is, and its shape. Raises OutputTooLarge."""
        if array.dtype.hasobject:
            data = strings.encode(array)
            self._take(name, array.shape, len(data))
            self._arena.view[self.offsets[name] : self.offsets[name] + len(data)] = data
        return self.offsets[name], array.shape

    def _take(self, name: str, shape: tuple[int, ...], size: int) -> None:
        if size <= self._sizes.get(name, -1):
            return
        if size > self._end - self._cursor:
            raise OutputTooLarge(
                f"output {name!r} of shape {list(shape)} needs {size} bytes where {self._end - self._cursor} are left: "
                "raise TRTMODEL_MAX_OUTPUT_BYTES or send a smaller batch"
            )
        self.offsets[name] = self._cursor
        self._sizes[name] = size
        self._cursor = align(self._cursor + size, ALIGNMENT)


class LaneMaker:
    """Makes the lanes of an engine, at the start and after an error. Makes and frees one at a time: not every runtime
    can do that side by side."""

    def __init__(self, engine: Engine, manifest: Manifest) -> None:
        self._engine = engine
        self._manifest = manifest
        self._lock = threading.Lock()

    def make(self) -> Lane:
        """Raises EngineError."""
        with self._lock:
            return self._engine.create_lane()

    def serve_from(self, memory: memoryview, pace: Pace) -> None:
        """Preparation is over, for an engine that wants to know. Raises EngineError."""
        if isinstance(self._engine, ServingEngine):
            with self._lock:
                self._engine.serve_from(memory, pace.run)

    def shared(self) -> Shared | None:
        """For files that the device reads by itself, if it can."""
        engine = self._engine
        return Shared(engine) if isinstance(engine, PinningEngine) and can_pin(engine) else None

    def replace(self, free: Callable[[], None]) -> Lane:
        """A lane, run once, in place of the one that `free` lets go of. Raises EngineError."""
        with self._lock:
            free()
        tries = 0
        while True:
            tries += 1
            try:
                lane = self.make()
                warm_once(lane, self._manifest)
                return lane
            except (Sticky, DeviceLost):
                raise
            except Exception as e:
                log.warning("try %d to make a lane anew failed: %s", tries, e)
                if tries == _REBUILDS:
                    raise


class _Prepared(NamedTuple):
    bound: Bound
    places: Places


class LaneServer:
    """Runs batches of one lane until the front hangs up. A poisoned or lost device ends the process at once: nothing
    of the device may be touched any more, and the exit code tells the front which it was.

    A run that comes again at the same places and shapes was prepared: its message is the same but for the generation.
    """

    def __init__(
        self,
        lane: Lane,
        maker: LaneMaker,
        channel: socket.socket,
        arena: Arena,
        manifest: Manifest,
        samples: Sequence[Sample],
        spin_seconds: float = 0.0,
        shared: Shared | None = None,
    ) -> None:
        self._lane: Lane | None = lane
        self._binds = isinstance(lane, BindingLane)  # asked once: it takes longer than a small run
        self._wakes = isinstance(lane, WakingLane)
        self._maker = maker
        self._channel = channel
        self._arena = arena
        self._samples = samples
        self._spin_seconds = spin_seconds
        self._shared = shared
        self._taken: list[SharedFile] = []
        self._base = arena.address if shared is not None else 0
        self._inputs = [(s.name, DTYPES[s.datatype]) for s in manifest.inputs]
        self._ranks = [len(s.shape) for s in manifest.inputs]
        self._run_bytes = run_bytes(self._ranks)
        self._files = reading.Files()
        self._outputs = manifest.outputs
        self._dtypes = {s.name: DTYPES[s.datatype] for s in manifest.outputs}
        self._prepared: dict[bytes, _Prepared] = {}
        self._suspect = False

    def run(self) -> None:
        receive, send = self._channel.recv, self._channel.send
        data = b""
        try:
            while data := self._receive_soon() if is_followed_soon(data) else receive(MAX_MESSAGE_BYTES):
                if data == WAKE:
                    if self._wakes:
                        cast("WakingLane", self._lane).wake()
                    continue
                file = parse_file(data)
                if file is not None:
                    self._files.told(*file, self._channel)
                    continue
                send(self._serve(data))
                if self._suspect:
                    send(self._rebuild())
        except MessageError:
            _end_confused()
        except OSError:
            log.info("the front hung up")

    def _receive_soon(self) -> bytes:
        """The next message; at first without sleep, since it would take longer to wake up than it takes to come."""
        receive = self._channel.recv
        end = time.perf_counter() + self._spin_seconds
        while time.perf_counter() < end:
            try:
                return receive(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
        return receive(MAX_MESSAGE_BYTES)

    def _serve(self, data: bytes) -> bytes:
        generation, started = 0, time.perf_counter_ns()
        try:
            generation = parse_generation(data)
            places = self._probe() if is_probe(data) else self._run(data)
            return answer_message(generation, time.perf_counter_ns() - started, places)
        except MessageError:
            _end_confused()
        except (Sticky, DeviceLost) as e:
            _end(e)
        except (EngineError, OutputTooLarge, WrongOutput) as e:
            failure, text = _classify(e), str(e)
        except Exception as e:
            log.exception("the engine broke its protocol")
            failure, text = FailureClass.INTERNAL, f"{type(e).__name__}: {e}"
        finally:
            for file in self._taken:
                cast("Shared", self._shared).give(file)
            self._taken.clear()
        self._suspect = failure is FailureClass.RECOVERABLE
        return failure_message(generation, failure, time.perf_counter_ns() - started, text)

    def _fetch(self, reads: Sequence[reading.Read]) -> list[Elsewhere]:
        """What the device reads by itself; the rest is in the arena now. Raises as `_read` does."""
        if self._shared is None:
            self._read(reads)
            return []
        found, left = [], []
        for read in reads:
            taken = self._shared.take(read.descriptor, read.at, read.size) if read.size >= LEAST_BYTES else None
            if taken is None:
                left.append(read)
                continue
            self._taken.append(taken[0])
            found.append(Elsewhere(self._base + read.place, taken[1], read.size))
        self._read(left)
        return found

    def _read(self, reads: Sequence[reading.Read]) -> None:
        """Raises MessageError, and InvalidInput if something is not there any more."""
        try:
            for read in reads:
                if read.place + read.size > self._arena.size:
                    raise MessageError("what is to be read does not fit into the arena")
                reading.read_into(self._arena.view[read.place : read.place + read.size], read.descriptor, read.at)
        except reading.Unread as e:
            raise InvalidInput(f"an input in shared memory: {e}") from e

    def _run(self, data: bytes) -> Places:
        reads: Sequence[reading.Read] = ()
        elsewhere: Sequence[Elsewhere] = ()
        if has_reads(data):
            reads = self._files.reads(data[self._run_bytes :])
            elsewhere = self._fetch(reads)
            data = data[: self._run_bytes]
        prepared = self._prepared.get(data[8:])
        if prepared is not None:
            if _run_bound(prepared.bound, elsewhere):
                return prepared.places
            del self._prepared[data[8:]]
        lane = self._lane
        assert lane is not None
        inputs, region = self._places(data)
        if self._binds:
            bound = cast("BindingLane", lane).bind(inputs, region.allocate)
            if bound is not None and _run_bound(bound, elsewhere):
                places = tuple(region.place(s.name, bound.outputs[s.name]) for s in self._outputs)
                if len(self._prepared) >= _MOST_PREPARED:
                    self._prepared.clear()
                self._prepared[data[8:]] = _Prepared(bound, places)
                return places
        if elsewhere:
            self._read(reads)
        outputs = lane.run(inputs, region.allocate)
        return tuple(region.place(s.name, outputs[s.name]) for s in self._outputs)

    def _places(self, data: bytes) -> tuple[dict[str, Array], Region]:
        """Raises MessageError, also where a place is outside of the arena, and InvalidInput for strings that are
        none."""
        _, out_offset, out_bytes, given = parse_run(data, self._ranks)
        inputs: dict[str, Array] = {}
        try:
            for (name, dtype), (offset, shape) in zip(self._inputs, given, strict=True):
                inputs[name] = self._input(offset, dtype, shape)
        except (ValueError, TypeError) as e:
            raise MessageError(f"an input lies outside of the arena: {e}") from e
        if not 0 <= out_offset <= out_offset + out_bytes <= self._arena.size:
            raise MessageError("the output region lies outside of the arena")
        return inputs, Region(self._arena, self._dtypes, out_offset, out_bytes)

    def _input(self, offset: int, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> Array:
        if dtype.hasobject:
            if not 0 <= offset <= self._arena.size or min(shape, default=0) < 0:
                raise ValueError(f"strings at {offset}")
            return strings.decode(self._arena.view[offset : offset + MAX_BYTES_TENSOR], shape)
        array = self._arena.array(offset, dtype, shape)
        array.flags.writeable = False
        return array

    def _probe(self) -> Places:
        """Run the golden samples in private memory. Raises WrongOutput."""
        assert self._lane is not None
        for sample in self._samples:
            try:
                found = self._lane.run(sample.inputs, allocate_anew)
            except InvalidInput as e:
                raise WrongOutput(f"golden sample {sample.name}: {e}") from e
            for fault in compare(sample.outputs, found, sample.tolerances, self._outputs):
                raise WrongOutput(f"golden sample {sample.name}: {fault}")
        return ()

    def _rebuild(self) -> bytes:
        """Replace the lane. The end of the process if that cannot be done."""
        started = time.perf_counter_ns()
        try:
            self._lane = self._maker.replace(self._free)
        except (Sticky, DeviceLost) as e:
            _end(e)
        except Exception:
            log.exception("a lane could not be made anew: this process ends")
            os._exit(HostExit.LANE_LOST)
        self._suspect = False
        return rested_message(time.perf_counter_ns() - started)

    def _free(self) -> None:
        self._prepared.clear()
        self._lane = None


def _run_bound(bound: Bound, elsewhere: Sequence[Elsewhere]) -> bool:
    return cast("FetchingBound", bound).run_from(elsewhere) if elsewhere else bound.run()


def _classify(error: Exception) -> FailureClass:
    if isinstance(error, InvalidInput):
        return FailureClass.INVALID_INPUT
    if isinstance(error, OutOfMemory):
        return FailureClass.OUT_OF_MEMORY
    if isinstance(error, OutputTooLarge):
        return FailureClass.OUTPUT_TOO_LARGE
    if isinstance(error, WrongOutput):
        return FailureClass.WRONG_OUTPUT
    return FailureClass.RECOVERABLE


def _end_confused() -> NoReturn:
    log.exception("the front and this host do not speak the same protocol")
    os._exit(HostExit.CANNOT_LOAD)


def _end(cause: EngineError) -> NoReturn:
    log.critical("%s: this process ends", cause)
    os._exit(HostExit.STICKY_ERROR if isinstance(cause, Sticky) else HostExit.DEVICE_LOST)
