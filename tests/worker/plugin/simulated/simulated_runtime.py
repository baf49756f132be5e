"""The test runtime's engines on a simulated GPU, through the worker's own code for TensorRT.

This directory on PYTHONPATH is what asks for it: see `worker_harness.PLUGIN_PATH`. Faults of the device happen in the
device and are classified by the worker; those of a process happen in the process, as without a GPU.
"""

from __future__ import annotations

import ctypes
import json
import sys

from simulated_gpu import Gpu, cuda_modules
from simulated_tensorrt import NUMPY, tensorrt_module

VERSION = "10.16.1.11"
DEVICE_FAULTS = ("sticky", "lost", "recoverable", "memory")


def installed(gpu):
    """{name: module}, to be put into sys.modules."""
    return {**cuda_modules(gpu), "tensorrt": tensorrt_module(gpu)}


def can_serve(behaviour, profiles):
    """TensorRT has no strings, no FP64, and no free dimensions without a profile."""
    specs = [*behaviour["inputs"], *behaviour["outputs"]]
    free = any(-1 in shape for _, _, shape in behaviour["inputs"])
    return (
        all(datatype in NUMPY for _, datatype, _ in specs)
        and len(behaviour["inputs"]) >= len(behaviour["outputs"])
        and (bool(profiles) or not free)
    )


def load(behaviour, profiles, lanes):
    """(the GPU, the worker's engine)."""
    gpu = Gpu(version=VERSION)
    sys.modules.update(installed(gpu))
    from trtmodel_worker.engines.tensorrt.runtime import TensorRtRuntime

    shapes = [{n: [r.min, r.opt, r.max] for n, r in p.inputs.items()} for p in profiles]
    plan = json.dumps({**behaviour, "profiles": shapes}).encode()
    return gpu, TensorRtRuntime().load(memoryview(plan), profiles, lanes)


class SimulatedBound:
    """Runs what is bound, with what the test lane does before and after."""

    def __init__(self, test_lane, bound, inputs, allocate):
        self.test_lane, self.bound, self.inputs, self.allocate = test_lane, bound, inputs, allocate
        self.outputs, self.is_warm = bound.outputs, bound.is_warm

    def run(self):
        return self._run(self.inputs, self.bound.run)

    def run_from(self, elsewhere):
        inputs = {name: array.copy() for name, array in self.inputs.items()}
        for place, address, size in elsewhere:
            for name, array in self.inputs.items():
                at = place - array.ctypes.data
                if 0 <= at < array.nbytes:
                    ctypes.memmove(inputs[name].ctypes.data + at, address, size)
        return self._run(inputs, lambda: self.bound.run_from(elsewhere))

    def _run(self, inputs, run):
        self.test_lane.before(inputs, self.allocate)
        if not run():
            return False
        self.test_lane.after(self.outputs)
        return True


def drift(outputs):
    for array in outputs.values():
        array += array.dtype.type(1)
