"""Each way to hang is caused here, and ends in a probe that fails: the kubelet then starts the process again."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable

import pytest
from fakes.api_server import FakeApiServer
from kubernetes.aio.client import Configuration
from trtmodel_operator import controller as controllers
from trtmodel_operator.adapters import children
from trtmodel_operator.adapters.api import Api
from trtmodel_operator.adapters.children import KeptChildren
from trtmodel_operator.controller import Controller, Witness
from trtmodel_operator.health import Health
from trtmodel_operator.lease import Lease
from trtmodel_operator.metrics import OperatorMetrics
from trtmodel_operator.ports import ClusterError, Json, Key
from trtmodel_operator.queue import WorkQueue

A: Key = ("ml", "a")
B: Key = ("ml", "b")
HANGS = 3600.0


class Cluster:
    async def list_models(self) -> dict[Key, str]:
        return {}


class Store:
    """A Lease that can be had; with `silent`, nothing is ever answered."""

    def __init__(self, *, silent: bool = False) -> None:
        self._silent = silent

    async def get_lease(self, namespace: str, name: str) -> Json | None:
        if self._silent:
            await asyncio.sleep(HANGS)
        return None

    async def create_lease(self, lease: Json) -> Json:
        return lease | {"metadata": lease["metadata"] | {"resourceVersion": "1"}}

    async def replace_lease(self, lease: Json) -> Json:
        return lease


def controlled(
    queue: WorkQueue, reconcile: Callable[[Key], Awaitable[float | None]], workers: int = 2, pass_timeout: float = 0.05
) -> Controller:
    return Controller(
        queue,
        reconcile,
        Cluster(),  # type: ignore[arg-type]
        OperatorMetrics(),
        Witness(),
        lambda: None,
        workers=workers,
        pass_timeout=pass_timeout,
    )


def ask(health: Health, timeout: float) -> tuple[int, str]:
    """As the kubelet does: 0 when there is no answer in time."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{health.port}/livez", timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()
    except OSError as e:
        return 0, str(e)


def play(scene: Callable[[Health], Awaitable[None]]) -> None:
    async def go() -> None:
        health = Health()
        await health.start("127.0.0.1", 0)
        try:
            async with asyncio.timeout(30):
                await scene(health)
        finally:
            await health.stop()

    asyncio.run(go())


async def probe(health: Health, timeout: float = 10.0) -> tuple[int, str]:
    return await asyncio.to_thread(ask, health, timeout)


async def until(over: threading.Event) -> None:
    """For the API server, which runs in a loop of its own."""
    while not over.is_set():  # noqa: ASYNC110 - it is another loop's
        await asyncio.sleep(0.01)


async def fails(health: Health) -> str:
    """What the probe says once it fails."""
    while True:
        status, text = await probe(health)
        if status == 503:
            return text
        await asyncio.sleep(0.02)


def test_a_process_in_good_health_says_so() -> None:
    async def scene(health: Health) -> None:
        health.watch_over(lambda: "", lambda: "")
        assert await probe(health) == (200, "ok\n")

    play(scene)


def test_a_blocked_event_loop_answers_no_probe() -> None:
    async def scene(health: Health) -> None:
        asked = asyncio.create_task(probe(health, timeout=0.5))
        await asyncio.sleep(0)
        time.sleep(2.0)  # noqa: ASYNC251 - this is the fault
        assert (await asked)[0] == 0

    play(scene)


