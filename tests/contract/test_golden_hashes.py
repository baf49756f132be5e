"""The same documents have the same hashes on every Python, today and in the next version."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CONTRACT = HERE.parents[1] / "contract"
RECORDED = json.loads((HERE / "golden_hashes.json").read_text())
SUPPORTED = ("3.10", "3.11", "3.12", "3.13", "3.14")


def interpreters() -> dict[str, Path]:
    """One interpreter of each supported version that this machine has: its own, those on PATH, those of pyenv."""
    found = {f"{sys.version_info.major}.{sys.version_info.minor}": Path(sys.executable)}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in SUPPORTED:
        candidates = [*sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True), shutil.which(f"python{version}")]
        for candidate in candidates:
            if version not in found and candidate and _works(candidate):
                found[version] = Path(candidate)
    return found


def _works(candidate: str | Path) -> bool:
    """A shim of pyenv is on PATH also for versions that are not installed or not active."""
    return subprocess.run([candidate, "-c", ""], capture_output=True, timeout=30, check=False).returncode == 0


FOUND = interpreters()


@pytest.mark.parametrize("version", sorted(FOUND))
@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_every_python_computes_the_recorded_hashes(version: str, hash_seed: str) -> None:
    done = subprocess.run(
        [FOUND[version], "-S", HERE / "golden_hashes.py"],
        env={"PYTHONPATH": str(CONTRACT), "PYTHONHASHSEED": hash_seed, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == RECORDED
