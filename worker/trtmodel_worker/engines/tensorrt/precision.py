"""How a precision is reached, which is the real difference between the versions.

    flags   8.6, 10    the builder may use kernels of that type where they are faster; layers can be told to stay FP32
    graph   any        casts and Q/DQ nodes are written into the ONNX file, and decide

    FP32    nothing is done; TF32 is off, since it keeps 10 bits of a number's 23
    FP16    flags, and the graph from 11
    BF16    the graph, from 10
    INT8    the graph: the same nodes are quantised in every version, the rest stays FP32. Where 8.6 or 10 does not take
            that graph, or has no kernel for a node of it: flags, and TensorRT's own calibrator

A source that carries Q/DQ nodes keeps them. Nothing is ever made narrower than was asked for.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx
from trtmodel_contract.identity import EngineSettings
from trtmodel_contract.jobs import Reason

from trtmodel_worker.engines.building import CalibrationData, Rejected
from trtmodel_worker.engines.precision.half import HalfGraph
from trtmodel_worker.engines.precision.keep import NamedNode, kept
from trtmodel_worker.engines.precision.reduced import Reduced
from trtmodel_worker.engines.tensorrt import compat
from trtmodel_worker.engines.tensorrt.compat import Capabilities, IBuilderConfig, INetworkDefinition, Trt

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
    keep: frozenset[str] = frozenset()
    done: Mapping[str, str] = field(default_factory=dict)


def require(version: str, settings: EngineSettings, calibration_method: str | None, *, quantized: bool) -> None:
    """Raises Rejected (PrecisionUnsupported) for what this version, or none, is used for here."""
    wanted = settings.precision
    has = ("FP32", "FP16", "INT8") if compat.parse(version) < (10,) else ("FP32", "FP16", "BF16", "INT8")
    if wanted not in has:
        newer = ", or an image with TensorRT 10 or newer" if wanted == "BF16" else ""
        raise _refused(f"{wanted} is not built with TensorRT {version}: use {', '.join(has)}{newer}")
    if wanted == "INT8" and calibration_method is None and not quantized:
        raise _refused(
            "INT8 needs spec.engine.calibration, or a graph that carries Q/DQ nodes: ranges are never guessed"
        )
    if wanted != "INT8" and quantized:
        text = f"the graph carries Q/DQ nodes, so it is no {wanted}"
        raise _refused(f"{text}: set precision INT8, or export it without them")
    if calibration_method is not None and calibration_method not in CALIBRATION_METHODS:
        text = f"calibration method {calibration_method} does not exist"
        raise _refused(f"{text}: use {' or '.join(CALIBRATION_METHODS)}")
    keep = settings.keep_precision
    if keep is not None and keep.precision != "FP32":
        raise _refused(f"keepPrecision {keep.precision} is not possible with TensorRT: nodes can be kept in FP32")


def is_quantized(source: Path) -> bool:
    return any(node.op_type in _QUANTIZERS for node in _load(source).graph.node)


def reduced(
    source: Path, settings: EngineSettings, calibration: CalibrationData | None, folder: Path
) -> Reduced | None:
    """The graph that can be written with less precision. None if these settings reduce nothing. Raises Rejected."""
    if settings.precision in ("FP16", "BF16"):
        return HalfGraph(source, settings, folder)
    if settings.precision == "INT8" and calibration is not None:
        # Its tools double what resolve would load.
        from trtmodel_worker.engines.precision.int8 import TENSORRT, Int8Graph

        return Int8Graph(source, settings, calibration, TENSORRT, folder)
    return None


def plan(
    caps: Capabilities, source: Path, settings: EngineSettings, calibration: CalibrationData | None, folder: Path
) -> Plan:
    """`folder`: for files that have to live until the parser has read them. Raises Rejected."""
    if settings.precision == "FP16" and caps.weak_types:
        return _flags(source, settings, ("FP16",))
    # A network of weak types takes Q/DQ nodes only if INT8 is allowed; one of strong types allows no flag.
    strongly_typed = caps.strong_typing_by_flag or not caps.weak_types
    flags = ("INT8",) if settings.precision == "INT8" and not strongly_typed else ()
    graph = reduced(source, settings, calibration, folder)
    if graph is not None:
        target = folder / "reduced.onnx"
        return Plan("graph", target, flags, strongly_typed, done=graph.write(graph.kept, target))
    if settings.precision == "INT8":
        return Plan("graph", source, flags, strongly_typed, done={"quantizedNodes": "as in the source"})
    return Plan("none", source, strongly_typed=strongly_typed)


def by_calibrator(source: Path, settings: EngineSettings) -> Plan:
    """INT8 by TensorRT's own means, for 8.6 and 10."""
    return dataclasses.replace(_flags(source, settings, ("INT8",)), calibrate=True)


def _flags(source: Path, settings: EngineSettings, flags: tuple[str, ...]) -> Plan:
    keep = kept(settings.keep_precision, (NamedNode(n.name, n.op_type) for n in _load(source).graph.node))
    return Plan("flags", source, flags, keep=keep, done={"keptNodes": str(len(keep))})


def set_flags(trt: Trt, caps: Capabilities, config: IBuilderConfig, flags: Collection[str]) -> None:
    config.clear_flag(trt.BuilderFlag.TF32)
    if caps.weak_types:
        if "FP16" in flags:
            config.set_flag(trt.BuilderFlag.FP16)
        if "INT8" in flags:
            config.set_flag(trt.BuilderFlag.INT8)


def keep_layers(
    trt: Trt, caps: Capabilities, config: IBuilderConfig, network: INetworkDefinition, keep: frozenset[str]
) -> int:
    """Layers of the nodes in `keep` compute in FP32 and hand FP32 on. How many there are. Raises Rejected if there are
    none, since a guard that guards nothing is a mistake: the parser may have merged them into others."""
    if not caps.weak_types or not keep:
        return 0
    # The parser names a node's first layer after it, further ones with a number behind.
    floating = (trt.DataType.FLOAT, trt.DataType.HALF)
    count = 0
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if not keep & {layer.name, re.sub(r"_\d+$", "", layer.name)}:
            continue
        floats = [i for i in range(layer.num_outputs) if layer.get_output(i).dtype in floating]
        if not floats or layer.type == trt.LayerType.CONSTANT:
            continue
        layer.precision = trt.DataType.FLOAT
        for i in floats:
            layer.set_output_type(i, trt.DataType.FLOAT)
        count += 1
    if count == 0:
        shown = ", ".join(sorted(keep)[:5])
        text = f"keepPrecision: TensorRT's parser made no layer that computes with floats of {shown}"
        raise _refused(f"{text}: name the nodes before and after them, too, or leave them out")
    config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
    return count


def scratch(plan_file: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder for rewritten graphs, on the volume of the plan: they are as large as the model."""
    return tempfile.TemporaryDirectory(dir=plan_file.parent, prefix="graph-")


def _load(source: Path) -> onnx.ModelProto:
    return onnx.load(source, load_external_data=False)


def _refused(text: str) -> Rejected:
    return Rejected(Reason.PRECISION_UNSUPPORTED, text)
