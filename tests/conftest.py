"""What all tests share: the way to the local cluster."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

CLUSTER = Path(__file__).parent / "cluster" / "cluster"
CALL_SECONDS = 60
LEAST_ROLLOUTS = 20_000
LONG = "long and not e2e"  # as the Makefile asks for it


@pytest.fixture(scope="session")
def cluster_tools() -> Mapping[str, str]:
    """What `tests/cluster/cluster env` exports (KUBECONFIG, KUBECTL, HELM ...), whether the cluster is up or not."""
    done = subprocess.run([CLUSTER, "env"], capture_output=True, text=True, timeout=CALL_SECONDS, check=False)
    if done.returncode != 0:
        pytest.fail(f"{CLUSTER.name} env failed: {done.stderr.strip()}")
    exports = re.findall(r"^export (\w+)=(.*)$", done.stdout, re.MULTILINE)
    return {name: " ".join(shlex.split(value)) for name, value in exports}


@pytest.fixture(scope="session")
def cluster_environment(cluster_tools: Mapping[str, str]) -> Mapping[str, str]:
    """The same, for tests that need the cluster: they touch no other one."""
    if not Path(cluster_tools.get("KUBECONFIG", "")).is_file():
        pytest.fail("the local cluster is not up: run make cluster-up")
    return cluster_tools


def _counts(terminalreporter: Any) -> dict[str, int]:
    """What tests counted with `record_property("<plural>", number)`."""
    counts: dict[str, int] = {}
    for report in terminalreporter.stats.get("passed", ()):
        for name, value in report.user_properties:
            if isinstance(value, int):
                counts[name] = counts.get(name, 0) + value
    return counts


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How much a matrix covers is part of its result."""
    for name, count in sorted(_counts(terminalreporter).items()):
        terminalreporter.write_line(f"{count:,} {name}: all ended well")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where all of the matrix ran, it was as large as is claimed for it."""
    config = session.config
    whole = config.args_source is config.ArgsSource.TESTPATHS and config.option.markexpr == LONG
    terminal = config.pluginmanager.get_plugin("terminalreporter")  # None in the processes that only run tests
    if not whole or config.option.keyword or config.option.collectonly or terminal is None or session.exitstatus:
        return
    rollouts = _counts(terminal).get("simulated rollouts", 0)
    if rollouts < LEAST_ROLLOUTS:
        terminal.write_line(
            f"the matrix had {rollouts:,} simulated rollouts, {LEAST_ROLLOUTS:,} are the least", red=True
        )
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
