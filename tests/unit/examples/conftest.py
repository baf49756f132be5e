"""The examples are programs beside each other: their modules are found in their folder, as when they are run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "magika"))
