"""The whole operator in the process of a test, wired as `main` wires it: one can look into its parts."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes.api_server import FakeApiServer
from free_ports import free_port
from trtmodel_operator import main
from trtmodel_operator.settings import from_environment

PARTS = (
    "Controller",
    "Health",
    "HttpInquiries",
    "HttpProgress",
    "HttpWorkers",
    "KeptChildren",
    "KeptModels",
    "KubernetesCluster",
    "Lease",
    "OperatorMetrics",
    "Pace",
    "Rotation",
    "Witness",
    "WorkQueue",
)

Parts = Mapping[str, Any]


def with_operator(
    server: FakeApiServer,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    scene: Callable[[Parts, list[int]], Awaitable[None]],
) -> None:
    """Plays the scene when the operator leads and watches. It gets the parts by the names of their classes, and the
    codes with which the process would have ended. The resync comes twice a second."""
    parts: dict[str, Any] = {}
    for name in PARTS:
        options = {"resync": 0.5} if name == "Controller" else {}
        monkeypatch.setattr(main, name, _remembering(parts, name, functools.partial(getattr(main, name), **options)))
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(folder)))
    ports = {name: str(free_port()) for name in ("TRTMODEL_HTTP_PORT", "TRTMODEL_METRICS_PORT")}
    own = {"POD_NAME": "one", "TRTMODEL_NAMESPACE": "ops", "TRTMODEL_WORKER_IMAGE": "worker:1"}
    settings = from_environment(own | {"TRTMODEL_HOST": "127.0.0.1"} | ports)
    ended: list[int] = []

    async def play() -> None:
        running = asyncio.create_task(main.run(settings))
        try:
            await until(lambda: running.done() or ("KeptChildren" in parts and parts["KeptChildren"].fresh()))
            assert not running.done(), await running
            await until(lambda: [s for s in server.seen if "watch" in s.query and "trtmodels" in s.path])
            await scene(parts, ended)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    with monkeypatch.context() as patched:
        patched.setattr(os, "_exit", ended.append)
        asyncio.run(play())


def _remembering(parts: dict[str, Any], name: str, make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **options: Any) -> Any:
        return parts.setdefault(name, make(*args, **options))

    return made


async def until(condition: Callable[[], Any], what: Callable[[], Any] = str) -> None:
    try:
        async with asyncio.timeout(40):
            while not condition():  # noqa: ASYNC110 - what it waits for is no event
                await asyncio.sleep(0.05)
    except TimeoutError:
        pytest.fail(f"not in time: {what()}")
