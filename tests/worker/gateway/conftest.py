"""Workers with gRPC, and a scripted front."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway_harness import ScriptedFront


@pytest.fixture
def front() -> Iterator[ScriptedFront]:
    directory = tempfile.mkdtemp()  # a socket's path has 107 characters at most: tmp_path may be longer
    scripted = ScriptedFront(Path(directory) / "front.sock")
    yield scripted
    scripted.close()
    shutil.rmtree(directory)
