"""What is kept and what runs has an end, also where no other test causes it (docs/scale.md lists all bounds)."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest
from aiohttp import web
from decide_scene import edited, finished, found, obey, resolve_result, serving
from fakes.api_server import FakeApiServer
from test_workers_adapter import SIGNER, Clock
from trtmodel_contract.codec import canonical, encode
from trtmodel_operator.adapters import api as adapter
from trtmodel_operator.adapters import progress, workers
from trtmodel_operator.adapters.api import Api
from trtmodel_operator.adapters.progress import HttpProgress
from trtmodel_operator.adapters.workers import HttpWorkers
from trtmodel_operator.decide import decide
from trtmodel_operator.decide.turn import BUILT_KEPT, REJECTED_KEPT
from trtmodel_operator.model import JobKind
from trtmodel_operator.ports import ClusterError, WorkerError
from with_api import with_api


def test_the_memory_of_a_model_that_was_changed_and_rejected_again_and_again_stops_to_grow() -> None:
    seen, sizes = serving(), list[int]()
    for n in range(40):
        revision = f"{n:010x}"
        seen = edited(seen, source__uri=f"s3://models/{revision}.onnx")
        seen = obey(seen, decide(seen))
        result = resolve_result(revision, found(revision, differs=1900))  # which no gate lets pass
        seen = finished(seen, JobKind.RESOLVE, result)
        for _ in range(3):
            seen = obey(seen, decide(seen))
        sizes.append(len(canonical(encode(seen.memory))))
    assert len(seen.memory.rejected) == REJECTED_KEPT
    assert len(seen.memory.built) <= BUILT_KEPT
    assert len(seen.memory.history) == 5
    assert max(sizes[20:]) <= max(sizes[10:20]) + 10  # a longer number


def test_an_event_of_a_watch_that_does_not_end_is_given_up(
    api_server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "_EVENT_BYTES", 10_000)

    async def scene(api: Api) -> None:
        with pytest.raises(ClusterError, match="an event is longer than"):
            async for _ in api.watch("/api/v1/pods", "", "1", 20.0, lambda: None):
                pass

    api_server.fault = lambda seen: web.Response(text="x" * 50_000) if "watch" in seen.query else None
    with_api(api_server, scene)


def test_no_more_workers_are_asked_at_a_time_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "AT_ONCE", 2)

    async def scene() -> None:
        asked, most, go_on = 0, 0, asyncio.Event()

        async def call(method: str, *_: Any) -> tuple[int, bytes]:
            nonlocal asked, most
            asked += 1
            most = max(most, asked)
            await go_on.wait()
            asked -= 1
            raise WorkerError("seen enough")

        client = HttpWorkers(SIGNER, Clock(), lambda _: None)
        monkeypatch.setattr(client, "_call", call)
        asking = [asyncio.create_task(client.report(f"10.0.0.{n}", "uid")) for n in range(9)]
        while most < 2:  # noqa: ASYNC110 - what it waits for is no event
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert (asked, most) == (2, 2)
        go_on.set()
        results = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(r) for r in results] == [WorkerError] * 9
        assert most == 2
        await client.close()

    asyncio.run(scene())


def test_addresses_of_jobs_that_let_us_wait_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REMEMBERED", 3)
    monkeypatch.setattr(progress, "TIMEOUT", 0.05)

    async def scene(port: int) -> None:
        client = HttpProgress(port)
        for n in range(1, 9):
            with pytest.raises(WorkerError, match="no answer"):
                await client.ask(f"127.0.0.{n}")
            assert len(client._until) <= 3
        await client.close()

    with socket.create_server(("0.0.0.0", 0)) as silent:
        asyncio.run(scene(silent.getsockname()[1]))


def test_no_more_calls_are_made_at_a_time_than_the_bound_and_the_lease_and_watches_are_beside_them(
    api_server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "CALLS_AT_ONCE", 2)
    under_way, most, go_on = 0, 0, threading.Event()

    async def slowly(seen: Any) -> None:
        nonlocal under_way, most
        if seen.path.endswith("/pods") and "watch" not in seen.query:
            under_way += 1
            most = max(most, under_way)
            while not go_on.is_set():  # noqa: ASYNC110 - another thread sets it
                await asyncio.sleep(0.005)
            under_way -= 1

    async def scene(api: Api) -> None:
        opened, led = asyncio.Event(), [True]
        api.may_write = lambda: led[0]
        calls = [asyncio.create_task(api.list_all("/api/v1/pods")) for _ in range(6)]
        while most < 2:  # noqa: ASYNC110 - what it waits for is no event
            await asyncio.sleep(0.005)
        watch = api.watch("/api/v1/pods", "", "1", 20.0, opened.set)
        watching = asyncio.create_task(anext(watch))  # type: ignore[arg-type]
        await opened.wait()
        assert await api.get("/apis/coordination.k8s.io/v1/namespaces/ops/leases/x", urgent=True) is None
        late = asyncio.create_task(api.create("/api/v1/namespaces/ml/configmaps", {"metadata": {}}, manager="m"))
        await asyncio.sleep(0.05)
        assert (under_way, most) == (2, 2)
        led[0] = False  # while the write waits for its place
        go_on.set()
        assert await asyncio.gather(*calls) == [[]] * 6
        with pytest.raises(ClusterError, match="another may lead"):
            await late
        assert most == 2
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    api_server.fault = slowly
    with_api(api_server, scene)
    assert api_server.all("configmaps") == []
