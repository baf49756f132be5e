"""Everything that a check looks at, in the process of a check: a file that crashes a parser takes only that down.

    bytes -> outline -> weights -> structure -> the runtime's own loader -> ONNX checker -> shapes -> what is wanted

Native libraries get the outline of the model (see `outline`), whose large weights are holes: what they think of a graph
does not depend on those, and a model of any size takes as much memory as its graph.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import onnx
from onnx import ModelProto, TensorProto, ValueInfoProto
from trtmodel_contract.codec import dumps, loads
from trtmodel_contract.gate import Task
from trtmodel_contract.identity import EngineSettings
from trtmodel_contract.jobs import Reason

from trtmodel_worker.builder import outline, profiles, sniff, structure, walk, weights
from trtmodel_worker.builder.findings import Report, error, warning
from trtmodel_worker.builder.process import telling_no_space
from trtmodel_worker.builder.wanted import Request, Wanted
from trtmodel_worker.engines import registry
from trtmodel_worker.engines.building import Builder, Finding, Graph, GraphTensor, Rejected, Severity
from trtmodel_worker.lifetime import end_with_parent
from trtmodel_worker.protobuf import Damaged

_QUANTIZERS = {"QuantizeLinear", "DequantizeLinear"}
_WORDS = 500  # of a library, at most
_DATATYPES = {
    TensorProto.FLOAT: "FP32",
    TensorProto.FLOAT16: "FP16",
    TensorProto.DOUBLE: "FP64",
    TensorProto.BOOL: "BOOL",
    **{getattr(TensorProto, f"{sign}INT{bits}"): f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)},
}


@runtime_checkable
class Limited(Protocol):
    """A Builder that cannot build every model of any size."""

    def most_weight_bytes(self, settings: EngineSettings, calibrated: bool) -> int: ...


def examine(request: Request) -> Report:
    """All findings, the most important ones first. Raises OSError."""
    source, what = Path(request.source), request.what
    hint = sniff.guess(source)
    if hint is not None:
        return Report((error(Reason.MODEL_INVALID, f"{what} is {hint}"),))
    try:
        read = outline.read(source)
    except Damaged as e:
        return Report((error(Reason.MODEL_INVALID, f"{what} is not ONNX, or was cut off: {e}"),))
    if structure.is_empty(read.model):
        return Report((error(Reason.MODEL_INVALID, f"{what} is not ONNX: it holds no graph"),))
    strange = structure.strange_names(read.model)
    if strange:
        return Report(tuple(replace(f, message=f"{what}: {f.message}") for f in strange))
    return _examine(read, request)


def _examine(read: outline.Outline, request: Request) -> Report:
    model, builder = read.model, registry.builder(request.runtime)
    found = structure.check(model)
    of_weights, total = weights.check(read, Path(request.source))
    found += of_weights
    if isinstance(builder, Limited) and request.wanted is not None:
        found += _check_size(total, builder, request.wanted)
    folder = Path(request.folder)
    path = folder / "outline.onnx"
    weights.write_holes(read, folder)
    path.write_bytes(model.SerializeToString())
    graph = None
    try:
        graph = builder.inspect(path)
        found += _impossible(graph)
    except Rejected as e:
        found += _unknown(e.findings, found)
    found += _check_standard(path, found, runs=graph is not None)
    found += _check_shapes(path, folder / "inferred.onnx", runs=graph is not None)
    quantized = any(node.op_type in _QUANTIZERS for node in walk.nodes(model))
    stated = graph or _as_stated(model)
    if request.wanted is not None:
        found += check_wanted(stated, quantized, builder, request.wanted)
    if not stated.inputs:
        found.append(error(Reason.MODEL_INVALID, "the model has no input: there is nothing to serve"))
    return Report(
        tuple(sorted(found, key=lambda f: f.severity.value)),  # errors first, otherwise as they were found
        graph,
        quantized,
        model.ir_version,
        tuple(f"{opset.domain or 'ai.onnx'} {opset.version}" for opset in model.opset_import),
        sum(1 for _ in walk.nodes(model)),
        total,
    )


def _check_size(total: int, builder: Limited, wanted: Wanted) -> Iterator[Finding]:
    most = builder.most_weight_bytes(wanted.engine, wanted.calibration_method is not None)
    if total > most:
        precision = wanted.engine.precision
        text = f"the weights take {total:,} bytes, {wanted.engine.runtime} makes {precision} of at most {most:,}"
        yield error(Reason.MODEL_INVALID, text, "use FP32, a smaller model, or TensorRT")


def check_wanted(graph: Graph, quantized: bool, builder: Builder, wanted: Wanted) -> list[Finding]:
    """Whether the graph can be built so, and verified so."""
    found = profiles.check(graph, wanted.engine.profiles)
    try:
        builder.require(wanted.engine, wanted.calibration_method, quantized)
    except Rejected as e:
        found += e.findings
    return found + list(_check_task(graph, wanted.task))


def _impossible(graph: Graph) -> Iterator[Finding]:
    for tensor in (*graph.inputs, *graph.outputs):
        if any(isinstance(d, int) and d < 0 for d in tensor.dims):
            text = f"{tensor.name!r} would be of shape {list(tensor.dims)}: no size is negative"
            yield error(Reason.MODEL_INVALID, text, "sizes, strides or dilations of its nodes contradict one another")


def _unknown(new: tuple[Finding, ...], known: list[Finding]) -> list[Finding]:
    """Without the runtime's raw words about faults of the file that were found before, and told better."""
    told = any(f.severity is Severity.ERROR for f in known)
    zipped = any(f.operator == "ZipMap" for f in known)
    return [f for f in new if (f.way_out or not told) and not (zipped and "seq(map(" in f.text)]


