"""Tensors of strings through the whole worker: ONNX Runtime gives back what came, as JSON and as binary data."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_models as models
import pytest
from onnx import TensorProto
from protocol_harness import INFER, parts
from trtmodel_contract.manifest import Golden, Manifest, TensorSpec
from trtmodel_worker.engines.registry import runtime
from worker_harness import REVISION_1, Bucket, Operator, WorkerProcess, binary_request

LOAD_KEY = runtime("ONNXRuntime").load_key()
HI = b"\2\0\0\0hi\0\0\0\0"


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """s:BYTES[1..8, 2] -> t = s."""
    folder = tmp_path_factory.mktemp("echo")
    operator, bucket = Operator(), Bucket(folder / "bucket")
    string, shape = TensorProto.STRING, ("n", 2)
    node = models.node("Identity", ["s"], ["t"])
    models.save(folder / "m", [node], [("s", string, shape)], [("t", string, shape)])
    samples = io.BytesIO()
    words = np.array([["a", ""]])
    np.savez(samples, i0=words, o0=words)

    def change(manifest: Manifest) -> Manifest:
        golden = Golden(bucket.store.put_bytes(samples.getvalue()), 1, {})
        plan = bucket.store.put_bytes((folder / "m").read_bytes())
        return dataclasses.replace(manifest, load_key=LOAD_KEY, plan=plan, golden=(golden,))

    digest, _ = bucket.publish(
        REVISION_1, inputs=[TensorSpec("s", "BYTES", (-1, 2))], outputs=[TensorSpec("t", "BYTES", (-1, 2))],
        change=change,
    )  # fmt: skip
    worker = WorkerProcess(folder / "worker", operator, bucket, TRTMODEL_RUNTIME="ONNXRuntime")
    worker.point(operator.artifact(REVISION_1, digest), load_key=LOAD_KEY)
    worker.start()
    try:
        worker.wait_ready()
        yield worker
    finally:
        assert worker.stop() == 0, worker.tail()


def tensor(rows: int, **more: Any) -> dict[str, Any]:
    return {"name": "s", "datatype": "BYTES", "shape": [rows, 2], **more}


@pytest.mark.parametrize("words", [["hi", ""], ["ü\n:\"\\", "x" * 5000, "", "{}"]])  # fmt: skip
def test_strings_come_back_as_json(echo: WorkerProcess, words: list[str]) -> None:
    rows = len(words) // 2
    answer = echo.infer({"inputs": [tensor(rows, data=words)]})
    assert answer.json["outputs"] == [{"name": "t", "datatype": "BYTES", "shape": [rows, 2], "data": words}]
    assert echo.infer({"inputs": [tensor(rows, data=[words[i : i + 2] for i in range(0, len(words), 2)])]}).json == (
        answer.json
    )


def test_strings_come_back_as_binary_data(echo: WorkerProcess) -> None:
    document = {"inputs": [tensor(1, parameters={"binary_data_size": 10})], "parameters": {"binary_data_output": True}}
    body, headers = binary_request(document, HI)
    head, tail = parts(echo.post(INFER, body, **headers))
    assert head["outputs"][0]["parameters"] == {"binary_data_size": 10}
    assert tail == HI


@pytest.mark.parametrize(
    "blob", [b"\2\0\0\0hi", b"\3\0\0\0hi\0\0\0\0", b"\xff\xff\xff\xff" + b"\0" * 6, HI + b"\0", b"\1\0\0\0\xff\0\0\0\0"]
)
def test_what_are_no_strings_are_the_clients_error(echo: WorkerProcess, blob: bytes) -> None:
    body, headers = binary_request({"inputs": [tensor(1, parameters={"binary_data_size": len(blob)})]}, blob)
    answer = echo.post(INFER, body, **headers)
    assert answer.status == 400, answer.body
    assert echo.infer({"inputs": [tensor(1, data=["a", "b"])]}).json["outputs"][0]["data"] == ["a", "b"]


def test_strings_have_their_own_name_in_the_configuration(echo: WorkerProcess) -> None:
    config = echo.get("/v2/models/m/config").json
    assert (config["platform"], config["max_batch_size"]) == ("onnxruntime_onnx", 8)
    assert config["input"] == [{"name": "s", "data_type": "TYPE_STRING", "dims": [2]}]
    assert echo.get("/v2/models/m").json["inputs"] == [{"name": "s", "datatype": "BYTES", "shape": [-1, 2]}]
