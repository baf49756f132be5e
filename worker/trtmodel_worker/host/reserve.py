"""Threads that are made before a host makes way.

A host that is prepared beside traffic gives way to what serves: its main thread, which imports, warms and proves, takes
the lowest priority. No thread can raise its priority again, and new ones inherit it. So the lanes' threads are made
before, and so is the one that loads the engine, since a runtime's own threads are made there.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
_LOWEST = 19


class ReservedThread:
    """Runs one thing after the other."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def start(self, work: Callable[[], T]) -> Future[T]:
        """The future of what `work` returns or raises."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as e:  # noqa: BLE001 - it is raised where the future is waited for
                future.set_exception(e)

        self._work.put(run)
        return future

    def _run(self) -> None:
        while True:
            self._work.get()()


def make_way() -> None:
    """The calling thread, and those that it makes from now on, run when nothing else wants to."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
