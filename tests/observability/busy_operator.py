"""An operator's queue, passes and metrics as they are, without a cluster: its passes end when they are told to."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Any, cast

from free_ports import free_port
from trtmodel_operator.controller import Controller, Witness
from trtmodel_operator.metrics import OperatorMetrics
from trtmodel_operator.ports import Key
from trtmodel_operator.queue import WorkQueue

ENDLESS = 3600.0  # seconds
START_SECONDS = 60


class _Nothing:
    async def list_models(self) -> dict[Key, str]:
        return {}


class BusyOperator:
    """One pass at a time. Use as a context manager: it runs in a thread."""

    def __init__(self) -> None:
        self.port = free_port()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), name="busy operator")
        self._begun, self._over = threading.Event(), asyncio.Event()
        self._queue = WorkQueue()

    def __enter__(self) -> BusyOperator:
        self._thread.start()
        assert self._begun.wait(START_SECONDS)
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(START_SECONDS)
        self._loop.close()

    def change(self, name: str) -> None:
        """A TRTModel of this name changed: it wants a pass, which does not end."""
        self._loop.call_soon_threadsafe(self._queue.add, ("ml", name))

    async def _pass(self, key: Key) -> float | None:
        await self._over.wait()
        return None

    async def _run(self) -> None:
        metrics, queue = OperatorMetrics(), self._queue
        metrics.watch(queue.depth, queue.oldest, lambda: 0.0, lambda: 1.0)
        stop = metrics.serve("127.0.0.1", self.port)
        controller = Controller(
            queue, self._pass, cast("Any", _Nothing()), metrics, Witness(), lambda: None,
            workers=1, pass_timeout=ENDLESS,
        )  # fmt: skip
        controller.start()
        self._begun.set()
        await self._over.wait()
        await controller.stop()
        stop()
