"""A request on its way through an engine, and what it becomes there: part of a batch, run in one or two attempts.

    Call --+
    Call --+-- Batch (one input region) --+-- Attempt (a lane, its own output region, a generation)
    Call --+                              `-- Attempt: a hedge. The first answer counts

An input region is not written while an attempt reads it (a hedge may read the same bytes into it once more), and free
when the last one was acknowledged or its host was reaped.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from trtmodel_worker.front.sharing import ClientFile
from trtmodel_worker.front.windows import Counters

if TYPE_CHECKING:
    from trtmodel_worker.front.batching import Waiting
    from trtmodel_worker.front.engine import Engine
    from trtmodel_worker.front.hedging import Hedges
    from trtmodel_worker.front.outcomes import Outcomes

FIRST_LOOK_SECONDS = 0.002
"""After so long, and twice, four times ..., is looked whether somebody has killed the host of an attempt."""

Shape = tuple[int, ...]
Outputs = list[tuple[Shape, memoryview]]
"""Shape and bytes of each output, in the manifest's order. The bytes are valid only during the call."""


class Unreadable(Exception):
    """Bytes of a request that lie elsewhere cannot be read. The text names the cause."""


class Elsewhere(Protocol):
    """Bytes of a request that stay where they are until its batch is filled, or run: they are copied once only. They
    begin at `at` in `file`."""

    at: int
    file: ClientFile

    def __len__(self) -> int: ...

    def read_into(self, place: memoryview) -> None:
        """Raises Unreadable."""
        ...

    def copy(self) -> memoryview:
        """Raises Unreadable."""
        ...


Body = memoryview | Elsewhere


class Failed(Exception):
    """A request that gets no answer from the engine: the HTTP status and the text of the answer instead."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Call:
    """One request. `on_answer` gets the engine that answered: it need not be the one that was asked. `key`: calls with
    the same one may run together; None: this one runs alone. `deaths` of hosts that it may have been the reason of,
    `kills` of others that had it. `mirror`: where attempts of a shadow request are counted, None for any other. Nobody
    waits for a shadow: it runs alone, and once. `rehearsed`: not even a shadow, so it is counted nowhere."""

    __slots__ = (
        "alone", "bodies", "deadline", "deaths", "done", "key", "kills", "mirror", "on_answer", "on_failure", "queue",
        "rehearsed", "rows", "shapes", "since", "tries",
    )  # fmt: skip

    def __init__(
        self,
        shapes: Sequence[Shape],
        bodies: Sequence[Body],
        deadline: float,
        on_answer: Callable[[Outputs, Engine], None],
        on_failure: Callable[[Failed], None],
    ) -> None:
        self.shapes = shapes
        self.bodies = bodies
        self.deadline = deadline
        self.on_answer = on_answer
        self.on_failure = on_failure
        self.key: tuple[Shape, ...] | None = None
        self.rows = 1
        self.alone = False
        self.tries = 0
        self.deaths = 0
        self.kills = 0
        self.done = False
        self.queue: Waiting | None = None
        self.mirror: Counters | None = None
        self.rehearsed = False
        self.since = time.monotonic()

    @property
    def ran(self) -> bool:
        """It was with a host already."""
        return bool(self.tries or self.deaths or self.kills)

    def group(self, *, together: bool) -> None:
        """Which others it can run with, if rows of several may run `together`."""
        if not together:
            self.rows, self.key = 1, None
            return
        self.rows = self.shapes[0][0]
        self.key = (self.shapes[0][1:],) if len(self.shapes) == 1 else tuple(shape[1:] for shape in self.shapes)

    def cancel(self) -> None:
        """The client is gone: nobody waits for the answer, and its place is free."""
        self.done = True
        if self.queue is not None:
            self.queue.left(self)

    def fail(self, failure: Failed) -> None:
        if not self.done:
            self.done = True
            self.on_failure(failure)

    def digest(self) -> bytes:
        """Of what it asks: the same request again has the same one."""
        found = hashlib.sha256(repr([tuple(shape) for shape in self.shapes]).encode())
        for body in self.bodies:
            with contextlib.suppress(Unreadable):
                found.update(body if isinstance(body, memoryview) else body.copy())
        return found.digest()


class OwnCall(Call):
    """One that this worker makes itself: it runs alone. `look` sees its answer. `ended`: it was answered, or has
    failed."""

    __slots__ = ("ended",)

    def __init__(
        self,
        shapes: Sequence[Shape],
        bodies: Sequence[Body],
        deadline: float,
        look: Callable[[Outputs], object] = lambda _: None,
    ) -> None:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def end() -> None:
            if not ended.done():
                ended.set_result(None)

        def answered(outputs: Outputs, _: Engine) -> None:
            end()
            look(outputs)

        super().__init__(shapes, bodies, deadline, answered, lambda _: end())
        self.ended = ended
        self.alone = True


class Batch:
    """Calls that run together. `rows` are theirs, `padded` what the engine gets. `answered`: their callers have been
    told, whatever comes of attempts that still run. `reads`: bytes that the host puts into the arena, and where; each
    entry is (bytes elsewhere, offset in them, offset in the arena, size)."""

    __slots__ = (
        "answered", "attempts", "bucket", "calls", "hedged", "hedges", "input_slot", "owner", "padded", "places",
        "reads", "rows", "shapes", "suspect",
    )  # fmt: skip

    def __init__(
        self,
        owner: Outcomes,
        hedges: Hedges,
        calls: Sequence[Call],
        shapes: Sequence[Shape],
        rows: int,
        padded: int,
        bucket: str,
    ) -> None:
        self.owner = owner
        self.hedges = hedges
        self.calls = calls
        self.shapes = shapes
        self.rows = rows
        self.padded = padded
        self.bucket = bucket
        self.input_slot = -1
        self.places: list[int] = []
        self.reads: list[tuple[Elsewhere, int, int, int]] = []
        self.attempts: list[Attempt] = []
        self.answered = False
        self.hedged = False
        self.suspect = False

    @property
    def wanted(self) -> bool:
        """A client waits for it."""
        return not self.answered and any(not call.done and call.mirror is None for call in self.calls)


class Attempt:
    """One run of a batch. `look`: seconds after which its host is looked at next. `uncounted`: requests of it that were
    not counted as abandoned yet. `abandoned`: nobody waits for it any more, whatever comes of it. `stopped`: its host
    was seen standing still with it."""

    __slots__ = (
        "abandoned", "batch", "counters", "generation", "is_hedge", "look", "output_slot", "started", "stopped",
        "uncounted",
    )  # fmt: skip

    def __init__(self, batch: Batch, counters: Counters, generation: int, output_slot: int) -> None:
        self.batch = batch
        self.counters = counters
        self.abandoned = False
        self.stopped = False
        self.uncounted = len(batch.calls)
        self.is_hedge = bool(batch.attempts)
        self.generation = generation
        self.output_slot = output_slot
        self.look = FIRST_LOOK_SECONDS
        self.started = time.monotonic()

    def abandon(self) -> None:
        if not self.abandoned:
            self.abandoned = True
            self.counters.abandoned += self.uncounted
            self.uncounted = 0

    def abandon_one(self) -> None:
        """One of its requests has run out of time."""
        if self.uncounted:
            self.uncounted -= 1
            self.counters.abandoned += 1
