"""What the processes that a front starts may know of its environment: no token, no credentials, nothing of the pod.

A plan is executable content, and a gateway reads bytes of strangers.
"""

from __future__ import annotations

from collections.abc import Mapping

_INHERITED = (
    "PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE",
    "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES",
)  # fmt: skip


def scrubbed(env: Mapping[str, str]) -> dict[str, str]:
    return {name: env[name] for name in _INHERITED if name in env}
