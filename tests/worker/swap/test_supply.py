"""Where the files of engines come from."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from trtmodel_contract.identity import LoadKey, Storage
from trtmodel_worker.front.artifacts import Artifacts, Refused
from trtmodel_worker.front.reading import THREADS
from trtmodel_worker.front.supply import Supply
from trtmodel_worker.settings import from_environment
from trtmodel_worker.storage.backends import DirectoryStore

PATIENCE_SECONDS = 30.0
KEY = LoadKey("Test", "1", "cpu")
NAMES = ("POD_NAME", "POD_UID", "POD_NAMESPACE", "TRTMODEL_MODEL", "TRTMODEL_MODEL_UID", "TRTMODEL_RUNTIME")


def test_a_store_that_answers_nonsense_at_the_first_touch_ends_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engines").mkdir()
    touched: list[str] = []

    def now(_: DirectoryStore) -> float:
        touched.append("now")
        raise ValueError("Invalid date value or format")

    monkeypatch.setattr(DirectoryStore, "now", now)
    supply = Supply(from_environment({**dict.fromkeys(NAMES, "x"), "TRTMODEL_CONTEXTS": "1"}))
    asyncio.run(supply.reach(Storage("engines", "trtmodel", f"file://{tmp_path}")))
    supply.close()
    assert touched == ["now"]


def test_a_first_touch_that_hangs_takes_no_thread_from_who_prepares_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engines").mkdir()
    gate, touched, asked = threading.Event(), threading.Event(), threading.Barrier(THREADS + 1)

    def hang(_: DirectoryStore) -> float:
        touched.set()
        gate.wait(3 * PATIENCE_SECONDS)  # longer than all others together
        return 0.0

    def refuse(*_: object) -> None:
        asked.wait(PATIENCE_SECONDS)  # all of them are here at once, so each has a thread
        raise Refused("Test", "there is none", transient=True)

    monkeypatch.setattr(DirectoryStore, "now", hang)
    monkeypatch.setattr(Artifacts, "manifest", refuse)
    storage, artifact = Storage("engines", "trtmodel", f"file://{tmp_path}"), Mock()

    async def story() -> None:
        supply = Supply(from_environment({**dict.fromkeys(NAMES, "x"), "TRTMODEL_CONTEXTS": "1"}))
        reaching = asyncio.create_task(supply.reach(storage))
        await asyncio.to_thread(touched.wait, PATIENCE_SECONDS)
        fetches = [asyncio.create_task(supply.fetched(storage, artifact, KEY)) for _ in range(THREADS)]
        await asyncio.to_thread(asked.wait, PATIENCE_SECONDS)
        assert [type(e) for e in await asyncio.gather(*fetches, return_exceptions=True)] == [Refused] * THREADS
        gate.set()
        await reaching
        supply.close()

    asyncio.run(story())
