"""Where the files of engines come from."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from trtmodel_contract.identity import Storage
from trtmodel_worker.front.supply import Supply
from trtmodel_worker.settings import from_environment
from trtmodel_worker.storage.backends import DirectoryStore

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
