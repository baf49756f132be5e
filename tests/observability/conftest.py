"""promtool, as Debian has it."""

from __future__ import annotations

from pathlib import Path

import pytest
from debian_prometheus import Missing, programs


@pytest.fixture(scope="session")
def promtool() -> Path:
    try:
        return programs()["promtool"]
    except Missing as e:
        pytest.fail(str(e))
