"""What an engine takes of a device: measured when it is built, for every worker that will load it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from trtmodel_worker.builder import stages
from trtmodel_worker.devicememory import DeviceMemory

MIB = 1 << 20


class Device:
    """Its engine takes 300 MiB when its first lane runs, and each lane what its largest batch needs."""

    def __init__(self) -> None:
        self.used = 0

    def memory(self) -> DeviceMemory:
        return DeviceMemory(1000 * MIB - self.used, self.used, 1000 * MIB)

    def create_lane(self) -> Lane:
        return Lane(self)


class Lane:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.largest = 0

    def run(self, inputs: Any, allocate: Any) -> Any:
        rows = len(inputs["x"])
        self.device.used += 300 * MIB if not self.device.used else 0
        self.device.used += 10 * MIB * max(0, rows - self.largest)
        self.largest = max(rows, self.largest)
        return {}


def measured(device: Any, before: DeviceMemory | None) -> tuple[int, int, int]:
    lanes, device_bytes, lane_bytes = stages.measured_lanes(
        device, (1, 8), lambda rows: {"x": np.zeros((rows, 1), np.float32)}, before
    )
    return len(lanes), device_bytes // MIB, lane_bytes // MIB


def test_the_second_lane_tells_what_each_further_one_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(stages, "device_memory", device.memory)
    assert measured(device, device.memory()) == (2, 300 + 80 + 80, 80)


def test_where_nothing_is_known_of_the_device_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "device_memory", lambda: None)
    assert measured(Device(), None) == (2, 0, 0)
