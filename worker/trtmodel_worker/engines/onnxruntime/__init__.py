"""ONNX Runtime on the CPU: nodes without a GPU, laptops, tests. A plan is the graph as ONNX Runtime optimised it for
this machine, so it is compiled once and loads without being optimised again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtmodel_contract.identity import LoadKey, Profile

from trtmodel_worker.engines.onnxruntime import machine

if TYPE_CHECKING:  # NumPy, as in the registry
    from trtmodel_worker.engines.base import Engine


class OnnxRuntime:
    """The Runtime of the Engine protocol. Importing it, and asking for the load key, does not load ONNX Runtime."""

    NAME = "ONNXRuntime"

    def load_key(self) -> LoadKey:
        device, level = machine.device_and_level()
        return LoadKey(self.NAME, machine.onnxruntime_version(), device, level)

    def driver(self) -> str:
        return ""

    def load(self, plan: memoryview, profiles: tuple[Profile, ...], lanes: int) -> Engine:
        from trtmodel_worker.engines.onnxruntime.run import OnnxEngine

        return OnnxEngine(plan, profiles, threads=max(1, machine.cpu_quota() // max(1, lanes)))
