"""The OpenAPI 3.1 document of the HTTP port: what is at which path, and every status it answers with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Document = dict[str, Any]
_JSON = "application/json"
_BINARY = "application/octet-stream"
_DATATYPES = (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES",
)  # fmt: skip
_ALWAYS = ("400", "405", "408", "413", "431", "503")  # any request: no HTTP, wrong method, slow, large, no room
_WHY = {
    "400": "The request is wrong; the text says how",
    "404": "No such path, model, revision, or no shared memory here",
    "405": "Another method is used at this path: see Allow",
    "408": "The request came too slowly",
    "413": "The body is too large",
    "415": "The body is of another type, or compressed in another way, than is understood",
    "431": "The request's head is too large",
    "500": "The engine failed, or its output has no JSON form",
    "503": "Not now: see Retry-After",
}


def openapi(version: str, model: str, revisions: Sequence[str], shared_memory: bool) -> Document:
    """`revisions`: those that can be named now. `shared_memory`: its paths are there."""
    paths: Document = {
        "/v2": {"get": _read("What the server is and can do", _ref("ServerMetadata"))},
        "/v2/health/live": {"get": _read("Is the server alive?", _flag("live"))},
        "/v2/health/ready": {"get": _read("Does it want requests?", _flag("ready"), refusal=_flag("ready"))},
        "/v2/models/stats": {"get": _read("Statistics of all revisions", _ref("Statistics"))},
        "/v2/repository/index": {"post": _post("All revisions, and whether they can answer", _ref("Index"))},
        "/openapi.json": {"get": _read("This document", {"type": "object"})},
    }
    named, version_named = _parameter("model", [model]), _parameter("revision", revisions)
    for prefix, parameters in (
        ("/v2/models/{model}", [named]),
        ("/v2/models/{model}/versions/{revision}", [named, version_named]),
    ):
        paths |= _of_model(prefix, parameters)
    for change in ("load", "unload"):
        operation = _post("Always refused: the TRTModel decides what is loaded", None, "404")
        paths[f"/v2/repository/models/{{model}}/{change}"] = {"parameters": [named], "post": operation}
    if shared_memory:
        paths |= _of_memory("/v2/systemsharedmemory", [])
        paths |= _of_memory("/v2/systemsharedmemory/region/{region}", [_parameter("region")])
        paths["/v2/systemsharedmemory/region/{region}/register"] = {
            "parameters": [_parameter("region")],
            "post": _post("Make a region known", {"type": "object"}, body=_ref("MemoryRegion")),
        }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "TRTModel worker: Open Inference Protocol v2",
            "version": version,
            "description": "A body may be compressed (Content-Encoding: gzip or deflate), and so is the answer if "
            "Accept-Encoding names one of them alone.",
        },
        "paths": paths,
        "components": {"schemas": _schemas()},
    }


def _of_model(prefix: str, parameters: list[Document]) -> Document:
    def at(method: str, operation: Document) -> Document:
        return {"parameters": parameters, method: operation}

    ready = _object(["name", "ready"], name=_TEXT, ready={"type": "boolean"})
    return {
        prefix: at("get", _read("Inputs and outputs", _ref("ModelMetadata"), "404")),
        f"{prefix}/ready": at("get", _read("Can it answer?", ready, "404", refusal=ready)),
        f"{prefix}/config": at("get", _read("Triton's model configuration", _ref("ModelConfig"), "404")),
        f"{prefix}/stats": at("get", _read("Counters and durations", _ref("Statistics"), "404")),
        f"{prefix}/infer": at("post", _inference()),
    }


def _of_memory(prefix: str, parameters: list[Document]) -> Document:
    regions = {"type": "array", "items": _ref("MemoryStatus")}
    return {
        f"{prefix}/status": {"parameters": parameters, "get": _read("Regions that are registered", regions)},
        f"{prefix}/unregister": {"parameters": parameters, "post": _post("Forget them", {"type": "object"})},
    }


def _inference() -> Document:
    length = {
        "name": "Inference-Header-Content-Length",
        "in": "header",
        "required": False,
        "schema": {"type": "integer", "minimum": 1},
        "description": "Bytes of the JSON part, which binary tensors follow in the order of the inputs",
    }
    binary = {"type": "string", "contentMediaType": _BINARY}
    answer = {
        "description": "The outputs",
        "headers": {
            "x-trtmodel-revision": {"description": "The revision that answered", "schema": _TEXT},
            "inference-header-content-length": {
                "description": "Bytes of the JSON part, if binary tensors follow it",
                "schema": {"type": "integer"},
            },
        },
        "content": {_JSON: {"schema": _ref("InferenceResponse")}, _BINARY: {"schema": binary}},
    }
    return {
        "summary": "Inference",
        "parameters": [length],
        "requestBody": {
            "required": True,
            "content": {_JSON: {"schema": _ref("InferenceRequest")}, _BINARY: {"schema": binary}},
        },
        "responses": {"200": answer, **_errors("404", "415", "500")},
    }


def _read(summary: str, schema: Document, *more: str, refusal: Document | None = None) -> Document:
    """`refusal`: what 503 says, if it is no error object."""
    responses = {"200": _says("It is so", schema), **_errors(*more)}
    if refusal is not None:
        responses["503"] = _says("It is not", {"anyOf": [refusal, _ref("Error")]})
    return {"summary": summary, "responses": responses}


def _post(summary: str, schema: Document | None, *more: str, body: Document | None = None) -> Document:
    operation: Document = {"summary": summary, "responses": _errors(*more)}
    if schema is not None:
        operation["responses"]["200"] = _says("Done", schema)
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": body}}}
    return operation


def _errors(*more: str) -> Document:
    return {status: _says(_WHY[status], _ref("Error")) for status in sorted({*_ALWAYS, *more})}


def _says(description: str, schema: Document) -> Document:
    return {"description": description, "content": {_JSON: {"schema": schema}}}


def _ref(name: str) -> Document:
    return {"$ref": f"#/components/schemas/{name}"}


def _parameter(name: str, values: Sequence[str] = ()) -> Document:
    schema = {"type": "string", "enum": list(values)} if values else {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _object(required: list[str], **properties: Document) -> Document:
    return {"type": "object", "required": required, "properties": properties}


def _array(items: Document) -> Document:
    return {"type": "array", "items": items}


def _flag(name: str) -> Document:
    return _object([name], **{name: {"type": "boolean"}})


_TEXT: Document = {"type": "string"}
_COUNT: Document = {"type": "integer", "minimum": 0}
_SHAPE = _array({"type": "integer", "minimum": -1})
_DATATYPE: Document = {"type": "string", "enum": list(_DATATYPES)}


def _schemas() -> Document:
    tensor = {"name": _TEXT, "datatype": _DATATYPE, "shape": _SHAPE}
    names = list(tensor)
    memory = {
        "shared_memory_region": _TEXT,
        "shared_memory_offset": _COUNT,
        "shared_memory_byte_size": _COUNT,
        "binary_data_size": _COUNT,
    }
    values = {"type": "array", "description": "Flat, or nested as the shape. FP16 has no JSON form."}
    duration = _object(["count", "ns"], count=_COUNT, ns=_COUNT)
    durations = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
    config_tensor = _object(["name", "data_type", "dims"], name=_TEXT, data_type=_TEXT, dims=_SHAPE)
    region = {"key": _TEXT, "offset": _COUNT, "byte_size": {"type": "integer", "minimum": 1}}
    return {
        "Error": _object(["error"], error=_TEXT, id=_TEXT),
        "ServerMetadata": _object(["name", "version", "extensions"], name=_TEXT, version=_TEXT,
                                  extensions=_array(_TEXT)),
        "ModelMetadata": _object(["name", "versions", "platform", "inputs", "outputs"], name=_TEXT,
                                 versions=_array(_TEXT), platform=_TEXT, inputs=_array(_object(names, **tensor)),
                                 outputs=_array(_object(names, **tensor))),
        "ModelConfig": _object(["name", "platform", "max_batch_size", "input", "output"], name=_TEXT, platform=_TEXT,
                               max_batch_size=_COUNT, input=_array(config_tensor), output=_array(config_tensor)),
        "Statistics": _object(["model_stats"], model_stats=_array(_object(
            ["name", "version", "inference_count", "execution_count", "inference_stats"], name=_TEXT, version=_TEXT,
            inference_count=_COUNT, execution_count=_COUNT,
            inference_stats=_object(list(durations), **dict.fromkeys(durations, duration))))),
        "Index": _array(_object(["name", "version", "state", "reason"], name=_TEXT, version=_TEXT,
                                state={"enum": ["READY", "UNAVAILABLE"]}, reason=_TEXT)),
        "MemoryRegion": _object(["key", "byte_size"], **region),
        "MemoryStatus": _object(["name", *region], name=_TEXT, **region),
        "InferenceRequest": _object(
            ["inputs"], id=_TEXT,
            parameters={"type": "object", "properties": {
                "binary_data_output": {"type": "boolean"},
                "timeout": {"type": "integer", "minimum": 1, "description": "Microseconds"}}},
            inputs={**_array(_object(names, **tensor, data=values, parameters=_object([], **memory))), "minItems": 1},
            outputs={**_array(_object(["name"], name=_TEXT, parameters=_object(
                [], binary_data={"type": "boolean"}, **memory))), "minItems": 1}),
        "InferenceResponse": _object(
            ["model_name", "model_version", "outputs"], model_name=_TEXT, model_version=_TEXT, id=_TEXT,
            outputs=_array(_object(names, **tensor, data=values, parameters=_object([], **memory)))),
    }  # fmt: skip
