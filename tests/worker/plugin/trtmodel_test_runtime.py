"""A runtime that is plugged in from outside, as another package would be: its plan is JSON that says how it behaves.

{"factor": 2.0}                      every output is the input of the same place times factor (strings as they are)
"mode": "nonzero" | "inf"            other ways to answer; "centred": less the mean of the batch
"work": seconds per run              "first": more seconds for the first run of a shape on a lane
"load": seconds to load              "refuse": why it cannot be loaded
"ballast": bytes of memory that it takes while it is loaded
"fault": {"when": value, "do": ...}  on a first input that starts with `value`: die, hang, sticky, lost, invalid,
                                     recoverable, memory, crash, too-large, lie (its output is elsewhere),
                                     break (the lane fails from then on), drift (answers are wrong from then on),
                                     segv, abort, exit (with code 70);
                                     "anywhere": whichever row of a batch has the value
"sometimes": {"share": s, "do": ...} the same in so large a share of the runs. This and what follows spare runs whose
                                     inputs are 2 at most: those of warm-up, self-test and the trial of rows
"most_rows": more of them at once do not fit into memory
"slow": {"width": n, "seconds": s}   inputs whose second dimension is n take longer
"drifting": path                     answers are wrong in the processes whose ids are in this file
"record": path                       the shape of the first input is written there, a line for each run
"lanes": how many lanes can be made   "helper": it has a thread of its own from its loading on
"sick": {"path": p, ...}             while that file is there: {"run": do} fails each run so, {"proof": do} those of
                                     warm-up, self-test and probe (inputs of 2 at most), {"load": do} each load
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
from trtmodel_contract.identity import LoadKey
from trtmodel_contract.manifest import TensorSpec
from trtmodel_worker.engines.base import CannotLoad, DeviceLost, InvalidInput, OutOfMemory, Recoverable, Sticky

try:
    import simulated_runtime as simulated  # its directory is on the path where the suite runs on a simulated GPU
except ImportError:
    simulated = None

LOAD_KEY = LoadKey("Test", "1", "cpu")


class TestRuntime:
    def load_key(self):
        return LOAD_KEY

    def driver(self):
        return "5.5"

    def load(self, plan, profiles, lanes):
        try:
            behaviour = json.loads(bytes(plan))
        except ValueError as e:
            raise CannotLoad("the plan is not JSON") from e
        if behaviour.get("helper"):
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        time.sleep(behaviour.get("load", 0.0))
        if behaviour.get("refuse"):
            raise CannotLoad(behaviour["refuse"])
        sicken(behaviour, "load")
        if simulated is not None and simulated.can_serve(behaviour, profiles):
            return SimulatedEngine(behaviour, *simulated.load(behaviour, profiles, lanes))
        return TestEngine(behaviour)


class ProcessorRuntime(TestRuntime):
    """The same without a device: its work is all the processor's."""

    def driver(self):
        return ""


class LateRuntime(TestRuntime):
    """Its look at the machine takes as long as there is no file `seen` in TMPDIR."""

    def load_key(self):
        while not Path(os.environ["TMPDIR"], "seen").exists():
            time.sleep(0.01)
        return LOAD_KEY


class TestEngine:
    def __init__(self, behaviour):
        self.behaviour = behaviour
        self.ballast = bytes(b"x" * behaviour.get("ballast", 0))
        self.inputs = tuple(TensorSpec(n, d, tuple(s)) for n, d, s in behaviour["inputs"])
        self.outputs = tuple(TensorSpec(n, d, tuple(s)) for n, d, s in behaviour["outputs"])
        self.made = 0
        self.drifted = False
        self.picky = not behaviour.keys().isdisjoint(("record", "most_rows", "slow", "sometimes"))

    def drifts(self):
        path = self.behaviour.get("drifting")
        return bool(path) and Path(path).exists() and str(os.getpid()) in Path(path).read_text().split()

    def create_lane(self):
        self.made += 1
        if self.made > self.behaviour.get("lanes", self.made):
            raise OutOfMemory("no memory for another lane")
        return TestLane(self)


