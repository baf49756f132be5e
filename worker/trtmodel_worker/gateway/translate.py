"""ModelInfer as a request of the HTTP protocol with binary tensors, and its answer back.

Contents that come typed are made raw here; outputs are always raw. The request's id stays here and is put into the
answer, and a time limit is rounded: the front knows the JSON part of like requests by heart, and so does this module.
"""

from __future__ import annotations

import functools
import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import grpc

from trtmodel_worker.gateway import inference_pb2 as pb
from trtmodel_worker.gateway.client import Answer
from trtmodel_worker.gateway.failure import Failure

LENGTH = b"inference-header-content-length"
_OURS = ("binary_data", "binary_data_size", "binary_data_output")  # say how the HTTP body is laid out
_CACHED_BYTES = 4096
_MOST_NAME = 1024
# Field of InferTensorContents and type code of its elements' binary form.
_TYPED = {
    "UINT8": ("uint_contents", "B"), "UINT16": ("uint_contents", "H"), "UINT32": ("uint_contents", "I"),
    "UINT64": ("uint64_contents", "Q"), "INT8": ("int_contents", "b"), "INT16": ("int_contents", "h"),
    "INT32": ("int_contents", "i"), "INT64": ("int64_contents", "q"), "FP32": ("fp32_contents", "f"),
    "FP64": ("fp64_contents", "d"),
}  # fmt: skip


@functools.lru_cache(maxsize=64)
def model_target(model: str, version: str, action: str) -> bytes:
    """``/v2/models/m/versions/1/infer``; `action` '' for the model itself. Raises Failure."""
    if not model:
        raise invalid("the request names no model")
    if len(model) + len(version) > _MOST_NAME:
        raise Failure(grpc.StatusCode.NOT_FOUND, "the request's model_name or model_version is no name of a model")
    parts = ["/v2/models", quote(model, safe="")]
    if version:
        parts += ["versions", quote(version, safe="")]
    return "/".join((*parts, action) if action else parts).encode()


def infer_body(message: pb.ModelInferRequest, seconds: float | None) -> tuple[bytes, list[bytes]]:
    """(header line, parts of the body). `seconds`: when the caller gives up. Takes the raw contents out of `message`.
    Raises Failure."""
    limit = None if seconds is None else _coarse(int(seconds * 1e6))
    blobs = list(message.raw_input_contents)
    if blobs:
        message.ClearField("raw_input_contents")
        request_id, message.id = message.id, ""
        rest = message.SerializeToString()
        message.id = request_id
        known = _known_raw_head if len(rest) <= _CACHED_BYTES else _raw_head
        head = known(rest, tuple(map(len, blobs)), limit)
    else:
        inputs, blobs = _inputs(message, ())
        head = _head(message, inputs, limit)
    return b"%b: %d\r\n" % (LENGTH, len(head)), [head, *blobs]


def _raw_head(rest: bytes, sizes: tuple[int, ...], limit: int | None) -> bytes:
    """The JSON part of a message: `rest` is what it has beside its id and raw contents, which are of these `sizes`."""
    message = pb.ModelInferRequest.FromString(rest)
    return _head(message, _inputs(message, sizes)[0], limit)


_known_raw_head = functools.lru_cache(maxsize=256)(_raw_head)


def _head(message: pb.ModelInferRequest, inputs: list[dict[str, Any]], limit: int | None) -> bytes:
    """The JSON part. `limit`: microseconds that the caller waits. Raises Failure."""
    document: dict[str, Any] = {"inputs": inputs}
    parameters = document["parameters"] = _plain(message.parameters)
    parameters["binary_data_output"] = True
    if limit is not None:
        given = parameters.get("timeout")
        if given is None or (type(given) is int and given > limit):
            parameters["timeout"] = limit
    if message.outputs:
        document["outputs"] = [
            {"name": o.name, "parameters": _plain(o.parameters)} if o.parameters else {"name": o.name}
            for o in message.outputs
        ]
    try:
        return _ENCODER.encode(document).encode()
    except ValueError as e:
        raise invalid(f"a parameter is not a finite number: {e}") from e


