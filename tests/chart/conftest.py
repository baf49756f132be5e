"""helm as the local cluster brings it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from chart_helm import Helm


@pytest.fixture(scope="session")
def helm(cluster_tools: Mapping[str, str]) -> Helm:
    if not Path(cluster_tools.get("HELM", "")).is_file():
        pytest.fail("helm is not there yet: make cluster-up builds it")
    return Helm(cluster_tools)
