"""Threads for reading a storage that may drip for hours.

A thread cannot be ended from outside. So these reads have threads of their own, few of them: whoever waits for one
gives up in time, the thread goes on until the storage lets go of it, and while all of them hang nothing new is begun.
The loop's default threads are never among them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from trtmodel_worker.front.artifacts import Refused
from trtmodel_worker.placement import leave_to_front

T = TypeVar("T")
THREADS = 2


class Reading:
    """`threads` of them. `hanging`: reads that were given up and have not ended."""

    def __init__(self, name: str, threads: int = THREADS) -> None:
        self.hanging = 0
        self._most = threads
        # The loop's slices are not for who hashes gigabytes.
        self._threads = ThreadPoolExecutor(threads, name, leave_to_front)

    async def run(self, seconds: float, what: str, work: Callable[[], T], lost: Callable[[T], None]) -> T:
        """What `work` returns or raises. After `seconds`, or when it is cancelled, nobody waits any more: then `lost`
        gets the result, should there be one some day. Raises Refused: StorageStuck or FetchTimeout."""
        if self.hanging >= self._most:
            text = f"{self.hanging} earlier reads of the storage have not ended: nothing more is read until one does"
            raise Refused("StorageStuck", text, transient=True)
        work_done = self._threads.submit(work)
        reading = asyncio.wrap_future(work_done)
        try:
            return await asyncio.wait_for(asyncio.shield(reading), seconds)
        except asyncio.CancelledError:
            self._give_up(work_done, reading, lost)
            raise
        except asyncio.TimeoutError as e:
            if reading.done():
                return reading.result()  # its own timeout, or it came in this very moment
            self._give_up(work_done, reading, lost)
            text = f"{what} was not read within {seconds:g} s (TRTMODEL_PREPARE_SECONDS)"
            raise Refused("FetchTimeout", text, transient=True) from e

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _give_up(self, work_done: Future[T], reading: asyncio.Future[T], lost: Callable[[T], None]) -> None:
        if work_done.cancel():  # it waited for a thread
            return
        self.hanging += 1

        def ended(reading: asyncio.Future[T]) -> None:
            self.hanging -= 1
            if not reading.cancelled() and reading.exception() is None:
                lost(reading.result())

        reading.add_done_callback(ended)
