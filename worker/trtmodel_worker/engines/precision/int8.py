"""INT8 by static calibration, as Q/DQ nodes that any runtime reads, with settings that keep answers.

Stock quantisation changes most answers of Magika, since it also quantises the arithmetic of its layer norm. Here only
Conv, MatMul and Gemm are: weights symmetric and per channel, the bias of a Gemm stays a float addition.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnxruntime.quantization import CalibrationMethod, QDQQuantizer, QuantType
from onnxruntime.quantization.calibrate import TensorsData
from trtmodel_contract.identity import EngineSettings
from trtmodel_contract.jobs import Reason

from trtmodel_worker.engines.building import CalibrationData, Rejected
from trtmodel_worker.engines.onnxruntime.graph import prepare
from trtmodel_worker.engines.precision import calibrate
from trtmodel_worker.engines.precision.keep import NamedNode, kept

QUANTIZED = ("Conv", "MatMul", "Gemm")
OPSET = 13  # the first whose QuantizeLinear works per channel


@dataclass(frozen=True)
class Style:
    """How a runtime wants it.

    `signed`: activations in INT8 about zero, as TensorRT demands, else in UINT8 with a zero point, as CPUs prefer.
    `outputs`: Q/DQ also after a node, and a quantised bias of Conv: ONNX Runtime makes its integer kernels of that
    pattern only; TensorRT fuses better without.
    `narrow_weights`: 7 bits, where 8-bit products saturate.
    """

    signed: bool
    outputs: bool
    narrow_weights: bool = False


TENSORRT = Style(signed=True, outputs=False)


class Int8Graph:
    """A Reduced graph whose ranges are known. Raises Rejected; reads all calibration data."""

    def __init__(
        self, source: Path, settings: EngineSettings, calibration: CalibrationData, style: Style, folder: Path
    ) -> None:
        self._style, self._calibration = style, calibration
        self.prepared = folder / "prepared.onnx"
        self._model = prepare(source, self.prepared, OPSET)
        before = [NamedNode(n.name, n.op_type) for n in onnx.load(source, load_external_data=False).graph.node]
        nodes = [NamedNode(n.name, n.op_type) for n in self._model.graph.node]
        self.kept = kept(settings.keep_precision, nodes, before)
        self.nodes = tuple(node.name for node in nodes if node.operator in QUANTIZED)
        if not set(self.nodes) - self.kept:
            raise _nothing()
        tensors = {
            name for node in self._model.graph.node if node.op_type in QUANTIZED for name in (*node.input, *node.output)
        }
        with tempfile.TemporaryDirectory(dir=folder) as directory:
            self._ranges = calibrate.ranges(
                self._model, tensors, calibration.batches, calibration.method, Path(directory)
            )

    def write(self, keep: Collection[str], target: Path) -> dict[str, str]:
        chosen = [name for name in self.nodes if name not in keep]
        if not chosen:
            raise _nothing()
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        options: dict[str, object] = {"WeightSymmetric": True, "ActivationSymmetric": self._style.signed}
        if not self._style.outputs:
            options |= {"QuantizeBias": False, "OpTypesToExcludeOutputQuantization": list(QUANTIZED)}
        quantizer = QDQQuantizer(
            model,
            per_channel=self._calibration.per_channel,
            reduce_range=self._style.narrow_weights,
            weight_qType=QuantType.QInt8,
            activation_qType=QuantType.QInt8 if self._style.signed else QuantType.QUInt8,
            tensors_range=_as_tensors_data(self._ranges),
            nodes_to_quantize=chosen,
            nodes_to_exclude=[],
            op_types_to_quantize=list(QUANTIZED),
            extra_options=options,
        )
        quantizer.quantize_model()
        quantizer.model.save_model_to_file(str(target), False)
        return {
            "calibrationMethod": self._calibration.method,
            "perChannel": str(self._calibration.per_channel).lower(),
            "quantizedNodes": f"{len(chosen)} of {len(self.nodes)}",
            "weightBits": "7" if self._style.narrow_weights else "8",
        }


def _as_tensors_data(ranges: dict[str, calibrate.Range]) -> TensorsData:
    return TensorsData(
        CalibrationMethod.MinMax,
        {name: (np.float32(found.low), np.float32(found.high)) for name, found in ranges.items()},
    )


def _nothing() -> Rejected:
    text = f"INT8 was asked for, but the graph has no {', '.join(QUANTIZED)} outside of keepPrecision"
    return Rejected(Reason.PRECISION_UNSUPPORTED, text)
