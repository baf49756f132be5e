"""An operator that lost a right says so and asks on: nothing that restarts it would give the right back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from fakes.api_server import FakeApiServer, Seen, refusal
from test_main import Operator, Start, put_model, start
from trtmodel_operator.adapters import children, informer
from trtmodel_operator.adapters.children import KeptChildren
from trtmodel_operator.adapters.pacing import Pace
from trtmodel_operator.lease import Lease
from trtmodel_operator.ports import ClusterError, Json
from with_api import with_api
from yarl import URL

__all__ = ["start"]  # a fixture

PODS = "/api/v1/pods"
MODELS = "/apis/trtmodel.io/v1alpha1/trtmodels"
FORBIDDEN = 'pods is forbidden: User "operator" cannot list resource "pods" in API group ""'


def refuses(*paths: str) -> Callable[[Seen], web.Response | None]:
    return lambda seen: refusal(403, FORBIDDEN) if seen.path in paths else None


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(15):
        while not condition():  # noqa: ASYNC110 - what it waits for is no event
            await asyncio.sleep(0.01)


def refused_kinds(operator: Operator) -> str:
    lines = operator.get("/metrics", "TRTMODEL_METRICS_PORT")[1].splitlines()
    return next((line.rpartition(" ")[2] for line in lines if line.startswith("trtmodel_operator_refused_kinds ")), "")


def test_one_that_lost_its_rights_is_alive_and_not_ready_and_goes_on_when_it_has_them(
    api_server: FakeApiServer, start: Start
) -> None:
    api_server.fault = refuses(MODELS, PODS)
    put_model(api_server)
    operator = start()
    operator.until(lambda: all(said in operator.get("/readyz")[1] for said in (MODELS, FORBIDDEN)))
    status, text = operator.get("/readyz")
    assert status == 503
    assert "roles" in text
    assert len(text.splitlines()) == 1
    assert operator.get("/livez")[0] == 200
    assert operator.leads()
    assert refused_kinds(operator) == "2.0"
    calls = operator.get("/metrics", "TRTMODEL_METRICS_PORT")[1]
    assert 'api_requests_total{code="403",resource="trtmodels",verb="GET"}' in calls
    api_server.fault = None
    operator.until(lambda: operator.get("/readyz")[0] == 200)
    operator.until(lambda: len(api_server.all("jobs")) == 1)
    assert refused_kinds(operator) == "0.0"


def play(server: FakeApiServer, scene: Callable[[KeptChildren], Awaitable[None]]) -> None:
    async def with_children(api: Any) -> None:
        kept = KeptChildren(api, ())
        watching = asyncio.create_task(kept.run())
        try:
            await scene(kept)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    with_api(server, with_children)


def test_a_kind_that_may_not_be_listed_is_named_with_what_the_server_says_and_is_no_dead_watch(
    api_server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(kept: KeptChildren) -> None:
        await until(lambda: "Pod" in kept.refused())
        assert list(kept.refused()) == ["Pod"]
        assert FORBIDDEN in kept.refused()["Pod"]
        for stream in kept._informers["Pod"]._streams.values():
            stream.heard -= 2 * children.DEAD  # so long ago
        assert not kept.fresh()
        assert kept.trouble() == ""
        api_server.fault = None
        await until(lambda: not kept.refused() and kept.fresh())

    monkeypatch.setattr(informer, "AGAIN_MOST", 0.05)
    api_server.fault = refuses(PODS)
    play(api_server, scene)


def test_a_watch_that_may_not_be_opened_any_more_is_named_while_what_it_told_is_kept(
    api_server: FakeApiServer,
) -> None:
    async def scene(kept: KeptChildren) -> None:
        await until(lambda: "Service" in kept.refused())
        assert list(kept.refused()) == ["Service"]
        api_server.fault = None
        await until(lambda: not kept.refused())

    api_server.fault = lambda seen: (
        refusal(403, FORBIDDEN) if seen.path.endswith("/services") and "watch" in seen.query else None
    )
    play(api_server, scene)


def test_kopf_asks_on_and_what_it_may_not_read_is_named() -> None:
    told: list[tuple[bool, str, int]] = []
    answers = [403, 403, 200, 401]

    class Answer:
        reason = "Forbidden"

        def __init__(self, status: int) -> None:
            self.status = status

    async def send(_: Any) -> Any:
        return Answer(answers.pop(0))

    async def now(_: float) -> None:
        return

    class Request:
        url = URL(f"https://server{MODELS}")

    async def scene() -> None:
        pace = Pace(sleep=now, answered=lambda *call: told.append(call))
        for expected in ({"trtmodels"}, {"trtmodels"}, set(), {"trtmodels"}):
            await pace(Request(), send)  # type: ignore[arg-type]
            assert set(pace.refused()) == expected

    asyncio.run(scene())
    assert told == [(False, MODELS, status) for status in (403, 403, 200, 401)]


def test_one_that_may_not_have_the_lease_says_so_until_it_may() -> None:
    answers: list[int] = [403, 500, 403, 0]

    class Store:
        async def get_lease(self, namespace: str, name: str) -> Json | None:
            if status := answers[0]:
                raise ClusterError("GET", "leases", "forbidden", status)
            return None

        async def create_lease(self, lease: Json) -> Json:
            return lease

        async def replace_lease(self, lease: Json) -> Json:
            return lease

    async def scene() -> None:
        lease = Lease(Store(), "ops", "trtmodel-operator", "one", retry_period=0.001)
        asking = asyncio.create_task(lease.acquire())
        await until(lambda: lease.refused() == {"Lease": "cannot GET leases: forbidden"})
        answers.pop(0)
        await until(lambda: not lease.refused())  # a server in trouble is no matter of rights
        answers.pop(0)
        await until(lease.refused)
        answers.pop(0)
        await asking
        assert not lease.refused()

    asyncio.run(scene())
