"""INT8 written into the graph, as TensorRT takes it.

Activations are INT8 and symmetric, weights per channel and symmetric, and biases stay float: the parser of 8.6 refuses
INT32 ("only activation types allowed"). As on the CPU only Conv, MatMul and Gemm are quantised (see onnxruntime.int8).
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from pathlib import Path

from onnxruntime.quantization import QDQQuantizer, QuantType
from trtmodel_contract.jobs import Reason

from trtmodel_worker.engines.building import CalibrationData, Rejected
from trtmodel_worker.engines.onnxruntime.graph import prepare
from trtmodel_worker.engines.onnxruntime.int8 import OPSET, QUANTIZED, calibrate


def to_int8(source: Path, keep: Collection[str], calibration: CalibrationData, target: Path) -> dict[str, str]:
    """Raises Rejected if there is nothing to quantise, or no data."""
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        prepared = Path(directory) / "prepared.onnx"
        model = prepare(source, prepared, OPSET)
        nodes = [node for node in model.graph.node if node.op_type in QUANTIZED]
        chosen = [node.name for node in nodes if node.name not in keep]
        if not chosen:
            text = f"INT8 was asked for, but the graph has no {', '.join(QUANTIZED)} outside of keepPrecision"
            raise Rejected(Reason.PRECISION_UNSUPPORTED, text)
        ranges = calibrate(prepared, calibration, Path(directory) / "augmented.onnx")
    quantizer = QDQQuantizer(
        model,
        per_channel=calibration.per_channel,
        reduce_range=False,
        weight_qType=QuantType.QInt8,
        activation_qType=QuantType.QInt8,
        tensors_range=ranges,
        nodes_to_quantize=chosen,
        nodes_to_exclude=[],
        op_types_to_quantize=list(QUANTIZED),
        extra_options={"WeightSymmetric": True, "ActivationSymmetric": True, "QuantizeBias": False},
    )
    quantizer.quantize_model()
    quantizer.model.save_model_to_file(str(target), False)
    return {
        "calibrationMethod": calibration.method,
        "perChannel": str(calibration.per_channel).lower(),
        "quantizedNodes": f"{len(chosen)} of {len(nodes)}",
    }
