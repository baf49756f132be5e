"""A leader that is told to end: the next one need not wait for what does nobody harm."""

from __future__ import annotations

import asyncio
import signal

from fakes.api_server import FakeApiServer, Seen
from test_main import Start, put_model, start
from trtmodel_operator.lease import Lease
from trtmodel_operator.ports import Json

__all__ = ["start"]  # a fixture


def test_the_lease_is_let_go_before_events_that_nobody_takes_are_waited_for(
    api_server: FakeApiServer, start: Start
) -> None:
    posted: list[bool] = []
    dropped_before: list[bool] = []

    async def fault(seen: Seen) -> None:
        if seen.path.endswith("/events"):
            posted.append(True)
            await asyncio.sleep(3600)
        if (seen.body.get("spec") or {}).get("holderIdentity") == "":
            dropped_before.append("events dropped at the end" in operator.log)

    api_server.fault = fault
    put_model(api_server)
    operator = start()
    operator.until(lambda: bool(posted))
    operator.process.send_signal(signal.SIGTERM)
    assert operator.ends() == 0
    assert dropped_before == [False]
    assert "events dropped at the end" in operator.log


def test_who_has_let_the_lease_go_may_send_nothing_more() -> None:
    class Store:
        lease: Json | None = None

        async def get_lease(self, namespace: str, name: str) -> Json | None:
            return self.lease

        async def create_lease(self, lease: Json) -> Json:
            self.lease = lease
            return lease

        async def replace_lease(self, lease: Json) -> Json:
            assert leader.expired()  # before the next one can see it
            self.lease = lease
            return lease

    store = Store()
    leader = Lease(store, "ops", "trtmodel-operator", "one")

    async def scene() -> None:
        await leader.acquire()
        assert not leader.expired()
        await leader.release()
        assert leader.expired()

    asyncio.run(scene())
    assert store.lease is not None
    assert store.lease["spec"]["holderIdentity"] == ""