def test_a_watch_that_hears_nothing_fails_the_probe(api_server: FakeApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is open and nothing comes: not even the bookmarks."""
    monkeypatch.setattr(children, "DEAD", 0.3)

    async def scene(health: Health) -> None:
        api = Api(Configuration(host=api_server.url))
        kept = KeptChildren(api, ())
        watching = asyncio.create_task(kept.run())
        try:
            await kept.ready()
            health.watch_over(kept.trouble)
            assert "nothing was heard of Job" in await fails(health)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await api.close()

    play(scene)


def test_one_that_stood_by_for_long_is_alive_while_it_lists_for_the_first_time(api_server: FakeApiServer) -> None:
    """It listens only from the moment at which it leads."""

    async def scene(health: Health) -> None:
        over = threading.Event()
        api_server.fault = lambda _: until(over)
        api = Api(Configuration(host=api_server.url))
        kept = KeptChildren(api, ())
        for stream in (s for informer in kept._informers.values() for s in informer._streams.values()):
            stream.heard -= 2 * children.DEAD  # so long ago was its start
        watching = asyncio.create_task(kept.run())
        try:
            await asyncio.sleep(0)  # the watches begin; none was answered yet
            await asyncio.sleep(0)
            health.watch_over(kept.trouble)
            assert await probe(health) == (200, "ok\n")
            assert not kept.fresh(), "nothing was listed"
            over.set()
            await kept.ready()
            assert kept.fresh()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await api.close()

    play(scene)


def test_a_leader_that_does_not_renew_fails_the_probe_and_sends_nothing_more(api_server: FakeApiServer) -> None:
    """Its renewing task is stuck or gone: nothing else would notice."""

    async def scene(health: Health) -> None:
        now = [100.0]
        lease = Lease(Store(), "ops", "trtmodel-operator", "one", now=lambda: now[0])
        health.watch_over(lease.trouble)
        assert not lease.expired()  # one that stands by
        await lease.acquire()
        assert (await probe(health))[0] == 200
        now[0] += 9.0
        assert not lease.expired()
        now[0] += 2.0
        assert lease.expired()
        assert await probe(health) == (503, "the lease was not renewed for 11 s\n")

    play(scene)


def test_one_that_stands_by_and_does_not_ask_for_the_lease_any_more_fails_the_probe() -> None:
    """It answers, it says that it is ready, and it would never take over."""

    async def scene(health: Health) -> None:
        now = [100.0]
        lease = Lease(Store(silent=True), "ops", "trtmodel-operator", "two", now=lambda: now[0])
        health.watch_over(lease.trouble)
        asking = asyncio.create_task(lease.acquire())
        await asyncio.sleep(0)
        now[0] += 50.0
        assert (await probe(health))[0] == 200
        now[0] += 11.0
        assert await probe(health) == (503, "the lease was not asked for for 61 s\n")
        asking.cancel()

    play(scene)


def test_one_that_stands_by_while_the_api_server_is_away_is_not_started_again_for_it() -> None:
    async def scene(health: Health) -> None:
        asked, now = [0], [100.0]

        class Away(Store):
            async def get_lease(self, namespace: str, name: str) -> Json | None:
                asked[0] += 1
                now[0] += 15.0  # what a call may take
                raise ClusterError("GET", "leases", "no answer in time")

        lease = Lease(Away(), "ops", "trtmodel-operator", "two", retry_period=0.001, now=lambda: now[0])
        health.watch_over(lease.trouble)
        asking = asyncio.create_task(lease.acquire())
        while asked[0] < 10:  # noqa: ASYNC110 - two and a half minutes of that clock
            await asyncio.sleep(0.001)
        assert await probe(health) == (200, "ok\n")
        asking.cancel()

    play(scene)


def test_a_pass_that_cannot_be_cancelled_fails_the_probe_though_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controllers, "ENDLESS", 0.3)

    async def scene(health: Health) -> None:
        over = asyncio.Event()

        async def reconcile(key: Key) -> float | None:
            while key == A and not over.is_set():
                try:
                    await over.wait()
                except asyncio.CancelledError:
                    if over.is_set():
                        raise
            return 0.01

        queue = WorkQueue()
        controller = controlled(queue, reconcile)
        health.watch_over(controller.trouble)
        controller.start()
        queue.add(A)
        queue.add(B)
        assert await fails(health) == "passes that do not end: ml/a\n"
        over.set()
        await controller.stop()

    play(scene)


def test_a_queue_that_nobody_gets_through_fails_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes end, but what changed waits: too many come, or each takes too long."""
    monkeypatch.setattr(controllers, "STARVED", 0.3)

    async def scene(health: Health) -> None:
        async def reconcile(key: Key) -> float | None:
            await asyncio.sleep(0.2)
            return None

        queue = WorkQueue()
        controller = controlled(queue, reconcile, workers=1, pass_timeout=10.0)
        health.watch_over(controller.trouble)
        controller.start()
        for n in range(100):
            queue.add(("ml", f"m{n}"))
        assert "a change has waited for its pass for" in await fails(health)
        await controller.stop()

    play(scene)


def test_passes_that_all_hang_fail_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controllers, "STUCK", 0.3)

    async def scene(health: Health) -> None:
        async def reconcile(key: Key) -> float | None:
            await asyncio.sleep(HANGS)
            return None

        queue = WorkQueue()
        controller = controlled(queue, reconcile, pass_timeout=HANGS)
        health.watch_over(controller.trouble)
        controller.start()
        queue.add(A)
        queue.add(B)
        assert "no pass has ended for" in await fails(health)
        await controller.stop()

    play(scene)


def test_a_pass_that_cannot_be_cancelled_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controllers, "STOP_SECONDS", 0.1)

    async def scene(_: Health) -> None:
        begun, over = asyncio.Event(), asyncio.Event()

        async def reconcile(key: Key) -> float | None:
            begun.set()
            while not over.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await over.wait()
            return None

        queue = WorkQueue()
        controller = controlled(queue, reconcile)
        controller.start()
        queue.add(A)
        await begun.wait()
        await controller.stop()
        assert not over.is_set()
        over.set()

    play(scene)
