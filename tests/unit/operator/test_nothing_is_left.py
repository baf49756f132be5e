"""The whole operator in this process, so that one can look into what it keeps: of models that came, failed and went
nothing is left, wherever something is kept."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.api_server import FakeApiServer, Seen, refusal
from test_main import put_model, put_pod
from whole_operator import Parts, until, with_operator

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


def kept(parts: Parts) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, part in parts.items():
        for path, size in sizes(part, name, set()):
            found[path] = found.get(path, 0) + size
    return {path: size for path, size in found.items() if size and not path.endswith(WITH_A_BOUND)}


def left(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    return {path: size - before.get(path, 0) for path, size in now.items() if size > before.get(path, 0)}


def test_of_models_that_came_failed_and_went_nothing_is_kept(
    api_server: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(seen: Seen) -> Any:
        name = seen.body.get("metadata", {}).get("name", "")
        return refusal(500) if seen.method == "POST" and name.startswith(f"{FAILING}-") else None

    async def scene(parts: Parts, _: list[int]) -> None:
        await asyncio.sleep(0.5)
        before = kept(parts)
        for name in MODELS:
            put_model(api_server, name)
            put_pod(api_server, f"{name}-pod", {"trtmodel.io/model": name, "trtmodel.io/role": "worker"})
        await until(lambda: len(api_server.all("jobs")) == len(MODELS) - 1)
        await until(lambda: parts["WorkQueue"]._failures)
        there = kept(parts)
        assert sum(there.values()) > sum(before.values()) + 4 * len(MODELS)
        for name in MODELS:
            api_server.delete("trtmodels", "ml", name)
            api_server.delete("pods", "ml", f"{name}-pod")
        # As a garbage collector does. A pass that has not heard yet that its model is gone makes its Job anew.
        await until(lambda: not len(parts["KeptModels"]))
        for job in api_server.all("jobs"):
            api_server.delete("jobs", "ml", job["metadata"]["name"])
        await until(lambda: left(before, kept(parts)) == {}, lambda: left(before, kept(parts)))

    api_server.fault = fault
    with_operator(api_server, tmp_path, monkeypatch, scene)
