"""What follows a failure: pure decisions, and the counters that bound them.

recoverable error   again, on another lane: first as it was, then each request alone; within the retry budget
out of memory       the batch's requests one by one, and smaller batches for a while
the request's fault the batch's requests one by one, so that only the guilty one is refused
host killed         again as it was: nothing says that a request did it
host crashed        each request alone, one at a time, where a second death would leave another host alive
"""

from __future__ import annotations

import enum
from collections import OrderedDict

from trtmodel_contract.histogram import bucket_index, quantile

from trtmodel_worker.host.wire import FailureClass

MAX_DEATHS = 2  # a request that was there each time is the suspect
MAX_KILLS = 4  # of hosts that were ended from outside while they ran it
MAX_FAILURES_IN_A_ROW = 5  # requests on one host, without a success between: it must prove itself
_MOST_SAVED = 100.0  # retries that a long time without any can save up; they are there before the first request
_REFUSED_SECONDS = 600.0
_MOST_REFUSED = 1000
_FEWEST_SAMPLES = 50
_RECENT = 2000


class Next(enum.Enum):
    """What a failed batch's requests do."""

    TOGETHER = "again, as they were"
    ALONE = "again, each alone"
    FAIL = "no more"


def after_failure(failure: FailureClass, calls: int, tries: int, attempts: int) -> tuple[Next, bool]:
    """What a batch of `calls` does after its `tries`-th try of at most `attempts`, and whether that takes from the
    retry budget."""
    if failure in (FailureClass.INVALID_INPUT, FailureClass.OUTPUT_TOO_LARGE):
        return (Next.ALONE, False) if calls > 1 else (Next.FAIL, False)
    if failure is FailureClass.OUT_OF_MEMORY and calls > 1:
        return Next.ALONE, False  # free, since batches become smaller by it
    if tries >= attempts:
        return Next.FAIL, False
    return (Next.TOGETHER if tries == 1 else Next.ALONE), True


class RetryBudget:
    """Retries as a share of all requests. Without one, an engine that fails everything would get a multiple of its
    load."""

    def __init__(self, percent: float) -> None:
        self._share = percent / 100.0
        self._left = _MOST_SAVED if percent else 0.0

    def earn(self) -> None:
        """A request came."""
        if self._left < _MOST_SAVED:
            self._left += self._share

    def take(self, retries: int) -> bool:
        """Whether so many retries are allowed now; then they are spent. The requests of a large batch may be more than
        was saved: the rest is owed."""
        if self._left < 1.0:
            return False
        self._left -= retries
        return True


class Refused:
    """Digests of requests that killed hosts: for a while they are not tried again."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._until)

    def add(self, digest: bytes, now: float) -> None:
        self._until[digest] = now + _REFUSED_SECONDS
        self._until.move_to_end(digest)
        while len(self._until) > _MOST_REFUSED:
            self._until.popitem(last=False)

    def holds(self, digest: bytes, now: float) -> bool:
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        return digest in self._until


class Overdue:
    """When a batch has run so long that it is also run elsewhere: by `asked` seconds, or, if that is 0, five times the
    99th percentile of its bucket's recent runs."""

    FACTOR = 5.0
    LEAST_SECONDS = 0.010

    def __init__(self, asked: float) -> None:
        self._asked = asked
        self._recent: dict[str, dict[int, int]] = {}
        self._counts: dict[str, int] = {}
        self._after: dict[str, float] = {}
        self._fallback = 0.0

    @property
    def is_auto(self) -> bool:
        """Nobody has asked for a time."""
        return not self._asked

    def expect(self, slowest: float) -> None:
        """`slowest`: the slowest run of the warm-up, in seconds, for buckets that were not seen often yet."""
        self._fallback = slowest

    def observe(self, bucket: str, seconds: float) -> None:
        recent = self._recent.setdefault(bucket, {})
        index = bucket_index(seconds)
        recent[index] = recent.get(index, 0) + 1
        count = self._counts[bucket] = self._counts.get(bucket, 0) + 1
        if count % _FEWEST_SAMPLES == 0:
            self._after[bucket] = self.FACTOR * (quantile(recent, 0.99) or 0.0)
            if count >= _RECENT:  # what was long ago counts half
                self._recent[bucket] = {i: n // 2 for i, n in recent.items() if n > 1}
                self._counts[bucket] = sum(self._recent[bucket].values())

    def after(self, bucket: str) -> float:
        """Seconds."""
        if self._asked:
            return self._asked
        return max(self.LEAST_SECONDS, self._after.get(bucket) or self.FACTOR * self._fallback)
