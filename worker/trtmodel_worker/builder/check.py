"""Is the source a model that the runtime can run, as the settings want it? The cheap questions come first, and every
answer names the cause and the way out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from trtmodel_contract.gate import Task
from trtmodel_contract.identity import EngineSettings
from trtmodel_contract.jobs import Reason

from trtmodel_worker.builder import profiles, sniff
from trtmodel_worker.engines.building import Builder, Graph, Rejected

_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE}
_QUANTIZERS = {"QuantizeLinear", "DequantizeLinear"}


def check(
    source: Path, what: str, builder: Builder, settings: EngineSettings, task: Task, calibration_method: str | None
) -> Graph:
    """The graph of a model that can be built. `what` names the file in messages: URI, size and digest. Raises
    Rejected."""
    graph, quantized = graph_of(source, what, builder)
    require(graph, quantized, builder, settings, task, calibration_method)
    return graph


def graph_of(source: Path, what: str, builder: Builder) -> tuple[Graph, bool]:
    """The graph of a model that the runtime can run, whatever is wanted of it, and whether it is quantized already.
    Raises Rejected."""
    try:
        model = _parse(source, what)
        quantized = any(node.op_type in _QUANTIZERS for node in model.graph.node)
        _refuse_external_data(model)
        _refuse_nan(model)
        del model  # weights in memory twice would double what this Job needs
        graph = builder.inspect(source)
        _check_structure(source)
    except ValueError as e:  # weights of another size than their shape says, names that are no UTF-8
        raise Rejected(Reason.MODEL_INVALID, f"{what} is damaged: {e}") from e
    return graph, quantized


def require(
    graph: Graph, quantized: bool, builder: Builder, settings: EngineSettings, task: Task, method: str | None
) -> None:
    """The graph can be built with these settings and calibration method, and verified as `task`. Raises Rejected."""
    profiles.check(graph, settings.profiles)
    builder.require(settings, method, quantized)
    _check_task(graph, task)


def _parse(source: Path, what: str) -> onnx.ModelProto:
    hint = sniff.guess(source)
    if hint is not None:
        raise Rejected(Reason.MODEL_INVALID, f"{what} is {hint}")
    try:
        model = onnx.load(source, load_external_data=False)
    except Exception as e:
        raise Rejected(Reason.MODEL_INVALID, f"{what} is not ONNX, or was cut off: {e}") from e
    if not model.graph.node and not model.graph.output:
        raise Rejected(Reason.MODEL_INVALID, f"{what} is not ONNX: it holds no graph")
    return model


def _refuse_external_data(model: onnx.ModelProto) -> None:
    outside = [t.name for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    if outside:
        text = f"{len(outside)} weights, such as {outside[0]!r}, are in other files (external data)"
        raise Rejected(Reason.MODEL_INVALID, f"{text}: not supported yet, save the model as one file")


def _refuse_nan(model: onnx.ModelProto) -> None:
    for weight in model.graph.initializer:
        if weight.data_type in _FLOATS and np.isnan(numpy_helper.to_array(weight)).any():
            text = f"weight {weight.name!r} holds NaN: the training diverged or the export went wrong"
            raise Rejected(Reason.MODEL_INVALID, text)


def _check_structure(source: Path) -> None:
    """By path: the checker cannot take more than 2 GB in memory. After the runtime, which words it better."""
    try:
        onnx.checker.check_model(str(source))
    except onnx.checker.ValidationError as e:
        raise Rejected(Reason.MODEL_INVALID, f"the ONNX checker refuses the model: {str(e).strip()[:500]}") from e


def _check_task(graph: Graph, task: Task) -> None:
    if not graph.inputs:
        raise Rejected(Reason.MODEL_INVALID, "the model has no input: there is nothing to serve")
    scores = [o for o in graph.outputs if len(o.dims) == 2 and o.dims[1] != 1 and o.datatype.startswith("FP")]
    if task is Task.CLASSIFICATION and not scores:
        shapes = ", ".join(f"{o.name!r} {o.datatype}{list(o.dims)}" for o in graph.outputs[:5])
        text = f"verify.task Classification needs an output [batch, classes] of scores, the model has {shapes}"
        raise Rejected(Reason.MODEL_INVALID, f"{text}: use Regression, Embedding or Raw")
