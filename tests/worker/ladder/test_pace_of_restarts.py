"""How fast a host is started again: gently beside others that serve, at once when requests wait for it."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from simulated import INPUTS, OUTPUT_BYTES, OUTPUTS, PROFILES, Request
from trtmodel_worker.front.engine import PACED_DUTY, Engine, EngineSettings
from trtmodel_worker.front.hostproc import EngineHost, Payload
from trtmodel_worker.front.ladder import Refused, RetryBudget
from trtmodel_worker.front.lanes import LanePort
from trtmodel_worker.front.regions import Arenas
from trtmodel_worker.front.scheduler import Rules
from trtmodel_worker.front.stats import RevisionStats
from trtmodel_worker.front.windows import Windows
from trtmodel_worker.host.wire import Ready

SECONDS = 20.0


class Host(EngineHost):
    """One lane, which takes a run and never answers."""

    guilty, killed_from_outside = True, False  # type: ignore[assignment]

    def __init__(self) -> None:
        self.pid, self.why, self.failures, self.innocent = 1, "", 0, False
        front, self.back = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        front.setblocking(False)
        self.lanes = [LanePort(self, front)]
        self.ready = Ready(0.001)
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.on_dying: Callable[[Any], None] = lambda _: None

    def listen(self, readable: Callable[[LanePort], None]) -> None:
        """Nothing ever comes."""

    def epitaph(self) -> str:
        return "exit code 70"

    def die(self) -> None:
        self.on_dying(self)
        self.exited.set_result(70)

    async def end(self, grace: float = 0.0) -> None:
        self.back.close()


class Hosts:
    def __init__(self) -> None:
        self.duties: list[float] = []
        self.made: list[Host] = []

    def look(self) -> None:
        """Nobody must."""

    def run_freely(self, host: Host) -> None:
        """It does."""

    async def start(self, *arguments: Any) -> Host:
        *_, duty, _auto, _spin = arguments
        self.duties.append(duty)
        self.made.append(Host())
        return self.made[-1]


async def nothing(*_: Any) -> None:
    """Takes no time."""


class World:
    """An engine with one host, and one that helps it, with another."""

    def __init__(self) -> None:
        self.hosts = Hosts()
        self.arenas = Arenas(4, OUTPUT_BYTES)
        self.windows = Windows()
        self.stable, self.standby = self._engine("stable"), self._engine("standby")
        self.stable.fallback = lambda: self.standby

    def _engine(self, name: str) -> Engine:
        rules = Rules(100, 0.0, 3, RetryBudget(10.0), Refused())
        settings = EngineSettings(1, 1, (), 60.0, 60.0, 60.0, 60.0, rules)
        manifest: Any = SimpleNamespace(revision=name, inputs=INPUTS, outputs=OUTPUTS, profiles=PROFILES)
        return Engine(
            "m", name, manifest, self._payload, self.hosts, self.arenas, self.windows,  # type: ignore[arg-type]
            RevisionStats(), settings,
        )  # fmt: skip

    async def _payload(self) -> Payload:
        return Payload((os.open(os.devnull, os.O_RDONLY), 0), ())

    async def start(self) -> None:
        for engine in (self.stable, self.standby):
            await engine.start(await self._payload())

    async def restarted(self) -> float:
        """The share of the time that the third host, which replaces the first, may compute."""
        await until(lambda: len(self.hosts.duties) == 3)
        return self.hosts.duties[2]

    async def close(self) -> None:
        for engine in (self.stable, self.standby):
            await engine.close(0.0)


async def until(holds: Callable[[], bool]) -> None:
    late = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < late
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("asked", [False, True], ids=["idle", "with a request"])
def test_a_host_that_requests_wait_for_is_started_again_at_full_pace(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtmodel_worker.front.engine.rehearse", nothing)  # these hosts answer nobody

    async def story() -> None:
        world = World()
        await world.start()
        request = Request(0, 1, 3, 60.0)
        if asked:
            world.stable.submit(request.call)
            await until(lambda: world.stable.scheduler.running == 1)
        world.hosts.made[0].die()
        assert await world.restarted() == (1.0 if asked else PACED_DUTY)
        if asked:  # it runs where the new host lives on if it kills again
            await until(lambda: world.standby.scheduler.running == 1)
            assert not request.failures
        await world.close()

    asyncio.run(story())
