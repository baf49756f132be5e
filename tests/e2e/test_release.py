"""The chart's own test of a release."""

from __future__ import annotations

import subprocess

import pytest

from .cluster import Cluster
from .install import RELEASE, SYSTEM, Operator

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

HELM_SECONDS = 180


def test_helm_test_passes_where_the_operator_leads(cluster: Cluster, operator: Operator) -> None:
    done = subprocess.run(
        [cluster.environment["HELM"], "test", RELEASE, "--namespace", SYSTEM, "--timeout", "2m"],
        capture_output=True, text=True, timeout=HELM_SECONDS, check=False, env=cluster.environment,
    )  # fmt: skip
    pods = cluster.kubectl("get", "pods", "-n", SYSTEM, "-o", "wide")
    log = cluster.kubectl("logs", "-n", SYSTEM, f"{RELEASE}-test", "--ignore-errors") if done.returncode else ""
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{pods}\n{log}"
    assert "Succeeded" in done.stdout
