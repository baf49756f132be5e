"""The scheduler of one engine: requests wait here, in order, until a lane is free. Nothing else schedules.

    submit -> [queue] -> dispatch: rows into an input region, one message -> lane (at most one attempt each)
                              answer: bounds checked, delivered, regions free, next one dispatched first
    host reaped -> its attempts go back to the head of the queue, once

A region is free again only when its attempt was acknowledged or its host reaped: an attempt that nobody waits for any
more keeps its lane and its regions until then.
"""

from __future__ import annotations

import itertools
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from trtmodel_contract.manifest import TensorSpec

from trtmodel_worker.engines.base import DTYPES
from trtmodel_worker.front.regions import NONE, SharedArena
from trtmodel_worker.front.stats import RevisionStats
from trtmodel_worker.front.windows import Counters
from trtmodel_worker.host.wire import (
    MAX_MESSAGE_BYTES,
    Answer,
    FailureClass,
    MessageError,
    parse_answer,
    run_message,
)

if TYPE_CHECKING:
    from trtmodel_worker.front.engine import Engine

log = logging.getLogger(__name__)
_generations = itertools.count(1)  # of all engines: regions are shared between them

Shape = tuple[int, ...]
Outputs = list[tuple[Shape, memoryview]]
"""Shape and bytes of each output, in the manifest's order. The bytes are valid only during the call."""

_CLASS_NAMES = {
    FailureClass.RECOVERABLE: "Recoverable",
    FailureClass.OUT_OF_MEMORY: "OutOfMemory",
    FailureClass.OUTPUT_TOO_LARGE: "OutputTooLarge",
    FailureClass.INTERNAL: "Internal",
}
HOST_DEATH = "HostDeath"
_LOG_SECONDS = 1.0
MAX_DEATHS = 2  # a request that was there each time is the suspect


class Failed(Exception):
    """A request that gets no answer from the engine: the HTTP status and the text of the answer instead."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Call:
    """One request on its way through an engine. `on_answer` gets the engine that answered: it need not be the one that
    was asked."""

    __slots__ = ("bodies", "bucket", "deadline", "deaths", "done", "on_answer", "on_failure", "shapes", "since")

    def __init__(
        self,
        shapes: Sequence[Shape],
        bodies: Sequence[memoryview],
        bucket: str,
        deadline: float,
        on_answer: Callable[[Outputs, Engine], None],
        on_failure: Callable[[Failed], None],
    ) -> None:
        self.shapes = shapes
        self.bodies = bodies
        self.bucket = bucket
        self.deadline = deadline
        self.on_answer = on_answer
        self.on_failure = on_failure
        self.deaths = 0
        self.done = False
        self.since = time.monotonic()

    def cancel(self) -> None:
        """The client is gone: nobody waits for the answer."""
        self.done = True

    def fail(self, failure: Failed) -> None:
        if not self.done:
            self.done = True
            self.on_failure(failure)


class Host(Protocol):
    """What the scheduler may do to a host: end it. Its attempts come back when it was reaped."""

    def kill(self, why: str) -> None: ...


class Attempt:
    """One run of a call. `abandoned`: counted as such already, whatever comes of it."""

    __slots__ = ("abandoned", "call", "counters", "generation", "input_slot", "output_slot", "started")

    def __init__(self, call: Call, counters: Counters, generation: int, input_slot: int, output_slot: int) -> None:
        self.call = call
        self.counters = counters
        self.abandoned = False
        self.generation = generation
        self.input_slot = input_slot
        self.output_slot = output_slot
        self.started = time.monotonic()


class LanePort:
    """The front's end of a lane."""

    __slots__ = ("attempt", "channel", "dying", "host")

    def __init__(self, host: Host, channel: socket.socket) -> None:
        self.host = host
        self.dying = False
        self.channel = channel
        self.attempt: Attempt | None = None


