"""How much memory of the device is free, asked of the driver's management library.

CUDA tells that, too, but only to a process that holds some hundred MiB of the device by itself. What an engine needs is
measured from before its process initialised CUDA, and the front, which decides whether there is room, never does.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)
_LIBRARY = "libnvidia-ml.so.1"


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes, whoever uses them."""

    free: int
    used: int
    total: int


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Nvml:
    """The first device that this container may use, or its slice of one. Raises OSError where the driver's library is
    missing or refuses: the container runtime mounts it for the capability `utility`."""

    def __init__(self, environment: Mapping[str, str] = os.environ, library: Any = None) -> None:
        self._library: Any = ctypes.CDLL(_LIBRARY) if library is None else library
        self._call("nvmlInit_v2")
        self._device = ctypes.c_void_p()
        uuid = visible(environment)
        if uuid:
            self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._device))
        else:
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index(environment)), ctypes.byref(self._device))

    def memory(self) -> DeviceMemory:
        """Raises OSError."""
        found = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", self._device, ctypes.byref(found))
        return DeviceMemory(int(found.free), int(found.used), int(found.total))

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise OSError(f"{function} of {_LIBRARY} gives status {status}")


def visible(environment: Mapping[str, str]) -> str:
    """The first device's UUID (GPU-... or MIG-...), as CUDA or the device plugin name it; '' if they number it."""
    first = _first(environment)
    return first if first.startswith(("GPU-", "MIG-")) else ""


def index(environment: Mapping[str, str]) -> int:
    first = _first(environment)
    return int(first) if first.isdecimal() else 0


def _first(environment: Mapping[str, str]) -> str:
    named = environment.get("CUDA_VISIBLE_DEVICES") or environment.get("NVIDIA_VISIBLE_DEVICES") or ""
    return named.split(",")[0].strip()


def taken(before: DeviceMemory | None, after: DeviceMemory | None) -> int:
    """Bytes that were taken between the two: by whoever, so it is measured where nobody else uses the device. 0 where
    nothing is known."""
    return max(0, after.used - before.used) if before is not None and after is not None else 0


def device_memory() -> DeviceMemory | None:
    """None where nothing is known: then nothing is limited by it."""
    try:
        return Nvml().memory()
    except OSError as e:
        log.debug("the device's memory is not known: %s", e)
        return None
