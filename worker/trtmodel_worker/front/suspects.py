"""Requests that may have killed a host: each runs alone, one at a time, so that the guilty one is found and no other
request is there when it kills again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from trtmodel_worker.front.calls import Call


class Suspects:
    """Wait their turn. `running` while one of them is with a host."""

    def __init__(self) -> None:
        self.running = False
        self._calls: deque[Call] = deque()

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def waiting(self) -> bool:
        """Whether one of them still wants an answer."""
        return any(not call.done for call in self._calls)

    def extend(self, calls: Iterable[Call]) -> None:
        for call in calls:
            call.alone = True
            self._calls.append(call)

    def next(self) -> Call | None:
        """The one that may run now; it stays here until `sent`."""
        while self._calls and self._calls[0].done:
            self._calls.popleft()
        return self._calls[0] if self._calls and not self.running else None

    def sent(self) -> None:
        self._calls.popleft()
        self.running = True

    def expired(self, now: float) -> list[Call]:
        return [call for call in self._calls if call.deadline <= now and not call.done]

    def drain(self) -> list[Call]:
        calls = list(self._calls)
        self._calls.clear()
        return calls
