from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from fakes.worker import FakeWorker
from trtmodel_contract.control import (
    AttemptCounts,
    DesiredRequest,
    DesiredState,
    Fence,
    ModelReport,
    Routes,
    WorkerState,
)
from trtmodel_operator.adapters.signing import Ed25519Signer, Keys
from trtmodel_operator.adapters.workers import HttpWorkers
from trtmodel_operator.ports import Key, WorkerError

KEY: Key = ("ml", "magika")
SIGNER = Ed25519Signer(Keys.made())


class Clock:
    def __init__(self, ahead: float = 0.0) -> None:
        self.ahead = ahead

    def now(self) -> float:
        return time.time() + self.ahead


@dataclasses.dataclass
class Scene:
    worker: FakeWorker
    workers: HttpWorkers
    changed: list[Key]
    clock: Clock
    calls: list[tuple[str, str]]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110 - what it waits for is no event
                await asyncio.sleep(0.005)


def play(scene: Callable[[Scene], Awaitable[Any]]) -> Any:
    async def go() -> Any:
        worker = FakeWorker("127.0.0.1", "pod-uid", SIGNER.public_keys())
        await worker.start()
        changed: list[Key] = []
        calls: list[tuple[str, str]] = []
        clock = Clock()
        workers = HttpWorkers(SIGNER, clock, changed.append, port=worker.port, on_call=lambda *call: calls.append(call))
        try:
            async with asyncio.timeout(20):
                return await scene(Scene(worker, workers, changed, clock, calls))
        finally:
            await workers.close()
            await worker.stop()

    return asyncio.run(go())


def request(sequence: int) -> DesiredRequest:
    return DesiredRequest(DesiredState(Fence("uid-1", sequence), {}))


def test_a_worker_that_checks_signatures_gives_its_report() -> None:
    async def scene(s: Scene) -> None:
        assert await s.workers.report("127.0.0.1", "pod-uid") == s.worker.report

    play(scene)


def test_desired_state_reaches_the_worker() -> None:
    async def scene(s: Scene) -> None:
        await s.workers.send("127.0.0.1", "pod-uid", request(3))
        assert s.worker.told == [request(3)]

    play(scene)


def test_a_refusal_for_a_lower_sequence_is_no_error_since_the_next_report_tells_the_held_one() -> None:
    async def scene(s: Scene) -> None:
        await s.workers.send("127.0.0.1", "pod-uid", request(3))
        await s.workers.send("127.0.0.1", "pod-uid", request(2))
        assert s.worker.told == [request(3)]
        assert (await s.workers.report("127.0.0.1", "pod-uid")).fence == Fence("uid-1", 3)
        assert s.calls == [("PUT", "ok"), ("PUT", "conflict"), ("GET", "ok")]

    play(scene)


def test_another_refusal_is_an_error_that_names_the_workers_reason() -> None:
    async def scene(s: Scene) -> None:
        s.worker.keys.clear()
        with pytest.raises(WorkerError, match=r"401.*BadSignature: not signed by a key"):
            await s.workers.send("127.0.0.1", "pod-uid", request(1))
        with pytest.raises(WorkerError, match=r"401.*BadSignature"):
            await s.workers.report("127.0.0.1", "pod-uid")
        assert s.calls == [("PUT", "unauthorized"), ("GET", "unauthorized")]

    play(scene)


def test_a_request_is_of_no_use_after_a_minute() -> None:
    async def scene(s: Scene) -> None:
        s.clock.ahead = -61
        with pytest.raises(WorkerError, match="Expired"):
            await s.workers.report("127.0.0.1", "pod-uid")

    play(scene)


def test_another_pod_at_the_address_of_a_deleted_one_is_not_taken_for_it() -> None:
    async def scene(s: Scene) -> None:
        s.worker.report = dataclasses.replace(s.worker.report, pod_uid="another")
        with pytest.raises(WorkerError, match=r"another worker \(pod-pod-uid\) answers at 127.0.0.1"):
            await s.workers.report("127.0.0.1", "pod-uid")

    play(scene)


def test_a_worker_that_hangs_is_unknown_after_two_seconds() -> None:
    async def scene(s: Scene) -> None:
        s.worker.hangs = True
        began = time.monotonic()
        with pytest.raises(WorkerError, match=r"no answer .* within 2 s"):
            await s.workers.report("127.0.0.1", "pod-uid")
        assert time.monotonic() - began < 3

    play(scene)


def test_a_worker_that_is_not_there_is_unknown_with_its_cause() -> None:
    async def scene(s: Scene) -> None:
        with pytest.raises(WorkerError, match=r"127.0.0.9:\d+ cannot be reached"):
            await s.workers.report("127.0.0.9", "pod-uid")
        assert s.calls == [("GET", "unreachable")]

    play(scene)


