"""How a precision is reached, which is the real difference between the versions.

    flags   8.6, 10    the builder may use kernels of that type where they are faster; layers can be told to stay FP32
    graph   any        casts and Q/DQ nodes are written into the ONNX file, and decide

    FP32    nothing is done; TF32 is off, since it keeps 10 bits of a number's 23
    FP16    flags, and the graph from 11
    INT8    the graph: the same nodes are quantised in every version (only Conv, MatMul and Gemm, as onnxruntime.int8
            does), the rest stays FP32. Where the parser of 8.6 or 10 does not take that graph: flags, and TensorRT's
            own calibrator

A source that carries Q/DQ nodes keeps them. Nothing is ever made narrower than was asked for.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx
from trtmodel_contract.identity import EngineSettings
from trtmodel_contract.jobs import Reason

from trtmodel_worker.engines.building import CalibrationData, Rejected
from trtmodel_worker.engines.onnxruntime.build import kept
from trtmodel_worker.engines.tensorrt.compat import Capabilities, IBuilderConfig, INetworkDefinition, Trt

PRECISIONS = ("FP32", "FP16", "INT8")
CALIBRATION_METHODS = ("Entropy", "MinMax")
_QUANTIZERS = {"QuantizeLinear", "DequantizeLinear"}


@dataclass(frozen=True)
class Plan:
    """`source`: the ONNX file to parse. `calibrate`: TensorRT finds the ranges. `keep`: nodes that stay FP32."""

    path: str
    source: Path
    flags: tuple[str, ...] = ()
    strongly_typed: bool = False
    calibrate: bool = False
    keep: tuple[str, ...] = ()
    done: Mapping[str, str] = field(default_factory=dict)


def require(version: str, settings: EngineSettings, calibration_method: str | None, *, quantized: bool) -> None:
    """Raises Rejected (PrecisionUnsupported) for what no version, or this one, is used for here."""
    wanted = settings.precision
    if wanted not in PRECISIONS:
        text = f"{wanted} is not built with TensorRT {version}: use {', '.join(PRECISIONS)}"
        raise Rejected(Reason.PRECISION_UNSUPPORTED, text)
    if wanted == "INT8" and calibration_method is None and not quantized:
        text = "INT8 needs spec.engine.calibration, or a graph that carries Q/DQ nodes: ranges are never guessed"
        raise Rejected(Reason.PRECISION_UNSUPPORTED, text)
    if wanted != "INT8" and quantized:
        text = f"the graph carries Q/DQ nodes, so it is no {wanted}: set precision INT8, or export it without them"
        raise Rejected(Reason.PRECISION_UNSUPPORTED, text)
    if calibration_method is not None and calibration_method not in CALIBRATION_METHODS:
        text = f"calibration method {calibration_method} does not exist: use {' or '.join(CALIBRATION_METHODS)}"
        raise Rejected(Reason.PRECISION_UNSUPPORTED, text)
    keep = settings.keep_precision
    if keep is not None and keep.precision != "FP32":
        text = f"keepPrecision {keep.precision} is not possible with TensorRT: nodes can be kept in FP32"
        raise Rejected(Reason.PRECISION_UNSUPPORTED, text)


def is_quantized(source: Path) -> bool:
    model = onnx.load(source, load_external_data=False)
    return any(node.op_type in _QUANTIZERS for node in model.graph.node)


def plan(
    caps: Capabilities, source: Path, settings: EngineSettings, calibration: CalibrationData | None, folder: Path
) -> Plan:
    """`folder`: for files that have to live until the parser has read them. Raises Rejected."""
    keep = kept(source, settings)
    if settings.precision == "INT8":
        return _int8(caps, source, keep, calibration, folder)
    if settings.precision == "FP16" and not caps.weak_types:
        target = folder / "fp16.onnx"
        return Plan("graph", target, strongly_typed=True, done=to_half(source, keep, target))
    if settings.precision == "FP16":
        return Plan("flags", source, ("FP16",), keep=keep, done={"keptNodes": str(len(keep))})
    return Plan("none", source, strongly_typed=not caps.weak_types)


def by_calibrator(source: Path, settings: EngineSettings) -> Plan:
    """INT8 by TensorRT's own means, for 8.6 and 10."""
    keep = kept(source, settings)
    return Plan("flags", source, ("INT8",), calibrate=True, keep=keep, done={"keptNodes": str(len(keep))})


def _int8(
    caps: Capabilities, source: Path, keep: tuple[str, ...], calibration: CalibrationData | None, folder: Path
) -> Plan:
    # A network of weak types takes Q/DQ nodes only if INT8 is allowed; one of strong types allows no flag.
    weak = caps.weak_types and not caps.strong_typing_by_flag
    flags = ("INT8",) if weak else ()
    if calibration is None:
        return Plan("graph", source, flags, strongly_typed=not weak, done={"quantizedNodes": "as in the source"})
    target = folder / "int8.onnx"
    from trtmodel_worker.engines.tensorrt import quantise  # its tools double what resolve would load

    done = quantise.to_int8(source, keep, calibration, target)
    return Plan("graph", target, flags, strongly_typed=not weak, done=done)


def to_half(source: Path, keep: Collection[str], target: Path) -> dict[str, str]:
    """Weights and values in half precision, casts around the nodes in `keep`; inputs and outputs stay as they are."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = onnx.load(source)
    before = len(model.graph.node)
    half = convert_float_to_float16(model, keep_io_types=True, op_block_list=[], node_block_list=sorted(keep))
    onnx.save(half, target)
    return {"keptNodes": str(len(keep)), "castsAdded": str(len(half.graph.node) - before)}


def set_flags(trt: Trt, caps: Capabilities, config: IBuilderConfig, flags: Collection[str]) -> None:
    config.clear_flag(trt.BuilderFlag.TF32)
    if caps.weak_types:
        if "FP16" in flags:
            config.set_flag(trt.BuilderFlag.FP16)
        if "INT8" in flags:
            config.set_flag(trt.BuilderFlag.INT8)


def keep_layers(
    trt: Trt, caps: Capabilities, config: IBuilderConfig, network: INetworkDefinition, keep: Collection[str]
) -> int:
    """Layers of the nodes in `keep` compute in FP32 and hand FP32 on. How many there are. Raises Rejected if a node has
    none: the parser merged it into another, and a guard that guards nothing is a mistake."""
    if not caps.weak_types or not keep:
        return 0
    # The parser names a node's first layer after it, further ones with a number behind.
    floating = (trt.DataType.FLOAT, trt.DataType.HALF)
    found: set[str] = set()
    count = 0
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        node = next((n for n in (layer.name, re.sub(r"_\d+$", "", layer.name)) if n in keep), None)
        if node is None:
            continue
        found.add(node)
        floats = [i for i in range(layer.num_outputs) if layer.get_output(i).dtype in floating]
        if not floats or layer.type == trt.LayerType.CONSTANT:
            continue
        layer.precision = trt.DataType.FLOAT
        for i in floats:
            layer.set_output_type(i, trt.DataType.FLOAT)
        count += 1
    lost = sorted(set(keep) - found)
    if lost:
        text = f"keepPrecision: TensorRT's parser made no layer of {', '.join(lost[:5])}"
        raise Rejected(Reason.PRECISION_UNSUPPORTED, f"{text}: name the nodes before and after, too, or leave them out")
    config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
    return count


def scratch(plan_file: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder for rewritten graphs, on the volume of the plan: they are as large as the model."""
    return tempfile.TemporaryDirectory(dir=plan_file.parent, prefix="graph-")
