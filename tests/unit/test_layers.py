"""The architecture is checked, and the check sees what it should."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOUSES = ("contract", "operator", "worker")
LINT = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command(['--no-cache']))"


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(root / house) for house in HOUSES)}
    command = [sys.executable, "-c", LINT]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=110, check=False)


def test_no_layer_imports_what_is_above_it() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "line", "rule"),
    [
        ("contract/trtmodel_contract/gate.py", "import numpy", "The contract is the standard library only"),
        ("contract/trtmodel_contract/gate.py", "import trtmodel_worker", "The contract is the standard library only"),
        ("operator/trtmodel_operator/decide.py", "import time", "The pure core does no input or output"),
        ("operator/trtmodel_operator/model.py", "import trtmodel_operator.decide", "The operator's layers"),
        ("worker/trtmodel_worker/front/__init__.py", "import onnxruntime", "The front process never imports"),
        ("worker/trtmodel_worker/__init__.py", "import trtmodel_operator", "The worker never imports the operator"),
    ],
)
def test_a_wrong_import_is_seen(module: str, line: str, rule: str, tmp_path: Path) -> None:
    for house in HOUSES:
        shutil.copytree(ROOT / house, tmp_path / house, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / module
    if path.is_dir() or not path.exists():  # a module that has become a package
        path = path.with_suffix("") / "__init__.py"
    path.write_text(f"{path.read_text()}\n{line}\n")
    done = lint_imports(tmp_path)
    broken = [text for text in done.stdout.splitlines() if "BROKEN" in text]
    assert done.returncode != 0
    assert any(text.startswith(rule) for text in broken), done.stdout