def test_an_answer_that_is_no_report_or_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(s: Scene) -> None:
        async def nonsense(_: web.Request) -> web.Response:
            return web.Response(body=b'{"schema": "trtmodel.io/report/v9"}')

        monkeypatch.setattr(s.worker, "_refuse", nonsense)
        with pytest.raises(WorkerError, match=r"cannot be read: expected a document of schema trtmodel\.io/report/v1"):
            await s.workers.report("127.0.0.1", "pod-uid")
        monkeypatch.setattr("trtmodel_operator.adapters.workers.REPORT_BYTES", 8)
        with pytest.raises(WorkerError, match="longer than"):
            await s.workers.report("127.0.0.1", "pod-uid")

    play(scene)


def test_news_of_a_followed_worker_enqueue_its_model_at_once() -> None:
    async def scene(s: Scene) -> None:
        s.workers.follow(KEY, {"pod-uid": ("127.0.0.1", 1)})
        await s.until(lambda: s.worker.asked == 1)
        assert s.changed == []
        began = time.monotonic()
        await s.worker.becomes(state=WorkerState.SERVING)
        await s.until(lambda: s.changed == [KEY])
        assert time.monotonic() - began < 0.5
        await s.until(lambda: s.worker.asked == 2)  # and it is asked for what comes after that
        await s.worker.becomes(state=WorkerState.DRAINING)
        await s.until(lambda: s.changed == [KEY, KEY])

    play(scene)


def test_what_changed_between_the_report_that_was_seen_and_the_first_poll_is_not_missed() -> None:
    async def scene(s: Scene) -> None:
        seen = (await s.workers.report("127.0.0.1", "pod-uid")).version
        await s.worker.becomes(state=WorkerState.SERVING)
        s.workers.follow(KEY, {"pod-uid": ("127.0.0.1", seen)})
        await s.until(lambda: s.changed == [KEY])

    play(scene)


def test_a_worker_is_followed_once_however_often_it_is_named_and_no_longer_when_it_is_not() -> None:
    async def scene(s: Scene) -> None:
        for _ in range(3):
            s.workers.follow(KEY, {"pod-uid": ("127.0.0.1", 1)})
        await s.until(lambda: s.worker.asked == 1)
        assert s.workers.following == 1
        s.workers.follow(("ml", "other"), {})
        assert s.workers.following == 1
        s.workers.follow(KEY, {})
        assert s.workers.following == 0
        await s.worker.becomes(state=WorkerState.SERVING)
        assert await s.workers.report("127.0.0.1", "pod-uid") == s.worker.report
        assert s.changed == []

    play(scene)


def test_a_worker_that_stops_answering_is_told_once_and_again_when_it_is_back() -> None:
    async def scene(s: Scene) -> None:
        s.workers.follow(KEY, {"pod-uid": ("127.0.0.1", 1)})
        await s.until(lambda: s.worker.asked == 1)
        port = s.worker.port
        await s.worker.stop()
        await s.until(lambda: s.changed == [KEY])
        await s.worker.start(port)
        await s.until(lambda: s.changed == [KEY, KEY])

    play(scene)


def test_a_worker_that_does_not_answer_is_asked_ever_more_rarely_and_told_once() -> None:
    async def scene(s: Scene) -> None:
        times: list[float] = []

        async def slam(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            times.append(asyncio.get_running_loop().time())
            writer.close()

        server = await asyncio.start_server(slam, "127.0.0.3", s.worker.port)
        s.workers.follow(KEY, {"pod-uid": ("127.0.0.3", 1)})
        await s.until(lambda: len(times) == 6)  # aiohttp itself connects once more when a connection is closed on it
        assert s.changed == [KEY]
        assert 0.3 < times[2] - times[1] < times[4] - times[3]
        server.close()

    play(scene)


def test_no_more_workers_are_followed_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtmodel_operator.adapters.workers.FOLLOWED_MOST", 2)

    async def scene(s: Scene) -> None:
        s.workers.follow(KEY, {f"uid-{n}": ("127.0.0.1", 1) for n in range(5)})
        assert s.workers.following == 2

    play(scene)


def test_a_report_that_cannot_be_true_is_an_error_and_its_worker_unknown() -> None:
    """Minus a thousand failures would have hidden those of all the others."""

    async def scene(s: Scene) -> None:
        counts = {"w1": {"d": AttemptCounts(ok=5, failed={"Error": -1000})}}
        s.worker.report = dataclasses.replace(s.worker.report, models={"magika": ModelReport((), Routes("d"), counts)})
        with pytest.raises(WorkerError, match="cannot be true: Error is -1000"):
            await s.workers.report("127.0.0.1", "pod-uid")

    play(scene)
