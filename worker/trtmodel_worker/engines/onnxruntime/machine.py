"""What this machine is to ONNX Runtime: instruction set level, CPUs that may be used, version."""

from __future__ import annotations

import importlib.metadata
import math
import platform
from pathlib import Path

from trtmodel_worker.cpus import usable_cpus

# Best first. The level decides the block size of ONNX Runtime's NCHWc layout, which is written into an optimised graph,
# and whether 8-bit products saturate (they do on x86 without VNNI), which changes the answers of an INT8 engine.
_X86_LEVELS = (
    ("amx-int8", {"amx_int8", "avx512_vnni"}),
    ("avx512-vnni", {"avx512f", "avx512bw", "avx512vl", "avx512_vnni"}),
    ("avx512", {"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    ("avx2-vnni", {"avx2", "avx_vnni"}),
    ("avx2", {"avx2", "fma"}),
    ("avx", {"avx"}),
)
_ARM_LEVELS = (("i8mm", {"i8mm", "asimddp"}), ("dotprod", {"asimddp"}), ("asimd", {"asimd"}))


def onnxruntime_version() -> str:
    """Without importing it, since the front process asks too."""
    try:
        return importlib.metadata.version("onnxruntime")
    except importlib.metadata.PackageNotFoundError:  # another distribution of the same module
        import onnxruntime

        return str(onnxruntime.__version__)


def device_and_level(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, str]:
    """Such as ("cpu-x86_64", "avx512-vnni"). The level is "base" where no flags can be read."""
    flags = _flags(cpuinfo)
    for level, needed in (*_X86_LEVELS, *_ARM_LEVELS):
        if needed <= flags:
            return f"cpu-{platform.machine()}", level
    return f"cpu-{platform.machine()}", "base"


def has_wide_int8(level: str) -> bool:
    """Whether 8-bit products are summed without saturating at 16 bits."""
    return level not in ("avx512", "avx2", "avx", "base")


def cpu_quota(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """CPUs that this process may use: the affinity mask, limited by the cgroup's quota, at least 1."""
    return max(1, math.ceil(usable_cpus(cgroup)))


def _flags(cpuinfo: Path) -> set[str]:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return set()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            return set(value.split())
    return set()
