"""How a request is written and an answer read, per protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from models import BenchModel

V2_PATH = "/v2/models/m/infer"


@dataclass(frozen=True)
class Request:
    path: str
    headers: Mapping[str, str]
    body: bytes

    def bytes(self, host: str = "127.0.0.1") -> bytes:
        """Head and body, as sent over a kept connection."""
        lines = [f"POST {self.path} HTTP/1.1", f"Host: {host}"]
        lines += [f"{key}: {value}" for key, value in self.headers.items()]
        lines.append(f"Content-Length: {len(self.body)}")
        return "\r\n".join([*lines, "", ""]).encode() + self.body


def v2_json(model: BenchModel) -> Request:
    document = {"inputs": [_tensor(model, data=model.sample.ravel().tolist())]}
    return Request(V2_PATH, {"Content-Type": "application/json"}, json.dumps(document).encode())


def v2_binary(model: BenchModel) -> Request:
    """The binary tensor extension, both ways."""
    blob = model.sample.tobytes()
    tensor = _tensor(model, parameters={"binary_data_size": len(blob)})
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))}
    return Request(V2_PATH, headers, head + blob)


def build(kind: str, path: str, model: BenchModel) -> Request:
    """`kind`: v2-json, v2-binary, json ({"input": rows}), raw (the row's bytes)."""
    if kind == "v2-json":
        return v2_json(model)
    if kind == "v2-binary":
        return v2_binary(model)
    if kind == "json":
        body = json.dumps({"input": model.sample.tolist()}).encode()
        return Request(path, {"Content-Type": "application/json"}, body)
    return Request(path, {"Content-Type": "application/octet-stream"}, model.sample.tobytes())


def read(kind: str, model: BenchModel, headers: Mapping[str, str], body: bytes) -> np.ndarray:
    """The answer's array. `headers`: lower case. Raises ValueError, KeyError or IndexError for what is no answer."""
    columns = model.expected[0].shape[1]
    if kind == "raw":
        return np.frombuffer(body, "<f4").reshape(-1, columns)
    if kind == "json":
        document = json.loads(body)
        return np.array(document["output"] if isinstance(document, dict) else document, np.float32)
    if kind == "v2-binary":
        return np.frombuffer(body[int(headers["inference-header-content-length"]) :], "<f4").reshape(-1, columns)
    output = json.loads(body)["outputs"][0]
    return np.array(output["data"], np.float32).reshape(output["shape"])


def _tensor(model: BenchModel, **more: object) -> dict[str, object]:
    return {"name": model.input_name, "shape": list(model.sample.shape), "datatype": model.datatype, **more}
