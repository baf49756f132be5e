"""A simulated GPU in the test's own process, and engines on it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from trtmodel_contract.identity import Profile, ShapeRange
from trtmodel_worker.engines.tensorrt.runtime import TensorRtRuntime

sys.path.append(str(Path(__file__).parents[1] / "plugin" / "simulated"))

import simulated_tensorrt
from simulated_gpu import Gpu
from simulated_runtime import installed

OLD, NEW = "8.6.0", "10.16.1.11"
X, Y = ["x", "FP32", [-1, 4]], ["y", "FP32", [-1, 4]]


class World:
    """One GPU, seen through the modules that are put in place for it."""

    def __init__(self, monkeypatch, version=NEW, **properties):
        self.gpu = Gpu(version=version, **properties)
        for name, module in installed(self.gpu).items():
            monkeypatch.setitem(sys.modules, name, module)

    def record_inputs(self, monkeypatch):
        """What each run from now on computes with."""
        found, compute = [], simulated_tensorrt.compute

        def recorded(behaviour, array, shape):
            found.append(array.tolist())
            return compute(behaviour, array, shape)

        monkeypatch.setattr(simulated_tensorrt, "compute", recorded)
        return found

    def plan(self, rows=((1, 8),), **behaviour):
        """`rows`: least and greatest number of each profile."""
        profiles = [{"x": [[low, 4], [low, 4], [high, 4]]} for low, high in rows]
        return json.dumps({"factor": 2, "inputs": [X], "outputs": [Y], "profiles": profiles, **behaviour}).encode()

    def load(self, lanes=1, rows=((1, 8),), **behaviour):
        profiles = tuple(Profile({"x": ShapeRange((low, 4), (low, 4), (high, 4))}) for low, high in rows)
        return TensorRtRuntime().load(memoryview(self.plan(rows, **behaviour)), profiles, lanes)


def row_of(value, rows=1):
    return {"x": np.full((rows, 4), value, np.float32)}
