"""The whole operator in this process, so that one can look into what it keeps: of models that came, failed and went
nothing is left, wherever something is kept."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.api_server import FakeApiServer, Seen, refusal
from test_main import free_port, put_model, put_pod
from trtmodel_operator import main
from trtmodel_operator.settings import from_environment

KEEPERS = (
    "Controller",
    "HttpInquiries",
    "HttpProgress",
    "HttpWorkers",
    "KeptChildren",
    "KeptModels",
    "KubernetesCluster",
    "OperatorMetrics",
    "Pace",
    "Rotation",
    "Witness",
    "WorkQueue",
)
WITH_A_BOUND = "._events._series"  # of its own, whatever comes and goes
MODELS = [f"model-{n}" for n in range(12)]
FAILING = "model-3"


def sizes(thing: Any, path: str, seen: set[int]) -> Iterator[tuple[str, int]]:
    """How many things each collection holds that can be reached through objects of the operator."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, dict | list | set | deque | tuple):
        if not isinstance(thing, tuple):
            yield path, len(thing)
        for held in list(thing.values()) if isinstance(thing, dict) else list(thing):
            yield from sizes(held, path, seen)
    elif type(thing).__module__.startswith("trtmodel_operator"):
        for name, held in vars(thing).items() if hasattr(thing, "__dict__") else ():
            yield from sizes(held, f"{path}.{name}", seen)


def kept(keepers: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, keeper in keepers.items():
        for path, size in sizes(keeper, name, set()):
            found[path] = found.get(path, 0) + size
    return {path: size for path, size in found.items() if size and not path.endswith(WITH_A_BOUND)}


def remembering(keepers: dict[str, Any], name: str, make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **options: Any) -> Any:
        return keepers.setdefault(name, make(*args, **options))

    return made


async def until(condition: Callable[[], Any], what: Callable[[], Any] = str) -> None:
    try:
        async with asyncio.timeout(40):
            while not condition():  # noqa: ASYNC110 - what it waits for is no event
                await asyncio.sleep(0.05)
    except TimeoutError:
        pytest.fail(f"not in time: {what()}")


def test_of_models_that_came_failed_and_went_nothing_is_kept(
    api_server: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keepers: dict[str, Any] = {}
    for name in KEEPERS:
        options = {"resync": 0.5} if name == "Controller" else {}
        monkeypatch.setattr(main, name, remembering(keepers, name, functools.partial(getattr(main, name), **options)))
    monkeypatch.setenv("KUBECONFIG", str(api_server.kubeconfig(tmp_path)))
    ports = {name: str(free_port()) for name in ("TRTMODEL_HTTP_PORT", "TRTMODEL_METRICS_PORT")}
    settings = from_environment(
        {"POD_NAME": "one", "TRTMODEL_NAMESPACE": "ops", "TRTMODEL_WORKER_IMAGE": "worker:1"}
        | {"TRTMODEL_HOST": "127.0.0.1"}
        | ports
    )

    def fault(seen: Seen) -> Any:
        name = seen.body.get("metadata", {}).get("name", "")
        return refusal(500) if seen.method == "POST" and name.startswith(f"{FAILING}-") else None

    async def scene() -> None:
        running = asyncio.create_task(main.run(settings))
        try:
            await until(lambda: running.done() or ("KeptChildren" in keepers and keepers["KeptChildren"].fresh()))
            assert not running.done(), await running
            await until(lambda: [w for w in api_server.seen if "watch" in w.query and "trtmodels" in w.path])
            await asyncio.sleep(0.5)
            before = kept(keepers)
            for name in MODELS:
                put_model(api_server, name)
                put_pod(api_server, f"{name}-pod", {"trtmodel.io/model": name, "trtmodel.io/role": "worker"})
            await until(lambda: len(api_server.all("jobs")) == len(MODELS) - 1)
            await until(lambda: keepers["WorkQueue"]._failures)
            there = kept(keepers)
            assert sum(there.values()) > sum(before.values()) + 4 * len(MODELS)
            for name in MODELS:
                api_server.delete("trtmodels", "ml", name)
                api_server.delete("pods", "ml", f"{name}-pod")
            # As a garbage collector does. A pass that has not heard yet that its model is gone makes its Job anew.
            await until(lambda: not len(keepers["KeptModels"]))
            for job in api_server.all("jobs"):
                api_server.delete("jobs", "ml", job["metadata"]["name"])
            await until(lambda: left(before, kept(keepers)) == {}, lambda: left(before, kept(keepers)))
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    api_server.fault = fault
    asyncio.run(scene())


def left(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    return {path: size - before.get(path, 0) for path, size in now.items() if size > before.get(path, 0)}
