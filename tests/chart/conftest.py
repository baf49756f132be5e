"""helm as the local cluster brings it. To render takes no cluster."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from chart_helm import Helm
from hollow.plane import binaries, settings


@pytest.fixture(scope="session")
def helm() -> Helm:
    """Of no cluster."""
    return Helm({"HELM": str(binaries.build(settings.from_environment(), ("helm",)).path("helm", "helm"))})


@pytest.fixture(scope="session")
def cluster_helm(cluster_environment: Mapping[str, str]) -> Helm:
    """Of the local cluster."""
    return Helm(cluster_environment)
