"""Memory of the size of an engine, given back beside the loop: to unmap 64 MiB and to close their last descriptor took
12 to 16 ms, in which no request would have moved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def dispose(close: Callable[[], None]) -> None:
    """Call `close` in a thread of the running loop. What it raises is logged by the loop."""
    asyncio.get_running_loop().run_in_executor(None, close)
