"""TensorRT with faults on demand, and without CUDA graphs: for tests on a real GPU.

A fault is a symbolic link at `TRIGGER` whose target is its name. The first lane that takes the link away has the fault:

    sticky         a kernel stores to address 0
    memory         an allocation of more than the device has left
    recoverable    the enqueue fails
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from cuda.bindings import driver, runtime
from trtmodel_worker.engines.base import Recoverable
from trtmodel_worker.engines.tensorrt.device import CudaError
from trtmodel_worker.engines.tensorrt.graphs import NotCaptured
from trtmodel_worker.engines.tensorrt.runtime import TensorRtRuntime

TRIGGER = Path(tempfile.gettempdir()) / "trtmodel-gpu-fault"

# Text, so that no compiler is needed: the driver compiles it.
PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry wrong() {
    .reg .b64 %address;
    .reg .b32 %value;
    mov.u64 %address, 0;
    mov.u32 %value, 1;
    st.global.u32 [%address], %value;
    ret;
}
"""


def ask_for(fault):
    TRIGGER.unlink(missing_ok=True)
    TRIGGER.symlink_to(fault)


def taken():
    """The fault that this lane has to have, '' if none."""
    try:
        fault = str(TRIGGER.readlink())
        TRIGGER.unlink()
    except OSError:
        return ""
    return fault


def store_to_nowhere(stream):
    runtime.cudaFree(0)  # the driver's calls need the context that the runtime makes
    _, module = checked(driver.cuModuleLoadData(PTX + b"\0"))
    _, function = checked(driver.cuModuleGetFunction(module, b"wrong"))
    checked(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0))


def checked(result):
    if result[0]:
        raise RuntimeError(f"the fault could not be made: {result[0]}")
    return result if len(result) > 1 else (result[0], None)


class Faulty:
    def __init__(self, lane):
        self.lane = lane

    def run(self, inputs, allocate):
        self.maybe_fail()
        return self.lane.run(inputs, allocate)

    def bind(self, inputs, allocate):
        bound = self.lane.bind(inputs, allocate)
        return None if bound is None else FaultyBound(self, bound)

    def maybe_fail(self):
        fault = taken()
        if fault == "sticky":
            store_to_nowhere(self.lane._place.stream.handle)
        elif fault == "memory":
            cuda = self.lane._loaded.cuda
            try:
                cuda.allocate(cuda.memory()[0] + (1 << 30))
            except CudaError as e:
                raise self.lane._loaded.failure("no memory", self.lane._place.recorder, None, e) from e
        elif fault == "recoverable":
            raise Recoverable("Error Code 1: Cask (Cask convolution execution)")


class FaultyBound:
    def __init__(self, faulty, bound):
        self.faulty, self.bound, self.outputs, self.is_warm = faulty, bound, bound.outputs, bound.is_warm

    def run(self):
        self.faulty.maybe_fail()
        return self.bound.run()


class FaultyEngine:
    def __init__(self, engine):
        self.engine, self.inputs, self.outputs = engine, engine.inputs, engine.outputs
        self.serve_from = engine.serve_from

    def create_lane(self):
        return Faulty(self.engine.create_lane())


class FaultyTensorRt(TensorRtRuntime):
    NAME = "TensorRTFaulty"

    def load(self, plan, profiles, lanes):
        return FaultyEngine(super().load(plan, profiles, lanes))


class PlainTensorRt(TensorRtRuntime):
    """Every run is enqueued: what a CUDA graph gains is what this loses."""

    NAME = "TensorRTPlain"

    def load(self, plan, profiles, lanes):
        without_graphs()
        return super().load(plan, profiles, lanes)


def without_graphs():
    from trtmodel_worker.engines.tensorrt import graphs

    def refuse(*_):
        raise NotCaptured("this test is without graphs")

    graphs.capture = refuse
