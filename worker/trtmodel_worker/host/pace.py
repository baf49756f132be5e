"""How fast an engine is prepared: beside traffic it may use a share of the time only."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_LEAST_DUTY = 0.01  # less would be no preparation at all


class Pace:
    """Runs work, and rests after each piece so long that work takes at most the share `duty` of the time. `clock` tells
    how long a piece took."""

    def __init__(
        self,
        duty: float = 1.0,
        rest: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._rests = max(0.0, 1.0 / max(duty, _LEAST_DUTY) - 1.0)
        self._rest = rest

    def run(self, work: Callable[..., T], *arguments: Any) -> tuple[T, float]:
        """What `work` returns, and the seconds that it took."""
        started = self._clock()
        result = work(*arguments)
        spent = self._clock() - started
        if self._rests:
            self._rest(spent * self._rests)
        return result, spent
