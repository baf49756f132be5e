"""What hangs is seen by the probe of the running operator, or ends it: the parts are wired as `main` wires them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from fakes.api_server import FakeApiServer
from test_liveness import probe
from test_main import put_model
from trtmodel_operator.adapters.children import DEAD
from trtmodel_operator.controller import STARVED
from trtmodel_operator.lease import RENEW_DEADLINE
from trtmodel_operator.main import EXIT_FAILED
from trtmodel_operator.queue import CHANGED
from whole_operator import Parts, until, with_operator


def test_a_dead_watch_a_change_that_waits_and_a_lost_lease_fail_the_probe_and_the_last_ends_the_process(
    api_server: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(parts: Parts, ended: list[int]) -> None:
        health, queue, lease = parts["Health"], parts["WorkQueue"], parts["Lease"]
        assert await probe(health) == (200, "ok\n")
        streams = [s for informer in parts["KeptChildren"]._informers.values() for s in informer._streams.values()]
        before = [s.heard for s in streams]
        for stream in streams:
            stream.heard -= DEAD + 1
        assert "nothing was heard of Job" in (await probe(health))[1]
        for stream, heard in zip(streams, before, strict=True):
            stream.heard = heard
        queue._lanes[CHANGED]["ml", "stuck"] = time.monotonic() - STARVED - 1  # no worker is told of it
        assert "a change has waited for its pass" in (await probe(health))[1]
        del queue._lanes[CHANGED]["ml", "stuck"]
        assert await probe(health) == (200, "ok\n")
        assert ended == []
        lease._renewed -= RENEW_DEADLINE + 1
        assert "the lease was not renewed" in (await probe(health))[1]
        await until(lambda: ended)
        assert set(ended) == {1}

    with_operator(api_server, tmp_path, monkeypatch, scene)


def test_a_watch_of_models_that_delivers_nothing_ends_the_process(
    api_server: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is open, and what others wrote is only seen in lists."""

    async def scene(parts: Parts, ended: list[int]) -> None:
        put_model(api_server)
        await until(lambda: api_server.all("jobs"))
        await asyncio.sleep(1.2)  # two lists
        assert ended == []
        model = api_server.get("trtmodels", "ml", "magika")
        assert model is not None
        model["metadata"]["annotations"] = {"edited": "unseen"}
        api_server.put(model, silently=True)
        await until(lambda: ended)
        assert ended == [EXIT_FAILED]

    with_operator(api_server, tmp_path, monkeypatch, scene)
