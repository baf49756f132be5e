"""Golden samples as requests, where too few come by themselves to prove a candidate.

They are attempts like any other: through the scheduler, counted in the window. One at a time, with a pause as long as
the last one took, and only while no engine has anything to do: a request that comes meanwhile waits for one batch at
most. Of a sample that may be cut to one row, one is sent: two engines that were built for different batch sizes are
compared in the same bucket.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from trtmodel_contract.manifest import Manifest

from trtmodel_worker.engines.base import Array
from trtmodel_worker.front.artifacts import Refused
from trtmodel_worker.front.calls import OwnCall, Shape
from trtmodel_worker.front.engine import Engine
from trtmodel_worker.front.models import BYTES, Admission, InputRule, Invalid
from trtmodel_worker.front.router import Router
from trtmodel_worker.front.windows import Windows
from trtmodel_worker.host.proving import SelfTestFailed, read_samples

log = logging.getLogger(__name__)
LOOK_SECONDS = 0.2  # between two looks whether anything is to be done
LEAST_PAUSE = 0.002
RETRY_SECONDS = 5.0  # after samples that could not be read
KEPT = 2  # engines whose samples are kept

Ask = tuple[list[Shape], list[memoryview]]
ReadGoldens = Callable[[Manifest], Awaitable[Sequence[bytes]]]
"""The golden files of an engine, verified. Raises Refused."""


class GoldenTraffic:
    """`wanted`: how many attempts each engine of the table should have in the window; 0: none are made. `seconds`: how
    long one may take."""

    def __init__(
        self, router: Router, windows: Windows, wanted: Callable[[], int], read: ReadGoldens, seconds: float
    ) -> None:
        self._router, self._windows, self._wanted, self._read, self._seconds = router, windows, wanted, read, seconds
        self._asks: dict[str, list[Ask]] = {}

    async def run(self) -> None:
        """Until cancelled. Nothing that goes wrong here may end a worker that serves."""
        while True:
            pause = LOOK_SECONDS
            try:
                engine = self._lacking()
                if engine is not None:
                    pause = await self._one(engine)
            except (Refused, SelfTestFailed) as e:
                log.warning("golden samples cannot be run: %s", e)
                pause = RETRY_SECONDS
            except Exception:
                log.exception("golden samples cannot be run")
                pause = RETRY_SECONDS
            await asyncio.sleep(pause)

    def _lacking(self) -> Engine | None:
        """The engine that has fewer attempts than the other, and than are wanted; None while any is at work."""
        wanted, table = self._wanted(), self._router.table
        if not wanted:
            self._asks.clear()
            return None
        if table is None:
            return None
        engines = [e for e in table.engines() if e.alive]
        if not engines or not all(e.scheduler.idle for e in engines):
            return None
        fewest = min(engines, key=self._attempts)
        return fewest if self._attempts(fewest) < wanted else None

    def _attempts(self, engine: Engine) -> int:
        return self._windows.counters(engine.digest).attempts

    async def _one(self, engine: Engine) -> float:
        """Runs a sample. Seconds until the next may run."""
        asks = self._asks.get(engine.digest)
        if asks is None:
            goldens = await self._read(engine.manifest)
            asks = await asyncio.to_thread(_asks_of, engine.manifest, engine.admission, goldens)
            self._asks = dict([*self._asks.items(), (engine.digest, asks)][-KEPT:])
            return LEAST_PAUSE  # somebody may have come meanwhile
        counters = self._windows.counters(engine.digest)
        shapes, bodies = asks[counters.synthetic % len(asks)]
        counters.synthetic += 1
        began = time.monotonic()
        call = OwnCall(shapes, bodies, began + self._seconds)
        engine.submit(call)
        try:
            await asyncio.wait_for(call.ended, 2 * self._seconds)
        except asyncio.TimeoutError:
            log.warning("a golden sample got neither an answer nor an error")
        finally:
            call.cancel()
        return max(LEAST_PAUSE, time.monotonic() - began)


def _asks_of(manifest: Manifest, admission: Admission, goldens: Sequence[bytes]) -> list[Ask]:
    """Raises SelfTestFailed."""
    asks = []
    for sample in read_samples(manifest, goldens):
        arrays = [sample.inputs[spec.name] for spec in manifest.inputs]
        single = [array[:1] for array in arrays]
        if admission.batched and _fits(admission, single):
            arrays = single
        bodies = [_body(rule.datatype, array) for rule, array in _with(admission, arrays)]
        asks.append(([tuple(array.shape) for array in arrays], bodies))
    return asks


def _fits(admission: Admission, arrays: Sequence[Array]) -> bool:
    try:
        for rule, array in _with(admission, arrays):
            rule.check(rule.datatype, list(array.shape))
        admission.check_together([tuple(array.shape) for array in arrays])
    except Invalid:
        return False
    return True


def _with(admission: Admission, arrays: Sequence[Array]) -> list[tuple[InputRule, Array]]:
    return list(zip(admission.rules, arrays, strict=True))


def _body(datatype: str, array: Array) -> memoryview:
    """As the protocol has it in binary: strings with their length before them."""
    if datatype == BYTES:
        return memoryview(b"".join(len(item).to_bytes(4, "little") + item for item in array.reshape(-1).tolist()))
    return memoryview(np.ascontiguousarray(array).tobytes())
