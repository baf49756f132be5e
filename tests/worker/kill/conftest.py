"""A server of Jobs and a world for them, shared by the tests of a module: both take a second to make."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kill_harness import KillServer, World


@pytest.fixture(scope="module")
def kill_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillServer]:
    server = KillServer(tmp_path_factory.mktemp("server") / "errors")
    yield server
    server.close()


@pytest.fixture
def world(tmp_path: Path, kill_server: KillServer) -> World:
    return World(tmp_path, kill_server)
