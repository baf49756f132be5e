"""ONNX file -> plan: precision written into the graph, then optimised for this machine by ONNX Runtime and saved.

FP32   optimise
FP16   round to half (see precision.rounded) -> optimise
INT8   fold -> calibrate -> Q/DQ around Conv, MatMul, Gemm -> optimise; a graph with Q/DQ is taken as it is
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import onnxruntime as ort
from trtmodel_contract.identity import EngineSettings
from trtmodel_contract.jobs import Reason

from trtmodel_worker.engines.building import CalibrationData, Graph, Rejected
from trtmodel_worker.engines.onnxruntime import inspect
from trtmodel_worker.engines.onnxruntime.graph import optimise, optimise_apart
from trtmodel_worker.engines.precision.reduced import Reduced
from trtmodel_worker.engines.precision.rounded import RoundedGraph
from trtmodel_worker.storage.external import size_of_model

PRECISIONS = ("FP32", "FP16", "INT8")
CALIBRATION_METHODS = ("Entropy", "MinMax")
REWRITTEN_MOST = 2_000_000_000  # bytes of weights
APART_FROM = 64 << 20  # bytes of a model: from there on it pays that weights are used where they lie
_LEVELS = (
    ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
)


class OnnxBuilder:
    """The Builder of the ONNX Runtime engine."""

    def most_weight_bytes(self, settings: EngineSettings, calibrated: bool) -> int:
        """See examine.Limited. A precision is written into the graph as one protobuf message, which ends at 2 GiB."""
        rewritten = settings.precision == "FP16" or (settings.precision == "INT8" and calibrated)
        return REWRITTEN_MOST if rewritten else sys.maxsize

    def inspect(self, source: Path) -> Graph:
        return inspect.inspect(source)

    def require(self, settings: EngineSettings, calibration_method: str | None, quantized: bool) -> None:
        wanted = settings.precision
        if wanted not in PRECISIONS:
            text = f"ONNX Runtime on a CPU has no {wanted}: use {', '.join(PRECISIONS)}"
            raise Rejected(Reason.PRECISION_UNSUPPORTED, text)
        if wanted == "INT8" and calibration_method is None and not quantized:
            text = "INT8 needs spec.engine.calibration, or a graph that carries Q/DQ nodes: ranges are never guessed"
            raise Rejected(Reason.PRECISION_UNSUPPORTED, text)
        if calibration_method is not None and calibration_method not in CALIBRATION_METHODS:
            text = f"calibration method {calibration_method} does not exist: use {' or '.join(CALIBRATION_METHODS)}"
            raise Rejected(Reason.PRECISION_UNSUPPORTED, text)
        keep = settings.keep_precision
        if keep is not None and keep.precision != "FP32":
            text = f"keepPrecision {keep.precision} is not possible with ONNX Runtime: nodes can be kept in FP32"
            raise Rejected(Reason.PRECISION_UNSUPPORTED, text)

    def build(
        self, source: Path, settings: EngineSettings, calibration: CalibrationData | None, plan: Path
    ) -> Mapping[str, str]:
        done = {"precision": settings.precision, "runtime": "ONNXRuntime"}
        with tempfile.TemporaryDirectory(dir=plan.parent) as directory:
            ready = source
            graph = self.reduced(source, settings, calibration, Path(directory))
            if graph is not None:
                ready = Path(directory) / "reduced.onnx"
                done |= graph.write(graph.kept, ready)
            level = _LEVELS[3 if settings.optimization_level is None else min(3, settings.optimization_level)]
            if size_of_model(ready) >= APART_FROM:
                optimise_apart(ready, plan, level)
            else:
                optimise(ready, plan, level)
        return done | {"graphOptimizationLevel": level.name}

    def reduced(
        self, source: Path, settings: EngineSettings, calibration: CalibrationData | None, folder: Path
    ) -> Reduced | None:
        """See ReducingBuilder."""
        if settings.precision == "FP16":
            return RoundedGraph(source, settings, folder)
        if settings.precision == "INT8" and calibration is not None:
            # Its tools double what resolve would load.
            from trtmodel_worker.engines.onnxruntime import int8
            from trtmodel_worker.engines.precision.int8 import Int8Graph

            return Int8Graph(source, settings, calibration, int8.style(), folder)
        return None
