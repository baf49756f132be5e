"""What the processes that a front starts may know of its environment: no token, no credentials, nothing of the pod.

A plan is executable content, and a gateway reads bytes of strangers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_BLAS_THREADS = "OPENBLAS_NUM_THREADS"
_INHERITED = (
    "PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE",
    "OMP_NUM_THREADS", _BLAS_THREADS, "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES",
)  # fmt: skip


def scrubbed(env: Mapping[str, str]) -> dict[str, str]:
    return {name: env[name] for name in _INHERITED if name in env}


def without_blas_threads() -> None:
    """To be called before NumPy is imported, unless somebody has chosen a number. Its BLAS then starts a thread for
    each processor, and each looks for work for 0.1 s without sleeping: a host that was prepared beside traffic took all
    16 processors of a machine for that long, and requests took 1.7 instead of 0.6 ms (H200). Nothing here multiplies
    matrices."""
    os.environ.setdefault(_BLAS_THREADS, "1")
