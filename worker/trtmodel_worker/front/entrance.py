"""Who may wait for a lane, and who waits in vain.

A queue that may be as long as the time limit allows is as long as that whenever more comes than can be answered. Then
everybody waits nearly until the end, and who is answered a moment too late has cost a lane its time for nothing. So a
request may wait for a part of its time only, as the last ones ran: lanes are as busy with a short queue, and when runs
become slower its tail is still in time. What is too late all the same is not run while others wait.
"""

from __future__ import annotations

import time

from trtmodel_worker.front.batching import Waiting
from trtmodel_worker.front.calls import Call
from trtmodel_worker.front.lanes import Lanes
from trtmodel_worker.front.outcomes import Outcomes

EACH = 2  # for every lane so many may wait, however long runs seem to take: else nobody would learn that they do not
SHARE = 0.5  # of a request's time, to wait in


class Entrance:
    """`limit`: requests that may wait."""

    def __init__(self, limit: int, lanes: Lanes, waiting: Waiting, outcomes: Outcomes) -> None:
        self._limit = limit
        self._lanes = lanes
        self._waiting = waiting
        self._outcomes = outcomes

    def why_not(self, call: Call, rows: int = 0) -> str:
        """Why `call` may not wait, "" if it may. `rows`: of a batch, for a free lane takes so many at once."""
        waiting = len(self._waiting)
        if waiting >= self._limit + len(self._lanes.free) * rows:
            return f"{self._limit} requests wait for a lane already"
        pace, most = self._outcomes.pace, SHARE * (call.deadline - call.since)
        if pace * waiting > most:  # for one lane
            lanes = max(1, self._lanes.living)
            if pace * waiting > most * lanes and waiting >= EACH * lanes:
                return "so many requests wait that this one might not be answered in time"
        return ""

    def next_late(self) -> Call | None:
        """The call whose turn it is, if it cannot be answered in time and others wait behind it; it waits no more. The
        last one runs: else nobody would learn that runs have become faster."""
        if len(self._waiting) < 2:
            return None
        return self._waiting.pop_late(time.monotonic() + self._outcomes.run_seconds)
