"""Whose fault is it that an engine fails? If the model itself fails on the same rows, no retry cures it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import onnxruntime as ort

from trtmodel_worker.engines.base import Array, OutOfMemory
from trtmodel_worker.engines.onnxruntime import faults
from trtmodel_worker.engines.onnxruntime.machine import cpu_quota
from trtmodel_worker.engines.onnxruntime.run import classify, session_options


class Rows(Protocol):
    """A data set, as far as it is needed here."""

    def head(self, rows: int) -> Mapping[str, Array]: ...


def model_fails(source: Path, data: Rows, batch_sizes: Sequence[int]) -> str:
    """What ONNX Runtime says to the model as the user gave it, on the first rows in one of these batch sizes; '' if it
    runs, or if only memory is lacking, which another machine may have."""
    options = session_options(cpu_quota(), ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    try:
        session = ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
        for rows in batch_sizes:
            session.run(None, dict(data.head(rows)))
    except Exception as e:  # noqa: BLE001 - of every kind that it has
        return "" if isinstance(classify(e), OutOfMemory) else faults.words(str(e))
    return ""
