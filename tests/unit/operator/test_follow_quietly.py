"""Workers of a model that rests are followed only as far as that is cheap."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from fakes.worker import FakeWorker
from trtmodel_operator.adapters import workers as adapter
from trtmodel_operator.adapters.signing import Ed25519Signer, Keys
from trtmodel_operator.adapters.workers import HttpWorkers
from trtmodel_operator.main import SystemClock
from trtmodel_operator.ports import Key

SIGNER = Ed25519Signer(Keys.made())
BUSY: Key = ("ml", "busy")
QUIET: Key = ("ml", "quiet")


def play(scene: Callable[[HttpWorkers], Awaitable[None]]) -> None:
    async def go() -> None:
        worker = FakeWorker("127.0.0.1", "pod-uid", SIGNER.public_keys())
        await worker.start()
        workers = HttpWorkers(SIGNER, SystemClock(), lambda _: None, port=worker.port)
        try:
            async with asyncio.timeout(20):
                await scene(workers)
        finally:
            await workers.close()
            await worker.stop()

    asyncio.run(go())


def three(name: str) -> dict[str, tuple[str, int]]:
    return {f"{name}-{n}": ("127.0.0.1", 1) for n in range(3)}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "QUIET_MOST", 4)
    monkeypatch.setattr(adapter, "FOLLOWED_MOST", 8)


def test_of_models_at_rest_only_as_many_workers_are_followed_as_is_cheap() -> None:
    async def scene(workers: HttpWorkers) -> None:
        for n in range(5):
            workers.follow(("ml", f"quiet-{n}"), three(f"q{n}"), closely=False)
        assert workers.following == 4

    play(scene)


def test_a_rollout_is_followed_closely_whatever_rests_and_let_go_when_it_rests() -> None:
    async def scene(workers: HttpWorkers) -> None:
        workers.follow(QUIET, three("quiet"), closely=False)
        workers.follow(BUSY, three("busy"), closely=True)
        assert workers.following == 6
        workers.follow(BUSY, three("busy"), closely=False)
        assert workers.following == 3

    play(scene)


def test_a_small_fleet_is_followed_also_while_it_rests() -> None:
    async def scene(workers: HttpWorkers) -> None:
        workers.follow(QUIET, three("quiet"), closely=True)
        workers.follow(QUIET, three("quiet"), closely=False)
        assert workers.following == 3

    play(scene)
