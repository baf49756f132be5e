"""Asking Jobs how far they are, over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aiohttp import web
from trtmodel_contract.codec import dumps
from trtmodel_contract.progress import JobProgress
from trtmodel_operator.adapters import progress
from trtmodel_operator.adapters.progress import HttpProgress
from trtmodel_operator.ports import WorkerError

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def asked(answer: Answer, times: int = 1) -> list[Any]:
    """What a Job that answers so is found to say; errors in place of what could not be had."""

    async def at_once(client: HttpProgress) -> list[Any]:
        return list(await asyncio.gather(*(client.ask("127.0.0.1") for _ in range(times)), return_exceptions=True))

    found: list[Any] = with_job(answer, at_once)
    return found


def with_job(answer: Answer, scene: Callable[[HttpProgress], Awaitable[Any]]) -> Any:
    async def go() -> Any:
        app = web.Application()
        app.router.add_get("/progress", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client = HttpProgress(port=runner.addresses[0][1])
        try:
            return await scene(client)
        finally:
            await client.close()
            await runner.cleanup()

    return asyncio.run(go())


def saying(body: bytes, status: int = 200) -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, status=status)

    return answer


def test_what_a_job_says_is_taken_and_bounded() -> None:
    (found,) = asked(saying(dumps(JobProgress("prove" * 20, "m" * 5000, 3.0, 60))))
    assert (len(found.stage), len(found.message), found.percent) == (32, 512, 60)


@pytest.mark.parametrize("percent", [-1, 101])
def test_a_percentage_that_is_none_is_left_out(percent: int) -> None:
    (found,) = asked(saying(dumps(JobProgress("build", "", 3.0, percent))))
    assert found.percent is None


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"<html>", 200, "no progress of a Job"),
        (b"{}", 200, "no progress of a Job"),
        (b"", 404, "answers 404"),
        (b"x" * 100_000, 200, "more than 16 KiB"),
        (b"", 302, "answers 302"),
    ],
)
def test_an_answer_that_is_none_is_an_error_with_its_cause(body: bytes, status: int, says: str) -> None:
    (found,) = asked(saying(body, status))
    assert isinstance(found, WorkerError)
    assert says in str(found)


def test_a_job_that_does_not_answer_is_waited_for_no_longer_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "TIMEOUT", 0.2)

    async def never(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        return web.Response()

    (found,) = asked(never)
    assert isinstance(found, WorkerError)
    assert "within 0.2 s" in str(found)


def test_a_job_that_let_us_wait_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "TIMEOUT", 0.2)
    came = 0

    async def never(_: web.Request) -> web.StreamResponse:
        nonlocal came
        came += 1
        await asyncio.sleep(60)
        return web.Response()

    async def one_after_the_other(client: HttpProgress) -> list[str]:
        said = []
        for _ in range(3):
            with pytest.raises(WorkerError) as found:
                await client.ask("127.0.0.1")
            said.append(str(found.value))
        return said

    said = with_job(never, one_after_the_other)
    assert came == 1
    assert ["did not answer lately" in text for text in said] == [False, True, True]


def test_only_a_few_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "TIMEOUT", 60.0)
    monkeypatch.setattr(progress, "AT_ONCE", 3)
    now, most = 0, 0

    async def answer(_: web.Request) -> web.StreamResponse:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await asyncio.sleep(0.01)
        now -= 1
        return web.Response(body=dumps(JobProgress("build", "", 1.0)))

    assert all(isinstance(found, JobProgress) for found in asked(answer, times=12))
    assert most <= 3


@contextmanager
def nobody() -> Iterator[int]:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_a_port_on_which_nobody_listens_is_an_error() -> None:
    async def go(port: int) -> None:
        client = HttpProgress(port=port)
        try:
            await client.ask("127.0.0.1")
        finally:
            await client.close()

    with nobody() as port, pytest.raises(WorkerError, match="cannot be reached"):
        asyncio.run(go(port))
