"""An event loop whose time passes at once, where nothing is to be read."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any
from unittest import mock


class _Jumping(selectors.SelectSelector):
    """Does not wait: time passes at once, unless something can be read."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if not found and timeout is None:
            raise AssertionError("nothing will ever happen again")
        if not found and timeout:
            self.now += timeout
        return found


def simulate(world: Coroutine[Any, Any, None]) -> None:
    """Run `world` on a clock that jumps to the next event."""
    clock = _Jumping()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now  # type: ignore[method-assign]
    with mock.patch.object(time, "monotonic", loop.time):
        try:
            loop.run_until_complete(world)
        finally:
            loop.close()
