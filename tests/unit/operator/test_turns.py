"""With hundred changes at once the first thing that is done about each goes before what is told of the others."""

from __future__ import annotations

import asyncio
import time

from test_reconcile import JOB, KEY, World, decision
from trtmodel_operator.adapters.signing import Ed25519Signer, Keys
from trtmodel_operator.ports import Key
from trtmodel_operator.queue import ASKED, WorkQueue
from trtmodel_operator.reconcile import TELL_LATER, Reconciler

A: Key = ("ml", "a")
B: Key = ("ml", "b")
LONG = 3600.0


async def waits(queue: WorkQueue) -> bool:
    """Whether one that has acted would still wait."""
    waiting = asyncio.create_task(queue.calm(LONG))
    for _ in range(5):
        await asyncio.sleep(0)
    done = waiting.done()
    waiting.cancel()
    return not done


def test_one_waits_until_all_that_people_asked_for_was_acted_upon() -> None:
    async def scene() -> None:
        queue = WorkQueue()
        assert not await waits(queue)
        queue.add(A)
        assert not await waits(queue)  # nobody asked for that
        queue.add(A, ASKED)
        queue.add(B, ASKED)
        assert not await waits(queue)  # its place may be what they need
        assert [await queue.get(), await queue.get()] == [A, B]
        queue.acted(A)
        assert await waits(queue)
        queue.acted(B)
        assert not await waits(queue)
        queue.add(A, ASKED)  # while it is worked on
        queue.done(B)
        assert not await waits(queue)
        queue.done(A)
        assert await queue.get() == A
        assert await waits(queue)

    asyncio.run(scene())


def test_a_pass_that_ends_without_having_acted_holds_up_nobody() -> None:
    async def scene() -> None:
        queue = WorkQueue()
        queue.add(A, ASKED)
        await queue.get()
        assert await waits(queue)
        queue.done(A)
        assert not await waits(queue)

    asyncio.run(scene())


def test_nobody_waits_for_longer_than_it_says() -> None:
    async def scene() -> None:
        queue = WorkQueue()
        queue.add(A, ASKED)
        await queue.get()
        began = time.monotonic()
        async with asyncio.timeout(20):
            await queue.calm(0.1)
        assert time.monotonic() - began >= 0.09

    asyncio.run(scene())


def test_what_is_done_is_done_before_the_wait_and_what_is_told_after_it() -> None:
    world = World()

    class Turns:
        def acted(self, key: Key) -> None:
            world.log.append(f"acted {key[1]}")

        async def calm(self, most: float) -> None:
            world.log.append(f"calm {most:g}")

    signer = Ed25519Signer(Keys.made())
    reconciler = Reconciler(
        world, world, signer, world, world, "worker:1", decide=lambda _: decision(JOB), turns=Turns()
    )
    asyncio.run(reconciler.reconcile(KEY))
    assert world.log[:5] == ["memory", f"job {JOB.name}", "acted magika", f"calm {TELL_LATER:g}", "status"]
