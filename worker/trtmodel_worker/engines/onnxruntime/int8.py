"""How ONNX Runtime wants INT8: activations in UINT8, as it advises for CPUs, with Q/DQ on both sides of a node."""

from __future__ import annotations

from trtmodel_worker.engines.onnxruntime import machine
from trtmodel_worker.engines.precision.int8 import Style


def style() -> Style:
    _, level = machine.device_and_level()
    return Style(signed=False, outputs=True, narrow_weights=not machine.has_wide_int8(level))
