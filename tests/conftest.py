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


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What tests counted with `record_property("<plural>", number)`: how much a matrix covers is part of its result."""
    counts: dict[str, int] = {}
    for report in terminalreporter.stats.get("passed", ()):
        for name, value in report.user_properties:
            if isinstance(value, int):
                counts[name] = counts.get(name, 0) + value
    for name, count in sorted(counts.items()):
        terminalreporter.write_line(f"{count:,} {name}: all ended well")
