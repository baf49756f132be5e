"""helm as the local cluster brings it. Rendering needs no cluster."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[2] / "charts" / "trtmodel-operator"
CALL_SECONDS = 60

Json = dict[str, Any]


@dataclass(frozen=True)
class Helm:
    environment: Mapping[str, str]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.environment["HELM"], *arguments],
            capture_output=True, text=True, timeout=CALL_SECONDS, check=False,
            env={**os.environ, **self.environment},
        )  # fmt: skip

    def ok(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, f"helm {' '.join(arguments)}: {done.stderr or done.stdout}"
        return done.stdout

    def template(self, *settings: str, release: str = "trtmodel-operator") -> list[Json]:
        """The objects of a release in the namespace ops."""
        flags = [flag for setting in settings for flag in ("--set-json", setting)]
        text = self.ok("template", release, str(CHART), "--namespace", "ops", *flags)
        return [document for document in yaml.safe_load_all(text) if document]

    def refusal(self, *settings: str, release: str = "x") -> str:
        """What helm says to these settings; empty if it takes them."""
        flags = [flag for setting in settings for flag in ("--set-json", setting)]
        done = self.run("template", release, str(CHART), *flags)
        return "" if done.returncode == 0 else done.stderr


def one(objects: list[Json], kind: str) -> Json:
    """The only object of that kind."""
    (found,) = [o for o in objects if o["kind"] == kind]
    return found