def infer_response(answer: Answer, request_id: str) -> bytes:
    """The answer as a ModelInferResponse on the wire: serialized messages in a row are one merged message."""
    body = answer.body
    length = int(answer.headers.get(LENGTH, len(body)))
    prefix, outputs = (_known_head if length <= _CACHED_BYTES else _read_head)(body[:length])
    parts: list[bytes | memoryview] = [prefix]
    if request_id:
        parts.append(pb.ModelInferResponse(id=request_id).SerializeToString())
    view, at = memoryview(body), length
    for size, before in outputs:
        parts += before, view[at : at + size]
        at += size
    return b"".join(parts)


def invalid(text: str) -> Failure:
    return Failure(grpc.StatusCode.INVALID_ARGUMENT, text)


def _inputs(message: pb.ModelInferRequest, raw: Sequence[int]) -> tuple[list[dict[str, Any]], list[bytes]]:
    """What the JSON part says of them, and the bytes of those that are typed. `raw`: sizes of the raw contents."""
    inputs, blobs, taken = [], [], 0
    for tensor in message.inputs:
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        parameters = _plain(tensor.parameters) if tensor.parameters else {}
        if "shared_memory_region" not in parameters:
            if raw and tensor.HasField("contents"):
                raise invalid(f"input {tensor.name!r} has contents although the request has raw_input_contents")
            if raw and taken == len(raw):
                raise invalid(f"the request has {len(raw)} raw_input_contents, too few: none is left for input "
                              f"{tensor.name!r}")  # fmt: skip
            if not raw:
                blobs.append(_binary(tensor))
            parameters["binary_data_size"] = raw[taken] if raw else len(blobs[-1])
            taken += 1
        if parameters:
            entry["parameters"] = parameters
        inputs.append(entry)
    if raw and taken != len(raw):
        raise invalid(f"the request has {len(raw)} raw_input_contents for {taken} inputs that need one")
    return inputs, blobs


def _binary(tensor: Any) -> bytes:
    """Typed contents as the bytes that they stand for."""
    contents, datatype = tensor.contents, tensor.datatype
    if datatype == "BOOL":
        return bytes(contents.bool_contents)
    if datatype == "BYTES":
        return b"".join(len(item).to_bytes(4, "little") + item for item in contents.bytes_contents)
    if datatype not in _TYPED:
        raise invalid(f"input {tensor.name!r} has datatype {datatype!r}, which has no typed contents: send it as "
                      "raw_input_contents")  # fmt: skip
    field, code = _TYPED[datatype]
    try:
        values = array(code, getattr(contents, field))
    except OverflowError as e:
        raise invalid(f"input {tensor.name!r}: contents hold a value outside the range of {datatype}") from e
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _plain(parameters: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    found = {}
    for name, value in parameters.items():
        kind = value.WhichOneof("parameter_choice")
        if kind is not None and name not in _OURS:
            found[name] = getattr(value, kind)
    return found


def _read_head(head: bytes) -> tuple[bytes, tuple[tuple[int, bytes], ...]]:
    """(what every answer with this JSON part begins with, of each raw output its size and what comes before it)."""
    document = json.loads(head)
    response = pb.ModelInferResponse(model_name=document["model_name"], model_version=document["model_version"])
    _fill(response.parameters, document.get("parameters", {}))
    outputs = []
    for output in document["outputs"]:
        parameters = dict(output.get("parameters", {}))
        size = parameters.pop("binary_data_size", 0)
        alone = pb.ModelInferResponse(raw_output_contents=[bytes(size)]).SerializeToString()
        outputs.append((size, alone[: len(alone) - size]))
        tensor = response.outputs.add(name=output["name"], datatype=output["datatype"], shape=output["shape"])
        _fill(tensor.parameters, parameters)
    return response.SerializeToString(), tuple(outputs)


_known_head = functools.lru_cache(maxsize=64)(_read_head)


def _fill(target: Any, parameters: Mapping[str, Any]) -> None:
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    for name, value in parameters.items():
        kind = kinds.get(type(value))
        if kind is not None:
            setattr(target[name], kind, value)


def _coarse(microseconds: int) -> int:
    """At least one, rounded up by at most a sixteenth."""
    step = 1 << max(0, microseconds.bit_length() - 5)
    return max(1, -(-microseconds // step) * step)


_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False, allow_nan=False, ensure_ascii=False)
