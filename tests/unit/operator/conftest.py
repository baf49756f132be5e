"""Fakes that tests of the operator share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parents[2]))

from fakes.api_server import FakeApiServer

# On a busy machine an example may take as long as it likes.
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")


@pytest.fixture
def api_server() -> Iterator[FakeApiServer]:
    with FakeApiServer() as server:
        yield server
