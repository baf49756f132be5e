"""Which requests run together.

Calls wait in groups of one shape (the leading dimension aside). A free lane takes from the group whose turn it is, so
that many requests of a slow shape do not keep those of another one waiting. Without a delay a batch is what came while
the lanes were busy: nothing waits for company while a lane is free.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence

from trtmodel_worker.front.calls import Call, Shape

OVERHEAD_SECONDS = 1e-4  # of a batch, in front and host: small batches of a fast model are not free
WORTH = 0.9  # a batch size is worth it up to the smallest that reaches this share of the best rows per second
SMALLER_SECONDS = 60.0  # batches stay small after one that did not fit into memory
_SWEEP = 64
_ALONE: tuple[Shape, ...] = ()


class Buckets:
    """Batch sizes. `asked`: those of the TRTModel, padded to; without any, batches are as large as they come.
    `largest`: rows that the profiles allow. `most`: rows that are put together at most."""

    def __init__(self, asked: Sequence[int], largest: int) -> None:
        fitting = [size for size in sorted(asked) if size <= largest]
        self.padded = bool(fitting)
        self.sizes = fitting or [1 << i for i in range(largest.bit_length()) if 1 << i <= largest]
        self.most = self._most = self.sizes[-1]
        self._small_until = 0.0
        self._names = [str(size) for size in self.sizes]

    def measured(self, seconds: Mapping[str, float]) -> None:
        """Batches that take as long as their rows one by one only make the first row wait: none are formed beyond what
        was measured to be worth it."""
        if self.padded or len(seconds) < 2:
            return
        rates = {int(rows): int(rows) / (each + OVERHEAD_SECONDS) for rows, each in seconds.items()}
        best = max(rates.values())
        self._most = min(self.sizes[-1], *(rows for rows, rate in rates.items() if rate >= WORTH * best))
        self.most = self._most if not self._small_until else min(self.most, self._most)

    def shrink(self, rows: int, now: float) -> None:
        """A batch of `rows` did not fit into memory: for a while they are half as large."""
        fitting = [size for size in self.sizes if 2 * size <= rows] if self.padded else [rows // 2]
        self.most = min(self.most, max(fitting, default=1) or 1)
        self._small_until = now + SMALLER_SECONDS

    def grow(self, now: float) -> None:
        """After that while they may be as large as before."""
        if self._small_until and now >= self._small_until:
            self._small_until = 0.0
            self.most = self._most

    def pad(self, rows: int) -> int:
        """How many rows the engine gets for `rows`."""
        if not self.padded or rows > self.sizes[-1]:
            return rows
        return self.sizes[bisect_left(self.sizes, rows)]

    def name(self, rows: int) -> str:
        """The bucket that `rows` are counted in."""
        at = bisect_left(self.sizes, rows)
        return self._names[at] if at < len(self._names) else str(rows)


class Waiting:
    """The calls that wait for a lane. `len` counts those whose client is still there."""

    def __init__(self) -> None:
        self._groups: OrderedDict[tuple[Shape, ...], deque[Call]] = OrderedDict()
        self._live = 0
        self._dead = 0

    def __len__(self) -> int:
        return self._live

    def push(self, call: Call) -> None:
        key = _ALONE if call.key is None or call.alone else call.key
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = deque()
        group.append(call)
        call.queue = self
        self._live += 1

    def push_front(self, calls: Sequence[Call]) -> None:
        """Calls that have waited before: it is their turn next."""
        for call in reversed(calls):
            key = _ALONE if call.key is None or call.alone else call.key
            self._groups.setdefault(key, deque()).appendleft(call)
            self._groups.move_to_end(key, last=False)
            call.queue = self
            self._live += 1

    def left(self, call: Call) -> None:
        """A waiting call was cancelled."""
        call.queue = None
        self._live -= 1
        self._dead += 1
        if self._dead > _SWEEP and self._dead > self._live:
            self._sweep()

    def rows(self, most: int) -> int:
        """Of the batch that would be taken now, counted up to `most`."""
        found = 0
        for key, group in self._groups.items():
            for call in group:
                if not call.done:
                    found += call.rows
                    if key is _ALONE or found >= most:
                        return found
            if found:
                return found
        return 0

    def full_first(self, most: int) -> bool:
        """Whether a batch of `most` rows is there; then it is its turn next."""
        for key, group in self._groups.items():
            rows = 0
            for call in group if key is not _ALONE else ():
                rows += 0 if call.done else call.rows
                if rows and rows >= most:
                    self._groups.move_to_end(key, last=False)
                    return True
        return False

    def oldest(self) -> Call | None:
        """The call whose turn it is."""
        for group in self._groups.values():
            for call in group:
                if not call.done:
                    return call
        return None

    def take(self, most: int) -> list[Call]:
        """The calls of the next batch, at most `most` rows (a single larger call goes alone); [] if nobody waits."""
        while self._groups:
            key = next(iter(self._groups))
            group = self._groups[key]
            taken: list[Call] = []
            rows = 0
            while group:
                call = group[0]
                if call.done:
                    group.popleft()
                    self._dead -= 1
                    continue
                if taken and (key is _ALONE or rows + call.rows > most):
                    break
                group.popleft()
                call.queue = None
                taken.append(call)
                rows += call.rows
            if group:
                self._groups.move_to_end(key)
            else:
                del self._groups[key]
            if taken:
                self._live -= len(taken)
                return taken
        return []

    def pop_late(self, soonest: float) -> Call | None:
        """The call whose turn it is, if its deadline is before `soonest`; it waits no more."""
        for group in self._groups.values():
            while group and group[0].done:
                group.popleft()
                self._dead -= 1
            if group:
                if group[0].deadline >= soonest:
                    return None
                call = group.popleft()
                call.queue = None
                self._live -= 1
                return call
        return None

    def expired(self, now: float) -> list[Call]:
        """Calls whose deadline has passed; they wait no more."""
        found = [c for group in self._groups.values() for c in group if not c.done and c.deadline <= now]
        if found:
            for call in found:
                call.queue = None
            self._live -= len(found)
            self._sweep()
        return found

    def drain(self) -> list[Call]:
        """Everybody who waits, and nobody waits any more."""
        found = [call for group in self._groups.values() for call in group if not call.done]
        for call in found:
            call.queue = None
        self._groups.clear()
        self._live = self._dead = 0
        return found

    def _sweep(self) -> None:
        """Drop the calls that do not wait any more."""
        for key in list(self._groups):
            left = deque(call for call in self._groups[key] if call.queue is self)
            if left:
                self._groups[key] = left
            else:
                del self._groups[key]
        self._dead = 0
