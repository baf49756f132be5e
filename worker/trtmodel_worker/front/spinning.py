"""Whether to sleep between two messages of a lone client.

A processor that sleeps takes tens of microseconds to wake up, and a request passes two processes: client -> front ->
host -> front -> client. While one client asks again and again and nobody else does, that is a large part of what a
small model takes where waking up is slow (Identity, two cores with the client: 0.23 ms, 0.14 if the front looks). So
front and host look instead of sleeping, for a bounded time:

    front   with two CPUs: from the dispatch until the answer, and from the answer until the next request
    host    with four: from its answer until the next message, as the front has told it in the message before

Only after some requests in a row that came alone, each answered and followed by the next one within the bound. Beside
others, or with pauses, nobody spins: the loop has enough to do, or nothing. The front spins by turns of its loop, so
whatever else comes is read as soon as ever.

Beside a device, where a processor has nothing else to do meanwhile, also the first request after a pause is waited for
so: the front looks for it when its client connects, the host when its head is here, and the front for its answer. To
wake up three times would be a third of what one row takes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

ENOUGH = 8  # lone requests in a row
_HOST_SECONDS = 0.0002
_DEVICE_SECONDS = 0.001  # small batches of usual models take less on a GPU, and its host needs no processor meanwhile
_PAUSES = 2.5  # a client that reads and writes JSON takes longer to ask again than a small model to answer
_MOST_CALLS = 50  # for nothing: a host that is stopped keeps them all, and its lane has to have room for a run
_TWO_CPUS = 2.0  # one that looks, and one for whoever it waits for: with a lone client no more than one of them works
_MANY_CPUS = 4.0  # with two, and the client on the same machine, a second one that looks keeps the client waiting


@dataclass(frozen=True)
class SpinRule:
    """`seconds`: bound of the wait for an answer, 0 for never; for the next request it is `_PAUSES` times that.
    `between`: the front looks also while no request is here. `host`: it, too. `eager`: also for a request that comes
    after a pause."""

    seconds: float = 0.0
    between: bool = False
    host: bool = False
    eager: bool = False


NEVER = SpinRule()


def spin_rule(asked: float | None, cpus: float, *, device: bool) -> SpinRule:
    """`asked`: seconds, None for Auto."""
    two, many = cpus >= _TWO_CPUS, cpus >= _MANY_CPUS
    if asked is None:
        asked = (_DEVICE_SECONDS if device else _HOST_SECONDS) if two else 0.0
    return SpinRule(asked, between=two, host=many, eager=many and device and asked > 0)


class Spin:
    """Of one scheduler. `eager`: it wants to know what `may_come` and `comes`."""

    def __init__(self, rule: SpinRule, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds = rule.seconds
        self._pause = _PAUSES * rule.seconds
        self._between = rule.between
        self._host = rule.host
        self.eager = rule.eager
        self._calls = 0  # since something was sent last
        self._loop = asyncio.get_running_loop()
        self._in_a_row = 0
        self._last = 0.0  # when something was sent or answered
        self._until = 0.0
        self._turning = False

    def sent(self, *, lone: bool) -> bool:
        """A batch goes to a host, `lone` if it is one request and nothing else runs. Whether the host should expect
        the next one soon after its answer."""
        if not self._seconds:
            return False
        now = self._clock()
        self._in_a_row = self._in_a_row + 1 if lone and now - self._last < self._pause else 0
        self._last = now
        self._calls = 0
        soon = self._in_a_row >= ENOUGH
        if soon or (self.eager and lone):
            self._look_until(now + self._seconds)
        else:
            self._until = 0.0
        return soon and self._host

    def may_come(self) -> None:
        """A client has connected, and nothing runs."""
        self._look_until(self._clock() + self._seconds)

    def comes(self) -> bool:
        """The head of a request is here, and nothing runs. Whether a host is to wake up for it."""
        if self._calls >= _MOST_CALLS or self._clock() - self._last < self._seconds:
            return False
        self._calls += 1
        return True

    def answered(self) -> None:
        if not self._seconds:
            return
        now = self._clock()
        if now - self._last > self._seconds:
            self._in_a_row = 0
        self._last = now
        self._until = now + self._pause if self._between and self._in_a_row >= ENOUGH else 0.0

    def _look_until(self, end: float) -> None:
        self._until = end
        if not self._turning:
            self._turning = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """While one of these is due, the loop polls and does not sleep."""
        self._turning = self._clock() < self._until
        if self._turning:
            self._loop.call_soon(self._turn)
