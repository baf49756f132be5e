"""A real API server with a hollow cluster below it, and operators that are real processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from hollow.operators import NAMESPACE, OperatorProcess  # noqa: E402
from hollow.plane import ControlPlane  # noqa: E402

TEAM = "ml"
Start = Callable[..., OperatorProcess]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    folder = tmp_path_factory.mktemp("plane")
    with ControlPlane(folder) as running:
        running.install_crd(NAMESPACE, TEAM)
        environment = os.environ | {"PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, "-m", "hollow", str(running.kubeconfig("hollow")), "--first", "127.65.0.1"]
        with (folder / "hollow.log").open("w") as log:
            hollow = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            yield running
        finally:
            hollow.terminate()
            hollow.wait(30)


@pytest.fixture
def start(plane: ControlPlane, tmp_path: Path) -> Iterator[Start]:
    """Starts an operator by name; it is killed when the test is over."""
    with contextlib.ExitStack() as stack:

        def begin(name: str, **environment: str) -> OperatorProcess:
            operator = OperatorProcess(plane.kubeconfig("operator"), tmp_path, name, **environment)
            return stack.enter_context(operator)

        yield begin
