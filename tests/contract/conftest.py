"""How long hypothesis searches: the same quick examples each time, or (HYPOTHESIS_PROFILE=explore) many new ones."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile("repeatable", max_examples=50, derandomize=True, deadline=None)
settings.register_profile(
    "explore",
    max_examples=1_000,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
