"""Memory of the device, as the driver's management library tells it: here one that answers as it does."""

from __future__ import annotations

import ctypes
from typing import ClassVar

import pytest
from trtmodel_worker import devicememory
from trtmodel_worker.devicememory import DeviceMemory, Nvml, device_memory, taken


class Library:
    """Of a machine with two devices of 1000 and 2000 bytes, 100 of each in use, and a slice of one."""

    TOTALS: ClassVar[dict[object, int]] = {0: 1000, 1: 2000, b"GPU-5": 2000, b"MIG-7": 500}

    def __init__(self, status: int = 0) -> None:
        self._status = status
        self._named: list[object] = []

    def nvmlInit_v2(self) -> int:
        return self._status

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, handle: object) -> int:
        return self._name(index.value)

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: object) -> int:
        return self._name(uuid)

    def nvmlDeviceGetMemoryInfo(self, handle: object, found: object) -> int:
        total = self.TOTALS[self._named[-1]]
        memory = found._obj  # type: ignore[attr-defined]
        memory.total, memory.free, memory.used = total, total - 100, 100
        return 0

    def _name(self, device: object) -> int:
        self._named.append(device)
        return 0 if device in self.TOTALS else 6


@pytest.mark.parametrize(
    ("environment", "total"),
    [
        ({}, 1000),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, 1000),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, 2000),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-5"}, 2000),
        ({"NVIDIA_VISIBLE_DEVICES": "MIG-7"}, 500),
    ],
)
def test_the_memory_is_that_of_the_first_device_that_the_container_may_use(
    environment: dict[str, str], total: int
) -> None:
    assert Nvml(environment, Library()).memory() == DeviceMemory(total - 100, 100, total)


def test_a_library_that_refuses_is_named_with_its_status() -> None:
    with pytest.raises(OSError, match=r"nvmlInit_v2 .* gives status 9"):
        Nvml({}, Library(9))


@pytest.mark.parametrize(
    ("before", "after", "bytes_taken"),
    [
        (DeviceMemory(900, 100, 1000), DeviceMemory(600, 400, 1000), 300),
        (DeviceMemory(600, 400, 1000), DeviceMemory(900, 100, 1000), 0),  # somebody else gave some back
        (None, DeviceMemory(600, 400, 1000), 0),
    ],
)
def test_what_an_engine_takes_of_the_device_is_the_difference(
    before: DeviceMemory | None, after: DeviceMemory, bytes_taken: int
) -> None:
    assert taken(before, after) == bytes_taken


def test_without_a_driver_nothing_is_known_of_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devicememory, "_LIBRARY", "libnvidia-ml-which-is-not-there.so.1")
    assert device_memory() is None
