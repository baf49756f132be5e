"""The front's end of lanes: which are free, and which keep their time."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Sequence
from typing import Protocol

from trtmodel_worker.front.calls import Attempt, Elsewhere
from trtmodel_worker.front.ladder import Overdue
from trtmodel_worker.front.sharing import ClientFile
from trtmodel_worker.host.wire import WAKE, file_message, reads_part

_RESTS = 6.0  # times as long as a run may
_MOST_FILES = 32  # that a lane knows: each is a descriptor of its host
_next_number = itertools.count(1).__next__
next_generation = itertools.count(1).__next__  # of all engines: regions are shared between them


class Host(Protocol):
    """What the scheduler may do to a host: end it. Its attempts come back when it was reaped. `guilty`: what it runs
    may be why. `innocent`: it is known before it was reaped that nothing that it runs is why it ends."""

    failures: int
    innocent: bool

    def kill(self, why: str, *, guilty: bool = True) -> None: ...

    def is_lingering(self) -> bool:
        """Whether somebody has killed it, though its lanes are still open: then it is given up."""
        ...

    def is_stopped(self) -> bool:
        """Whether somebody has stopped it (SIGSTOP, a debugger): then all that it has waits with it."""
        ...

    def hung_up(self, why: str) -> None:
        """A lane is closed, so the host has ended or is about to: how it did says whether a request may be why."""
        ...


class LanePort:
    """One lane. `resting`: its host rebuilds it. `probing`: the generation of a probe, or 0. `since`: when it was sent
    something last, or was seen to end. `dying`: its host is about to end."""

    __slots__ = ("attempt", "channel", "dying", "files", "host", "probing", "resting", "since")

    def __init__(self, host: Host, channel: socket.socket) -> None:
        self.host = host
        self.channel = channel
        self.dying = False
        self.resting = False
        self.probing = 0
        self.since = 0.0
        self.attempt: Attempt | None = None
        self.files: dict[ClientFile, int] = {}  # those that it knows, and their numbers

    def numbered(self, reads: Sequence[tuple[Elsewhere, int, int, int]]) -> bytes:
        """The part of a run's message that says what is to be read, after the lane was told of files that it does not
        know. Raises OSError."""
        if len(self.files) > _MOST_FILES:
            for file in list(self.files):
                self.forget(file)
        told = []
        for body, offset, place, size in reads:
            file = body.file
            number = self.files.get(file)
            if number is None:
                number = _next_number()
                self.channel.send(file_message(number))
                socket.send_fds(self.channel, [b"f"], [file.reader])
                self.files[file] = number
                file.lanes.add(self)
            told.append((number, body.at + offset, place, size))
        return reads_part(told)

    def forget(self, file: ClientFile) -> None:
        number = self.files.pop(file, None)
        file.lanes.discard(self)
        if number is not None:
            with contextlib.suppress(OSError):  # its host is gone, or will be ended since it does not listen
                self.channel.send(file_message(number, forget=True))

    @property
    def busy(self) -> bool:
        return self.attempt is not None or self.resting or bool(self.probing)

    def hangs(self, now: float, after: float) -> bool:
        """`after`: seconds that no run takes. Making a lane anew takes many: its contexts, graphs and their proof."""
        return self.busy and not self.dying and now - self.since > after * (_RESTS if self.resting else 1.0)


class Lanes:
    """All lanes of an engine."""

    def __init__(self, overdue: Overdue) -> None:
        self.all: list[LanePort] = []
        self.free: list[LanePort] = []
        self._overdue = overdue

    @property
    def living(self) -> int:
        return sum(1 for lane in self.all if not lane.dying)

    @property
    def hosts(self) -> int:
        return len({id(lane.host) for lane in self.all if not lane.dying})

    @property
    def stuck(self) -> bool:
        """Every living lane runs something for longer than it should: their hosts were stopped, or hang."""
        now = time.monotonic()
        return all(lane.dying or self._is_late(lane, now) for lane in self.all)

    def add(self, lanes: Sequence[LanePort]) -> None:
        self.all.extend(lanes)
        self.free.extend(lanes)

    def suspend(self, host: Host) -> None:
        for lane in self.all:
            if lane.host is host and not lane.dying:
                lane.dying, lane.since = True, time.monotonic()
        self.free = [lane for lane in self.free if lane.host is not host]

    def remove(self, host: Host) -> list[LanePort]:
        """The lanes that were its."""
        self.suspend(host)
        gone = [lane for lane in self.all if lane.host is host]
        for lane in gone:
            for file in list(lane.files):
                lane.forget(file)
        self.all = [lane for lane in self.all if lane.host is not host]
        return gone

    def stopped(self, host: Host) -> None:
        """All that it runs waits with it."""
        for lane in self.all:
            if lane.host is host and lane.attempt is not None:
                lane.attempt.stopped = True

    def give(self, lane: LanePort) -> None:
        """It has answered and can take something again."""
        if not lane.dying:
            self.free.append(lane)

    def next(self, not_of: Host | None = None) -> LanePort | None:
        """A free lane, not of the host `not_of`; of one that keeps its time if there is such a one."""
        free = self.free
        if not free:
            return None
        late = self._late()
        if not late and not_of is None:
            return free[-1]
        fallback = None
        for lane in reversed(free):
            if lane.host is not_of:
                continue
            if id(lane.host) not in late:
                return lane
            fallback = lane
        return fallback if not_of is None else None

    def send(self, lane: LanePort, message: bytes, reads: Sequence[tuple[Elsewhere, int, int, int]] = ()) -> bool:
        """Takes the lane. `reads` as a batch has them. False if its host is gone."""
        self.free.remove(lane)
        lane.since = time.monotonic()
        try:
            lane.channel.send(message + lane.numbered(reads) if reads else message)
        except OSError as e:
            lane.host.hung_up(f"its lane failed: {e}")
            return False
        for body, *_ in reads:
            if body.file.gone:
                lane.forget(body.file)
        return True

    def wake(self) -> None:
        """Tell the lane that gets the next request."""
        if self.free:
            with contextlib.suppress(OSError):  # it shows when a request is sent
                self.free[-1].channel.send(WAKE)

    def _late(self) -> set[int]:
        """Hosts that run something for longer than they should."""
        now = time.monotonic()
        return {id(lane.host) for lane in self.all if self._is_late(lane, now)}

    def _is_late(self, lane: LanePort, now: float) -> bool:
        attempt = lane.attempt
        if attempt is None:  # a probe, or its rest: nobody waits for that, but for the lane
            return lane.busy and lane.host.is_stopped()
        return attempt.stopped or now - lane.since > self._overdue.after(attempt.batch.bucket)