def _check_standard(path: Path, found: list[Finding], *, runs: bool) -> Iterator[Finding]:
    """By path: the checker cannot take more than 2 GB in memory. After the runtime, which words it better."""
    try:
        onnx.checker.check_model(str(path))
    except Exception as e:  # noqa: BLE001 - ValidationError, and RuntimeError or ValueError for what it did not foresee
        text = f"the ONNX checker refuses the model: {str(e).strip()[:_WORDS]}"
        if runs:
            yield warning(Reason.MODEL_INVALID, text, "other runtimes may refuse it, too")
        elif not any(f.severity is Severity.ERROR for f in found):
            yield error(Reason.MODEL_INVALID, text)


def _check_shapes(path: Path, inferred: Path, *, runs: bool) -> Iterator[Finding]:
    """What shape inference finds contradictory, where the runtime did not mind, and values that no memory holds."""
    try:
        onnx.shape_inference.infer_shapes_path(str(path), str(inferred), check_type=True, strict_mode=True)
    except Exception as e:  # noqa: BLE001 - of many kinds
        if runs:  # otherwise the runtime has told what is wrong
            text = f"shape inference fails: {str(e).strip()[:_WORDS]}"
            yield warning(Reason.MODEL_INVALID, text, "other runtimes may refuse the model")
        try:
            onnx.shape_inference.infer_shapes_path(str(path), str(inferred))
        except Exception:  # noqa: BLE001
            return
    yield from structure.sizes(onnx.load(inferred, load_external_data=False))


def _check_task(graph: Graph, task: Task) -> Iterator[Finding]:
    scores = [o for o in graph.outputs if len(o.dims) == 2 and o.dims[1] != 1 and o.datatype.startswith("FP")]
    if task is Task.CLASSIFICATION and not scores:
        shapes = ", ".join(f"{o.name!r} {o.datatype}{list(o.dims)}" for o in graph.outputs[:5])
        text = f"verify.task Classification needs an output [batch, classes] of scores, the model has {shapes}"
        yield error(Reason.MODEL_INVALID, text, "use Regression, Embedding or Raw")


def _as_stated(model: ModelProto) -> Graph:
    """Inputs and outputs as the file states them, for a graph that no runtime loads."""
    given = {w.name for w in model.graph.initializer}
    inputs = tuple(_tensor(value) for value in model.graph.input if value.name not in given)
    return Graph(inputs, tuple(_tensor(value) for value in model.graph.output))


def _tensor(value: ValueInfoProto) -> GraphTensor:
    kind = value.type.tensor_type
    dims = tuple(
        d.dim_value if d.WhichOneof("value") == "dim_value" and d.dim_value >= 0 else d.dim_param or "?"
        for d in kind.shape.dim
    )
    return GraphTensor(value.name, _DATATYPES.get(kind.elem_type, "?"), dims)


def _peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def main(arguments: list[str]) -> int:
    """``examine request.json report.json``."""
    request_path, report_path = arguments
    faulthandler.enable()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print there what nobody reads
    end_with_parent()
    report = examine(loads(Request, Path(request_path).read_bytes()))
    partial = Path(f"{report_path}.part")
    partial.write_bytes(dumps(replace(report, peak_bytes=_peak_bytes())))
    partial.replace(report_path)
    return 0


if __name__ == "__main__":
    with telling_no_space():
        sys.exit(main(sys.argv[1:]))