class Scheduler:
    def __init__(
        self,
        engine: Engine,
        arena: SharedArena,
        outputs: Sequence[TensorSpec],
        counters: Callable[[], Counters],
        stats: RevisionStats,
        queue_limit: int,
    ) -> None:
        self._engine = engine
        self._arena = arena
        self._offsets = arena.layout.input_offsets
        self._outputs = [(s.shape, DTYPES[s.datatype].itemsize) for s in outputs]
        self._counters = counters
        self._stats = stats
        self._limit = queue_limit
        self._queue: deque[Call] = deque()
        self._free: list[LanePort] = []
        self._lanes: list[LanePort] = []
        self._logged = 0.0
        self.hang_after = float("inf")

    @property
    def lanes(self) -> int:
        """Lanes that can take a request, now or after the one they run."""
        return sum(1 for lane in self._lanes if not lane.dying)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        return sum(1 for lane in self._lanes if lane.attempt is not None)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self._queue and not self.running

    def submit(self, call: Call) -> None:
        if self._free and not self._queue:
            self._stats.lane_hits += 1
            if self._dispatch(call):
                return
        if len(self._queue) >= self._limit:
            self._stats.refused += 1
            call.fail(Failed(503, f"{self._limit} requests wait for a lane already: try again later"))
            return
        self._stats.lane_waits += 1
        self._queue.append(call)

    def add(self, lanes: Sequence[LanePort]) -> None:
        self._lanes.extend(lanes)
        self._free.extend(lanes)
        self._pump()

    def remove(self, host: Host, *, count_death: bool) -> None:
        """The host was reaped, so nothing of it can write any more: its attempts run again elsewhere, once."""
        gone = [lane for lane in self._lanes if lane.host is host]
        self._lanes = [lane for lane in self._lanes if lane.host is not host]
        self._free = [lane for lane in self._free if lane.host is not host]
        again: list[Call] = []
        counted = False
        for lane in gone:
            attempt, lane.attempt = lane.attempt, None
            if attempt is None:
                continue
            self._return(attempt.input_slot, attempt.output_slot)
            call = attempt.call
            call.deaths += 1
            if count_death and not attempt.abandoned:
                counted = True
                attempt.counters.count_failed(HOST_DEATH)
            if call.deaths >= MAX_DEATHS:
                call.fail(Failed(500, f"{call.deaths} engine hosts died while they ran this request"))
            elif not call.done:
                again.append(call)
        if count_death and not counted:
            self._counters().count_failed(HOST_DEATH)  # it died idle: the engine's fault all the same
        self._stats.replays += len(again)
        self._queue.extendleft(reversed(again))
        self._pump()

    def suspend(self, host: Host) -> None:
        """The host is about to end: it gets nothing more."""
        for lane in self._lanes:
            lane.dying = lane.dying or lane.host is host
        self._free = [lane for lane in self._free if lane.host is not host]

    def fail_waiting(self, message: str) -> None:
        """No lane will come: whoever waits learns it now."""
        waiting, self._queue = self._queue, deque()
        for call in waiting:
            call.fail(Failed(503, message))

    def tick(self, now: float) -> None:
        """Deadlines and hangs. Called several times a second."""
        for lane in self._lanes:
            attempt = lane.attempt
            if attempt is None:
                continue
            call = attempt.call
            if not call.done and call.deadline <= now:
                attempt.abandoned = True
                attempt.counters.abandoned += 1
                self._stats.timeouts += 1
                call.fail(Failed(503, "the engine did not answer within the request's time limit"))
            if now - attempt.started > self.hang_after:
                lane.host.kill(f"a run took longer than {self.hang_after:.1f} s")
        if self._queue and any(call.done or call.deadline <= now for call in self._queue):
            waiting, self._queue = self._queue, deque()
            for call in waiting:
                if call.deadline <= now and not call.done:
                    self._stats.timeouts += 1
                    call.fail(Failed(503, "no lane became free within the request's time limit: try again later"))
                elif not call.done:
                    self._queue.append(call)
        self._pump()

    def readable(self, lane: LanePort) -> None:
        """A lane's host has something to say."""
        try:
            data = lane.channel.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError as e:
            lane.host.kill(f"its lane failed: {e}")
            return
        if not data:
            lane.host.kill("it closed its lane")
            return
        attempt = lane.attempt
        try:
            answer = parse_answer(data, len(self._outputs))
            if attempt is None or answer.generation != attempt.generation:
                raise MessageError(f"an answer to attempt {answer.generation}, which does not run on this lane")
            outputs = self._checked(answer, attempt.output_slot)
        except MessageError as e:
            lane.host.kill(f"it broke the protocol: {e}")  # the regions stay taken until it was reaped
            return
        lane.attempt = None
        self._free.append(lane)
        if self._queue:
            self._pump()  # the lane works on while this answer is written
        try:
            self._deliver(attempt, answer, outputs)
        finally:
            self._return(attempt.input_slot, attempt.output_slot)
        if self._queue and self._free:
            self._pump()  # a region was missing

    def _pump(self) -> None:
        while self._queue and self._free:
            call = self._queue.popleft()
            if call.done:
                continue
            if not self._dispatch(call):
                self._queue.appendleft(call)
                return

    def _dispatch(self, call: Call) -> bool:
        """Give `call` to a free lane. False if there is no free region, or the lane turned out to be dead."""
        arena = self._arena
        input_slot, output_slot = arena.take_input(), arena.take_output()
        if input_slot == NONE or output_slot == NONE:
            self._return(input_slot, output_slot)
            return False
        base = arena.layout.input_region(input_slot)
        view = arena.memory.view
        places = []
        for offset, body in zip(self._offsets, call.bodies, strict=True):
            at = base + offset
            view[at : at + len(body)] = body
            places.append(at)
        lane = self._free.pop()
        attempt = Attempt(call, self._counters(), next(_generations), input_slot, output_slot)
        output = arena.layout.output_region(output_slot)
        message = run_message(attempt.generation, output, arena.layout.output_bytes, places, call.shapes)
        try:
            lane.channel.send(message)
        except OSError as e:
            self._return(input_slot, output_slot)
            lane.host.kill(f"its lane failed: {e}")
            return False
        lane.attempt = attempt
        return True

    def _checked(self, answer: Answer, output_slot: int) -> Outputs:
        """The outputs that a host names, if they lie within its attempt's region. Raises MessageError."""
        low = self._arena.layout.output_region(output_slot)
        high = low + self._arena.layout.output_bytes
        view = self._arena.memory.view
        outputs = []
        for (offset, shape), (expected, itemsize) in zip(answer.outputs, self._outputs, strict=False):
            size = itemsize
            if len(shape) != len(expected):
                raise MessageError(f"an output of shape {list(shape)} where {list(expected)} was expected")
            for have, want in zip(shape, expected, strict=True):
                if have < 0 or (have != want and want != -1):
                    raise MessageError(f"an output of shape {list(shape)} where {list(expected)} was expected")
                size *= have
            if offset < low or offset + size > high:
                raise MessageError("an output lies outside its region")
            outputs.append((shape, view[offset : offset + size]))
        return outputs

    def _deliver(self, attempt: Attempt, answer: Answer, outputs: Outputs) -> None:
        call, counters = attempt.call, attempt.counters
        seconds = answer.nanoseconds / 1e9
        if answer.failure is None:
            if not attempt.abandoned:
                counters.count_ok(call.bucket, seconds)
            self._stats.observe(attempt.started - call.since, seconds, time.monotonic() - call.since)
            if not call.done:
                call.done = True
                call.on_answer(outputs, self._engine)
            for _, view in outputs:
                view.release()
        elif answer.failure is FailureClass.INVALID_INPUT:
            call.fail(Failed(400, answer.text))
        else:
            name = _CLASS_NAMES[answer.failure]
            if not attempt.abandoned:
                counters.count_failed(name)
            self._stats.count_failure(name)
            if time.monotonic() - self._logged > _LOG_SECONDS:  # a broken engine would fill the log
                self._logged = time.monotonic()
                log.warning("an attempt failed, %s: %s", name, answer.text)
            call.fail(Failed(500, f"the engine failed ({name}): {answer.text}"))

    def _return(self, input_slot: int, output_slot: int) -> None:
        if input_slot != NONE:
            self._arena.give_input(input_slot)
        if output_slot != NONE:
            self._arena.give_output(output_slot)
