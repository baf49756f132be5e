"""How many CPUs this process may use."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """The affinity mask, limited by the cgroup's quota: 0.5 is half of one CPU's time."""
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_limit(cgroup)
    return allowed if quota is None else min(allowed, quota)


def cpu_limit(cgroup: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The cgroup's quota; None if there is none."""
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit = (cgroup / "cpu/cpu.cfs_quota_us").read_text()
        period = (cgroup / "cpu/cpu.cfs_period_us").read_text()
        return None if int(limit) <= 0 else int(limit) / int(period)
    except (OSError, ValueError):
        return None