class TestLane:
    def __init__(self, engine):
        self.engine = engine
        self.known = set()
        self.broken = False

    def run(self, inputs, allocate):
        answer = self.before(inputs, allocate)
        if answer is not None:
            return answer
        arrays = [inputs[s.name] for s in self.engine.inputs]
        return {s.name: self.output(s, a, allocate) for s, a in zip(self.engine.outputs, arrays, strict=False)}

    def before(self, inputs, allocate):
        """Everything that a run does but its answer."""
        behaviour = self.engine.behaviour
        arrays = [inputs[s.name] for s in self.engine.inputs]
        if "sick" in behaviour:
            sicken(behaviour, "run" if arrays[0].size and arrays[0].flat[0] > 2 else "proof")
        fault = behaviour.get("fault")
        if fault and arrays[0].size and self.is_meant(fault, arrays[0]):
            answer = self.fail(fault["do"], allocate)
            if answer is not None:
                return answer
        if self.engine.picky and arrays[0].size and arrays[0].flat[0] > 2:
            self.serve(behaviour, arrays[0], allocate)
        if self.broken:
            raise Recoverable("the lane is broken")
        self.have_run(arrays)
        if behaviour.get("work"):
            time.sleep(behaviour["work"])
        return None

    def have_run(self, arrays):
        shapes = tuple(a.shape for a in arrays)
        if shapes not in self.known:
            self.known.add(shapes)
            time.sleep(self.engine.behaviour.get("first", 0.0))

    def is_meant(self, fault, array):
        return fault["when"] in array if fault.get("anywhere") else array.flat[0] == fault["when"]

    def serve(self, behaviour, array, allocate):
        if "record" in behaviour:
            with Path(behaviour["record"]).open("a") as f:
                f.write(f"{list(array.shape)}\n")
        if len(array) > behaviour.get("most_rows", len(array)):
            raise OutOfMemory(f"no memory for {len(array)} rows")
        slow = behaviour.get("slow")
        if slow and array.shape[1] == slow["width"]:
            time.sleep(slow["seconds"])
        sometimes = behaviour.get("sometimes")
        if sometimes and random.random() < sometimes["share"]:
            self.fail(sometimes["do"], allocate)

    def output(self, spec, array, allocate):
        mode = self.engine.behaviour.get("mode")
        if mode == "nonzero":
            found = np.stack(np.nonzero(array)).astype(np.int64)
            out = allocate(spec.name, found.dtype, found.shape)
            out[...] = found
            return out
        out = allocate(spec.name, array.dtype, array.shape)
        if mode == "inf":
            out[...] = np.inf
        elif array.dtype == np.object_:
            out[...] = array
        elif mode == "centred":
            out[...] = array - array.mean(axis=0, keepdims=True)
        elif array.dtype == np.bool_:
            np.logical_not(array, out=out)
        else:
            out[...] = array * array.dtype.type(self.engine.behaviour.get("factor", 1))
            if self.engine.drifted or self.engine.drifts():
                out += array.dtype.type(1)
        return out

    def fail(self, how, allocate):
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            time.sleep(3600)
        if how == "segv":
            signal.raise_signal(signal.SIGSEGV)  # of this thread: not one answer more
        if how == "abort":
            os.abort()
        if how == "exit":
            os._exit(70)
        if how == "sticky":
            raise Sticky("an illegal address")
        if how == "lost":
            raise DeviceLost("no device")
        if how == "invalid":
            raise InvalidInput("no such token")
        if how == "recoverable":
            raise Recoverable("Error Code 1: Cask (Cask convolution execution)")
        if how == "memory":
            raise OutOfMemory("no memory")
        if how == "crash":
            raise RuntimeError("a bug of the engine")
        if how == "break":
            self.broken = True
        if how == "drift":
            self.engine.drifted = True
        if how == "too-large":
            allocate(self.engine.outputs[0].name, np.dtype(np.float32), (1 << 40,))
        if how == "lie":
            from trtmodel_worker.host import lanes

            lanes.answer_message = lie(lanes.answer_message)
        return


class SimulatedEngine(TestEngine):
    """The same on a simulated GPU: see simulated_runtime."""

    def __init__(self, behaviour, gpu, engine):
        super().__init__(behaviour)
        self.gpu, self.device_engine = gpu, engine
        self.serve_from, self.pin, self.unpin = engine.serve_from, engine.pin, engine.unpin

    def create_lane(self):
        self.made += 1
        if self.made > self.behaviour.get("lanes", self.made):
            raise OutOfMemory("no memory for another lane")
        return SimulatedLane(self)


class SimulatedLane(TestLane):
    def __init__(self, engine):
        super().__init__(engine)
        self.device_lane = engine.device_engine.create_lane()

    def run(self, inputs, allocate):
        answer = self.before(inputs, allocate)
        return self.after(self.device_lane.run(inputs, allocate)) if answer is None else answer

    def bind(self, inputs, allocate):
        bound = self.device_lane.bind(inputs, allocate)
        if bound is not None and bound.is_warm:
            self.have_run([inputs[s.name] for s in self.engine.inputs])
        return None if bound is None else simulated.SimulatedBound(self, bound, inputs, allocate)

    def after(self, outputs):
        if self.engine.drifted or self.engine.drifts():
            simulated.drift(outputs)
        return outputs

    def fail(self, how, allocate):
        if how in simulated.DEVICE_FAULTS:
            self.engine.gpu.arm(how)
            return None
        return super().fail(how, allocate)


SICK = {
    "sticky": Sticky("an illegal memory access was encountered"),
    "lost": DeviceLost("unknown error of the device"),
    "mismatch": DeviceLost("driver/library version mismatch"),
}


def sicken(behaviour, where):
    sick = behaviour.get("sick", {})
    if where in sick and Path(sick["path"]).exists():
        raise SICK[sick[where]]


def lie(honest):
    def answer_message(generation, nanoseconds, outputs):
        return honest(generation, nanoseconds, ((offset + (1 << 30), shape) for offset, shape in outputs))

    return answer_message


if __name__ == "__main__":
    sys.exit("this is no program")
