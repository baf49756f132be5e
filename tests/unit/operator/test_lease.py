from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Any

from trtmodel_operator.lease import Lease
from trtmodel_operator.ports import ClusterError, Conflict, Json


class Store:
    """One Lease as the API server keeps it."""

    def __init__(self) -> None:
        self.lease: Json | None = None
        self.down = False
        self.hangs = False
        self._version = 0

    async def get_lease(self, namespace: str, name: str) -> Json | None:
        await self._weather()
        return copy.deepcopy(self.lease)

    async def create_lease(self, lease: Json) -> Json:
        await self._weather()
        if self.lease is not None:
            raise Conflict("exists")
        return self._keep(lease)

    async def replace_lease(self, lease: Json) -> Json:
        await self._weather()
        if self.lease is None or lease["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise Conflict("modified")
        return self._keep(lease)

    @property
    def holder(self) -> str:
        return str((self.lease or {"spec": {}})["spec"].get("holderIdentity", ""))

    def _keep(self, lease: Json) -> Json:
        self._version += 1
        self.lease = copy.deepcopy(lease)
        self.lease["metadata"]["resourceVersion"] = str(self._version)
        return copy.deepcopy(self.lease)

    async def _weather(self) -> None:
        if self.hangs:
            await asyncio.sleep(3600)
        if self.down:
            raise ClusterError("GET", "lease", "connection refused")


def lease(store: Store, identity: str, lost: Callable[[], None] = lambda: None, **more: Any) -> Lease:
    """A hundred times faster than in life."""
    times = {"duration": 0.15, "renew_deadline": 0.1, "retry_period": 0.02} | more
    return Lease(store, "ops", "trtmodel-operator", identity, lost=lost, **times)


def run(scene: Callable[[], Awaitable[None]]) -> None:
    async def go() -> None:
        async with asyncio.timeout(10):
            await scene()

    asyncio.run(go())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what it waits for is no event
            await asyncio.sleep(0.005)


def test_the_first_one_creates_the_lease_and_holds_it() -> None:
    async def scene() -> None:
        store = Store()
        one = lease(store, "one")
        await one.acquire()
        assert store.lease is not None
        assert store.lease["spec"]["holderIdentity"] == "one"
        assert store.lease["spec"]["leaseTransitions"] == 0
        assert {"acquireTime", "renewTime", "leaseDurationSeconds"} <= store.lease["spec"].keys()

    run(scene)


def test_of_two_that_begin_together_one_leads() -> None:
    async def scene() -> None:
        store = Store()
        leases = [lease(store, "one"), lease(store, "two")]
        tasks = [asyncio.create_task(each.acquire()) for each in leases]
        done, pending = await asyncio.wait(tasks, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
        assert (len(done), len(pending)) == (1, 1)
        pending.pop().cancel()

    run(scene)


def test_a_standby_waits_while_the_leader_renews() -> None:
    async def scene() -> None:
        store = Store()
        one, two = lease(store, "one"), lease(store, "two")
        await one.acquire()
        holding = asyncio.create_task(one.hold())
        waiting = asyncio.create_task(two.acquire())
        await asyncio.wait([waiting], timeout=0.5)  # more than three lease durations
        assert not waiting.done()
        assert store.holder == "one"
        holding.cancel()
        waiting.cancel()

    run(scene)


def test_a_standby_takes_over_from_a_leader_that_died_and_counts_the_transition() -> None:
    async def scene() -> None:
        store = Store()
        await lease(store, "one").acquire()
        loop = asyncio.get_running_loop()
        began = loop.time()
        await lease(store, "two").acquire()
        assert loop.time() - began >= 0.15
        assert store.holder == "two"
        assert store.lease is not None
        assert store.lease["spec"]["leaseTransitions"] == 1

    run(scene)


def test_a_released_lease_is_taken_at_once() -> None:
    async def scene() -> None:
        store = Store()
        one = lease(store, "one", duration=60)
        await one.acquire()
        await one.release()
        await asyncio.wait_for(lease(store, "two", duration=60).acquire(), 1)
        assert store.holder == "two"

    run(scene)


def test_who_does_not_hold_the_lease_does_not_release_it() -> None:
    async def scene() -> None:
        store = Store()
        await lease(store, "one").acquire()
        await lease(store, "two").release()
        assert store.holder == "one"

    run(scene)


def test_a_leader_that_cannot_renew_until_the_deadline_ends_itself_before_another_can_lead() -> None:
    async def scene(break_it: Callable[[Store], None]) -> None:
        store, lost = Store(), []
        one = lease(store, "one", lost=lambda: lost.append(store.holder))
        await one.acquire()
        holding = asyncio.create_task(one.hold())
        await asyncio.sleep(0)
        break_it(store)
        await until(lambda: bool(lost))
        assert lost == ["one"]  # nobody else held it yet
        await asyncio.wait_for(holding, 1)

    run(lambda: scene(lambda store: setattr(store, "down", True)))
    run(lambda: scene(lambda store: setattr(store, "hangs", True)))


def test_a_short_outage_of_the_api_server_costs_no_leadership() -> None:
    async def scene() -> None:
        store, lost = Store(), []
        one = lease(store, "one", lost=lambda: lost.append(1), renew_deadline=1.0, duration=1.5)
        await one.acquire()
        holding = asyncio.create_task(one.hold())
        store.down = True
        await asyncio.wait([holding], timeout=0.2)
        store.down = False
        before = store.lease
        await until(lambda: store.lease != before)
        assert not lost
        holding.cancel()

    run(scene)


def test_a_leader_whose_lease_was_taken_ends_itself() -> None:
    async def scene() -> None:
        store, lost = Store(), []
        one = lease(store, "one", lost=lambda: lost.append(1), renew_deadline=60, duration=60)
        await one.acquire()
        assert store.lease is not None
        store.lease["spec"]["holderIdentity"] = "two"
        store.lease["metadata"]["resourceVersion"] = "stolen"
        await asyncio.wait_for(one.hold(), 5)
        assert lost == [1]

    run(scene)


def test_a_renewal_is_one_call_and_one_that_somebody_disturbed_reads_first() -> None:
    async def scene() -> None:
        store, lost = Counting(), []
        one = lease(store, "one", lost=lambda: lost.append(1), renew_deadline=60, duration=60)
        await one.acquire()
        reads, writes = store.reads, store.writes
        holding = asyncio.create_task(one.hold())
        await until(lambda: store.writes >= writes + 3)
        assert store.reads == reads
        assert store.lease is not None
        store.lease["metadata"]["resourceVersion"] = "by hand"
        await until(lambda: store.reads == reads + 1)
        assert not lost
        holding.cancel()

    run(scene)


def test_a_lease_that_is_deleted_is_made_again_by_its_leader() -> None:
    async def scene() -> None:
        store, lost = Store(), []
        one = lease(store, "one", lost=lambda: lost.append(1), renew_deadline=60, duration=60)
        await one.acquire()
        holding = asyncio.create_task(one.hold())
        store.lease = None
        await until(lambda: store.holder == "one")
        assert not lost
        holding.cancel()

    run(scene)


def test_a_leader_that_stood_still_knows_that_its_lease_expired_before_it_does_anything() -> None:
    async def scene() -> None:
        now = [0.0]
        one = lease(Store(), "one", now=lambda: now[0], renew_deadline=10, duration=15)
        await one.acquire()
        now[0] = 9.9
        assert not one.expired()
        now[0] = 10.0  # the clock goes on while the process is stopped
        assert one.expired()
        assert one.trouble() == "the lease was not renewed for 10 s"

    run(scene)


class Counting(Store):
    def __init__(self) -> None:
        super().__init__()
        self.reads = self.writes = 0

    async def get_lease(self, namespace: str, name: str) -> Json | None:
        self.reads += 1
        return await super().get_lease(namespace, name)

    async def replace_lease(self, lease: Json) -> Json:
        self.writes += 1
        return await super().replace_lease(lease)
