"""INT8 by static calibration, with ONNX Runtime's own tools and settings that keep answers.

Stock quantisation changes most answers of Magika, since it also quantises the arithmetic of its layer norm. Here
only Conv, MatMul and Gemm are: weights per channel and symmetric in INT8, activations in UINT8 (what ONNX Runtime
advises for CPUs), the bias of a Gemm stays a float addition.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from onnxruntime.quantization import CalibrationMethod, QDQQuantizer, QuantType
from onnxruntime.quantization.calibrate import CalibrationDataReader, create_calibrator
from trtmodel_contract.jobs import Reason

from trtmodel_worker.engines.base import Array
from trtmodel_worker.engines.building import CalibrationData, Rejected
from trtmodel_worker.engines.onnxruntime import machine
from trtmodel_worker.engines.onnxruntime.graph import prepare

_METHODS = {"Entropy": CalibrationMethod.Entropy, "MinMax": CalibrationMethod.MinMax}
QUANTIZED = ("Conv", "MatMul", "Gemm")
OPSET = 13  # the first whose QuantizeLinear works per channel


def to_int8(source: Path, keep: Collection[str], calibration: CalibrationData, target: Path) -> dict[str, str]:
    """Q/DQ around the nodes that pay. Raises Rejected if there are none."""
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        prepared = Path(directory) / "prepared.onnx"
        model = prepare(source, prepared, OPSET)
        nodes = [node for node in model.graph.node if node.op_type in QUANTIZED]
        chosen = [node.name for node in nodes if node.name not in keep]
        if not chosen:
            text = f"INT8 was asked for, but the graph has no {', '.join(QUANTIZED)} outside of keepPrecision"
            raise Rejected(Reason.PRECISION_UNSUPPORTED, text)
        ranges = calibrate(prepared, calibration, Path(directory) / "augmented.onnx")
    _, level = machine.device_and_level()
    narrow = not machine.has_wide_int8(level)
    quantizer = QDQQuantizer(
        model,
        per_channel=calibration.per_channel,
        reduce_range=narrow,
        weight_qType=QuantType.QInt8,
        activation_qType=QuantType.QUInt8,
        tensors_range=ranges,
        nodes_to_quantize=chosen,
        nodes_to_exclude=[],
        op_types_to_quantize=list(QUANTIZED),
        extra_options={"WeightSymmetric": True},
    )
    quantizer.quantize_model()
    quantizer.model.save_model_to_file(str(target), False)
    return {
        "calibrationMethod": calibration.method,
        "perChannel": str(calibration.per_channel).lower(),
        "quantizedNodes": f"{len(chosen)} of {len(nodes)}",
        "weightBits": "7" if narrow else "8",
    }


def calibrate(model: Path, calibration: CalibrationData, augmented: Path) -> Any:
    """Ranges of the activations. Batch by batch: collecting all of them first took 1.9 GB for 200 samples."""
    calibrator = create_calibrator(
        model, list(QUANTIZED), str(augmented), calibrate_method=_METHODS[calibration.method]
    )
    empty = True
    for batch in calibration.batches:
        calibrator.collect_data(_One(batch))
        empty = False
    if empty:
        raise Rejected(Reason.DATASET_INVALID, "the calibration data set is empty: ranges are never guessed")
    return calibrator.compute_data()


class _One(CalibrationDataReader):  # type: ignore[misc]
    """A single batch, in the form that the calibrator wants."""

    def __init__(self, batch: Mapping[str, Array]) -> None:
        self._batches: Iterable[Any] = iter((dict(batch),))

    def get_next(self) -> Any:
        return next(iter(self._batches), None)
