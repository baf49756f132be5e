"""What the model is, as the protocol and Triton's model configuration extension say it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trtmodel_contract.control import EngineState
from trtmodel_contract.manifest import TensorSpec

from trtmodel_worker.front.engine import Engine
from trtmodel_worker.front.router import Table

_PLATFORMS = {"ONNXRuntime": "onnxruntime_onnx", "TensorRT": "tensorrt_plan"}
_CONFIG_TYPES = {"BYTES": "TYPE_STRING"}  # the others are called as in the protocol
Document = dict[str, Any]


def metadata(model: str, runtime: str, engine: Engine, revisions: Sequence[str]) -> Document:
    return {
        "name": model,
        "versions": list(revisions),
        "platform": platform(runtime),
        "inputs": [_tensor(s) for s in engine.manifest.inputs],
        "outputs": [_tensor(s) for s in engine.manifest.outputs],
    }


def trial(table: Table | None) -> bytes:
    """A header line about the candidate beside the stable revision: the share of requests that it answers, and of
    those that it mirrors, in percent. Empty where none is on trial."""
    if table is None or table.candidate is None or table.candidate is table.stable:
        return b""
    revision = table.candidate.revision
    return f"x-trtmodel-candidate: {revision}; weight={table.weight}; shadow={table.shadow}\r\n".encode()


def config(model: str, runtime: str, engine: Engine) -> Document:
    """With a `max_batch_size` other than 0, `dims` leave out the batch, as Triton's do."""
    manifest = engine.manifest
    rows = engine.admission.most_rows
    return {
        "name": model,
        "platform": platform(runtime),
        "backend": platform(runtime).partition("_")[0],
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": rows,
        "input": [_config_tensor(s, rows > 0) for s in manifest.inputs],
        "output": [_config_tensor(s, rows > 0) for s in manifest.outputs],
        "model_transaction_policy": {"decoupled": False},
    }


def index(model: str, engines: Sequence[Engine]) -> list[Document]:
    """Of the model repository extension: each revision, and whether it can answer."""
    found: dict[str, Document] = {}
    for engine in engines:
        ready = engine.alive and engine.state is not EngineState.FAILED
        known = found.get(engine.revision)
        if known is None or (ready and known["state"] != "READY"):
            reason = "" if ready else engine.message
            state = "READY" if ready else "UNAVAILABLE"
            found[engine.revision] = {"name": model, "version": engine.revision, "state": state, "reason": reason}
    return list(found.values())


def platform(runtime: str) -> str:
    return _PLATFORMS.get(runtime, runtime.lower())


def _tensor(spec: TensorSpec) -> Document:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}


def _config_tensor(spec: TensorSpec, batched: bool) -> Document:
    data_type = _CONFIG_TYPES.get(spec.datatype, f"TYPE_{spec.datatype}")
    return {"name": spec.name, "data_type": data_type, "dims": list(spec.shape[1:] if batched else spec.shape)}
